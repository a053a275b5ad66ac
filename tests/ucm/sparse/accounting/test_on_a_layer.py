"""`SinkWindow` on the installed vLLM's own layer and kernel: released blocks are overwritten, and not read."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.sparse.steps import step
from ucm.sparse.base import Role
from ucm.sparse.blocks import TILE
from ucm.sparse.sink_window import SinkWindow
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

SIZE, HEAD = 32, 64
#: Two blocks of sinks; a window that begins within a block.
OPTIONS = {"sink_tokens": 40, "window_tokens": 50}
#: For each row: tokens before the step, new tokens, prompt tokens. Decodes, parts of prompts and short requests.
STEPS = [
    [(300, 1, 10), (129, 1, 100), (64, 1, 64), (7, 1, 5)],
    [(300, 1, 10), (200, 60, 400), (0, 33, 33), (150, 1, 2)],
    [(96, 128, 300), (224, 5, 229), (146, 1, 1), (145, 1, 1)],
    [(10, 3, 13), (30, 1, 2)],
    [(70, 330, 350), (300, 1, 10), (130, 250, 390)],
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), request.param, SIZE, HEAD, blocks=64)


def masked(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute attention in double precision; ``mask`` is ``[num_queries, num_keys]``."""
    shared = HEADS // KV_HEADS
    of_heads = keys.double().repeat_interleave(shared, 1), values.double().repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), of_heads[0]) * HEAD**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, of_heads[1])


@pytest.mark.parametrize("prefill", ["window", "dense"])
@pytest.mark.parametrize("rows", STEPS)
def test_attention_is_that_of_the_sinks_and_the_window(
    real: RealLayer, rows: list[tuple[int, int, int]], prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SinkWindow(real.config, Role.WORKER, {**OPTIONS, "prefill": prefill})
    method.attention = real.view
    method.worker_started()
    source = torch.Generator().manual_seed(1)
    kind = real.kv_cache.dtype
    real.kv_cache.fill_(1000.0)
    blocks = torch.randperm(63, generator=source).add(1).tolist()
    tables, read, kept = [], [], []
    for computed, new, prompt in rows:
        length = computed + new
        table = [blocks.pop() for _ in range(-(-length // SIZE))]
        keys, values = (torch.randn((length, KV_HEADS, HEAD), generator=source).to(kind) for _ in range(2))
        places, queries = torch.arange(length), torch.arange(computed, length)[:, None]
        first = (queries // TILE * TILE - OPTIONS["window_tokens"]).clamp(min=0) // SIZE * SIZE
        whole = (queries < prompt) & (prefill == "dense")
        mine = ((places < 2 * SIZE) | (places >= first) | whole) & (places <= queries)
        kept_places = mine.any(0)
        slots = torch.tensor(table)[places // SIZE] * SIZE + places % SIZE
        real.write(keys[kept_places], values[kept_places], slots[kept_places])
        tables.append(table)
        read.append(mine)
        kept.append((keys, values))
    counts = [new for _, new, _ in rows]
    monkeypatch.setattr(real.view, "batch", lambda *_: step(*[(f"{n}", *row) for n, row in enumerate(rows)]))
    dense = real.metadata(tables, [computed + new for computed, new, _ in rows], counts)
    query = torch.randn((sum(counts), HEADS, HEAD), generator=source).to(kind)
    method.execute_begin(None, None, None)
    used = method.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3]
    assert method.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3] is used
    output = real.attend(query, used)
    method.execute_finished(None, None, None)
    assert (used is dense) == all(bool(mine[-1].all()) for mine in read)
    exact = 1e-5 if kind == torch.float32 else 2e-2
    for part, found, of, mine in zip(query.split(counts), output.split(counts), kept, read, strict=True):
        torch.testing.assert_close(found.double(), masked(part, *of, mine), rtol=exact, atol=exact)
