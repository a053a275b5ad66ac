"""How many drafts pay, by what steps have cost and what was accepted.

A step without drafts takes some time, and each draft adds to it: the forward that makes it, and a further token to
verify. If each draft is accepted with the same chance, given that the one before it was, ``n`` drafts yield
``1 + p + p² + … + pⁿ`` tokens on average, so there is a best number; it is 0 if even the first draft costs more than it
yields.

Both costs are measured in the running engine, as they depend on the machine, the model, the lengths of the contexts and
the number of requests. The interval between the starts of two steps contains whatever a step costs, the scheduler's
part included, and now and then something else: so what counts is the median of the last ones. What is measured only by
drafting, while drafting does not pay, is paid from a share of the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: The samples of a cost that count, and the weight that older cycles keep in a chance of acceptance.
LAST, KEPT = 9, 0.98
#: The steps without drafts that are measured first, and the most drafted steps after which one more is: at first fewer.
FIRST, AGAIN = 2, 64
#: The steps of a trial, its drafts, which are also a request's first ones, and the share of the time that trials may
#: lose; and the steps after a trial in which there is no other, even if nothing was lost, for instance because other
#: requests gain.
TRIAL, FEW, LOSS, REST = 3, 2, 0.01, 100


def _samples() -> deque[float]:
    return deque(maxlen=LAST)


def typical(samples: deque[float]) -> float:
    """Return the median, of two in the middle the lower one, as an interruption only makes some too long; 0 of none."""
    return median_low(samples) if samples else 0.0


@dataclass(slots=True)
class Chance:
    """The chance that a draft is accepted, given that those before it were.

    Attributes:
        accepted: Accepted drafts, older ones with less weight.
        judged: Likewise these and the rejected ones, of which there is one at most in each step; the drafts behind it
            are not judged.
    """

    accepted: float = 0.0
    judged: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Add what became of the drafts of one step."""
        self.accepted = KEPT * self.accepted + accepted
        self.judged = KEPT * self.judged + accepted + (accepted < drafted)

    def value(self, like: Chance) -> float:
        """Return the chance, where little is known drawn to that of others."""
        others = like.accepted / like.judged if like.judged else 1.0
        return (self.accepted + others) / (self.judged + 1.0)


@dataclass(slots=True)
class Costs:
    """What a step costs with some number of requests and tokens, in seconds.

    Attributes:
        plain: A step that verifies no drafts, without the time in which drafts are made.
        verify: What it adds to verify one more draft of each request.
        make: The time in which one more draft of each request is made.
        since: Steps with drafts since one without was measured.
    """

    plain: deque[float] = field(default_factory=_samples)
    verify: deque[float] = field(default_factory=_samples)
    make: deque[float] = field(default_factory=_samples)
    since: int = 0

    def best(self, chance: float, most: int) -> int:
        """Return how many drafts yield most tokens per second; 0 if they yield no more than none.

        Args:
            chance: That a draft is accepted, if those before it are.
            most: The most drafts.
        """
        ratio = max(0.0, typical(self.verify) + typical(self.make)) / typical(self.plain)
        tokens, best = 1.0, (1.0, 0)
        for number in range(1, most + 1):
            tokens += chance**number
            best = max(best, (tokens / (1 + ratio * number), number))
        return best[1]


@dataclass(slots=True)
class Step:
    """A step of generating requests.

    Attributes:
        request_ids: They.
        context: The tokens that they have, together.
        began: When it began.
        verified: The drafts that it verifies, per request.
        tokens: The tokens that it generates, per request.
        made: The drafts that are made after it, per request.
        making: The seconds in which they are made.
        trial: Whether drafts of it, or of the step before it, are a trial.
    """

    request_ids: Sequence[str]
    context: int
    began: float
    verified: float
    tokens: float = 1.0
    made: float = 0.0
    making: float = 0.0
    trial: bool = False


class Payoff:
    """Decides after each step how many drafts each request gets.

    Args:
        most: The most drafts of a request in a step.
        now: The time in seconds.
        always: Whether each request gets the most drafts after any step.
    """

    def __init__(self, most: int, now: Callable[[], float], *, always: bool = False) -> None:
        self._most, self._now, self._always = most, now, always
        self._costs: dict[tuple[int, int], Costs] = {}
        self._chances: dict[str, Chance] = {}
        self._all = Chance()
        self._step: Step | None = None  #: None while prompts are computed
        self._trial = 0  #: the steps that are left of a trial
        self._owed = 0.0  #: the seconds without a trial that are due

    def begin(self, request_ids: Sequence[str], context: int, drafts: Mapping[str, int], *, decodes: bool) -> None:
        """A step begins.

        Args:
            request_ids: Its requests.
            context: The tokens that they have, together.
            drafts: The number of drafts that it verifies, of each request that has some.
            decodes: Whether none of them computes a prompt.
        """
        now, before = self._now(), self._step
        if before is not None and decodes and before.request_ids == request_ids:
            self._measure(before, now - before.began)
        per_request = sum(drafts.values()) / max(1, len(request_ids))
        trial = before is not None and before.made > 0 and before.trial
        self._step = Step(request_ids, context, now, per_request, trial=trial) if decodes else None

    def judged(self, request_id: str, drafted: int, accepted: int) -> None:
        """Drafts of a request were verified: the first ``accepted`` of ``drafted`` ones were right."""
        for chance in (self._chances.setdefault(request_id, Chance()), self._all):
            chance.add(drafted, accepted)
        if self._step is not None:
            self._step.tokens += accepted / len(self._step.request_ids)

    def choose(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Return how many drafts to make for each of some requests of the running step, those with none left out."""
        step = self._step
        if self._always:
            return dict.fromkeys(request_ids, self._most)
        if step is None or not request_ids:
            return {}
        costs = self._of(step)
        if len(costs.plain) < FIRST:
            return {}
        found = self._gaining(request_ids, costs) if costs.make and costs.verify else {}
        if self._trial or self._owed <= 0:
            found |= self._tried([name for name in request_ids if name not in found], step, costs)
        costs.since += bool(found)
        if costs.since > min(AGAIN, 2 ** len(costs.plain)):
            costs.since = 0
            return {}
        return found

    def _gaining(self, request_ids: Sequence[str], costs: Costs) -> dict[str, int]:
        """Return the best numbers of drafts by what is known."""
        found = {}
        for request_id in request_ids:
            known = self._chances.get(request_id)
            number = costs.best((known or Chance()).value(self._all), self._most)
            if number:  # what others accepted promises little of this one's text
                found[request_id] = min(FEW, number) if known is None else number
        return found

    def _tried(self, request_ids: Sequence[str], step: Step, costs: Costs) -> dict[str, int]:
        """Return drafts for requests that should have none by what is known."""
        if not request_ids:
            return {}
        if not self._trial:
            self._trial, self._owed = TRIAL, REST * typical(costs.plain)
        self._trial -= 1
        step.trial = True
        return dict.fromkeys(request_ids, min(FEW, self._most))

    def made(self, drafts: int, seconds: float) -> None:
        """Drafts of the running step's requests were made."""
        if self._step is not None:
            self._step.made = drafts / len(self._step.request_ids)
            self._step.making = seconds

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._chances.pop(request_id, None)

    def _of(self, step: Step) -> Costs:
        """Return the costs of steps with about as many requests and tokens: fewer than 1.42 times as many tokens."""
        return self._costs.setdefault((len(step.request_ids).bit_length(), (step.context**2).bit_length()), Costs())

    def _measure(self, step: Step, took: float) -> None:
        costs = self._of(step)
        plain = typical(costs.plain)
        if step.made:
            costs.make.append(step.making / step.made)
        if not step.verified:
            costs.plain.append(took - step.making)
        elif plain:
            costs.verify.append((took - step.making - plain) / step.verified)
        if step.trial:
            more = typical(costs.verify) * step.verified + typical(costs.make) * step.made
            self._owed += max(0.0, more - plain * (step.tokens - 1)) / LOSS
        else:
            self._owed -= took
