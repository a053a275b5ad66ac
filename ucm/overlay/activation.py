"""Check that the installed overlay is active in this process.

vLLM calls `check_active` through its ``vllm.general_plugins`` entry points in every process that it starts. This
catches the case that the interpreter silently skipped the ``.pth`` file. Other plugins may run later, so each feature
checks again, with `check_feature`, when it starts.

``VLLM_PLUGINS`` may leave these entry points out. Then each connector and sparse method calls them itself, with
`check_left_out`, and `ucm doctor` says so.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import PIP
from ucm.logger import get_logger
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.finder import boots, check_unshared, manifest_of
from ucm.overlay.replaced import LOADED, Replacement, replacements
from ucm.overlay.switches import ALL, PLUGINS, is_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucm.overlay.manifest import Manifest

#: The entry-point group that lists the packages of installed overlays.
GROUP = "ucm.overlays"
#: vLLM's entry points, which it calls in each of its processes.
GENERAL_PLUGINS = "vllm.general_plugins"
DISABLE = f"run upstream's vLLM, without UCM: set {ALL}=1, or uninstall the overlay"


def check_active(finder: Any, directory: str) -> None:
    """Raise unless the overlay is active in this process; log which of its functions other packages have replaced.

    A replaced function is only refused when a feature that needs it starts; the features are not known here.

    Raises:
        OverlayImportError: If the finder is missing, was installed too late or is preceded by one that takes its
            modules, the overlay is installed twice, or another overlay shadows one of its modules.
    """
    if is_set(ALL):
        return
    manifest = manifest_of(directory)
    _check_single(manifest.distribution)
    check_in_place(finder, manifest)
    for name in manifest.modules:
        check_unshared(finder, name)
    for replacement in replacements(manifest, manifest.needs):
        get_logger(__name__).warning("[UCM.Patch] %s; a feature that needs it will be refused", replacement)


def left_out() -> list[metadata.EntryPoint]:
    """Return the installed overlays' entry points that ``VLLM_PLUGINS`` keeps vLLM from calling."""
    allowed = os.environ.get(PLUGINS)
    if allowed is None or is_set(ALL):
        return []
    return [
        point
        for point in metadata.entry_points(group=GENERAL_PLUGINS)
        if point.name not in allowed.split(",")
        and point.dist is not None
        and any(other.group == GROUP for other in point.dist.entry_points)
    ]


def names_and_remedy(missing: Iterable[metadata.EntryPoint]) -> tuple[str, str]:
    """Return the names of entry points, and the command that adds them to those that vLLM calls."""
    names = sorted({point.name for point in missing})
    return ", ".join(names), f"export {PLUGINS}={','.join(filter(None, [os.environ.get(PLUGINS, ''), *names]))}"


def check_left_out() -> None:
    """Make the check that ``VLLM_PLUGINS`` keeps vLLM from making in this process.

    Raises:
        OverlayImportError: As `check_active`.
    """
    for point in left_out():
        point.load()()


def check_feature(groups: Iterable[str], kind: type | None = None) -> list[Replacement]:
    """Find the functions that a starting feature needs and other packages have replaced.

    Returns:
        The replacements; none in a process without an overlay.

    Raises:
        OverlayImportError: As `check_in_place`, and as `check_active` if vLLM did not call it.
    """
    check_left_out()
    wanted, found = list(groups), []
    for boot in [] if is_set(ALL) else boots():
        manifest = manifest_of(boot.DIRECTORY)
        check_in_place(boot.FINDER, manifest)
        found += replacements(manifest, wanted, kind)
    return found


def check_in_place(finder: Any, manifest: Manifest, root: Path | None = None) -> None:
    """Raise unless an overlay's finder loads the modules that it shadows.

    Args:
        finder: The overlay's finder; None if it has not run.
        manifest: The overlay's manifest.
        root: The directory that contains the shadowed package; see `claims`.

    Raises:
        OverlayImportError: The finder is missing, was installed too late, or another one takes its modules.
    """
    if finder not in sys.meta_path:
        raise OverlayImportError(
            "it is installed, and its finder does not run in this process",
            [
                f"overlay: {manifest.directory}",
                f"process: {sys.executable} {' '.join(sys.orig_argv[1:4])}",
                (
                    "Python reads .pth files only in site-packages directories, so an overlay that is reached "
                    "through PYTHONPATH or was installed with --target is never activated"
                ),
            ],
            [f"install the wheel into the environment that runs vLLM: `{PIP} install <wheel>`", DISABLE],
        )
    late = sorted(foreign_modules(manifest))
    if late:
        raise OverlayImportError(
            "modules that it shadows were imported before its finder ran, or bypassed it",
            [f"{name}: {origin}" for name, origin in late],
            [
                (
                    "find what imports vLLM at interpreter start (another .pth file, sitecustomize, another import "
                    "hook): `ucm doctor` lists them"
                ),
                DISABLE,
            ],
        )
    claimed = sorted(claims(finder, manifest, root))
    if claimed:
        raise OverlayImportError(
            "a finder in front of its own would load modules that it shadows from elsewhere",
            [f"{name}: {by}" for name, by in claimed],
            [
                "remove the package that puts this finder into sys.meta_path, or make that finder ignore these names",
                DISABLE,
            ],
        )


def foreign_modules(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the shadowed modules that this process has loaded from elsewhere, each with its origin."""
    for name, module in manifest.modules.items():
        loaded = sys.modules.get(name)
        if loaded is None or module.group in manifest.disabled:
            continue
        spec = getattr(loaded, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if origin is None or Path(origin) != manifest.file(module):
            yield name, str(origin)
        elif name not in LOADED and not getattr(spec, "_initializing", False):
            yield name, f"{origin}, by another loader, {name_of(getattr(spec, 'loader', None))}"


def claims(finder: Any, manifest: Manifest, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield the shadowed modules that are not loaded yet and that an earlier finder would load from elsewhere.

    Args:
        finder: The overlay's finder.
        manifest: The overlay's manifest.
        root: The directory that contains the package vllm. Without it, only modules whose package is loaded are
            checked, because a finder may import a module's parent packages to find it.
    """
    ahead = sys.meta_path[: sys.meta_path.index(finder)] if finder in sys.meta_path else []
    for name, module in manifest.modules.items():
        package = sys.modules.get(name.rpartition(".")[0])
        path = getattr(package, "__path__", None) if root is None else [str((root / module.path).parent)]
        if name in sys.modules or path is None or module.group in manifest.disabled:
            continue
        for other in ahead:
            found = _claim(other, name, path)
            if found is not None and Path(found) != manifest.file(module):
                yield name, f"{name_of(other)} finds {found}"
            if found is not None:
                break


def _claim(finder: Any, name: str, path: Any) -> str | None:
    """Return the origin from which a finder would load a module; None if it does not handle the module."""
    find_spec = getattr(finder, "find_spec", None)
    if find_spec is None:
        return None
    try:
        spec = find_spec(name, path)
    except Exception as error:  # noqa: BLE001 - another's code; the import would end in the same
        return repr(error)
    return None if spec is None else str(spec.origin)


def name_of(finder: object) -> str:
    """Return the name of a finder or loader for messages: module and class."""
    kind = finder if isinstance(finder, type) else type(finder)
    return f"{kind.__module__}.{kind.__qualname__}"


def overlay_packages() -> list[str]:
    """Return the packages of installed overlays, by their distributions' entry points."""
    return sorted({point.name for point in metadata.entry_points(group=GROUP)})


def _check_single(distribution: str) -> None:
    places = installed_overlays(distribution)
    if len(places) > 1:
        raise OverlayImportError(
            "more than one overlay is installed, and only the first on sys.path is active",
            [f"{version}: {place}" for place, version in places.items()],
            [
                (
                    f"uninstall all but the one that you want: `{PIP} uninstall {distribution}`, or the same with the "
                    "Python of the environment that has it"
                ),
                DISABLE,
            ],
        )


def installed_overlays(distribution: str) -> dict[str, str]:
    """Return the version of each installed overlay of one distribution name, by directory.

    A directory that sys.path contains twice counts once (``lib64`` may be a link to ``lib``).
    """
    found = metadata.distributions(name=distribution)
    return {str(Path(str(d.locate_file(""))).resolve()): d.version for d in found}
