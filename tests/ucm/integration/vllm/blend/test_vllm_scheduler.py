"""Blended requests under vLLM's own schedulers: with asynchronous scheduling, two steps are in flight."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from tests.ucm.integration.vllm.blend.vllm_engine import BlendEngine
from tests.ucm.integration.vllm.connector.simulation.engine import IDLE, PATIENCE
from tests.ucm.integration.vllm.connector.simulation.setting import Setting

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import SimulatedClock

pytest_plugins = ("tests.simulated",)

REQUESTS = 60


def a_prompt(chance: random.Random, texts: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Return a prompt of some chunks, some of them twice, with or without gaps, and its marks."""
    prompt, marks = [chance.randrange(1, 6) for _ in range(chance.choice((0, 0, 3)))], []
    for _ in range(chance.randrange(1, 5)):
        text = chance.choice(texts)
        marks.append([len(prompt), len(prompt) + len(text)])
        prompt += text + [chance.randrange(1, 6) for _ in range(chance.choice((0, 0, 0, 2, 9)))]
    return prompt, marks


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "blend",
    [{"select": "question", "ratio": 1.0}, {"select": "edges", "edge_tokens": 1000}],
    ids=["question", "edges"],
)
def test_what_is_recomputed_as_a_whole_is_exact_in_any_schedule(
    clock: SimulatedClock, tmp_path: Path, blend: dict[str, Any], *, asynchronous: bool
) -> None:
    """Prompts in chunks of a few tokens, preempted and aborted, with plain requests between them."""
    chance = random.Random(5)  # noqa: S311 - no secrets
    setting = Setting(asynchronous=asynchronous, blocks=70, budget=24, aborts=0.04, loads="within", batches=2)
    engine = BlendEngine(setting, tmp_path, chance, clock, **blend)
    texts = [[chance.randrange(1, 6) for _ in range(length)] for length in (12, 17, 20, 33)]
    stored: set[int] = set()
    until = clock.monotonic() + PATIENCE
    while len(stored) < len(texts):  # what is computed before the weights are identified is not stored
        for number, text in enumerate(texts):
            engine.store(text)
            before = engine.happened["blends"]
            own = [chance.randrange(1, 6) for _ in range(5)]  # or an exact prefix would be found instead
            engine.submit([*own, *text, 1], 1, {"ucm_chunks": [[5, 5 + len(text)]]})
            engine.drain()
            stored |= {number} if engine.happened["blends"] > before else set()
        clock.sleep(IDLE)
        assert clock.monotonic() < until
    engine.scheduler.connector_prefix_cache_stats = hits = PrefixCacheStats()  # as if statistics were logged
    left = REQUESTS
    while left:
        while left and chance.random() < 0.4:
            prompt, marks = a_prompt(chance, texts)
            engine.submit(prompt, chance.randrange(1, 12), None if chance.random() < 0.2 else {"ucm_chunks": marks})
            left -= 1
        engine.turn()
    engine.drain()
    happened = engine.happened
    assert happened["blends"] > 20
    assert happened["two in a step"]
    assert happened["aborts"]
    assert hits.hits_by_source[CacheHitSource.DISK] > hits.hits // 2
    assert sum(hits.hits_by_source.values()) == hits.hits
    assert bool(happened["ahead"]) == asynchronous
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == setting.blocks - 1
    planning = engine.connector._scheduler.blending
    assert not planning._requests
    assert not planning._to_blend
    engine.close()


def test_a_chunk_that_vllm_may_have_found_under_another_contents_name_is_not_saved(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    """For instance because a request with prompt embeddings had the same block hashes."""
    chance = random.Random(5)  # noqa: S311 - no secrets
    engine = BlendEngine(Setting(blocks=70, budget=24, loads="within"), tmp_path, chance, clock)
    chunks = [[token] * 20 for token in (1, 2, 3)]
    until = clock.monotonic() + PATIENCE
    while not engine.happened["saved chunks"]:
        engine.store(chunks[0])
        assert clock.monotonic() < until
    before = engine.happened["saved chunks"]
    engine.doubt(chunks[1])
    engine.store(chunks[1])
    assert engine.happened["saved chunks"] == before
    engine.store(chunks[2])
    assert engine.happened["saved chunks"] > before
    engine.close()
