"""The kernels compile for GPUs of NVIDIA and AMD, which needs no GPU. Nothing is run here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("triton", reason="Triton is not installed; the end-to-end session runs these tests")

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ucm.sparse.topk import kernels
from ucm.sparse.topk.codes import KeyCodes

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The dtypes of arguments that are tensors.
POINTERS = {
    "keys": "bf16",
    "block_ids": "i64",
    "query": "bf16",
    "block_table": "i32",
    "plan": "i32",
    "scores": "fp32",
    "shares": "i64",
    "done": "i32",
    "table": "i32",
    "codes": "i64",
    "scales": "bf16",
    "means": "bf16",
    "turn": "fp32",
}


#: The kind of binary, the target, and the bytes of shared memory that a program may have there.
TARGETS = {
    "A100": ("cubin", GPUTarget("cuda", 80, 32), 166_912),
    "L40": ("cubin", GPUTarget("cuda", 89, 32), 101_376),
    "H100": ("cubin", GPUTarget("cuda", 90, 32), 232_448),
    "MI300": ("hsaco", GPUTarget("hip", "gfx942", 64), 65_536),
}


def compiled(function: Any, gpu: str, given: Mapping[str, int]) -> bytes:
    """Compile a kernel; it must fit into the shared memory of its target, as Triton checks at a launch only."""
    constants = {name: value for name, value in given.items() if name != "num_warps"}
    options = {name: value for name, value in given.items() if name == "num_warps"}
    signature = {name: _kind(name, constants) for name in function.arg_names}
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    binary, target, most = TARGETS[gpu]
    found = triton.compile(ASTSource(function, signature, values), target=target, options=options)
    assert found.metadata.shared <= most
    made: bytes = found.asm[binary]
    return made


def _kind(name: str, constants: Mapping[str, int]) -> str:
    if name in constants:
        return "constexpr"
    return f"*{POINTERS[name]}" if name in POINTERS else "fp32" if name == "scale" else "i32"


@pytest.fixture(autouse=True)
def _compiling(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.delitem(backends, "cpu", raising=False)  # of the tests of the V2 runner; it compiles nothing


def made(size: int, head: int) -> KeyCodes:
    return KeyCodes(4, torch.zeros((1, size, 2, head)))


@pytest.mark.parametrize("gpu", list(TARGETS))
@pytest.mark.parametrize(("size", "head"), [(16, 80), (16, 128), (32, 192), (128, 256)])
def test_scores(size: int, head: int, gpu: str) -> None:
    kernel = made(size, head).scoring_kernel(8)
    assert compiled(kernel.function, gpu, kernel.constants)


@pytest.mark.parametrize("gpu", list(TARGETS))
@pytest.mark.parametrize(("size", "head"), [(16, 80), (16, 128), (128, 256)])
def test_summaries(size: int, head: int, gpu: str) -> None:
    kernel = made(size, head).making_kernel()
    assert compiled(kernel.function, gpu, kernel.constants)


def test_choose_of_amd() -> None:
    assert compiled(kernels.choose, "MI300", {})


@pytest.mark.parametrize("ones", [{}, {"rows": 1, "sinks": 1, "recent": 1}])
def test_choose(ones: dict[str, int]) -> None:
    """Triton makes constants of arguments that are 1."""
    assert compiled(kernels.choose, "H100", ones)
