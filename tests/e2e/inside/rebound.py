"""A general plug-in of vLLM: whose code some attributes have in this process, and which moved hooks were called."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: The variable with the dotted names of the attributes.
NAMES = "UCM_E2E_ATTRIBUTES"
HOOKS = "ascend_patches.hooks"
calls: Counter[str] = Counter()


def start() -> None:
    """Count the calls of the hooks from now on; vLLM calls this before a process makes its part of an engine."""
    if calls or importlib.util.find_spec(HOOKS.partition(".")[0]) is None:  # not installed beside the patches
        return
    hooks = importlib.import_module(HOOKS)

    for name, function in vars(hooks).copy().items():
        if inspect.isfunction(function) and function.__module__ == HOOKS and not name.startswith("_"):
            calls[name] = 0
            setattr(hooks, name, counted(name, function))


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also counts."""

    @functools.wraps(function)
    def count(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*given, **named)

    return count


def told() -> dict[str, Any]:
    """Return the files of the code of each attribute whose module is loaded, outermost first, and the calls."""
    return {
        "files": {name: files for name in json.loads(os.environ[NAMES]) if (files := code(name))},
        "calls": {name: count for name, count in calls.items() if count},
        "daemon": multiprocessing.current_process().daemon,
    }


def code(name: str) -> list[str]:
    """Return the files of an attribute's code; none if its module is not loaded."""
    parts = name.split(".")
    found: Any = next((m for n in range(len(parts), 0, -1) if (m := sys.modules.get(".".join(parts[:n])))), None)
    try:
        for part in parts[len(found.__name__.split(".")) :]:
            found = getattr(found, part)
    except AttributeError:
        return []
    if inspect.isclass(found):
        return [str(sys.modules[found.__module__].__file__)]
    files = []
    found = getattr(found, "fget", found)
    while found is not None:
        files.append(found.__code__.co_filename)
        found = getattr(found, "__wrapped__", None)
    return files
