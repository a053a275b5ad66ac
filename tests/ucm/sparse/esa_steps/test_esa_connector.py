"""UCM's connector beside ESA's scheduler side, on vLLM's own scheduler: what is stored, loaded and generated is right.

The engine of the connector's own tests has a model in miniature whose every wrong byte shows. Its layers attend to a
few tokens only, so what it computes does not depend on what was released. A worker writes into resident blocks while
its layers run; here garbage is written into all of them, at the beginning and at the end of that time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_sparse_esa.py runs these beside it")

from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import END, VOCABULARY, Truth
from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine, Work
from tests.ucm.integration.vllm.connector.test_vllm_scheduler import check_stored

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.sparse.middle import MiddleNews

#: The model attends to this many tokens, the newest among them; the method keeps as many before the newest, or more.
ATTENDS = 9
OPTIONS = {"sink_tokens": 3, "window_tokens": 10, "token_budget": 12}
REQUESTS = 40
GARBAGE = 0xBAD


class RetrievingEngine(VllmEngine):
    """The same with the method beside the connector."""

    def __init__(self, setting: Setting, directory: Path, chance: random.Random, truth: Truth) -> None:
        self.resident: dict[int, list[int]] = {}
        super().__init__(setting, directory, chance, truth)

    def _configuration(self, model: Path) -> Any:
        config = super()._configuration(model)
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["ucm_sparse_config"] = {"tests.e2e.inside.eager_esa:EagerESA": OPTIONS}
        return config

    def _execute(self, output: Any, work: list[Work]) -> None:
        news: MiddleNews | None = output.ucm_sparse_metadata
        if news is not None:
            for admission in news.dropped:
                self.resident.pop(admission, None)
            for released in news.released:
                self.resident.setdefault(released.admission, []).extend(released.resident)
                self.happened["released"] += len(released.block_ids)
        super()._execute(output, work)

    def _begin(self, worker: Any, output: Any) -> tuple[Any, Any]:
        found = super()._begin(worker, output)
        if worker is self.workers[-1]:
            self._scribble()
        return found

    def _end(self, manager: Any, output: Any) -> Any:
        self._scribble()
        return super()._end(manager, output)

    def _scribble(self) -> None:
        for memory in self.memories:
            for cells in memory._cells:
                for blocks in self.resident.values():
                    cells[blocks] = GARBAGE


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
    setting = replace(ENGINES[name], blocks=84, budget=24)
    truth = Truth([ATTENDS] * 5, setting.ranks)
    some = prompts(chance)
    happened: Counter[str] = Counter()
    known: dict[bytes, tuple[int, ...]] = {}
    for _ in range(2):
        engine = RetrievingEngine(setting, tmp_path, chance, truth)
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
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == setting.blocks - 1
        engine.close()
        happened += engine.happened
    print(name, dict(happened))
    expected = {"stored", "loads", "finished", "released"} | ({"invalid"} if setting.failing_loads else set())
    assert all(happened[what] for what in expected)
