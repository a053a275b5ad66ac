"""A back end of Triton's by the name of ``cpu`` that compiles nothing: all kernels are interpreted.

vLLM's V2 model runner wants Triton, and for the CPU a back end of that name. `tests.e2e.environment` installs this
package as one; with ``TRITON_INTERPRET=1`` Triton never asks it for anything but whether it is there.

Triton's interpreter exchanges most functions of its language before each launch and brings them back after it, which
takes longer than many a kernel. Here they stay exchanged: nothing but kernels calls them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

INTERPRETER = "triton.runtime.interpreter"


class _Exchanged:
    """What is to be brought back after a launch: nothing."""

    def restore(self) -> None:
        """Called after each launch."""


def exchange_once(interpreter: Any) -> None:
    """Let the interpreter exchange functions for the first kernel of each module only."""
    exchange, known = interpreter._patch_lang, set[int]()

    def exchanged(function: Any) -> _Exchanged:
        # A kernel finds the language in the names of its module, which stays.
        if id(function.__globals__) not in known:
            exchange(function)
            known.add(id(function.__globals__))
        return _Exchanged()

    interpreter._patch_lang = exchanged


class _Finder(MetaPathFinder):
    """Waits for the interpreter's import, which comes after that of back ends."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the interpreter's spec, whose execution ends with `exchange_once`; None for all other modules."""
        if name != INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            exchange_once(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
