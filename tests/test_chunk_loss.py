"""The count of what chunks find agrees with a store that is followed token by token."""

from __future__ import annotations

import random
from statistics import median

import pytest

from tests.chunk_loss import CHUNKS, Asked, found, lines, sessions, traces

SYSTEM = 11


def followed(asked: list[Asked], chunk: int) -> tuple[int, int]:
    """Return the tokens found and the objects stored, of sessions that begin with the same tokens."""
    stored: set[tuple[int, ...]] = set()
    hits, said, fresh = 0, list[int](), iter(range(SYSTEM, 10**6))
    for one in asked:
        before = said[: one.known] if one.known > SYSTEM else list(range(SYSTEM))
        tokens = [*before, *(next(fresh) for _ in range(one.prompt - len(before)))]
        hit = 0
        while hit + chunk < one.prompt and tuple(tokens[: hit + chunk]) in stored:
            hit += chunk
        hits += hit
        said = [*tokens, *(next(fresh) for _ in range(one.answer - 1))]
        stored |= {tuple(said[:end]) for end in range(chunk, len(said) + 1, chunk)}
    return hits, len(stored)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_every_hit_and_every_object_is_counted(chunk: int) -> None:
    chance = random.Random(3)  # noqa: S311 - no secret
    some = [lambda high=high: chance.randint(1, high) for high in (4, 9, 7)]
    asked = list(sessions(6, SYSTEM, *some))
    counted = found(asked, chunk)
    assert (counted.tokens, counted.objects) == followed(asked, chunk)
    assert counted.tokens + counted.computed == sum(one.prompt for one in asked)


def test_larger_chunks_find_less_and_store_fewer_objects() -> None:
    asked = traces()["agents"]
    counts = [found(asked, chunk) for chunk in CHUNKS]
    assert sorted((one.tokens for one in counts), reverse=True) == [one.tokens for one in counts]
    assert sorted((one.objects for one in counts), reverse=True) == [one.objects for one in counts]
    assert len(list(lines("agents", asked))) == 2 + len(CHUNKS)


def test_agents_are_as_published() -> None:
    asked = traces()["agents"]
    ends = [place for place, one in enumerate(asked) if place + 1 == len(asked) or asked[place + 1].known <= 20_000]
    turns = [end - before for before, end in zip([-1, *ends], ends, strict=False)]
    assert 35 <= median(turns) <= 50
    assert 120_000 <= median(asked[end].prompt for end in ends) <= 165_000
