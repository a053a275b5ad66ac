"""Block top-k through random schedules of vLLM's own scheduler: nothing is stale, and no row reads another's blocks.

The scheduler, its KV-cache manager, our reading of its steps and the method are the real ones; the model is a rule that
makes keys and the next token from all tokens before. `CheckedTopK` compares what is kept of blocks with their keys, in
every layer of every sparse step.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.e2e.engine import MODEL
from tests.e2e.inside.checked_topk import INJECTED, CheckedTopK
from tests.e2e.model import write_model
from tests.ucm.sparse.fake_view import FakeView, Metadata
from tests.ucm.stepping.engine import CheckedEngine
from tests.ucm.stepping.rows import Rows
from tests.ucm.stepping.setting import EngineSetting
from tests.ucm.stepping.vllm_objects import engine_config
from ucm.integration.vllm.sparse.layers import step_batch
from ucm.sparse.base import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.sparse.attention import StepBatch

SIZE, BLOCKS, KV_HEADS, HEADS, HEAD, LENGTH = 4, 70, 1, 2, 4, 512
LAYERS = [f"model.layers.{n}.attn" for n in (2, 3)]
OPTIONS = {"token_budget": 20, "min_context": 0, "sink_tokens": 2, "recent_tokens": 3, "dense_layers": 0}


class View(FakeView):
    """With our own reading of vLLM's steps."""

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        found = step_batch(runner, scheduler_output, input_batch)
        self.steps.append(found)
        return found


class Strict(CheckedTopK):
    """Lets a failure that is not on purpose fail the test."""

    def _fail(self, request_ids: Sequence[str], layer_name: str, error: Exception) -> None:
        if str(error) != INJECTED:
            raise error
        super()._fail(request_ids, layer_name, error)


def mark_of(tokens: list[int]) -> int:
    mark = 1
    for token in tokens:
        mark = (mark * 1_000_003 + token * 8_191 + 12_345) % (1 << 61)
    return mark


class Worker:
    """A V1 runner's state, a KV cache of one shape for all layers, and the method on it."""

    def __init__(self, config: Any) -> None:
        self.method = Strict(config, Role.WORKER, OPTIONS)
        self.cache = torch.zeros((2, BLOCKS, SIZE, KV_HEADS, HEAD))
        self.method.attention = View(bound=self.cache)
        self.method.worker_started()
        for name in LAYERS:
            self.method.layer_seen(name)
        self.method.layers_seen()
        self.rows = Rows()

    def run(self, output: Any, resumed: Mapping[str, list[int]], alive: set[str]) -> dict[str, list[int]]:
        """Write the step's keys, let the method choose in all layers, and give the next tokens."""
        del alive
        self.method.requests_finished(None, output.finished_req_ids)
        starts = self.rows.update(output, resumed)
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return {}
        counts = [output.num_scheduled_tokens[i] for i in ids]
        for request_id, count in zip(ids, counts, strict=True):
            for place in range(starts[request_id], starts[request_id] + count):
                chance = np.random.default_rng(mark_of(self.rows.tokens[request_id][: place + 1]))
                keys = torch.from_numpy(chance.standard_normal((KV_HEADS, HEAD))).float()
                self.cache[0, self.rows.blocks[request_id][place // SIZE], place % SIZE] = keys
        self._attend(ids, [starts[i] for i in ids], counts, output)
        sampled = {}
        for request_id, count in zip(ids, counts, strict=True):
            tokens = self.rows.tokens[request_id]
            if starts[request_id] + count == len(tokens):
                tokens.append(1 + mark_of(tokens) % 5)
                sampled[request_id] = [tokens[-1]]
        return sampled

    def _attend(self, ids: list[str], starts: list[int], counts: list[int], output: Any) -> None:
        lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)], dtype=torch.int32)
        dense = Metadata(self.rows.table(ids), lens, int(lens.max()))
        batch = SimpleNamespace(
            req_ids=ids,
            num_computed_tokens_cpu=np.array(starts),
            num_prompt_tokens=np.array([self.rows.prompts[i] for i in ids]),
        )
        query = torch.randn((sum(counts), HEADS, HEAD))
        places = [(i, p) for i, s, n in zip(ids, starts, counts, strict=True) for p in range(s, s + n)]
        slots = [self.rows.blocks[i][p // SIZE] * SIZE + p % SIZE for i, p in places]
        key = self.cache[0].flatten(0, 1)[slots]
        self.method.execute_begin(None, output, batch)
        for name in LAYERS:
            used = self.method.attention_begin(name, query, key, key, self.cache, dense)[3]
            self.method.attention_finished(name, query, self.cache, used, query)
        self.method.execute_finished(None, output, None)


class Engine(CheckedEngine):
    """With that worker; with asynchronous scheduling, one step ahead of it."""

    def __init__(self, chance: random.Random, *, asynchronous: bool) -> None:
        setting = EngineSetting(asynchronous=asynchronous, blocks=BLOCKS)
        sparse = {"ucm_sparse_config": {"BlockTopK": OPTIONS}}
        config = engine_config(write_model(MODEL), setting, SIZE, LENGTH, additional_config=sparse)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.float32)
        super().__init__(setting, config, LAYERS, spec, chance)
        self.device: Worker = Worker(config)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_stale_whatever_is_scheduled(seed: int, *, asynchronous: bool) -> None:
    """Prefix hits, chunks, preemptions, aborts and resets of the prefix cache; some steps fail on purpose."""
    chance = random.Random(seed)  # noqa: S311 - no secrets
    engine = Engine(chance, asynchronous=asynchronous)
    prefixes = [[chance.randrange(5) for _ in range(n)] for n in (17, 40)]
    while engine.happened["steps"] < 350:
        if len(engine.requests) < 9 and chance.random() < 0.3:
            prompt = chance.choice([[], *prefixes]) + [chance.randrange(5) for _ in range(chance.randrange(1, 30))]
            engine.submit(prompt, chance.randrange(1, 60))
        if engine.requests and chance.random() < 0.02:
            engine.abort(chance.choice(list(engine.requests.values())))
        if chance.random() < 0.01:
            engine.reset()
        engine.turn()
    engine.drain()
    method = engine.device.method
    assert {"resumed", "hits", "chunks", "aborts"} <= {name for name, count in engine.happened.items() if count}
    assert method.counts["rows"] > 300
    assert method.counts["representatives"] > 100
    assert method.counts["failures"] == 3
    planner = method._planner
    assert planner is not None
    assert not planner._made, "nothing is kept of ended requests"
    assert not method._dense
