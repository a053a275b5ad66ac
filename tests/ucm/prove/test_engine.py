"""The process of one engine of a proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ucm.prove.engines import WORKER
from ucm.prove.engine import ALONE, ANSWER, CROWD, make_prompts, run

ABOUT = {"workers": [WORKER], "vocabulary": 1000, "max_model_len": 2000, "dtype": "float32"}


@pytest.mark.parametrize("longest", [64, 300, 1000])
def test_the_prompts(longest: int) -> None:
    made = make_prompts(Path("/nowhere"), ABOUT, longest)
    assert made == make_prompts(Path("/nowhere"), ABOUT, longest)
    assert made["source"] == "token ids"
    assert [len(prompt) for prompt in made["alone"]] == [longest, longest - 3, longest - 6]
    crowd = made["crowd"]
    assert (len(made["alone"]), len(crowd)) == (ALONE, CROWD)
    # The answer needs another block soon.
    assert all(16 - len(prompt) % 16 in range(2, 6) for prompt in crowd)
    assert len({-(-len(prompt) // 16) for prompt in crowd}) == 1
    assert max(map(len, crowd)) <= max(longest // 3, 16)
    assert [prompt[: longest // 6] for prompt in crowd[-4:]] == [crowd[-4][: longest // 6]] * 4
    assert len({tuple(prompt) for prompt in crowd}) == CROWD


class Engine:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def about(self) -> dict[str, Any]:
        return ABOUT

    def ask(self, prompts: list[list[int]], count: int, aborted: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        self.asked.append(("ask", len(prompts), count, list(aborted)))
        return [{"tokens": [prompt[0]]} for prompt in prompts]

    def settle(self, prompts: list[list[int]]) -> None:
        self.asked.append(("settle", len(prompts)))

    def reset(self) -> None:
        self.asked.append(("reset",))

    def counters(self) -> dict[str, float]:
        return {"preemptions": float(len(self.asked))}


def test_the_phases_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm.prove.engine._versions", dict)
    prompts = {"alone": [[1], [2]], "crowd": [[3], [4], [5]], "aborted": [1]}
    phases = [
        {"name": "one", "of": "alone", "settle": True, "reset": True, "first": 1},
        {"name": "crowd", "of": "crowd", "reversed": True},
    ]
    engine, told = Engine(), list[dict[str, Any]]()
    run({"phases": phases, "prompts": prompts}, engine, told.append)
    asked = engine.asked[2:]  # without what warms it up
    assert asked == [("settle", 1), ("reset",), ("ask", 1, ANSWER, []), ("ask", 3, ANSWER, [1])]
    assert told[0]["about"]["dtype"] == "float32"
    assert [one["phase"] for one in told[1:]] == ["one", "crowd"]
    assert told[1]["answers"] == [{"tokens": [1]}]
    # In the order of the prompts, whatever the order of the requests.
    assert told[2]["answers"] == [{"tokens": [3]}, None, {"tokens": [5]}]
    assert told[2]["counters"] == {"preemptions": 1.0}


def test_an_answer_is_continued_as_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm.prove.engine._versions", dict)

    class Counting(Engine):
        """Generates the numbers after the last one of the prompt."""

        def ask(self, prompts: list[list[int]], count: int, aborted: tuple[int, ...] = ()) -> list[dict[str, Any]]:
            answers = [list(range(prompt[-1] + 1, prompt[-1] + 1 + count)) for prompt in prompts]
            super().ask(prompts, count, aborted)
            return [{"tokens": tokens, "logprobs": [{token: 0.0} for token in tokens]} for tokens in answers]

    prompts = {"alone": [], "crowd": [[1], [20], [30]], "aborted": [1]}
    phases = [{"name": "crowd", "of": "crowd"}, {"name": "continued", "of": "crowd", "continues": "crowd"}]
    engine, told = Counting(), list[dict[str, Any]]()
    run({"phases": phases, "prompts": prompts}, engine, told.append)
    assert engine.asked[-1] == ("ask", 2, ANSWER // 2, [])
    assert told[2]["answers"] == told[1]["answers"]
    assert told[2]["answers"][0]["tokens"] == list(range(2, 2 + ANSWER))
    assert told[2]["answers"][1] is None


def test_the_first_engine_makes_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm.prove.engine._versions", dict)
    told = list[dict[str, Any]]()
    run({"phases": [], "prompts": None, "longest": 500, "model": "/nowhere"}, Engine(), told.append)
    assert max(map(len, told[1]["prompts"]["alone"])) == 500
