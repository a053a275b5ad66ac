"""The task: a long context of filler with records in it, and at its end a question for the value of one of them.

A record is a key and the tokens of its value, which are symbols that occur nowhere else in the context; filler tokens
are no symbols. There is a record in every `SPACING` tokens, so a method cannot answer by reading whatever stands out:
it has to find the one that is asked for. The first token of the answer comes with the prompt's last step; each of the
others comes with a decode step of its own, which has to find the record again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The token that asks; the key follows.
QUESTION = 3
FILLER = range(4, 64)
SYMBOLS = range(64, 1024)
VOCABULARY = SYMBOLS.stop
#: Tokens of a value, and of a record.
VALUE = 4
RECORD = 1 + VALUE
#: One record in so many tokens.
SPACING = 128


@dataclass(frozen=True)
class Question:
    """A prompt with its answer.

    Attributes:
        prompt: The context, `QUESTION` and a key.
        answer: The key's value.
        behind: How many tokens of the prompt come after the record, the question included.
    """

    prompt: list[int]
    answer: list[int]
    behind: int


def questions(length: int, count: int, seed: int = 0) -> list[Question]:
    """Questions on contexts of their own, the records that they ask for spread evenly over all depths.

    Args:
        length: Tokens of each prompt.
        count: How many.
        seed: Other questions.
    """
    source = random.Random(f"{length} {seed}")  # noqa: S311 - contexts, no secrets
    found = []
    for number in range(count):
        context = [source.choice(FILLER) for _ in range(length - 2)]
        records = len(context) // SPACING
        symbols = source.sample(SYMBOLS, RECORD * records)
        asked = (number * records + records // 2) // count
        for index in range(records):
            place = index * SPACING + source.randrange(SPACING - RECORD + 1)
            record = symbols[RECORD * index : RECORD * (index + 1)]
            context[place : place + RECORD] = record
            if index == asked:
                wanted, behind = record, length - place - RECORD
        found.append(Question([*context, QUESTION, wanted[0]], wanted[1:], behind))
    return found


def accuracy(asked: Sequence[Question], answers: Sequence[Sequence[int]]) -> float:
    """The share of questions whose whole answer is right, 0 to 1; NaN without any."""
    right = [list(answer) == question.answer for question, answer in zip(asked, answers, strict=True)]
    return sum(right) / len(right) if right else float("nan")
