"""Check the installed overlays, and from where each shadowed module would be loaded."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.doctor.environment import OVERLAY_PACKAGE, package_directories
from ucm.doctor.findings import Finding, Status
from ucm.errors import PIP
from ucm.overlay.activation import boots, claims, installed_overlays, overlay_packages
from ucm.overlay.errors import TamperedOverlayError
from ucm.overlay.finder import how_to_build, how_to_complete, how_to_get, how_to_unite, missing_hooks, sha256_of
from ucm.overlay.manifest import REINSTALL, TOOLS, Manifest, ShadowedModule, read_manifest
from ucm.overlay.switches import ALL

if TYPE_CHECKING:
    from ucm.doctor.environment import Vllm

OVERLAY, MODULES = "overlay", "modules"
FINE, CHANGED, MISSING = "ok", "changed", "missing"


@dataclass(frozen=True)
class Overlay:
    """An overlay on ``sys.path``.

    Attributes:
        directory: The overlay package's directory.
        version: The version in its metadata, or else in its manifest; empty if neither can be read.
        manifest: Its manifest; None if it cannot be read.
        fault: Why the manifest cannot be read.
    """

    directory: Path
    version: str
    manifest: Manifest | None
    fault: str


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
        try:
            manifest, fault = read_manifest(place), ""
        except TamperedOverlayError as error:
            manifest, fault = None, str(error)
        version = versions.get(place) or next(iter(editable.values()), manifest.version if manifest else "")
        found.append(Overlay(place, version, manifest, fault))
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
    if overlay.manifest is None:
        what, details = "its manifest cannot be read", tuple(overlay.fault.splitlines()[1:2])
        return Finding(OVERLAY, Status.ERROR, what, details, (REINSTALL,))
    if lacking := _lacking(overlay.version, overlay.manifest):
        return lacking
    hooks = "all hooks" if overlay.manifest.hooks == "all" else "the hooks that UCM's features use"
    made_for = f"{overlay.manifest.title} {overlay.manifest.release}"
    what = f"{overlay.version} for {made_for}, {len(overlay.manifest.modules)} modules, {hooks}"
    return Finding(OVERLAY, Status.OK, what, (str(overlay.directory),))


def _lacking(name: str, manifest: Manifest) -> Finding | None:
    if not (missing := missing_hooks(manifest)):
        return None
    what = f"{name} calls hooks that are not installed"
    return Finding(OVERLAY, Status.ERROR, what, tuple(missing), tuple(how_to_complete(manifest, missing)))


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


def claimed_modules(manifest: Manifest | None, vllm: Vllm | None) -> list[tuple[str, str]]:
    """Return the shadowed modules that an earlier finder would load from elsewhere, each with a description."""
    boot = next((boot for boot in boots() if manifest and Path(boot.DIRECTORY) == manifest.directory), None)
    if boot is None or manifest is None or vllm is None:
        return []
    return list(claims(boot.FINDER, manifest, vllm.directory.parent))


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


def check_modules(states: list[ModuleState], manifest: Manifest, vllm: Vllm) -> list[Finding]:
    """Check that vLLM's files and the overlay's have the reviewed contents."""
    on = [state for state in states if state.disabled is None]
    findings = []
    broken = [state for state in on if state.rewritten != FINE]
    if broken:
        findings.append(
            Finding(
                MODULES,
                Status.ERROR,
                f"{len(broken)} of the overlay's files {_are(broken)} not as reviewed: vLLM will not start",
                tuple(f"{state.rewritten}: {manifest.file(state.module)}" for state in broken),
                (REINSTALL,),
            )
        )
    foreign = [state for state in on if state.upstream != FINE]
    if foreign:
        findings.append(_foreign(foreign, manifest, vllm))
    if not findings:
        findings.append(Finding(MODULES, Status.OK, f"{len(on)} of {len(states)} are loaded from the overlay"))
    return findings


def _foreign(foreign: list[ModuleState], manifest: Manifest, vllm: Vllm) -> Finding:
    release, serves = vllm.release, manifest.release
    todo: tuple[str, ...]
    package, place = vllm.distribution or "vllm", vllm.directory.parent
    if release and release != serves:
        what = f"the overlay is for vLLM {serves}, but vLLM {release} is installed: vLLM will not start"
        build, install = how_to_install(vllm)
        todo = (
            f"install the overlay for it: {how_to_build(manifest) if manifest.built_by == TOOLS else build}",
            f"and then: {install}",
            f"or install the vLLM that the overlay is for: {how_to_get(package, manifest)}",
        )
    else:
        what = (
            f"{len(foreign)} of vLLM's files {_are(foreign)} not what the overlay for {serves} was made from: "
            "vLLM will not start"
        )
        review = manifest.command("review", f"--from {place}")
        same = vllm.version.partition("+")[0] or serves
        todo = (
            f"if you did not mean to edit them: {PIP} install --force-reinstall --no-deps {package}=={same}",
            f"if the edits are intended, review an overlay made from the edited files: {review}",
        )
    return Finding(
        MODULES,
        Status.ERROR,
        what,
        tuple(f"{state.upstream}: {state.origin or state.module.name}" for state in foreign),
        (*todo, f"or run vLLM without UCM's changes: {ALL}=1"),
    )


def _are(things: list[ModuleState]) -> str:
    return "is" if len(things) == 1 else "are"


def check_further_overlays() -> list[Finding]:
    """Check that the overlays of other packages and projects are active and complete, and share no module."""
    manifests = [o.manifest for package in overlay_packages() for o in find_overlays(package)[:1] if o.manifest]
    findings = [_check_further(manifest) for manifest in manifests if manifest.directory.name != OVERLAY_PACKAGE]
    shadowed: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        for module in manifest.modules.values():
            if module.group not in manifest.disabled:
                shadowed.setdefault(module.name, []).append(manifest)
    shared = {name: by for name, by in shadowed.items() if len(by) > 1}
    if shared:
        involved = {manifest.directory: manifest for by in shared.values() for manifest in by}.values()
        details = tuple(f"{name}: {', '.join(m.distribution for m in by)}" for name, by in shared.items())
        todo = (f"build them as one: {how_to_unite(involved)}",)
        what = f"{len(shared)} modules are shadowed by more than one overlay: vLLM will not start"
        findings.append(Finding(OVERLAY, Status.ERROR, what, details, todo))
    return findings


def _check_further(manifest: Manifest) -> Finding:
    name, package = manifest.distribution, manifest.upstream_package
    spec = importlib.util.find_spec(package)
    if lacking := _lacking(f"{name} {manifest.version}", manifest):
        return lacking
    if spec is None or not spec.origin:
        what = f"{name} {manifest.version} is installed, but {package} is not"
        return Finding(OVERLAY, Status.WARNING, what, (), (f"install {package}, or uninstall {name}",))
    active = any(Path(boot.DIRECTORY) == manifest.directory for boot in boots())
    states = states_of(manifest, Path(spec.origin).parent, active=active)
    on = [state for state in states if state.disabled is None]
    wrong = [state for state in on if state.loads != manifest.file(state.module)]
    if wrong:
        what = f"{name} {manifest.version}: {len(wrong)} of {len(on)} modules are not loaded from it"
        details = tuple(f"{s.module.name}: its own file {s.upstream}, the overlay's {s.rewritten}" for s in wrong)
        todo = f"install the overlay for the {manifest.title} that is installed; this one is for {manifest.release}"
        return Finding(OVERLAY, Status.ERROR, what, details, (f"{todo}: {how_to_build(manifest)}",))
    what = f"{name} {manifest.version} for {manifest.title} {manifest.release}: {len(on)} of {len(states)} modules"
    return Finding(OVERLAY, Status.OK, what, (str(manifest.directory),))
