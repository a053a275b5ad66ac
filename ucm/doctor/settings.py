"""Check the process itself: Python, the runtime, and the kill switches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import ucm
from ucm.doctor.findings import Finding, Status
from ucm.doctor.vllm_install import package_directories, providers
from ucm.overlay.switches import ALL, is_set, variable_of

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNTIME = "ucm-runtime"
PLUGINS, PLUGIN = "VLLM_PLUGINS", "ucm_overlay"


def python_version() -> str:
    """Return the interpreter's version, as three numbers."""
    return ".".join(map(str, sys.version_info[:3]))


def check_python() -> Finding:
    """Report which interpreter runs."""
    return Finding("python", Status.OK, python_version(), (sys.executable,))


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
            "uninstall the others (uc-manager's: pip uninstall uc-manager), or remove their directories from sys.path",
            f"then: {sys.executable} -m pip install --force-reinstall --no-deps <{RUNTIME} wheel>",
        ),
    )


def switches(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the UCM_DISABLE_* variables that are set."""
    environ = os.environ if environ is None else environ
    return sorted(name for name in environ if name.startswith("UCM_DISABLE_") and is_set(name, environ))


def check_switches(on: list[str], groups: Mapping[str, tuple[str, ...]], disabled: Mapping[str, str]) -> Finding:
    """Report what is switched off, and what goes off with it.

    Args:
        on: The variables that are set.
        groups: The overlay's groups, each with those that it relies on.
        disabled: The groups that are off, with the reasons.
    """
    check = "switches"
    if not on:
        return Finding(check, Status.OK, "none is set")
    known = {ALL, *map(variable_of, groups)}
    unknown = [name for name in on if groups and name not in known]
    details = [f"{group} is off: {reason}" for group, reason in disabled.items()]
    details += [f"{name} names no group of this overlay and has no effect" for name in unknown]
    todo = f"to switch {'it' if len(on) == 1 else 'them'} on again: unset {' '.join(on)}"
    if ALL in on:
        return Finding(check, Status.WARNING, f"{ALL} is set: vLLM runs without the overlay", todo=(todo,))
    return Finding(check, Status.WARNING, f"set: {', '.join(on)}", tuple(details), (todo,))


def check_plugins() -> Finding:
    """Check that vLLM may call the entry point that stops a process in which the overlay is inactive."""
    check, allowed = "plugins", os.environ.get(PLUGINS)
    if allowed is None or PLUGIN in allowed.split(","):
        return Finding(check, Status.OK, "vLLM checks in each of its processes that the overlay is active")
    wanted = f"{allowed},{PLUGIN}" if allowed else PLUGIN
    return Finding(
        check,
        Status.WARNING,
        f"{PLUGINS} leaves out {PLUGIN}, so an inactive overlay in a process goes unnoticed",
        (f"{PLUGINS}={allowed}",),
        (f"export {PLUGINS}={wanted}",),
    )
