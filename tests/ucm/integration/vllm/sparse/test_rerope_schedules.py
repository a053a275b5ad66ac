"""ReRoPE through random schedules of vLLM's own schedulers; with asynchronous scheduling, two steps are in flight.

The scheduler, its KV-cache manager, our reading of its steps, the method, and a layer's kernel and cache are the real
ones. The model is a rule that makes queries, keys, values and the next token from all tokens before.
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
from tests.e2e.model import write_model
from tests.ucm.integration.vllm.sparse.rerope_truth import HEAD, Style, Way
from tests.ucm.integration.vllm.sparse.test_rerope_on_a_layer import Model, method
from tests.ucm.stepping.engine import CheckedEngine
from tests.ucm.stepping.rows import Rows
from tests.ucm.stepping.setting import EngineSetting
from tests.ucm.stepping.vllm_objects import engine_config
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZE, BLOCKS, LENGTH = 32, 12, 512
WAY, STYLE = Way(20, 4.0, 30), Style()
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Worker:
    """A V1 runner's state, and a real layer with the method on it."""

    def __init__(self, real: RealLayer) -> None:
        self._real = real
        self.method = method(real, WAY, STYLE)
        self._rotate = Model(real, STYLE).outer.rotary_emb.forward_native
        self.rows = Rows()
        self.checked = 0

    def run(self, output: Any, resumed: Mapping[str, list[int]], alive: set[str]) -> dict[str, list[int]]:
        """Compute the attention of a step, compare it with its definition, and give the next tokens."""
        self.method.requests_finished(None, output.finished_req_ids)
        starts = self.rows.update(output, resumed)
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return {}
        counts = [output.num_scheduled_tokens[i] for i in ids]
        begins = [starts[i] for i in ids]
        every = [projected(self.rows.tokens[i][: b + n]) for i, b, n in zip(ids, begins, counts, strict=True)]
        found = self._attend(output, ids, begins, counts, every).split(counts)
        for request_id, begin, (query, keys, values), own in zip(ids, begins, every, found, strict=True):
            if request_id in alive:
                wanted = WAY.attention(query[begin:], keys, values, begin, STYLE)
                torch.testing.assert_close(own.double(), wanted, rtol=2e-5, atol=2e-5)
                self.checked += len(own)
        sampled = {}
        for request_id, begin, count in zip(ids, begins, counts, strict=True):
            tokens = self.rows.tokens[request_id]
            if begin + count == len(tokens):
                tokens.append(1 + sum(place * token for place, token in enumerate(tokens)) % 5)
                sampled[request_id] = [tokens[-1]]
        return sampled

    def _attend(
        self, output: Any, ids: list[str], begins: list[int], counts: list[int], every: list[Projected]
    ) -> torch.Tensor:
        real, queries = self._real, []
        for request_id, begin, (query, keys, values) in zip(ids, begins, every, strict=True):
            places = torch.arange(begin, len(keys))
            rotated, stored = self._rotate(places, query[begin:].flatten(1), keys[begin:].flatten(1))
            slots = torch.tensor(self.rows.blocks[request_id])[places // SIZE] * SIZE + places % SIZE
            real.write(stored.view(-1, KV_HEADS, HEAD), values[begin:], slots)
            queries.append(rotated.view(-1, HEADS, HEAD))
        query = torch.cat(queries)
        lens = [begin + count for begin, count in zip(begins, counts, strict=True)]
        dense = real.metadata([self.rows.blocks[i] for i in ids], lens, counts)
        batch = SimpleNamespace(
            req_ids=ids,
            num_computed_tokens_cpu=np.array(begins),
            num_prompt_tokens=np.array([self.rows.prompts[i] for i in ids]),
        )
        self.method.execute_begin(None, output, batch)
        used = self.method.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3]
        result = real.attend(query, used).flatten(1)
        self.method.attention_finished(NAME, query, real.kv_cache, used, result)
        self.method.execute_finished(None, output, None)
        return result.view_as(query)


def projected(tokens: list[int]) -> Projected:
    """Return queries, keys and values of tokens, each made of the tokens up to its own."""
    found, mark = [], 1
    for token in tokens:
        mark = (mark * 1_000_003 + token * 8_191 + 12_345) % (1 << 61)
        drawn = np.random.default_rng(mark).standard_normal((HEADS + 2 * KV_HEADS, HEAD), np.float32)
        found.append(torch.from_numpy(drawn))
    query, keys, values = torch.stack(found).split([HEADS, KV_HEADS, KV_HEADS], 1)
    return query, keys.contiguous(), values.contiguous()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_attention_is_right_whatever_is_scheduled(tmp_path: Path, *, asynchronous: bool) -> None:
    """Prefix hits, chunks, preemptions, aborts and resets of the prefix cache."""
    chance = random.Random(3)  # noqa: S311 - no secrets
    setting = EngineSetting(asynchronous=asynchronous, blocks=BLOCKS)
    config = engine_config(write_model(MODEL), setting, SIZE, LENGTH)
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.float32)
    engine = CheckedEngine(setting, config, [NAME], spec, chance)
    engine.device = worker = Worker(real_layer(tmp_path / "layer", "float32", SIZE, HEAD, blocks=BLOCKS))
    prefixes = [[chance.randrange(5) for _ in range(n)] for n in (33, 70)]
    while engine.happened["steps"] < 250:
        if len(engine.requests) < 7 and chance.random() < 0.3:
            prompt = chance.choice([[], *prefixes]) + [chance.randrange(5) for _ in range(chance.randrange(1, 30))]
            engine.submit(prompt, chance.randrange(1, 60))
        if engine.requests and chance.random() < 0.02:
            engine.abort(chance.choice(list(engine.requests.values())))
        if chance.random() < 0.01:
            engine.reset()
        engine.turn()
    engine.drain()
    assert {"resumed", "hits", "chunks", "aborts"} <= {name for name, count in engine.happened.items() if count}
    assert worker.checked > 500
    assert worker.method.figures()["rerope_tokens.torch"] > 300
