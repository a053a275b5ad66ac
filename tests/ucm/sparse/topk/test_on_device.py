"""The Triton kernel scores blocks as torch does. It runs in Triton's interpreter.

`tests.e2e.test_inside_newest` runs this file, and the tests of the whole method, in a process that interprets kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("triton", reason="Triton is not installed; the end-to-end session runs these tests")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton interprets no kernels in this process", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ucm.sparse.fake_view import metadata
from tests.ucm.sparse.steps import step
from tests.ucm.sparse.topk.test_block_topk import HEAD, HEADS, LAYERS, LONG, cache, method, run
from ucm.sparse.topk import codes, kernels
from ucm.sparse.topk.codes import KeyCodes, kernel_for


def made_of(blocks: int, size: int, group: int, head: int, dtype: torch.dtype) -> tuple[KeyCodes, torch.Tensor]:
    """Return codes of random keys of two KV heads, and queries of three rows."""
    source = torch.Generator().manual_seed(blocks + size + group + head)
    keys = torch.randn((blocks, size, 2, head), generator=source).to(dtype)
    keys[2] = 1.0  # all keys of a block alike: nothing is beyond their mean
    made = KeyCodes(blocks, keys[:1])
    made.put(torch.arange(blocks), keys)
    # A part of what a layer computes, as vLLM gives it.
    query = torch.randn((3, 2 * group + 3, head), generator=source).to(dtype)[:, : 2 * group]
    query[1, 0] = 0.0
    return made, query


@pytest.mark.parametrize(
    "given",
    [
        *((16, group, 64, torch.float32) for group in (1, 4)),
        (32, 3, 64, torch.bfloat16),
        (128, 2, 64, torch.float32),
        (16, 2, 80, torch.float32),
        (16, 1, 128, torch.float16),
        (4, 1, 8, torch.float32),
        (16, 1, 192, torch.float32),
    ],
    ids=str,
)
def test_the_kernel_scores_what_torch_scores(given: Any) -> None:
    """Blocks in any order, and more than once."""
    made, query = made_of(24, *given)
    block_ids = torch.randint(0, 24, (3, 17), generator=torch.Generator().manual_seed(1))
    assert made._kernel is kernels.scores
    found = made.scores(query, block_ids)
    made._kernel = None
    torch.testing.assert_close(found, made.scores(query, block_ids), rtol=1e-4, atol=1e-4)


def test_more_blocks_than_a_program_scores() -> None:
    blocks = 2 * int(kernels.CHUNK.value) + 17
    made, query = made_of(blocks, 4, 2, 16, torch.float32)
    block_ids = torch.randperm(blocks).expand(3, -1)
    found = made.scores(query, block_ids)
    made._kernel = None
    torch.testing.assert_close(found, made.scores(query, block_ids), rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_serve_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of other sizes, GPUs before 8.0, and other devices."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert kernel_for(cpu, 16, 64, 1) is kernels.scores
    assert kernel_for(cpu, 48, 64, 1) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert kernel_for(cpu, 16, 40, 1) is None
    assert kernel_for(torch.device("meta"), 16, 64, 1) is None
    for capability, found in (((8, 0), kernels.scores), ((7, 5), None)):
        codes._has_triton.cache_clear()
        monkeypatch.setattr(codes, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object())))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, of=capability: of)
        assert kernel_for(gpu, 16, 64, 1) is found
    codes._has_triton.cache_clear()


class Launches(TorchDispatchMode):  # type: ignore[misc] # torch is not there when types are checked
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += 1
        return func(*args, **(kwargs or {}))


def test_the_operations_of_a_layer_do_not_depend_on_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    scored = kernels.scores
    for requests in (2, 5):  # the query of one alone is not copied: transposing it changes nothing
        made, kv = method(), cache()
        tables = [*([LONG] * requests), [30]]
        for computed in (28, 29):
            before = step(*((f"{n}", computed, 1, 8) for n in range(requests)), ("short", 2, 1, 2))
            run(made, before, metadata(before, tables), kv)
        batch = step(*((f"{n}", 30, 1, 8) for n in range(requests)), ("short", 3, 1, 2))
        query, dense = torch.ones((requests + 1, HEADS, HEAD)), metadata(batch, tables)
        made.execute_begin(None, None, batch)
        made.attention_begin(LAYERS[1], query, query, query, kv, dense)  # it prepares the step for all layers

        def quietly(*given: torch.Tensor) -> torch.Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                return scored(*given)

        monkeypatch.setattr(made._representatives[LAYERS[2]], "_kernel", quietly)
        with Launches() as counter:
            made.attention_begin(LAYERS[2], query, query, query, kv, dense)
        found.append(counter.found)
    assert found[0] == found[1] < 60
