"""Is the overlay that is installed also the one that acts, in this very process?

vLLM calls `check_active` through its ``vllm.general_plugins`` entry points in every process that it starts. It is the
net under the ``.pth`` file, which an interpreter skips without a word where it does not look for one. Other plug-ins
may run later, so a feature asks again, with `check_feature`, when it starts.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.logger import get_logger
from ucm.overlay.errors import InactiveOverlayError
from ucm.overlay.finder import check_unshared, state
from ucm.overlay.replaced import LOADED, Replacement, overrides, replacements
from ucm.overlay.switches import ALL, is_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

    from ucm.overlay.manifest import Manifest, ShadowedModule

#: The group of entry points that names the packages of installed overlays.
GROUP = "ucm.overlays"
DISABLE = f"run upstream's vLLM, without UCM: set {ALL}=1, or uninstall the overlay"


def check_active(finder: Any, directory: str) -> None:
    """Raise unless the overlay is active in this process; log the functions that other packages replaced.

    What is replaced is refused where a feature needs it, and which features are asked for is not known as yet.

    Args:
        finder: The overlay's finder.
        directory: The installed overlay package.

    Raises:
        InactiveOverlayError: If the finder is not in place, came too late or is not asked first, or the overlay is
            installed twice.
        SharedModuleError: If another overlay shadows one of its modules.
    """
    if is_set(ALL):
        return
    manifest = state(directory).manifest
    _check_single(manifest.distribution)
    _check_in_place(finder, directory)
    for name in manifest.modules:
        check_unshared(finder, name)
    for replacement in replacements(manifest, manifest.needs):
        get_logger(__name__).warning("[UCM.Patch] %s; a feature that needs it will be refused", replacement)


def boots() -> list[ModuleType]:
    """The boot modules of the overlays in this process; each has a finder, and the directory of its overlay."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.endswith("._boot") and hasattr(module, "FINDER") and hasattr(module, "DIRECTORY")
    ]


def check_feature(groups: Iterable[str], kind: type | None = None) -> list[Replacement]:
    """Find the functions that a feature needs and that other packages have replaced, when the feature starts.

    Args:
        groups: The groups of modules that the feature needs.
        kind: The class of the object that starts it, for instance the scheduler's.

    Returns:
        The replacements; none in a process without an overlay.

    Raises:
        InactiveOverlayError: As `check_active`.
    """
    wanted, found = list(groups), []
    for boot in [] if is_set(ALL) else boots():
        _check_in_place(boot.FINDER, boot.DIRECTORY)
        manifest = state(boot.DIRECTORY).manifest
        found += replacements(manifest, wanted)
        found += overrides(manifest, wanted, kind) if kind is not None else []
    return found


def _check_in_place(finder: Any, directory: str) -> None:
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
    claimed = sorted(claims(finder, state(directory).manifest, state(directory).disabled))
    if claimed:
        raise InactiveOverlayError(
            "a finder in front of its own would load modules that it shadows from elsewhere",
            [f"{name}: {by}" for name, by in claimed],
            ["remove the package that puts this finder into sys.meta_path, or let it pass these names on", DISABLE],
        )


def foreign_modules(directory: str) -> Iterator[tuple[str, str]]:
    """The shadowed modules that are loaded in this process from elsewhere, with where they came from."""
    known = state(directory)
    for name, module in known.manifest.modules.items():
        loaded = sys.modules.get(name)
        if loaded is None or module.group in known.disabled:
            continue
        spec = getattr(loaded, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if origin is None or Path(origin) != known.manifest.file(module):
            yield name, str(origin)
        elif name not in LOADED and not getattr(spec, "_initializing", False):
            yield name, f"{origin}, by another loader, {name_of(getattr(spec, 'loader', None))}"


def in_front(finder: Any) -> list[Any]:
    """The finders that Python asks before the overlay's."""
    return sys.meta_path[: sys.meta_path.index(finder)] if finder in sys.meta_path else []


def claims(
    finder: Any, manifest: Manifest, disabled: Iterable[str], root: Path | None = None
) -> Iterator[tuple[str, str]]:
    """The shadowed modules, not loaded as yet, that a finder in front of the overlay's would load from elsewhere.

    Args:
        finder: The overlay's finder.
        manifest: What it shadows.
        disabled: The groups that are off.
        root: The directory that holds the package vllm. Without it, only modules whose package is loaded are asked
            for: a finder may import the packages above a module to find it.
    """
    for name, module in manifest.modules.items():
        path = _package_path(module, root)
        if name in sys.modules or path is None or module.group in set(disabled):
            continue
        for other in in_front(finder):
            found = _claim(other, name, path)
            if found is not None and Path(found) != manifest.file(module):
                yield name, f"{name_of(other)} finds {found}"
            if found is not None:
                break


def _package_path(module: ShadowedModule, root: Path | None) -> Any:
    """The search path of a module's package; None if that is not loaded, and its place not given."""
    if root is not None:
        return [str((root / module.path).parent)]
    return getattr(sys.modules.get(module.name.rpartition(".")[0]), "__path__", None)


def _claim(finder: Any, name: str, path: Any) -> str | None:
    """Where a finder would load a module from; None if it leaves that to others."""
    find_spec = getattr(finder, "find_spec", None)
    if find_spec is None:
        return None
    try:
        spec = find_spec(name, path)
    except Exception as error:  # noqa: BLE001 - another's code; the import would end in the same
        return repr(error)
    return None if spec is None else str(spec.origin)


def name_of(finder: object) -> str:
    """A finder or loader as an operator knows it: module and class."""
    kind = finder if isinstance(finder, type) else type(finder)
    return f"{kind.__module__}.{kind.__qualname__}"


def overlay_packages() -> list[str]:
    """The packages of the overlays that installed distributions name."""
    return sorted({point.name for point in metadata.entry_points(group=GROUP)})


def _check_single(distribution: str) -> None:
    places = installed_overlays(distribution)
    if len(places) > 1:
        raise InactiveOverlayError(
            "more than one overlay is installed, and only the first on sys.path acts",
            [f"{version}: {place}" for place, version in places.items()],
            [f"uninstall all but the one that you want: `pip uninstall {distribution}` in each environment", DISABLE],
        )


def installed_overlays(distribution: str) -> dict[str, str]:
    """The installed overlays of one distribution's name: where each lies, and its version.

    A directory that sys.path names twice (in an environment whose ``lib64`` is a link to ``lib``) counts once.
    """
    found = metadata.distributions(name=distribution)
    return {str(Path(str(d.locate_file(""))).resolve()): d.version for d in found}
