"""The installed overlay, and what each module that it shadows would be loaded from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.doctor.distributions import package_directories
from ucm.doctor.findings import Finding, Status
from ucm.doctor.startup import OVERLAY_PACKAGE
from ucm.overlay.activation import DISTRIBUTION, installed_overlays
from ucm.overlay.errors import TamperedOverlayError
from ucm.overlay.finder import sha256_of
from ucm.overlay.manifest import Manifest, ShadowedModule, read_manifest
from ucm.overlay.seam import UPGRADE, missing_hooks
from ucm.overlay.switches import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.doctor.vllm_install import Vllm

OVERLAY, MODULES = "overlay", "modules"
PIP = f"{sys.executable} -m pip"
FINE, CHANGED, MISSING = "ok", "changed", "missing"


@dataclass(frozen=True)
class Overlay:
    """An overlay that ``sys.path`` leads to.

    Attributes:
        directory: The overlay package's directory.
        version: By its metadata, or else by its manifest; empty if neither can be read.
        manifest: What it says of itself; None if that cannot be read.
        fault: Why not.
    """

    directory: Path
    version: str
    manifest: Manifest | None
    fault: str


@dataclass(frozen=True)
class ModuleState:
    """One shadowed module.

    Attributes:
        module: What the manifest says of it.
        upstream: vLLM's file: `FINE`, `CHANGED` or `MISSING`.
        rewritten: The overlay's file, likewise.
        disabled: Why the group is off; None if it is not.
        loads: The file that Python would load; None where the finder would raise or there is none.
        origin: vLLM's own file; None if there is none.
    """

    module: ShadowedModule
    upstream: str
    rewritten: str
    disabled: str | None
    loads: Path | None
    origin: Path | None


def find_overlays() -> list[Overlay]:
    """The overlays, the one that Python imports first; those without metadata are found by their directory."""
    versions = {Path(place).resolve() / OVERLAY_PACKAGE: version for place, version in installed_overlays().items()}
    places = [*package_directories(OVERLAY_PACKAGE), *versions]
    found = []
    for place in dict.fromkeys(places):
        try:
            manifest, fault = read_manifest(place), ""
        except TamperedOverlayError as error:
            manifest, fault = None, str(error)
        version = versions.get(place) or (manifest.version if manifest else "")
        found.append(Overlay(place, version, manifest, fault))
    return found


def check_overlay(overlays: list[Overlay], vllm: Vllm | None, *, needed: bool) -> Finding:
    """Is there one overlay, and can it be read?

    Args:
        overlays: Those that were found.
        vllm: The vLLM that one would serve.
        needed: Whether the settings name a sparse method, which cannot do without.
    """
    if not overlays:
        return _none_installed(vllm, needed=needed)
    if len(overlays) > 1:
        return Finding(
            OVERLAY,
            Status.ERROR,
            f"{len(overlays)} overlays are installed, and only the first acts",
            tuple(f"{overlay.version or 'unknown version'}: {overlay.directory.parent}" for overlay in overlays),
            (
                f"keep the one that you want; in each other's environment: pip uninstall {DISTRIBUTION}",
                "or take its directory off PYTHONPATH",
            ),
        )
    (overlay,) = overlays
    if overlay.manifest is None:
        what, details = "its manifest cannot be read", tuple(overlay.fault.splitlines()[1:2])
        return Finding(OVERLAY, Status.ERROR, what, details, (_reinstall(),))
    missing = missing_hooks(overlay.manifest)
    if missing:
        what = f"{overlay.version} calls hooks that the installed runtime does not have"
        return Finding(OVERLAY, Status.ERROR, what, tuple(missing), (UPGRADE,))
    what = f"{overlay.version} for vLLM {overlay.manifest.release}, {len(overlay.manifest.modules)} modules"
    return Finding(OVERLAY, Status.OK, what, (str(overlay.directory),))


def _none_installed(vllm: Vllm | None, *, needed: bool) -> Finding:
    if needed:
        what = "none is installed: vLLM runs unchanged, without the sparse method of the settings"
        return Finding(OVERLAY, Status.WARNING, what, todo=how_to_install(vllm))
    what = "none is installed, and only sparse attention needs one: vLLM runs unchanged, without an import hook"
    build, install = how_to_install(vllm)
    return Finding(OVERLAY, Status.OK, what, (f"for sparse attention: {build}", f"and then: {install}"))


def how_to_install(vllm: Vllm | None) -> tuple[str, str]:
    """How an overlay for a vLLM is built, and how it is installed."""
    release = (vllm.nearest if vllm else "") or "RELEASE"
    return (
        f"in a checkout of the UCM overlay: nox -s build-overlay -- {release}",
        f"{PIP} install build/wheels/{OVERLAY_PACKAGE}-{release}.*.whl",
    )


def states_of(manifest: Manifest, vllm: Vllm | None, disabled: Mapping[str, str], *, active: bool) -> list[ModuleState]:
    """Each shadowed module's state.

    Args:
        manifest: The overlay's.
        vllm: The vLLM that it shadows.
        disabled: The groups that are off, with the reasons.
        active: Whether the finder is in place.
    """
    found = []
    for module in manifest.modules.values():
        origin = _origin(module, vllm)
        upstream = _compared(origin, module.upstream_sha256)
        rewritten = _compared(manifest.file(module), module.rewritten_sha256)
        reason = disabled.get(module.group)
        if not active or reason is not None or origin is None:
            loads = origin
        else:
            loads = manifest.file(module) if upstream == rewritten == FINE else None
        found.append(ModuleState(module, upstream, rewritten, reason, loads, origin))
    return found


def _origin(module: ShadowedModule, vllm: Vllm | None) -> Path | None:
    """The file of vLLM's own, as Python's own finder sees it; the packages above it are not imported."""
    if vllm is None:
        return None
    package = vllm.directory.joinpath(*module.name.split(".")[1:-1])
    spec = PathFinder.find_spec(module.name, [str(package)])
    return Path(spec.origin) if spec is not None and spec.origin else None


def _compared(path: Path | None, wanted: str) -> str:
    if path is None or not path.is_file():
        return MISSING
    return FINE if sha256_of(path) == wanted else CHANGED


def check_modules(states: list[ModuleState], manifest: Manifest, vllm: Vllm) -> list[Finding]:
    """Do vLLM's files and the overlay's have the contents that were reviewed?"""
    on = [state for state in states if state.disabled is None]
    findings = []
    broken = [state for state in on if state.rewritten != FINE]
    if broken:
        findings.append(
            Finding(
                MODULES,
                Status.ERROR,
                f"{len(broken)} of the overlay's files {_are(broken)} not the reviewed one: vLLM will not start",
                tuple(f"{state.rewritten}: {manifest.file(state.module)}" for state in broken),
                (_reinstall(),),
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
    package, place = vllm.distribution or "vllm", vllm.directory.parent
    if release and release != serves:
        what = f"the overlay is for vLLM {serves}, installed is {release}: vLLM will not start"
        todo = (
            f"install the overlay for it: nox -s build-overlay -- {release}, then pip install its wheel",
            f"or install the vLLM that the overlay is for: {PIP} install {package}=={serves}",
        )
    else:
        what = (
            f"{len(foreign)} of vLLM's files {_are(foreign)} not what the overlay for {serves} was made from: "
            "vLLM will not start"
        )
        todo = (
            f"if they were edited by accident: {PIP} install --force-reinstall --no-deps {package}=={serves}",
            f"if they are meant to be so, review an overlay made from them: nox -s review -- --from {place}",
        )
    return Finding(
        MODULES,
        Status.ERROR,
        what,
        tuple(f"{state.upstream}: {state.origin or state.module.name}" for state in foreign),
        (*todo, f"or run upstream's vLLM, without UCM: {ALL}=1"),
    )


def _are(things: list[ModuleState]) -> str:
    return "is" if len(things) == 1 else "are"


def _reinstall() -> str:
    return f"reinstall the overlay: {PIP} install --force-reinstall --no-deps <overlay wheel>"
