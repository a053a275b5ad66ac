"""How many drafts pay: engines whose steps have known costs, and texts whose drafts are accepted with known chances."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from ucm.sparse.topk.payoff import AGAIN, FEW, FIRST, Payoff

MOST = 6


@dataclass
class Engine:
    """Steps of generating requests, timed by a clock of their own.

    Attributes:
        plain: The seconds of a step without drafts.
        verify: The further seconds per verified draft.
        make: The seconds in which one more draft of each request is made.
        chances: Of each request, that a draft is accepted.
        context: The tokens of the requests together.
    """

    plain: float
    verify: float
    make: float
    chances: dict[str, float]
    context: int = 10_000
    now: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    chosen: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.payoff = Payoff(MOST, lambda: self.now)
        self._random = random.Random("payoff")  # noqa: S311 - no secret

    def run(self, steps: int) -> None:
        for _ in range(steps):
            ids = list(self.chances)
            self.payoff.begin(ids, self.context, {name: of for name, of in self.drafts.items() if of}, decodes=True)
            self.now += self.plain + self.verify * sum(self.drafts.values()) / len(ids)
            for name in ids:
                accepted = 0
                drafted = self.drafts.get(name, 0)
                while accepted < drafted and self._random.random() < self.chances[name]:
                    accepted += 1
                if drafted:
                    self.payoff.judged(name, drafted, accepted)
                self.tokens[name] = self.tokens.get(name, 0) + 1 + accepted
            self.drafts = self.payoff.choose(ids)
            self.chosen.append(self.drafts)
            if self.drafts:
                took = self.make * max(self.drafts.values())
                self.now += took
                self.payoff.made(sum(self.drafts.values()), took)

    def gain(self) -> float:
        """Tokens per second and request, in units of those without drafts."""
        return sum(self.tokens.values()) / len(self.tokens) / self.now * self.plain


def best_gain(engine: Engine, chance: float) -> float:
    """The gain of the best constant number of drafts."""
    gains = [1.0]
    for number in range(1, MOST + 1):
        tokens = sum(chance**place for place in range(number + 1))
        gains.append(tokens * engine.plain / (engine.plain + number * (engine.verify + engine.make)))
    return max(gains)


@pytest.mark.parametrize("verify", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("make", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_it_is_nearly_as_good_as_the_best_number_and_hardly_slower_than_none(
    chance: float, make: float, verify: float
) -> None:
    engine = Engine(1.0, verify, make, {"a": chance})
    engine.run(3000)
    assert engine.gain() > max(0.97, 0.93 * best_gain(engine, chance))


def test_a_short_request_that_drafts_do_not_help_loses_little() -> None:
    engine = Engine(1.0, 0.5, 0.5, {"a": 0.2})
    engine.run(300)
    assert engine.gain() > 0.97


def test_of_two_requests_it_drafts_the_one_that_is_easy_to_draft() -> None:
    engine = Engine(1.0, 0.05, 0.2, {"easy": 0.95, "hard": 0.02})
    engine.run(2000)
    drafted = {name: sum(name in of for of in engine.chosen[200:]) for name in engine.chances}
    assert drafted["easy"] > 1700
    assert drafted["hard"] < 100


@pytest.mark.parametrize("easy", [1, 4, 8])
@pytest.mark.parametrize(("make", "verify"), [(0.1, 0.0), (0.1, 0.3), (0.3, 0.1)])
def test_a_crowd_of_which_some_are_easy_to_draft_generates_no_less(easy: int, make: float, verify: float) -> None:
    """All of its requests together: the others wait while some of them are drafted."""
    engine = Engine(1.0, verify, make, {f"{number}": 0.95 if number < easy else 0.03 for number in range(16)})
    engine.run(1000)
    assert engine.gain() > 0.97


def test_first_it_measures_steps_without_drafts_and_again_from_time_to_time() -> None:
    engine = Engine(1.0, 0.0, 0.1, {"a": 0.9})
    engine.run(3 * AGAIN)
    assert not any(engine.chosen[:FIRST])
    without = [place for place, of in enumerate(engine.chosen) if not of]
    between = [after - before for before, after in itertools.pairwise(without[FIRST - 1 :])]
    assert between == sorted(between)  # at first more often
    assert between[-1] == AGAIN + 1


def test_a_text_that_becomes_easy_is_drafted_again() -> None:
    engine = Engine(1.0, 0.05, 0.2, {"a": 0.0})
    engine.run(1000)
    before = sum(map(bool, engine.chosen))
    assert before < 100
    engine.chances["a"] = 0.95
    engine.run(3000)
    assert sum(map(bool, engine.chosen[-1000:])) > 900


def test_a_pause_is_not_the_cost_of_a_step() -> None:
    engine = Engine(1.0, 0.05, 0.2, {"a": 0.9})
    engine.run(200)
    engine.now += 1000
    engine.run(1)
    assert engine.drafts


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("pause", [2, 20, 1000])
def test_a_pause_at_first_is_not_the_cost_of_a_step_either(pause: float, chance: float) -> None:
    """Else drafts would seem to pay until many other steps have been measured, one in 64."""
    engine = Engine(1.0, 0.2, 0.6, {"a": chance})
    engine.run(1)
    engine.now += pause
    engine.run(300)
    engine.now -= pause
    assert engine.gain() > 0.97


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_steps_that_are_slow_at_first_cost_little(chance: float) -> None:
    engine = Engine(1.0, 0.2, 0.6, {"a": chance})
    for slow in (5, 3, 1.5):
        engine.run(1)
        engine.now += slow - 1
    engine.run(300)
    engine.now -= 6.5
    assert engine.gain() > 0.85


def test_a_machine_that_has_become_much_slower_is_measured_again() -> None:
    """Each of its steps would once have been taken for one that was interrupted."""
    engine = Engine(1.0, 0.05, 0.2, {"a": 0.0})
    engine.run(200)
    engine.plain, engine.verify, engine.make = 100.0, 5.0, 20.0
    engine.chances["a"] = 0.9
    engine.run(2000)
    assert sum(map(bool, engine.chosen[-1000:])) > 900


@pytest.mark.parametrize("longer", [2, 3, 8, 30])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.83])
def test_requests_of_several_lengths_do_not_take_each_others_costs_for_their_own(longer: int, chance: float) -> None:
    """They come in turn, and a step of the longer ones takes so many times as long."""
    engine, took, dense = Engine(1.0, 0.1, 0.67, {}), {1: 0.0, longer: 0.0}, {1: 0.0, longer: 0.0}
    for number in range(20):
        length = (longer, 1)[number % 2]
        name, engine.plain, engine.verify, engine.context = f"{number}", length, 0.1 * length, 10_000 * length
        engine.payoff.begin([name], engine.context, {}, decodes=False)
        engine.chances, engine.drafts, began = {name: chance}, {}, engine.now
        while engine.tokens.get(name, 0) < 128:
            engine.run(1)
        took[length] += engine.now - began
        dense[length] += engine.tokens[name] * length
        engine.payoff.forget(name)
    assert min(dense[length] / took[length] for length in took) > 0.97


def test_steps_that_compute_prompts_are_neither_measured_nor_drafted() -> None:
    engine = Engine(1.0, 0.05, 0.2, {"a": 0.9})
    engine.payoff.begin(["a"], 100, {}, decodes=False)
    assert engine.payoff.choose(["a"]) == {}
    engine.now += 100
    engine.run(FIRST + 2)
    assert engine.drafts


def test_what_is_known_of_others_serves_a_new_request_at_once() -> None:
    engine = Engine(1.0, 0.05, 0.2, {"a": 0.9})
    engine.run(200)
    engine.payoff.forget("a")
    engine.chances = {"b": 0.9}
    engine.run(1)
    assert engine.drafts


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_new_request_begins_with_few_drafts_and_goes_on_as_its_own_text_allows(chance: float) -> None:
    engine = Engine(1.0, 0.15, 0.66, {"a": 1.0})
    engine.run(200)
    assert engine.drafts == {"a": MOST}
    engine.payoff.forget("a")
    engine.chances, engine.drafts, engine.chosen = {"b": chance}, {}, []
    engine.run(20)
    drafted = [of["b"] for of in engine.chosen if of]
    assert drafted[0] == FEW
    assert max(drafted) == (MOST if chance else FEW)
