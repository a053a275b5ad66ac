"""UCM's connector beside the method, on vLLM's own scheduler: what is stored, loaded and generated is right.

The engine of the connector's own tests has a model in miniature whose every wrong byte shows. Here its layers attend to
a few tokens only, so that what it computes depends neither on steps nor on what was released; for vLLM it is a model
with full attention, whose blocks the method gives back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_sparse_sink_window.py runs these beside it")

from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import END, VOCABULARY, Truth
from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine, Work
from tests.ucm.integration.vllm.connector.test_vllm_scheduler import check_stored
from ucm.errors import SparseMethodError
from ucm.sparse.window import SinksAndWindow

if TYPE_CHECKING:
    from pathlib import Path

#: The model attends to this many tokens, the newest among them; the method keeps as many before the newest, or more.
ATTENDS = 9
OPTIONS = {"sink_tokens": 3, "window_tokens": 10}
REQUESTS = 40


class WindowedEngine(VllmEngine):
    """The same with the method beside the connector; it counts what the scheduled requests have released."""

    def _configuration(self, model: Path) -> Any:
        config = super()._configuration(model)
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["ucm_sparse_config"] = {"SinkWindow": OPTIONS}
        return config

    def _work(self, output: Any) -> list[Work]:
        found = super()._work(output)
        self.happened["released"] += sum(work.block_ids[0].count(0) for work in found)
        return found


def prompts(chance: random.Random) -> list[list[int]]:
    """Some that share beginnings, of up to 30 blocks."""

    def some(length: int) -> list[int]:
        return [chance.choice([token for token in range(VOCABULARY) if token != END]) for _ in range(length)]

    stems = [some(length) for length in (8, 30, 70)]
    return [[*stem, *some(chance.randint(1, 50))] for stem in stems for _ in range(4)]


ENGINES = {
    "direct": Setting(),
    "direct, loads and dumps fail": Setting(ranks=2, failing_loads=0.3, failing_dumps=0.05, aborts=0.2),
    "direct, asynchronous": Setting(asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct, no prefix cache": Setting(caching=False, failing_loads=0.1),
    "layer by layer, asynchronous": Setting(layerwise=True, asynchronous=True, aborts=0.2),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)  # noqa: S311 - no secret
    setting = replace(ENGINES[name], blocks=72, budget=24)
    truth = Truth([ATTENDS] * 5, setting.ranks)
    some = prompts(chance)
    happened: Counter[str] = Counter()
    known: dict[bytes, tuple[int, ...]] = {}
    for _ in range(2):
        engine = WindowedEngine(setting, tmp_path, chance, truth)
        left = REQUESTS
        while left:
            while left and chance.random() < 0.4:
                engine.submit(list(chance.choice(some)), chance.choice((1, 6, 25)))
                left -= 1
            engine.turn()
        engine.drain()
        known.update(engine.known)
        engine.known = known
        happened["stored"] = check_stored(engine)
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == setting.blocks - 1
        engine.close()
        happened += engine.happened
    print(name, dict(happened))
    expected = {"stored", "loads", "finished", "released"} | ({"invalid"} if setting.failing_loads else set())
    assert all(happened[what] for what in expected)


def test_recovery_within_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparseMethodError, match="a layer that failed to load"):
        WindowedEngine(Setting(layerwise=True), tmp_path, random.Random(0), Truth([ATTENDS] * 5, 1))  # noqa: S311


def test_releasing_too_much_shows(tmp_path: Path) -> None:
    chance = random.Random(0)  # noqa: S311
    setting = Setting(caching=False)
    engine = WindowedEngine(setting, tmp_path, chance, Truth([ATTENDS] * 5, 1))
    engine.scheduler._ucm_sparse_method._blocks._window = SinksAndWindow(3, 2)
    for prompt in prompts(chance):
        engine.submit(prompt, 20)
    with pytest.raises(AssertionError, match="a wrong token was served"):
        engine.drain()
    engine._patched.stop()
