"""A stand-in for torch-npu, which cannot be imported without an NPU's libraries: it has every name, all inert.

It makes the modules of vLLM Ascend importable on a CPU, so that its schedulers run in a real engine. It computes
nothing; `npu_on_cpu.py` puts torch in the place of the kernels that a whole step needs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = __name__


class Anything:
    """An object of which every attribute, call and decoration is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: object, **__: object) -> Any:
        return Anything()

    def __or__(self, _: object) -> Any:
        return Anything()

    __ror__ = __getitem__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was opened."""

    def __bool__(self) -> bool:
        return False


class _Module(ModuleType):
    """A module with any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below torch_npu, and `acl`, the toolkit's own interface."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        below = fullname.startswith((f"{NAME}.", "acl"))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


sys.meta_path.append(_Finder())
torch.npu = Anything()
