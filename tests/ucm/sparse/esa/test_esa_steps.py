"""ESA on both sides of vLLM's scheduler, through hundreds of random steps over a real store."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.sparse.esa.engine import BLOCK, Engine, Setting
from tests.ucm.sparse.esa.toy import TILE, VOCABULARY
from ucm.sparse.esa.offloaded import tell_loss

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 150
ALL: dict[str, Any] = {"token_budget": 400, "sink_tokens": 3, "window_tokens": 10}
SOME = {**ALL, "token_budget": 16}
ENGINES = {
    "all comes back": Setting(ALL, at_once=True, blocks=160),
    "all comes back, few blocks": Setting(ALL, at_once=True, blocks=60, running=8),
    "all comes back, asynchronous": Setting(ALL, at_once=True, asynchronous=True, blocks=160),
    "all fits": Setting(ALL, blocks=160),
    "some": Setting(SOME, blocks=160),
    "some, few blocks": Setting(SOME, blocks=60, running=8),
    "some, asynchronous": Setting(SOME, asynchronous=True, blocks=160),
    "some, asynchronous, few blocks": Setting(SOME, asynchronous=True, blocks=60, running=8),
    "some, no prefix cache": Setting(SOME, caching=False, blocks=160),
    "one block, no sinks": Setting({"token_budget": 4, "sink_tokens": 0, "window_tokens": 1}, blocks=160),
}


def prompts(chance: random.Random) -> list[list[int]]:
    """Return some prompts with common prefixes, short and long."""
    stems = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in (5, 30, 80)]
    ends = [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40))] for _ in range(4)]
    return [[*stem, *end] for stem in stems for end in ends]


def run(engine: Engine) -> None:
    """Run random steps, then run all requests to their end."""
    chance = engine.chance
    some = prompts(chance)
    while engine.happened["steps"] < STEPS:
        if len(engine.requests) < 8 and chance.random() < 0.3:
            engine.submit(list(chance.choice(some)), chance.choice((1, 5, 20, 40)))
        if engine.requests and chance.random() < 0.03:
            engine.abort(chance.choice(list(engine.requests.values())))
        if chance.random() < 0.01:
            engine.reset()
        engine.turn()
    engine.drain()


@pytest.mark.parametrize("name", ENGINES)
def test_random_steps(name: str, tmp_path: Path) -> None:
    setting = ENGINES[name]
    engine = Engine(setting, tmp_path, random.Random(name))  # noqa: S311 - no secret
    run(engine)
    counts = engine.worker.counts
    print(name, dict(engine.happened), engine.worker.summary(), dict(engine.held))
    assert len(engine.answers) > 8
    assert (counts["copied_out"] == 0) == (name == "all fits")
    assert (engine.device.left_out == 0) == name.startswith("all")
    if "few blocks" in name:
        assert engine.happened["preempted answers"]
    if name.startswith("all"):
        for prompt, answer, _ in engine.answers.values():
            assert answer == engine.device.model.generate(prompt, len(answer))
    for prompt, answer, _ in engine.answers.values():
        assert answer[:1] == engine.device.model.generate(prompt, 1), "a prompt's last token reads everything"
    longest: dict[str, tuple[list[int], torch.Tensor]] = {}
    for prompt, answer, kv in engine.answers.values():
        known = longest.setdefault(str(prompt), (answer, kv))
        both = min(len(answer), len(known[0]))
        assert answer[:both] == known[0][:both], "the same prompt is answered alike, whatever becomes of it"
        both = min(len(kv), len(known[1]))
        torch.testing.assert_close(kv[:both], known[1][:both], rtol=1e-4, atol=1e-4)
    assert len(longest) < len(engine.answers)


def test_outcomes_of_requests_are_counted(tmp_path: Path) -> None:
    """A short request, and one whose prompt and answer outgrow sinks, window and budget."""
    engine = Engine(Setting(SOME, caching=False, blocks=60), tmp_path, random.Random(5))  # noqa: S311 - no secret
    for length in (8, 90):
        engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(length)], 6)
    engine.drain()
    engine.worker.requests_finished(None, ["1", "2"])
    found = engine.worker.figures()
    assert found["requests.restricted"] == 1
    assert found["requests.short"] == 1


@pytest.mark.parametrize("late", [False, True])
def test_copying_out_too_late_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: bool) -> None:
    """Once the step has begun, its new blocks may contain anything."""
    engine = Engine(Setting(SOME, caching=False, blocks=40, running=8), tmp_path, random.Random(3))  # noqa: S311
    if late:
        _copy_out_late(monkeypatch, engine.worker)
    for _ in range(12):
        engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(90)], 30)
    if late:
        with pytest.raises(AssertionError, match="reads what is not its own"):
            engine.drain()
    else:
        engine.drain()


def _copy_out_late(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    begin, arrived = worker.execute_begin, worker.update_states
    outputs: list[Any] = []
    monkeypatch.setattr(worker, "update_states", lambda runner, scheduler_output: outputs.append(scheduler_output))

    def begin_late(runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        for output in outputs:
            arrived(None, output)
        outputs.clear()
        begin(runner, scheduler_output, input_batch)

    monkeypatch.setattr(worker, "execute_begin", begin_late)


def test_resident_blocks_that_are_given_back_too_early_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(Setting(SOME, caching=False, blocks=60), tmp_path, random.Random(1))  # noqa: S311
    monkeypatch.setattr(engine, "_check_blocks", lambda: None)  # it would see it first
    news = engine.method._blocks.news

    def give_back() -> Any:
        found = news()
        for offloaded in engine.method._blocks._offloaded.values():
            if len(offloaded.resident) > 1:
                engine.pool.free_blocks([offloaded.resident.pop()])
        return found

    monkeypatch.setattr(engine.method._blocks, "news", give_back)
    with pytest.raises(AssertionError, match=r"reads what is not its own|tokens are read once"):
        run(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_has_lost_blocks_goes_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    engine = Engine(Setting(SOME, blocks=300, policy=policy), tmp_path, random.Random(2))  # noqa: S311
    requests = [engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(60)], 60) for _ in range(5)]
    while len(engine.method._blocks._offloaded) < len(requests):
        engine.turn()
    first = requests[0]
    priority, blocks = first.priority, engine.method._blocks
    give_way = blocks.give_way
    # As often as anybody likes.
    monkeypatch.setattr(blocks, "give_way", lambda request: [give_way(request) for _ in range(2)])
    tell_loss(engine.method._blocks.losses.path, engine.method._blocks._offloaded[first.request_id].admission)
    engine.drain()
    assert [request.num_preemptions for request in requests] == [1, 0, 0, 0, 0]
    assert first.priority == priority
    assert len(engine.answers) == len(requests)


def test_what_a_request_holds_is_flat_from_its_answer_on(tmp_path: Path) -> None:
    engine = Engine(Setting(SOME, blocks=140), tmp_path, random.Random(1))  # noqa: S311
    request = engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(300)], 180)
    row = engine.manager.req_to_blocks
    while request.num_computed_tokens < 300:
        engine.turn()
        assert not any(block.is_null for block in row[request.request_id]), "a prompt that is computed reads all of it"
    engine.drain()
    most = 1 + 16 // BLOCK + (10 + TILE + engine.setting.budget) // BLOCK + 3
    assert engine.held[4] <= most
    assert engine.worker.counts["copied_out"] > 100


def test_what_was_found_in_the_cache_is_copied_out_in_portions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(Setting(SOME, blocks=140), tmp_path, random.Random(1))  # noqa: S311
    prompt = [engine.chance.randrange(VOCABULARY) for _ in range(300)]
    engine.submit(prompt, 1)
    engine.drain()
    portions: list[int] = []
    news = engine.method._blocks.news

    def noted() -> Any:
        found = news()
        portions.extend(len(released.block_ids) for released in (found.released if found else ()))
        return found

    monkeypatch.setattr(engine.method._blocks, "news", noted)
    engine.submit(prompt, 30)
    engine.drain()
    assert engine.happened["hits"] == 1
    assert sum(portions) > 60
    assert max(portions) == 2 * engine.setting.budget // BLOCK


def test_a_store_that_goes_away_has_requests_computed_anew(tmp_path: Path) -> None:
    engine = Engine(Setting(SOME), tmp_path, random.Random(2))  # noqa: S311
    for _ in range(4):
        engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(100)], 60)
    for _ in range(40):
        engine.turn()
    before = engine.happened["preemptions"]
    engine.root.rename(tmp_path / "gone")  # at once: it is being written into
    engine.drain()
    counts = engine.worker._opened.counts
    print(counts, engine.happened)
    assert len(engine.answers) == 4
    assert counts["lost"] > 0
    assert counts["kept"] > 0, "what is released later stays in host memory"
    assert engine.happened["preemptions"] > before
    loaded = counts["loaded"]
    engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(200)], 60)
    engine.drain()
    assert (len(engine.answers), counts["loaded"]) == (5, loaded)


@pytest.mark.parametrize("caching", [True, False])
def test_a_request_that_is_computed_anew_goes_on_alike(tmp_path: Path, *, caching: bool) -> None:
    """With a prefix cache it may find blocks of its output again."""
    answers = []
    for lost in (False, True):
        (tmp_path / str(lost)).mkdir()
        setting = Setting(SOME, blocks=300, caching=caching)
        engine = Engine(setting, tmp_path / str(lost), random.Random(2))  # noqa: S311 - no secret
        request = engine.submit([engine.chance.randrange(VOCABULARY) for _ in range(90)], 80)
        while lost and request.num_output_tokens < 40:
            engine.turn()
        if lost:
            tell_loss(engine.method._blocks.losses.path, engine.method._blocks._offloaded[request.request_id].admission)
        engine.drain()
        assert request.num_preemptions == lost
        answers.append(engine.answers[request.request_id])
    assert answers[0][1] == answers[1][1]
    torch.testing.assert_close(answers[0][2], answers[1][2], rtol=1e-4, atol=1e-4)
