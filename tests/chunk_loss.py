"""Count what chunks of blocks find and lose on traces of agents, chats and others: `python -m tests.chunk_loss`.

No engine and no store: every request is asked of a store that keeps everything, as after a restart, in another engine,
or after a pause that the engine's own cache did not outlast. A prompt's last token is always computed. What a request
computed is stored in whole chunks, its answer as well.

The traces are generated. Agents have a median of 43 turns and of some 142,000 tokens in their last prompt, figures that
were published for coding agents. The messages and answers of chats are as long as those of ShareGPT in the paper on
PagedAttention (161 and 338 tokens in the mean).
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK = 16
CHUNKS = (16, 64, 128, 256, 512)
#: Keys and values of a token: 32 layers with 8 heads of 128 values of two bytes.
TOKEN_BYTES = 2 * 2 * 32 * 8 * 128


@dataclass(frozen=True)
class Asked:
    """A request.

    Args:
        prompt: The tokens of its prompt.
        known: How many of these, from the first on, an earlier request had in its prompt or its answer.
        answer: The tokens of its answer.
    """

    prompt: int
    known: int
    answer: int = 0


@dataclass(frozen=True)
class Found:
    """What a store had for a trace.

    Args:
        tokens: Tokens of prompts that were found.
        computed: Tokens of prompts that were not.
        missed: Requests that found nothing and could have found a block.
        objects: What was stored.
        stored: Its tokens.
    """

    tokens: int
    computed: int
    missed: int
    objects: int
    stored: int


def found(asked: Sequence[Asked], chunk: int) -> Found:
    """Return what a store with chunks of so many tokens had."""
    hits = [min(one.known, one.prompt - 1) // chunk * chunk for one in asked]
    # An answer's last token is never computed.
    objects = sum((one.prompt + max(one.answer - 1, 0)) // chunk - one.known // chunk for one in asked)
    missed = sum(not hit and min(one.known, one.prompt - 1) >= BLOCK for one, hit in zip(asked, hits, strict=True))
    prompts = sum(one.prompt for one in asked)
    return Found(sum(hits), prompts - sum(hits), missed, objects, objects * chunk)


def sessions(
    number: int, system: int, turns: Callable[[], int], message: Callable[[], int], answer: Callable[[], int]
) -> Iterator[Asked]:
    """Yield the turns of sessions that begin with one system prompt, each turn with all that was said before."""
    for session in range(number):
        known = system if session else 0
        prompt = system
        for _ in range(turns()):
            prompt += message()
            said = answer()
            yield Asked(prompt, known, said)
            prompt += said
            known = prompt - 1


def agents(chance: random.Random) -> list[Asked]:
    """Return sessions that grow with every result of a tool, behind one long system prompt."""
    system, median, turns = 20_000, 142_000, 43

    def growth(share: float) -> int:
        return max(1, int(_lognormal(chance, share * (median - system) / turns, 1.2)))

    many = lambda: max(1, int(chance.lognormvariate(math.log(turns), 0.8)))  # noqa: E731
    return list(sessions(200, system, many, lambda: growth(0.85), lambda: growth(0.15)))


def chats(chance: random.Random, system: int) -> list[Asked]:
    """Return chats of four turns in the mean."""
    many = lambda: 1 + int(chance.expovariate(1 / 3.5))  # noqa: E731
    lengths = [lambda mean=mean: max(4, int(_lognormal(chance, mean, 1.0))) for mean in (161, 338)]
    return list(sessions(4000, system, many, *lengths))


def questions(chance: random.Random, shared: Callable[[], int], each: int) -> list[Asked]:
    """Return questions of some 50 tokens about texts, each asked several times."""
    return [
        Asked(text + max(4, int(_lognormal(chance, 50, 0.7))), text if number else 0)
        for text in (shared() for _ in range(500))
        for number in range(each)
    ]


def _lognormal(chance: random.Random, mean: float, sigma: float) -> float:
    return chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def traces() -> dict[str, list[Asked]]:
    """Return all traces by name, always the same."""
    chance = random.Random(2)  # noqa: S311 - no secret
    return {
        "agents": agents(chance),
        "chats, no system prompt": chats(chance, 0),
        "chats, a system prompt of 200 tokens": chats(chance, 200),
        "chats, a system prompt of 2,000 tokens": chats(chance, 2000),
        "questions about texts of 1,000 to 8,000 tokens": questions(chance, lambda: chance.randint(1000, 8000), 8),
        "instructions of 100 to 400 tokens": questions(chance, lambda: chance.randint(100, 400), 50),
    }


def lines(name: str, asked: Sequence[Asked]) -> Iterator[str]:
    """Yield a table: what each size of chunks finds, relative to blocks, and how much more is computed."""
    ideal, blocks = found(asked, 1), found(asked, BLOCK)
    prompts = ideal.tokens + ideal.computed
    yield f"{name}: {len(asked)} requests, {prompts / len(asked):,.0f} tokens each, {ideal.tokens / prompts:.1%} known"
    yield "  chunk      found  lost to blocks  computed to blocks  find nothing     objects    GB stored"
    for chunk in CHUNKS:
        one = found(asked, chunk)
        yield (
            f"  {chunk:5}   {one.tokens / ideal.tokens:7.2%}  {1 - one.tokens / blocks.tokens:14.2%}"
            f"  {one.computed / blocks.computed:18.3f}  {one.missed / len(asked):12.1%}  {one.objects:10,}"
            f"   {one.stored * TOKEN_BYTES / 1e9:10,.1f}"
        )


if __name__ == "__main__":
    for title, requests in traces().items():
        sys.stdout.write("\n".join([*lines(title, requests), ""]) + "\n")
