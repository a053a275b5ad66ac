"""The example method on the installed vLLM's own layer and kernel: a decode reads its first and its recent blocks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.sparse.steps import step
from ucm.api import Role
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

FILE = Path(__file__).parents[3] / "examples" / "sparse_method" / "ucm_first_and_recent.py"
SIZE, HEAD, RECENT = 32, 64, 2
#: Of each row: tokens before the step, new ones, tokens of its prompt.
STEPS = [
    [(300, 1, 10), (129, 1, 100), (64, 1, 64), (7, 1, 5)],  # two rows long enough to be restricted, two that are not
    [(300, 1, 10), (200, 60, 400), (0, 33, 33)],  # beside parts of prompts, which stay dense
    [(30, 1, 2), (95, 1, 1)],  # nothing to restrict
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), "float32", SIZE, HEAD, blocks=64)


@pytest.mark.parametrize("rows", STEPS)
def test_attention_is_that_of_the_blocks_that_are_read(
    real: RealLayer, rows: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("ucm_first_and_recent", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    method = module.FirstAndRecent(real.config, Role.WORKER, {"recent_blocks": RECENT})
    method.attention = real.view
    method.worker_started()
    method.layer_seen(NAME)
    source = torch.Generator().manual_seed(1)
    blocks = torch.randperm(63, generator=source).add(1).tolist()
    tables, expected, counts = [], [], [new for _, new, _ in rows]
    query = torch.randn((sum(counts), HEADS, HEAD), generator=source)
    for (computed, new, prompt), of in zip(rows, query.split(counts), strict=True):
        length = computed + new
        table = [blocks.pop() for _ in range(-(-length // SIZE))]
        keys, values = (torch.randn((length, KV_HEADS, HEAD), generator=source) for _ in range(2))
        places, queries = torch.arange(length), torch.arange(computed, length)[:, None]
        real.write(keys, values, torch.tensor(table)[places // SIZE] * SIZE + places % SIZE)
        read = (places < SIZE) | (places // SIZE >= len(table) - RECENT)
        mask = (read if new == 1 and computed >= prompt else True) & (places <= queries)
        grouped = (of_heads.double().repeat_interleave(HEADS // KV_HEADS, 1) for of_heads in (keys, values))
        wide_keys, wide_values = grouped
        scores = torch.einsum("qhd,khd->hqk", of.double(), wide_keys) * HEAD**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, wide_values))
        tables.append(table)
    monkeypatch.setattr(real.view, "batch", lambda *_: step(*[(f"{n}", *row) for n, row in enumerate(rows)]))
    dense = real.metadata(tables, [computed + new for computed, new, _ in rows], counts)
    method.execute_begin(None, None, None)
    used = method.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3]
    assert method.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3] is used
    torch.testing.assert_close(real.attend(query, used).double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    restricted = [len(table) for table, (c, n, p) in zip(tables, rows, strict=True) if n == 1 and c >= p]
    assert method.counts["blocks_held"] == sum(held for held in restricted if held > RECENT + 1)
    assert method.counts["rows"] == sum(held > RECENT + 1 for held in restricted)
