"""Check the installed overlays, and from where each shadowed module would be loaded."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.doctor.environment import OVERLAY_PACKAGE, package_directories, why_not_started
from ucm.doctor.findings import Finding, Status
from ucm.errors import PIP
from ucm.overlay.activation import check_in_place, installed_overlays, overlay_packages
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.finder import boots, check_seam, check_unshared, check_upstream, reviewed_bytes, sha256_of
from ucm.overlay.manifest import Manifest, ShadowedModule, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.doctor.environment import ImportHooks, Vllm

OVERLAY, MODULES = "overlay", "modules"
FINE, CHANGED, MISSING = "ok", "changed", "missing"


@dataclass(frozen=True)
class Overlay:
    """An overlay on ``sys.path``.

    Attributes:
        directory: The overlay package's directory.
        version: The version in its metadata, or else in its manifest; empty if neither can be read.
        manifest: Its manifest; None if it cannot be read.
    """

    directory: Path
    version: str
    manifest: Manifest | None


@dataclass(frozen=True)
class ModuleState:
    """One shadowed module.

    Attributes:
        module: Its entry in the manifest.
        upstream: The state of vLLM's file: `FINE`, `CHANGED` or `MISSING`.
        rewritten: The state of the overlay's file, likewise.
        disabled: Why the group is off; None if it is on.
        loads: The file that Python would load; None if the finder would raise or there is no file.
        origin: vLLM's own file; None if there is none.
    """

    module: ShadowedModule
    upstream: str
    rewritten: str
    disabled: str | None
    loads: Path | None
    origin: Path | None


def find_overlays(package: str = OVERLAY_PACKAGE) -> list[Overlay]:
    """Return the overlays of one package name; the one that Python imports comes first.

    Overlays without metadata are found by their directory.
    """
    installed = installed_overlays(package.replace("_", "-"))
    versions = {Path(place).resolve() / package: version for place, version in installed.items()}
    # An editable installation has its metadata in site-packages, and the package elsewhere.
    editable = {place: version for place, version in versions.items() if not place.is_dir()}
    places = [*package_directories(package), *(p for p in versions if p not in editable)] or list(versions)
    found = []
    for place in dict.fromkeys(places):
        manifest = None
        with suppress(OverlayImportError):
            manifest = read_manifest(place)
        version = versions.get(place) or next(iter(editable.values()), manifest.version if manifest else "")
        found.append(Overlay(place, version, manifest))
    return found


def check_overlay(overlays: list[Overlay], vllm: Vllm | None, *, needed: bool) -> Finding:
    """Check that exactly one overlay is installed and its manifest can be read."""
    if not overlays:
        return _none_installed(vllm, needed=needed)
    if len(overlays) > 1:
        distribution = overlays[0].directory.name.replace("_", "-")
        return Finding(
            OVERLAY,
            Status.ERROR,
            f"{len(overlays)} overlays are installed, but only the first is active",
            tuple(f"{overlay.version or 'unknown version'}: {overlay.directory.parent}" for overlay in overlays),
            (
                f"keep one of them; uninstall each other one in its environment: {PIP} uninstall {distribution}",
                "or remove its directory from PYTHONPATH",
            ),
        )
    (overlay,) = overlays
    try:
        manifest = _usable(overlay.directory)
    except OverlayImportError as error:
        return Finding.of_import(OVERLAY, error)
    hooks = "all hooks" if manifest.hooks == "all" else "the hooks that UCM's features use"
    what = f"{overlay.version} for {manifest.title} {manifest.release}, {len(manifest.modules)} modules, {hooks}"
    return Finding(OVERLAY, Status.OK, what, (str(overlay.directory),))


def _usable(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    check_seam(manifest)
    return manifest


def _none_installed(vllm: Vllm | None, *, needed: bool) -> Finding:
    if needed:
        what = "not installed: vLLM runs unchanged, without the configured sparse method"
        return Finding(OVERLAY, Status.ERROR, what, todo=how_to_install(vllm))
    what = "not installed, and only sparse attention needs one: vLLM runs unchanged, without an import hook"
    build, install = how_to_install(vllm)
    return Finding(OVERLAY, Status.OK, what, (f"for sparse attention: {build}", f"and then: {install}"))


def how_to_install(vllm: Vllm | None) -> tuple[str, str]:
    """Return how to build an overlay for a vLLM, and how to install it."""
    if vllm is None or not vllm.release or importlib.util.find_spec("vllm_ascend") is not None:
        build, folder = f"installed --python {sys.executable}", "<the folder that it names>"
    else:
        build, folder = vllm.release, f"build/wheels/vllm-{vllm.release}"
    return f"in a checkout of the UCM overlay: nox -s build-overlay -- {build}", f"{PIP} install {folder}/*.whl"


def states_of(manifest: Manifest, package: Path | None, *, active: bool) -> list[ModuleState]:
    """Return each shadowed module's state.

    Args:
        manifest: The overlay's manifest.
        package: The directory of the shadowed package; None if it is not installed.
        active: Whether the finder is in place.
    """
    found = []
    for module in manifest.modules.values():
        origin = _origin(module, package)
        upstream = _compared(origin, module.upstream_sha256)
        rewritten = _compared(manifest.file(module), module.rewritten_sha256)
        reason = manifest.disabled.get(module.group)
        if not active or reason is not None or origin is None:
            loads = origin
        else:
            loads = manifest.file(module) if upstream == rewritten == FINE else None
        found.append(ModuleState(module, upstream, rewritten, reason, loads, origin))
    return found


def check_import_hook(hooks: ImportHooks, manifest: Manifest, vllm: Vllm | None, files: Iterable[Path]) -> Finding:
    """Check that the overlay's finder loads the modules that it shadows in this process.

    Args:
        hooks: The import hooks of this process.
        manifest: The overlay's manifest.
        vllm: The installed vLLM, if any.
        files: The start-up files that run code.
    """
    check = "import hook"
    if hooks.directory not in {None, manifest.directory.resolve()}:
        what = "in place, but for another overlay than the one found"
        details = (f"serves: {hooks.directory}", f"found first on sys.path: {manifest.directory}")
        return Finding(check, Status.ERROR, what, details, ("keep one of the two",))
    try:
        _check_in_place(manifest, vllm.directory if vllm else None)
    except OverlayImportError as error:
        why, todo = why_not_started(manifest.directory) if hooks.position is None else ((), ())
        found = Finding.of_import(check, error, *why, *(f"start-up file: {file}" for file in files))
        return replace(found, todo=(*todo, *found.todo))
    what = f"in place, number {(hooks.position or 0) + 1} on sys.meta_path of this process"
    ahead = tuple(f"earlier finder, ignores our modules: {name}" for name in hooks.ahead)
    return Finding(check, Status.OK, what, ahead)


def _check_in_place(manifest: Manifest, package: Path | None) -> None:
    boot = next((one for one in boots() if Path(one.DIRECTORY).resolve() == manifest.directory.resolve()), None)
    # By the name with which its finder loads it; a directory may have several.
    manifest = replace(manifest, directory=Path(boot.DIRECTORY)) if boot else manifest
    check_in_place(boot.FINDER if boot else None, manifest, package.parent if package else None)


def _origin(module: ShadowedModule, package: Path | None) -> Path | None:
    """Return the package's own file, as Python's own finder finds it, without importing the parent packages."""
    if package is None:
        return None
    place = package.joinpath(*module.name.split(".")[1:-1])
    spec = PathFinder.find_spec(module.name, [str(place)])
    return Path(spec.origin) if spec is not None and spec.origin else None


def _compared(path: Path | None, wanted: str) -> str:
    if path is None or not path.is_file():
        return MISSING
    return FINE if sha256_of(path) == wanted else CHANGED


def check_modules(states: list[ModuleState], manifest: Manifest, package: Path, release: str | None = None) -> Finding:
    """Check that the shadowed package's files and the overlay's have the reviewed contents.

    Args:
        states: The modules.
        manifest: The overlay's manifest.
        package: The shadowed package's directory.
        release: Its release, if known.
    """
    on = [state for state in states if state.disabled is None]
    wrong = [state for state in on if {state.upstream, state.rewritten} != {FINE}]
    try:
        for state in wrong:
            check_upstream(manifest, state.module, state.origin or package.parent / state.module.path)
            reviewed_bytes(state.module, manifest.file(state.module))
    except OverlayImportError as error:
        title, what = manifest.title, f"{len(wrong)} of {len(on)} are not as reviewed"
        if release not in {None, manifest.release}:
            what = f"the overlay is for {title} {manifest.release}, but {title} {release} is installed"
        details = [f"{s.module.name}: {title}'s file {s.upstream}, the overlay's {s.rewritten}" for s in wrong]
        todo = tuple(error.ways_out)
        return Finding(MODULES, Status.ERROR, f"{what}: {title} will not start", (*details, *error.details), todo)
    return Finding(MODULES, Status.OK, f"{len(on)} of {len(states)} are loaded from the overlay")


def check_further_overlays() -> list[Finding]:
    """Check that the overlays of other packages and projects are active and complete, and share no module."""
    others = [found for name in overlay_packages() if name != OVERLAY_PACKAGE for found in find_overlays(name)[:1]]
    findings = [_check_further(overlay) for overlay in others]
    try:
        for boot in boots() if findings else ():
            for name in boot.FINDER.modules:
                check_unshared(boot.FINDER, name)
    except OverlayImportError as error:
        findings.append(Finding.of_import(OVERLAY, error))
    return findings


def _check_further(overlay: Overlay) -> Finding:
    name = f"{overlay.directory.name} {overlay.version}"
    try:
        manifest = _usable(overlay.directory)
        spec = importlib.util.find_spec(manifest.upstream_package)
        if spec is None or not spec.origin:
            what = f"{name} is installed, but {manifest.upstream_package} is not"
            todo = f"install {manifest.upstream_package}, or uninstall {manifest.distribution}"
            return Finding(OVERLAY, Status.WARNING, what, (), (todo,))
        package = Path(spec.origin).parent
        _check_in_place(manifest, package)
    except OverlayImportError as error:
        return Finding.of_import(OVERLAY, error, name)
    found = check_modules(states_of(manifest, package, active=True), manifest, package)
    what = f"{manifest.distribution} {manifest.version} for {manifest.title} {manifest.release}: {found.what}"
    return replace(found, check=OVERLAY, what=what, details=(*found.details, str(overlay.directory)))
