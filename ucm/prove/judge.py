"""Judge the answers of engines with UCM by those of an engine without it.

One request at a time, an engine with UCM computes what the plain engine computes, so the tokens must be the same. In
batches the same requests may differ without UCM as well, because a kernel adds up numbers in another order in another
batch. How much is measured: the plain engine answers the same requests in two orders, and computes half of each answer
again as part of a prompt, as after a preemption; the largest difference of a log-probability of the same token after
the same tokens is its *noise*, or the resolution of the data type if that is more. A token that differs is explained by
noise only if the two runs were undecided between the two tokens to that degree; and log-probabilities that
move by more than `BEYOND` times the noise are a fault even where no token differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: How far rounding may move a log-probability even if no request of a small sample shows it. A logit of 16 has steps of
#: 0.125 in bfloat16 and 0.016 in float16.
RESOLUTION = {"bfloat16": 0.04, "float16": 0.005, "float32": 2.5e-4}
#: A shift of so many times the noise is a fault.
BEYOND = 4


class Verdict(Enum):
    """The outcome of a row."""

    SAME = "same"
    NOISE = "same but for noise"
    DIFFERS = "DIFFERS"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one request, as its process reported it.

    Attributes:
        tokens: The generated tokens.
        logprobs: At each position the log-probabilities of the likeliest tokens, by token.
        cached: Tokens of the prompt that were not computed.
        first_s: Seconds to the first token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] = ()
    cached: int = 0
    first_s: float | None = None


@dataclass(frozen=True)
class Phase:
    """The answers of one phase of one engine, as its process reported them; None for a request that was aborted."""

    answers: tuple[Answer | None, ...]
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        """Tokens of all prompts that were not computed."""
        return sum(answer.cached for answer in self.answers if answer is not None)

    @property
    def aborted(self) -> int:
        """The number of aborted requests."""
        return sum(answer is None for answer in self.answers)


@dataclass(frozen=True)
class Difference:
    """A request whose answer differs.

    Attributes:
        request: Its place among the prompts.
        position: The first position at which the tokens differ; None if only log-probabilities do.
        expected: The plain engine's token there.
        got: The token with UCM.
        margin: By how much the two runs together preferred their tokens, in units of log-probability.
        allowed: How much of that the plain engine's noise explains.
        shift: The largest difference of a log-probability after the same tokens.
        limit: From which shift on it is a fault.
    """

    request: int
    position: int | None
    expected: int | None
    got: int | None
    margin: float
    allowed: float
    shift: float
    limit: float

    @property
    def is_noise(self) -> bool:
        """Whether the plain engine's noise explains it."""
        return self.position is not None and self.margin <= self.allowed and self.shift <= self.limit

    def __str__(self) -> str:
        if self.position is None:
            return (
                f"request {self.request}: the tokens are the same, but log-probabilities moved by {self.shift:.2g}; "
                f"{self.limit:.2g} would be noise"
            )
        moved = f"; log-probabilities moved by {self.shift:.2g} before" if self.shift > self.limit else ""
        return (
            f"request {self.request}: token {self.position} of the answer is {self.got} and not {self.expected}; the "
            f"runs preferred theirs by {self.margin:.2g}, and {self.allowed:.2g} would be noise{moved}"
        )


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: What was done.
        verdict: The outcome.
        requests: How many answers were compared.
        differences: Those that differ, by noise or not.
        reason: Why it was not judged.
        shift: The largest difference of a log-probability after the same tokens.
        phase: The compared phase; None if it was not run.
    """

    name: str
    verdict: Verdict
    requests: int = 0
    differences: tuple[Difference, ...] = ()
    reason: str = ""
    shift: float = 0.0
    phase: Phase | None = None


@dataclass(frozen=True)
class Noise:
    """How far the plain engine's own log-probabilities move.

    Attributes:
        alone: Between repetitions of the same request alone.
        batches: Between batches, and between computing a prompt and finding it in vLLM's prefix cache.
        differing: How many of the plain engine's own ``requests`` got other tokens in another batch.
        requests: See ``differing``.
        resolution: The least that counts as noise in batches.
    """

    alone: float = 0.0
    batches: float = 0.0
    differing: int = 0
    requests: int = 0
    resolution: float = 0.0

    @property
    def explained(self) -> float:
        """How far a log-probability may move in another batch."""
        return max(self.batches, self.resolution)


def measure_noise(plain: Mapping[str, Phase], dtype: str = "bfloat16") -> Noise:
    """Return the plain engine's noise.

    Args:
        plain: Its phases: ``cold`` and ``cold again``, ``hit`` and ``hit again`` of the requests alone; ``crowd``,
            ``crowd reversed`` and ``crowd continued``. What is missing is passed over.
        dtype: The data type of the model.
    """
    repeated = [("cold", "cold again"), ("hit", "hit again")]
    batches = [("cold", "hit"), ("crowd", "crowd reversed"), ("crowd", "crowd continued")]
    alone = max((shift for one, other in repeated for shift in _shifts(plain, one, other)), default=0.0)
    moved = max((shift for one, other in batches for shift in _shifts(plain, one, other)), default=0.0)
    pairs = list(_pairs(plain, "crowd", "crowd reversed"))
    differing = sum(one.tokens != other.tokens for one, other in pairs)
    resolution = RESOLUTION.get(dtype, max(RESOLUTION.values()))
    return Noise(alone, max(alone, moved), differing, len(pairs), resolution)


def _pairs(phases: Mapping[str, Phase], one: str, other: str) -> Iterator[tuple[Answer, Answer]]:
    if one in phases and other in phases:
        for first, second in zip(phases[one].answers, phases[other].answers, strict=False):
            if first is not None and second is not None:
                yield first, second


def _shifts(phases: Mapping[str, Phase], one: str, other: str) -> Iterator[float]:
    return (shift_between(first, second) for first, second in _pairs(phases, one, other))


def first_difference(one: Answer, other: Answer) -> int | None:
    """Return the first position at which the tokens differ; None if the answers are the same."""
    for position, (first, second) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if first != second:
            return position
    return None if len(one.tokens) == len(other.tokens) else min(len(one.tokens), len(other.tokens))


def shift_between(one: Answer, other: Answer) -> float:
    """Return the largest difference of the log-probability of a token, at positions after the same tokens."""
    end = first_difference(one, other)
    compared = zip(one.logprobs, other.logprobs, strict=False)
    return max(
        (
            _moved(first[token], second[token])
            for position, (first, second) in enumerate(compared)
            if end is None or position <= end
            for token in first.keys() & second.keys()
        ),
        default=0.0,
    )


def _moved(one: float, other: float) -> float:
    """Return the difference of two log-probabilities; infinite if one of them is no number."""
    moved = 0.0 if one == other else abs(one - other)
    return math.inf if math.isnan(moved) else moved


def margin_between(one: Answer, other: Answer, position: int) -> float:
    """Return by how much two runs together preferred their own tokens at a position.

    It is infinite if one of them has no token there, or does not rank the other's token among its likeliest.
    """
    if position >= min(len(one.logprobs), len(other.logprobs)):
        return math.inf
    mine, theirs = one.tokens[position], other.tokens[position]
    first, second = one.logprobs[position], other.logprobs[position]
    if not {mine, theirs} <= first.keys() & second.keys():
        return math.inf
    # Greedy engines prefer their own tokens; one that does not returns another token than it computed.
    return abs(first[mine] - first[theirs]) + abs(second[theirs] - second[mine])


def judge(name: str, phase: Phase, references: Sequence[Phase], noise: Noise, *, exact: bool) -> Row:
    """Compare a phase with phases of the plain engine.

    Args:
        name: What was done.
        phase: The answers with UCM.
        references: The plain engine's answers to the same requests. An answer must equal one of them; the first one
            computes what the phase computes.
        noise: The plain engine's noise.
        exact: Whether the phase computes exactly what the first of the references computes, so that only what differs
            between repetitions is noise.
    """
    found, shift, compared = [], 0.0, 0
    if not math.isfinite(noise.explained):
        reason = "the engine without UCM computes log-probabilities that are no numbers"
        return Row(name, Verdict.NOT_JUDGED, reason=reason, phase=phase)
    wanted = max((len(reference.answers) for reference in references), default=0)
    for request, answer in enumerate(phase.answers):
        known = [one for reference in references for one in reference.answers[request : request + 1] if one is not None]
        if answer is None or not any(one.tokens for one in known):
            continue
        compared += 1
        difference = _compare(request, answer, known, noise, exact=exact and answer.cached == known[0].cached)
        shift = max(shift, difference.shift)
        if difference.position is not None or difference.shift > difference.limit:
            found.append(difference)
    if not compared:
        return Row(name, Verdict.NOT_JUDGED, reason="the engine without UCM did not answer these requests", phase=phase)
    if len(phase.answers) < wanted and all(difference.is_noise for difference in found):
        reason = f"the engine answered {len(phase.answers)} of {wanted} requests"
        return Row(name, Verdict.NOT_JUDGED, reason=reason, phase=phase)
    verdict = Verdict.SAME if not found else Verdict.NOISE
    if not all(difference.is_noise for difference in found):
        verdict = Verdict.DIFFERS
    return Row(name, verdict, compared, tuple(found), shift=shift, phase=phase)


def _compare(request: int, answer: Answer, known: Sequence[Answer], noise: Noise, *, exact: bool) -> Difference:
    """Return how an answer differs from the most similar one without UCM; no position if the tokens are the same."""
    allowed, limit = 2 * (noise.alone if exact else noise.explained), BEYOND * noise.explained
    nearest = None
    for reference in known:
        position, shift = first_difference(answer, reference), shift_between(answer, reference)
        if position is None:
            return Difference(request, None, None, None, 0.0, 0.0, shift, limit)
        margin = margin_between(answer, reference, position)
        expected, got = ((one.tokens[position : position + 1] or (None,))[0] for one in (reference, answer))
        difference = Difference(request, position, expected, got, margin, allowed, shift, limit)
        if nearest is None or difference.margin < nearest.margin:
            nearest = difference
    if nearest is None:
        raise AssertionError("there is at least one answer to compare with")
    return nearest
