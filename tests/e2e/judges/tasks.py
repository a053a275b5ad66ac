"""The tasks: a long context of filler with short records in it, and at its end a question.

A record is a symbol and what belongs to it; filler tokens are no symbols. All have many records that are not asked for,
evenly spread, so that nothing stands out. They are after those of RULER (Hsieh et al., arXiv:2404.06654): single and
multiple needles, chains of hops, variable tracking, aggregation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.e2e.needle.task import FILLER, QUESTION, SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Tokens of a needle's value; values of a key that has several; hops of a chain; chains of a context.
VALUE, VALUES, HOPS, CHAINS = 4, 4, 8, 4
#: How often a key stands with the value that is asked for, with each of some others, and how many these are.
OFTEN, SELDOM, OTHERS = 10, 3, 4


@dataclass(frozen=True)
class Question:
    """A prompt that ends with `QUESTION` and a symbol.

    Attributes:
        prompt: The context and the question.
        answer: What follows; for `Task.at_once` what may follow.
    """

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Task:
    """One kind of questions.

    Attributes:
        make: From a source of chance and a length, a question.
        at_once: Whether all of an answer has to be found in one step; else each step finds one token.
        partly: Whether an answer counts as far as it is right.
    """

    make: Callable[[random.Random, int], Question]
    at_once: bool = False
    partly: bool = False

    def questions(self, length: int, count: int, seed: int = 0) -> list[Question]:
        """So many questions with prompts of one length, the same each time."""
        source = random.Random(f"{self.make.__name__} {length} {seed}")  # noqa: S311 - contexts, no secrets
        return [self.make(source, length) for _ in range(count)]

    def score(
        self, questions: Sequence[Question], said: Sequence[Sequence[int]], best: Sequence[Sequence[int]]
    ) -> float:
        """How right answers are, 0 to 1.

        Args:
            questions: The questions.
            said: The tokens that were said to each.
            best: The likeliest first tokens, as many as the answer has.
        """
        return sum(map(self._score, questions, said, best)) / len(questions)

    def _score(self, question: Question, said: Sequence[int], best: Sequence[int]) -> float:
        answer = question.answer
        if self.at_once:
            return len(set(best) & set(answer)) / len(answer)
        right = next((n for n, (a, b) in enumerate(zip(said, answer, strict=False)) if a != b), len(answer))
        return right / len(answer) if self.partly else float(right == len(answer))


def _context(source: random.Random, length: int, records: list[list[int]], asked: int) -> list[int]:
    """Records in random order, each at a random place of a stretch of its own, and the question."""
    context = [source.choice(FILLER) for _ in range(length - 2)]
    stretch = len(context) // len(records)
    for number, record in enumerate(source.sample(records, len(records))):
        place = number * stretch + source.randrange(stretch - len(record) + 1)
        context[place : place + len(record)] = record
    return [*context, QUESTION, asked]


def _needle(source: random.Random, length: int) -> Question:
    """The value of one key."""
    symbols = source.sample(SYMBOLS, length // 128 * (1 + VALUE))
    records = [symbols[n : n + 1 + VALUE] for n in range(0, len(symbols), 1 + VALUE)]
    asked = source.choice(records)
    return Question(_context(source, length, records, asked[0]), asked[1:])


def _needles(source: random.Random, length: int) -> Question:
    """All values of one key, which stand at as many places."""
    symbols = source.sample(SYMBOLS, 8 * (1 + VALUES))
    keys, values = symbols[:8], symbols[8:]
    records = [[keys[n // VALUES], value] for n, value in enumerate(values)]
    return Question(_context(source, length, records, keys[0]), values[:VALUES])


def _chains(source: random.Random, length: int, uses: int) -> Question:
    symbols = source.sample(SYMBOLS, CHAINS * (HOPS + 1))
    chains = [symbols[n : n + HOPS + 1] for n in range(0, len(symbols), HOPS + 1)]
    records = [chain[n : n + 2] for chain in chains for n in range(HOPS)]
    records += [[record[0], source.choice(FILLER)] for record in records for _ in range(uses)]
    return Question(_context(source, length, records, chains[0][0]), chains[0][1:])


def _hops(source: random.Random, length: int) -> Question:
    """From symbol to symbol: each record leads to the next one, among other chains."""
    return _chains(source, length, 0)


def _tracking(source: random.Random, length: int) -> Question:
    """The same, but each symbol is also used once where nothing is assigned from it."""
    return _chains(source, length, 1)


def _aggregation(source: random.Random, length: int) -> Question:
    """The value that stands with a key most often."""
    symbols = source.sample(SYMBOLS, 4 * (2 + OTHERS))
    records = []
    for key, often, *others in (symbols[n : n + 2 + OTHERS] for n in range(0, len(symbols), 2 + OTHERS)):
        records += [[key, often]] * OFTEN + [[key, other] for other in others] * SELDOM
    return Question(_context(source, length, records, symbols[0]), symbols[1:2])


TASKS = {
    "needle": Task(_needle),
    "needles": Task(_needles, at_once=True),
    "hops": Task(_hops, partly=True),
    "tracking": Task(_tracking, partly=True),
    "aggregation": Task(_aggregation),
}
