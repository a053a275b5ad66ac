"""The kernel compiles for GPUs of NVIDIA and AMD, which needs no GPU. Nothing is run here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("triton", reason="Triton is not installed; the end-to-end session runs these tests")

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ucm.sparse.topk import kernels
from ucm.sparse.topk.codes import turn

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The dtypes of arguments that are tensors.
POINTERS = {
    "codes": "i64",
    "scales": "bf16",
    "means": "bf16",
    "query": "fp32",
    "turned": "fp32",
    "block_ids": "i64",
    "found": "fp32",
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
    return f"*{POINTERS[name]}" if name in POINTERS else "i32"


@pytest.fixture(autouse=True)
def _compiling(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.delitem(backends, "cpu", raising=False)  # of the tests of the V2 runner; it compiles nothing


@pytest.mark.parametrize("gpu", list(TARGETS))
@pytest.mark.parametrize(("size", "head"), [(16, 80), (16, 128), (32, 192), (128, 256)])
def test_scores(size: int, head: int, gpu: str) -> None:
    words = turn(head).shape[1] // 64
    assert compiled(kernels.score_codes, gpu, kernels.constants(4, head, words, size))
