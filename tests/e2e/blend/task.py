"""The task: prompts of chunks in ever other orders, and questions that reused KV may get wrong.

A record is a key and its value; both are symbols, and the rest of a chunk is filler. A reference is a symbol and the
key of a record in another chunk: its value is that record's. Three kinds of questions are asked:

- *inside*: of a record within a chunk, which is right however the chunk is reused;
- *split*: of a record whose key is the last token of a chunk and whose value is the first of the next one. Computed
  alone, the second chunk knows nothing of the key;
- *reference*: of a reference in the middle of a chunk, whose record stands in a chunk before it. Where the chunk was
  computed alone, the reference led nowhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

QUESTION = 3
FILLER = range(4, 64)
SYMBOLS = range(64, 1024)
VOCABULARY = SYMBOLS.stop
#: Tokens of a chunk, and of these, how many each record or reference has for itself.
CHUNK = 112
SPACING = 16
KINDS = ("inside", "split", "reference")


@dataclass(frozen=True)
class Question:
    """A prompt with its answer.

    Attributes:
        kind: One of `KINDS`.
        chunks: The chunks, in the prompt's order; behind them come `QUESTION` and what is asked for.
        asked: That.
        answer: The value.
    """

    kind: str
    chunks: list[list[int]]
    asked: int
    answer: int

    @property
    def prompt(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk] + [QUESTION, self.asked]

    @property
    def marks(self) -> list[list[int]]:
        """The chunks as ``ucm_chunks`` has them."""
        ends = [sum(map(len, self.chunks[: number + 1])) for number in range(len(self.chunks))]
        return [[start, end] for start, end in zip([0, *ends], ends, strict=False)]


def questions(chunks: int, count: int, seed: int = 0) -> list[Question]:
    """Questions of all kinds in turn, each over chunks of its own in a shuffled order.

    Args:
        chunks: How many a prompt has.
        count: How many questions.
        seed: Other questions.
    """
    source = random.Random(f"{chunks} {seed}")  # noqa: S311 - contexts, no secrets
    return [_question(source, chunks, KINDS[number % len(KINDS)]) for number in range(count)]


def _question(source: random.Random, count: int, kind: str) -> Question:
    free = iter(source.sample(SYMBOLS, len(SYMBOLS)))
    chunks = [[source.choice(FILLER) for _ in range(CHUNK)] for _ in range(count)]
    #: In the middle of each chunk, records at even places; the odd ones are left to references.
    places = range(SPACING, CHUNK - SPACING, SPACING)
    records: list[list[tuple[int, int]]] = []
    for chunk in chunks:
        chunk[0], chunk[-1] = next(free), next(free)
        own = []
        for place in places[::2]:
            at = place + source.randrange(SPACING - 1)
            chunk[at : at + 2] = own_record = [next(free), next(free)]
            own.append((own_record[0], own_record[1]))
        records.append(own)
    order = source.sample(range(count), count)
    # References lead to the chunk that comes before, whatever the order in which the chunks were stored.
    references = []
    for before, here in pairwise(order):
        targets = source.sample(records[before], min(2, len(records[before])))
        for place, (key, value) in zip(places[1::2], targets, strict=False):
            at = place + source.randrange(SPACING - 1)
            name = next(free)
            chunks[here][at : at + 2] = [name, key]
            references.append((name, value))
    chunks = [chunks[number] for number in order]
    if kind == "inside":
        asked, answer = source.choice([record for own in records for record in own])
    elif kind == "split":
        asked, answer = source.choice([(first[-1], second[0]) for first, second in pairwise(chunks)])
    else:
        asked, answer = source.choice(references)
    return Question(kind, chunks, asked, answer)
