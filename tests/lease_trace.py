"""Count what agents compute again under several orders of eviction: `python -m tests.lease_trace`.

No engine and no files: requests arrive at given times at a store that evicts chains of blocks from their ends, as the
Posix tier does, in the order of the times until which they are worth keeping. What a request of a session could have
found if nothing were evicted, and does not find, is *computed again*. `tests.e2e.bench.agents` sends such requests,
made shorter, to a real engine.

The trace is generated. Sessions of agents have a median of 43 turns and of some 142,000 tokens in their last prompt,
figures that were published for coding agents; they share one of four system prompts of 20,000 tokens. Beside them,
prompts that never come back (1,000 to 30,000 tokens) bring as many tokens as the agents do. How long an agent pauses is
an assumption: seven turns of eight wait for a tool (median 8 s), one waits for a person (median 10 min).

The orders:

- *LRU*: what UCM does without leases.
- *all*: each turn of a session retains its blocks for 30 min, also the last, as a client does that knows nothing.
- *1 min*, *5 min*: only a turn that waits for a tool does, for so long.
- *long*: 5 min if it waits for a tool, and 1 h if it waits for a person.
- *told*: 30 min if it waits for a tool, and 10 min if it waits for a person; system prompts are pinned; and a session
  that ends drops what it alone had.
- *random*: the end of a random chain.
- *Belady*: the chain whose next use is farthest, known from the future, but never a system prompt.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOOL, PERSON = "tool", "person"
#: Capacities, as shares of what all sessions hold that run at the busiest moment.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
#: For how many seconds a turn retains its blocks, by what it waits for.
RETAINS = {
    "1 min": {TOOL: 60.0},
    "5 min": {TOOL: 300.0},
    "all": dict.fromkeys((TOOL, PERSON, ""), 1800.0),
    "long": {TOOL: 300.0, PERSON: 3600.0},
    "told": {TOOL: 1800.0, PERSON: 600.0},
}
#: The order whose clients also pin and drop, and the one that no client can follow.
TOLD, BELADY = "told", "Belady"


@dataclass(frozen=True)
class Scale:
    """How large the requests are, and how many sessions run at a time.

    Args:
        block: Tokens of a block.
        system: Tokens of a system prompt.
        systems: How many of these there are.
        last: Tokens of a session's last prompt, and how many turns it has: the median.
        turns: See above.
        spreads: Of the turns of a session, and of what one adds to the prompt: the deviations of their logarithms.
        others: The fewest and the most tokens of a prompt that never comes back.
        every: Seconds from the beginning of one session to that of the next, on average.
    """

    block: int = 256
    system: int = 20_000
    systems: int = 4
    last: int = 142_000
    turns: int = 43
    spreads: tuple[float, float] = (0.8, 1.2)
    others: tuple[int, int] = (1_000, 30_000)
    every: float = 100.0

    @property
    def system_blocks(self) -> int:
        """Whole blocks of a system prompt."""
        return self.system // self.block


REAL = Scale()


@dataclass(frozen=True)
class Turn:
    """A request.

    Args:
        moment: When it arrives, in seconds.
        chain: The chain of its own blocks.
        system: The chain of the system prompt before it.
        blocks: How many own blocks it has afterwards.
        known: How many of these an earlier request had.
        waits: What follows: ``TOOL``, ``PERSON``, or nothing at the session's end.
        agent: Whether it belongs to a session.
    """

    moment: float
    chain: int
    system: int
    blocks: int
    known: int
    waits: str
    agent: bool


def trace(sessions: int = 300, others: float = 1.0, seed: int = 5, scale: Scale = REAL) -> list[Turn]:
    """Return the requests of sessions that begin at random moments, and those that never come back, in order.

    Args:
        sessions: How many sessions there are.
        others: How many tokens come that never come back, for each new token of a session.
        seed: The seed of all random choices.
        scale: How large they are.
    """
    of_turns, of_growth = scale.spreads
    typical = math.log((scale.last - scale.system) / scale.turns) - of_growth**2 / 2
    chance = random.Random(seed)  # noqa: S311 - no secret
    turns: list[Turn] = []
    for number in range(sessions):
        moment, blocks = chance.uniform(0.0, scale.every * sessions), 0
        count = max(1, int(chance.lognormvariate(math.log(scale.turns), of_turns)))
        for turn in range(count):
            known = blocks
            blocks = known + max(1, round(chance.lognormvariate(typical, of_growth) / scale.block))
            waits = "" if turn == count - 1 else TOOL if chance.random() < 7 / 8 else PERSON
            turns.append(Turn(moment, number, -1 - number % scale.systems, blocks, known, waits, agent=True))
            moment += chance.lognormvariate(math.log(8.0 if waits == TOOL else 600.0), 1.0)
    end, tokens = max(turn.moment for turn in turns), others * sum(turn.blocks - turn.known for turn in turns)
    chain, (fewest, most) = sessions, (round(count / scale.block) for count in scale.others)
    while tokens > 0:
        blocks = chance.randint(fewest, most)
        turns.append(Turn(chance.uniform(0.0, end), chain, chain, blocks, 0, "", agent=False))
        tokens, chain = tokens - blocks, chain + 1
    return sorted(turns, key=lambda turn: turn.moment)


def busiest(turns: Sequence[Turn], scale: Scale = REAL) -> int:
    """Return how many blocks the sessions hold that run at the busiest moment."""
    ends = {turn.chain: turn.moment for turn in turns if turn.agent}
    changes = [(turn.moment, turn.blocks - turn.known) for turn in turns if turn.agent]
    last = {turn.chain: turn.blocks for turn in turns if turn.agent}
    changes += [(ends[chain] + 1e-6, -blocks) for chain, blocks in last.items()]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most + scale.systems * scale.system_blocks


def had(turns: Sequence[Turn], scale: Scale = REAL) -> Iterator[tuple[Turn, int]]:
    """Yield each turn with the blocks at its beginning, the system prompt's included, that an earlier request had."""
    seen = set[int]()
    for turn in turns:
        yield turn, turn.known + (scale.system_blocks if turn.system in seen else 0)
        seen.add(turn.system)


class Store:
    """Chains of blocks with the times until which they are worth keeping.

    Args:
        capacity: How many blocks it holds.
        chance: Chooses the chain to shorten, each with equal chance; None: it is the one with the earliest time.
    """

    def __init__(self, capacity: int, chance: random.Random | None = None) -> None:
        self.held: dict[int, int] = {}
        self._free, self._until, self._chance = capacity, dict[int, float](), chance
        self._order: list[tuple[float, int]] = []

    def use(self, chain: int, blocks: int, until: float) -> None:
        """Store a chain's blocks, and keep the later of its times."""
        self._free -= blocks - self.held.get(chain, 0)
        self.held[chain] = blocks
        self.set(chain, max(until, self._until.get(chain, -math.inf)))
        while self._free < 0:
            self._evict()

    def set(self, chain: int, until: float) -> None:
        """Set the time of a chain, whatever it had."""
        self._until[chain] = until
        heapq.heappush(self._order, (until, chain))

    def drop(self, chain: int) -> None:
        """Forget a chain."""
        self._free += self.held.pop(chain, 0)
        self._until.pop(chain, None)

    def _evict(self) -> None:
        if self._chance is not None:
            chain = self._chance.choice(list(self.held))
        else:
            until, chain = self._order[0]
            if self._until.get(chain) != until or not self.held.get(chain):
                heapq.heappop(self._order)
                return
        count = min(self.held[chain], -self._free)
        self.held[chain] -= count
        self._free += count
        if not self.held[chain]:
            self.drop(chain)


def computed_again(turns: Sequence[Turn], capacity: int, order: str, scale: Scale = REAL) -> int:
    """Return the tokens of sessions that are computed although an earlier request had them."""
    store = Store(capacity, random.Random(1) if order == "random" else None)  # noqa: S311 - no secret
    following, nexts = dict[int, float](), list[float]()
    for turn in reversed(turns):
        nexts.append(following.get(turn.chain, math.inf))
        following[turn.chain] = turn.moment
    lost, size, retains = 0, scale.system_blocks, RETAINS.get(order, {})
    for (turn, known), again in zip(had(turns, scale), reversed(nexts), strict=True):
        if turn.agent:
            found = store.held.get(turn.system, 0)
            # Without the whole system prompt, nothing after it is found.
            found += min(store.held.get(turn.chain, 0), turn.known) if found == size else 0
            lost += known - found
        until = turn.moment + (retains.get(turn.waits, 0.0) if turn.agent else 0.0)
        if order == BELADY:
            until = -again
            store.set(turn.chain, until)
        if turn.agent:
            store.use(turn.system, size, math.inf if order in {TOLD, BELADY} else until)
        store.use(turn.chain, turn.blocks, until)
        if order == TOLD and turn.agent and not turn.waits:
            store.drop(turn.chain)
    return lost * scale.block


def lines(turns: Sequence[Turn], shares: Sequence[float] = SHARES) -> Iterator[str]:
    """Yield a table: for each capacity the share of the tokens that are computed again, under each order."""
    most = busiest(turns)
    agents = sum(turn.agent for turn in turns)
    asked = sum(turn.blocks for turn in turns if turn.agent) * REAL.block + agents * REAL.system
    known = sum(turn.known for turn in turns) * REAL.block
    yield f"{agents} requests of agents with {asked / agents:,.0f} tokens each, {len(turns) - agents} others"
    yield f"the sessions of the busiest moment hold {most * REAL.block:,} tokens; {known / 1e6:,.0f} million were known"
    orders = ("LRU", "all", "1 min", "5 min", "long", TOLD, "random", BELADY)
    yield "  capacity" + "".join(f"{order:>12}" for order in orders) + "   million tokens of agents computed again"
    for share in shares:
        counts = [computed_again(turns, int(share * most), order) for order in orders]
        yield f"  {share:8.3f}" + "".join(f"{count / 1e6:12.2f}" for count in counts)


if __name__ == "__main__":
    for factor in (1.0, 4.0):
        sys.stdout.write("\n".join([*lines(trace(others=factor)), "", ""]))
