"""Check the interpreter's start: the .pth files that this Python reads, and the import hooks in this process."""

from __future__ import annotations

import ast
import re
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.doctor.findings import Finding, Status
from ucm.doctor.vllm_install import providers
from ucm.overlay.activation import overlay_packages

if TYPE_CHECKING:
    from collections.abc import Iterable

OVERLAY_PACKAGE = "ucm_vllm_overlay"
PTH = f"{OVERLAY_PACKAGE}.pth"
CUSTOMISATIONS = ("sitecustomize", "usercustomize")
#: Words that show that a start-up file or an import hook affects vLLM.
TOUCHES_VLLM = re.compile(r"(?<![A-Za-z0-9_])(vllm|ucm|uc[-_]manager|unified[-_]cache)", re.IGNORECASE)
#: The distribution of another ``ucm``, which patches vLLM when Python starts.
UC_MANAGER = "uc-manager"
#: Packages whose import hooks only handle their own modules.
HARMLESS = ("_distutils_hack", "_virtualenv", "__editable___", "six")


@dataclass(frozen=True)
class StartUpFile:
    """A file that runs code when the interpreter starts.

    Attributes:
        path: Its path.
        touches_vllm: Whether it names vLLM or UCM.
        ours: Whether it belongs to an overlay.
    """

    path: Path
    touches_vllm: bool
    ours: bool


@dataclass(frozen=True)
class ImportHooks:
    """The import hooks of this process.

    Attributes:
        position: The index of the overlay's finder on ``sys.meta_path``; None if it is not there.
        directory: The directory of its overlay.
        ahead: The earlier hooks that are not Python's own.
        others: All hooks that are neither Python's own nor ours.
    """

    position: int | None
    directory: Path | None
    ahead: tuple[str, ...]
    others: tuple[str, ...]


def site_directories() -> list[Path]:
    """Return the directories whose .pth files this interpreter reads."""
    if sys.flags.no_site:
        return []
    directories = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        directories = [site.getusersitepackages(), *directories]
    return list(dict.fromkeys(Path(directory).resolve() for directory in directories))


def start_up_files() -> list[StartUpFile]:
    """Return the .pth files that run code, then sitecustomize and usercustomize."""
    found, ours = [], {OVERLAY_PACKAGE, *overlay_packages()}
    for directory in site_directories():
        for path in sorted(directory.glob("*.pth")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            code = [line for line in lines if line.startswith(("import ", "import\t"))]
            if code:
                touches = any(touches_vllm(line) for line in code)
                found.append(StartUpFile(path, touches, path.stem in ours))
    for name in CUSTOMISATIONS:
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.__file__:
            path = Path(loaded.__file__)
            text = path.read_text(encoding="utf-8", errors="replace")
            found.append(StartUpFile(path, touches_vllm(text), ours=False))
    return found


def touches_vllm(code: str) -> bool:
    """Return whether code that runs at interpreter start names vLLM or UCM, other than in a path or a comment.

    Args:
        code: A line of a .pth file, or a whole file; text that is not valid Python is searched as it is.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return TOUCHES_VLLM.search(code) is not None
    return any(TOUCHES_VLLM.search(name) for node in ast.walk(tree) for name in _names(node))


def _names(node: ast.AST) -> list[str]:
    """Return the names in a node of a syntax tree: modules, variables, attributes, and strings that are not paths."""
    match node:
        case ast.Import() | ast.ImportFrom():
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            return [module, *(alias.name for alias in node.names)]
        case ast.Name():
            return [node.id]
        case ast.Attribute():
            return [node.attr]
        case ast.Constant(value=str(text)) if not {"/", "\\"} & set(text):
            return [text]
    return []


def import_hooks() -> ImportHooks:
    """Return the import hooks on this process's ``sys.meta_path``."""
    names = [_name(finder) for finder in sys.meta_path]
    ours = [place for place, name in enumerate(names) if name.startswith(f"{OVERLAY_PACKAGE}.")]
    overlays = tuple(f"{package}." for package in (OVERLAY_PACKAGE, *overlay_packages()))
    foreign = [(n, name) for n, name in enumerate(names) if not _is_pythons(name) and not name.startswith(overlays)]
    position = ours[0] if ours else None
    boot = sys.modules.get(f"{OVERLAY_PACKAGE}._boot")
    directory = Path(boot.__file__).resolve().parent if boot is not None and boot.__file__ else None
    ahead = tuple(name for place, name in foreign if position is not None and place < position)
    return ImportHooks(position, directory, ahead, tuple(name for _, name in foreign))


def check_start_up_file(overlay: Path) -> Finding:
    """Check that the overlay's .pth file is in a directory that this Python reads.

    Args:
        overlay: The overlay package's directory.
    """
    check, place = "start-up file", overlay.parent
    if sys.flags.no_site:
        what = "this Python was started with -S, so it reads no .pth files"
        return Finding(check, Status.ERROR, what, todo=("start vLLM without -S",))
    if place.resolve() not in site_directories():
        return Finding(
            check,
            Status.ERROR,
            "Python does not read .pth files in the overlay's directory, so the overlay is never activated",
            (
                f"overlay: {place}",
                "it is on PYTHONPATH, or was installed with `pip install --target`",
                *(f"read: {directory}" for directory in site_directories()),
            ),
            (
                f"remove {place} from PYTHONPATH",
                f"install the wheel into the environment: {sys.executable} -m pip install <overlay wheel>",
            ),
        )
    if not (place / PTH).is_file():
        return Finding(
            check,
            Status.ERROR,
            f"{PTH} is missing: the overlay is never activated",
            (str(place),),
            (_reinstall(),),
        )
    return Finding(check, Status.OK, f"{PTH} is in a directory that this Python reads", (str(place),))


def check_import_hook(
    hooks: ImportHooks, overlay: Path, loaded: Iterable[str], claimed: Iterable[tuple[str, str]] = ()
) -> Finding:
    """Check that the overlay's finder was installed in this process in time, and no earlier finder takes its modules.

    Args:
        hooks: The import hooks of this process.
        overlay: The overlay package's directory.
        loaded: The modules of vLLM that were loaded before UCM's.
        claimed: The shadowed modules that an earlier finder would load from elsewhere, each with a description.
    """
    check = "import hook"
    if hooks.position is None:
        in_order = check_start_up_file(overlay).status is Status.OK
        return Finding(
            check,
            Status.ERROR,
            "not found in this process: vLLM's modules are not replaced here",
            (f"{PTH} did not run when {sys.executable} started",),
            (_reinstall(),) if in_order else (),
        )
    if hooks.directory is not None and hooks.directory != overlay.resolve():
        what = "in place, but for another overlay than the one found"
        details = (f"serves: {hooks.directory}", f"found first on sys.path: {overlay}")
        return Finding(check, Status.ERROR, what, details, ("keep one of the two",))
    early = sorted(loaded)
    if early:
        names = tuple(f"loaded already: {name}" for name in early[:5])
        what = "in place, but vLLM had been imported when the interpreter started"
        return Finding(check, Status.ERROR, what, names, ("remove the start-up file that imports vLLM",))
    taken = tuple(f"{name}: {by}" for name, by in claimed)
    if taken:
        what = "in place, but an earlier finder would load modules that it shadows: vLLM will not start"
        return Finding(check, Status.ERROR, what, taken, ("remove the package that installs the earlier finder",))
    ahead = tuple(f"earlier finder, ignores our modules: {name}" for name in hooks.ahead)
    return Finding(check, Status.OK, f"in place, number {hooks.position + 1} on sys.meta_path of this process", ahead)


def check_others(hooks: ImportHooks, files: list[StartUpFile]) -> Finding:
    """Check whether another package touches vLLM at interpreter start."""
    check = "other hooks"
    named = [f"start-up file: {file.path}" for file in files if file.touches_vllm and not file.ours]
    named += [f"import hook: {name}" for name in hooks.others if TOUCHES_VLLM.search(name)]
    if named:
        there = any(provider.name == UC_MANAGER for provider in providers("ucm"))
        return Finding(
            check,
            Status.WARNING,
            "another package touches vLLM when Python starts; it may replace what the overlay rewrites",
            tuple(named),
            (f"pip uninstall {UC_MANAGER}" if there else "check what it does, and uninstall it if it does",),
        )
    return Finding(check, Status.OK, "no other package touches vLLM when Python starts")


def own_modules_of_vllm() -> list[str]:
    """Return the modules of vLLM that were loaded at interpreter start."""
    return [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]


def _name(finder: object) -> str:
    kind = finder if isinstance(finder, type) else type(finder)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_pythons(name: str) -> bool:
    return name.startswith(HARMLESS) or name.partition(".")[0] in sys.stdlib_module_names


def _reinstall() -> str:
    return f"reinstall the overlay: {sys.executable} -m pip install --force-reinstall --no-deps <overlay wheel>"
