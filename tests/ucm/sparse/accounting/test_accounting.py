"""vLLM's own scheduler through thousands of random steps: no block is lost, freed twice, or read by another request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from tests.ucm.sparse.accounting.device import VOCABULARY
from tests.ucm.sparse.accounting.engine import BLOCK, Engine, Setting
from ucm.sparse import sink_window

STEPS = 500

#: Large enough that a request grows for a while after its admission.
WIDE = {"sink_tokens": 3, "window_tokens": 60}
ENGINES = {
    "one step at a time": Setting(),
    "few blocks": Setting(WIDE, blocks=40, running=8, crowded=True),
    "in chunks": Setting(chunk=7, budget=16),
    "no prefix cache": Setting(caching=False, blocks=40),
    "no sinks, a window within a block": Setting({"sink_tokens": 0, "window_tokens": 1}),
    "prompts as a whole": Setting({"sink_tokens": 4, "window_tokens": 9, "prefill": "dense"}, blocks=140),
    "prompts as a whole, few blocks": Setting({**WIDE, "prefill": "dense"}, blocks=70, running=8, crowded=True),
    "some dense": Setting({"sink_tokens": 4, "window_tokens": 9, "prefill": "dense"}, blocks=140, dense=0.3),
    "some dense, few blocks": Setting({**WIDE, "prefill": "dense"}, blocks=70, running=8, crowded=True, dense=0.3),
    "some dense, asynchronous": Setting(
        {"sink_tokens": 4, "window_tokens": 9, "prefill": "dense"}, asynchronous=True, blocks=140, dense=0.3
    ),
    "a window beyond all": Setting({"sink_tokens": 4, "window_tokens": 600}, blocks=150),
    "by priority": Setting(WIDE, blocks=40, running=8, crowded=True, policy="priority"),
    "asynchronous": Setting(asynchronous=True),
    "asynchronous, few blocks": Setting(WIDE, asynchronous=True, blocks=40, budget=16, running=8, crowded=True),
    "asynchronous, no prefix cache": Setting(asynchronous=True, caching=False, blocks=50),
    "asynchronous, a window within a block": Setting({"sink_tokens": 0, "window_tokens": 1}, asynchronous=True),
}


def prompts(chance: random.Random) -> list[list[int]]:
    """Return some prompts with common prefixes, short and long."""
    stems = [[chance.randint(1, VOCABULARY) for _ in range(length)] for length in (9, 40, 90)]
    ends = [[chance.randint(1, VOCABULARY) for _ in range(chance.randint(1, 60))] for _ in range(6)]
    return [[*stem, *end] for stem in stems for end in ends]


def run(engine: Engine) -> None:
    """Run random steps, then run all requests to their end."""
    chance = engine.chance
    answers = (60, 90, 120) if engine.setting.crowded else (1, 5, 20, 80)
    some = prompts(chance)
    while engine.happened["steps"] < STEPS:
        if len(engine.requests) < 10 and chance.random() < 0.25:
            prompt = chance.choice(some)
            engine.submit(
                prompt[: 12 if engine.setting.crowded and chance.random() < 0.8 else None], chance.choice(answers)
            )
        if engine.requests and chance.random() < 0.03:
            engine.abort(chance.choice(list(engine.requests.values())))
        if chance.random() < 0.02:
            engine.reset(running=chance.random() < 0.5)
        engine.turn()
    engine.drain()


@pytest.mark.parametrize("name", ENGINES)
def test_random_steps(name: str) -> None:
    engine = Engine(ENGINES[name], random.Random(name))  # noqa: S311 - no secret
    run(engine)
    print(name, dict(engine.happened), "skipped", engine.device.skipped_blocks)
    assert engine.happened["finished"] > 30
    assert engine.happened["aborts"]
    assert (engine.device.skipped_blocks == 0) == (name == "a window beyond all")
    assert (engine.happened["hits"] > 0) == engine.setting.caching
    if engine.setting.dense:
        assert engine.happened["longest dense row"] > 25
    if engine.setting.crowded:
        assert engine.happened["preemptions"] > 5


def test_releasing_behind_the_scheduler_s_count_shows() -> None:
    """With a step in flight, blocks that the scheduler counts as computed may still be read."""
    setting = Setting(asynchronous=True, caching=False, blocks=26, crowded=True)
    engine = Engine(setting, random.Random(1))  # noqa: S311
    engine.method._blocks._batches = 1
    with pytest.raises(AssertionError, match="reads what is not its own"):
        run(engine)


def test_releasing_blocks_of_a_dense_request_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ENGINES["some dense"], random.Random(1))  # noqa: S311
    monkeypatch.setattr(sink_window, "asked_of", lambda _: None)
    with pytest.raises(AssertionError, match=r"has lost blocks|reads what is not its own"):
        run(engine)


def test_releasing_one_block_too_many_shows() -> None:
    engine = Engine(ENGINES["one step at a time"], random.Random(1))  # noqa: S311
    engine.method._blocks._window = replace(engine.method.window, window_tokens=10 - BLOCK)
    with pytest.raises(AssertionError, match="reads what is not its own"):
        run(engine)


def test_reading_too_little_shows() -> None:
    engine = Engine(ENGINES["one step at a time"], random.Random(1))  # noqa: S311
    engine.device.wanted = replace(engine.device.wanted, window_tokens=10 + BLOCK)
    with pytest.raises(AssertionError, match="something else than its sinks and its window"):
        run(engine)
