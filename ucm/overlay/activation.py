"""Is the overlay that is installed also the one that acts, in this very process?

vLLM calls this through its ``vllm.general_plugins`` entry points in every process that it starts. It is the net under
the ``.pth`` file, which an interpreter skips without a word where it does not look for one.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.overlay.errors import InactiveOverlayError
from ucm.overlay.finder import state
from ucm.overlay.switches import ALL, is_set

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTRIBUTION = "ucm-vllm-overlay"
DISABLE = f"run upstream's vLLM, without UCM: set {ALL}=1, or uninstall {DISTRIBUTION}"


def check_active(finder: Any, directory: str) -> None:
    """Raise unless the overlay acts in this process as it was installed to.

    Args:
        finder: The overlay's finder.
        directory: The installed overlay package.

    Raises:
        InactiveOverlayError: If the finder is not in place, came too late, or two overlays are installed.
    """
    if is_set(ALL):
        return
    _check_single()
    if finder not in sys.meta_path:
        raise InactiveOverlayError(
            "it is installed, and its finder does not run in this process",
            [
                f"overlay: {directory}",
                f"process: {sys.executable} {' '.join(sys.orig_argv[1:4])}",
                (
                    "Python reads .pth files only in site-packages directories, so an overlay that is reached "
                    "through PYTHONPATH or was installed with --target is never activated"
                ),
            ],
            ["install the wheel into the environment that runs vLLM: `pip install <wheel>`", DISABLE],
        )
    late = sorted(foreign_modules(directory))
    if late:
        raise InactiveOverlayError(
            "modules that it shadows were imported before or around its finder",
            [f"{name}: {origin}" for name, origin in late],
            [
                (
                    "find what imports vLLM at interpreter start (another .pth file, sitecustomize, another import "
                    "hook): `ucm doctor` lists them"
                ),
                DISABLE,
            ],
        )


def foreign_modules(directory: str) -> Iterable[tuple[str, str]]:
    """The shadowed modules that are loaded in this process from elsewhere, with where they came from."""
    known = state(directory)
    for name, module in known.manifest.modules.items():
        loaded = sys.modules.get(name)
        if loaded is None or module.group in known.disabled:
            continue
        origin = getattr(getattr(loaded, "__spec__", None), "origin", None)
        if origin is None or Path(origin) != known.manifest.file(module):
            yield name, str(origin)


def _check_single() -> None:
    places = installed_overlays()
    if len(places) > 1:
        raise InactiveOverlayError(
            "more than one overlay is installed, and only the first on sys.path acts",
            [f"{version}: {place}" for place, version in places.items()],
            [f"uninstall all but the one that you want: `pip uninstall {DISTRIBUTION}` in each environment", DISABLE],
        )


def installed_overlays() -> dict[str, str]:
    """The installed overlay distributions: where each lies, and its version.

    A directory that sys.path names twice (in an environment whose ``lib64`` is a link to ``lib``) counts once.
    """
    found = metadata.distributions(name=DISTRIBUTION)
    return {str(Path(str(d.locate_file(""))).resolve()): d.version for d in found}
