"""The task: prompts of chunks in changing orders, and questions that reused KV may answer wrongly.

A record is a key and its value; both are symbols, and the rest of a chunk is filler. A reference is a symbol and the
key of a record in another chunk; its value is that record's. There are three kinds of questions:

- *inside*: a record within a chunk, which is answered correctly however the chunk is reused;
- *split*: a record whose key is the last token of a chunk and whose value is the first of the next one. Computed
  alone, the second chunk does not depend on the key;
- *reference*: a reference in the middle of a chunk to a record in an earlier chunk. If the chunk was
  computed alone, the record was missing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

QUESTION = 3
FILLER = range(4, 64)
SYMBOLS = range(64, 1024)
VOCABULARY = SYMBOLS.stop
#: The tokens of a chunk, and the tokens per record or reference in it.
CHUNK = 112
SPACING = 16
KINDS = ("inside", "split", "reference")


@dataclass(frozen=True)
class Question:
    """A prompt with its answer.

    Attributes:
        kind: One of `KINDS`.
        chunks: The chunks in the prompt's order; `QUESTION` and the asked symbol follow.
        asked: The asked symbol.
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
        """Return the chunks in the form of ``ucm_chunks``."""
        ends = [sum(map(len, self.chunks[: number + 1])) for number in range(len(self.chunks))]
        return [[start, end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def guess(self) -> float:
        """Return the probability that a guess among the prompt's other symbols is right."""
        return 1 / len({token for token in self.prompt if token in SYMBOLS and token != self.asked})


def questions(chunks: int, count: int, seed: int = 0) -> list[Question]:
    """Return questions of all kinds in turn, each with its own chunks in random order.

    Args:
        chunks: The number of chunks per prompt.
        count: The number of questions.
        seed: The random seed.
    """
    source = random.Random(f"{chunks} {seed}")  # noqa: S311 - contexts, no secrets
    return [_question(source, chunks, KINDS[number % len(KINDS)]) for number in range(count)]


def _question(source: random.Random, count: int, kind: str) -> Question:
    free = iter(source.sample(SYMBOLS, len(SYMBOLS)))
    chunks = [[source.choice(FILLER) for _ in range(CHUNK)] for _ in range(count)]
    #: In the middle of each chunk, records are at even places and references at odd ones.
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
    # References point to the previous chunk, whatever the order in which the chunks were stored.
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
