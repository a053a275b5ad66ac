"""Count what a tenant computes again beside another one that floods the store: `python -m tests.share_trace`.

No engine: requests arrive at a store that evicts chains of blocks from their ends. The *steady* tenant asks for one of
50 prompts of 10,000 tokens, popular ones more often, followed by 500 to 2,500 tokens of its own that never come back.
The *other* one brings ten times as many tokens: prompts that never come back (*flood*), or the same prompts in turn,
four times the capacity (*scan*), of which the least recently used one is always the next to be needed.

What a request could have found if nothing were evicted, and does not find, is *computed again*.

- *LRU*: the least recently used chain goes, whosever it is.
- *shares*: who holds the most loses its least recently used chain; see `ucm.store.shares`.
- *random*: the end of a random chain.
- *alone*: the steady tenant has the store, or half of it, for itself.

Then it measures the evictor: the processor's time for each deleted block, on real files.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ucm.store.evicting import evict_unpinned
from ucm.salts import tag_of_salt, tagged
from ucm.store.base import BlockKey
from ucm.store.posix.layout import Layout
from ucm.store.posix.scan import SAMPLE_BLOCKS, scan
from ucm.store.shares import Shares
from ucm.testing.blocks import key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK = 250
PROMPTS, PROMPT = 50, 40
STEADY, OTHER = "steady", "other"
#: Capacities, relative to all prompts of the steady tenant.
CAPACITIES = (1.0, 1.5, 2.0, 4.0)
ORDERS = ("LRU", "shares", "random", "alone", "alone, half")


@dataclass(frozen=True)
class Request:
    """A request for one chain of blocks, of a tenant."""

    tenant: str
    chain: int
    blocks: int


def trace(capacity: int, kind: str, requests: int = 4000, factor: float = 10.0, seed: int = 5) -> list[Request]:
    """Return the requests in order.

    Args:
        capacity: How many blocks the store holds.
        kind: ``flood`` or ``scan``.
        requests: How many the steady tenant sends.
        factor: How many tokens the other one brings for each of the steady one.
        seed: The seed of all random choices.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    weights = [1 / (rank + 1) for rank in range(PROMPTS)]
    found, fresh, turn, owed = list[Request](), PROMPTS, 0, 0.0
    for _ in range(requests):
        prompt = chance.choices(range(PROMPTS), weights)[0]
        tail = chance.randint(2, 10)
        found += [Request(STEADY, prompt, PROMPT), Request(STEADY, fresh, tail)]
        fresh, owed = fresh + 1, owed + factor * (PROMPT + tail)
        while owed > 0:
            blocks = PROMPT if kind == "scan" else chance.randint(10, 80)
            chain = -1 - turn % (4 * capacity // PROMPT) if kind == "scan" else -1 - turn
            found.append(Request(OTHER, chain, blocks))
            turn, owed = turn + 1, owed - blocks
    return found


class Store:
    """Chains of blocks of tenants.

    Args:
        capacity: How many blocks it holds.
        order: One of ``ORDERS``.
    """

    def __init__(self, capacity: int, order: str) -> None:
        self.held: dict[int, int] = {}
        self._free, self._order = capacity, order
        self._chance = random.Random(1)  # noqa: S311 - no secret
        self._used: dict[int, int] = {}
        self._of: Counter[str] = Counter()
        self._queues: dict[str, list[tuple[int, int]]] = {}
        self._moment = 0

    def use(self, request: Request) -> int:
        """Store a chain as a whole, and return how many of its blocks were there."""
        chain, before = request.chain, self.held.get(request.chain, 0)
        self._moment += 1
        self.held[chain], self._used[chain] = request.blocks, self._moment
        self._free -= request.blocks - before
        self._of[request.tenant] += request.blocks - before
        account = request.tenant if self._order == "shares" else ""
        heapq.heappush(self._queues.setdefault(account, []), (self._moment, chain))
        while self._free < 0:
            self._evict(account=max(self._queues, key=lambda one: self._of[one]))
        return before

    def _evict(self, account: str) -> None:
        queue = self._queues[account]
        if self._order == "random":
            moment, chain = self._chance.choice(queue)
        else:
            moment, chain = queue[0]
        if self._used.get(chain) != moment or not self.held.get(chain):
            queue.remove((moment, chain)) if self._order == "random" else heapq.heappop(queue)
            return
        count = min(self.held[chain], -self._free)
        self.held[chain] -= count
        self._free += count
        self._of[account] -= count


def computed_again(requests: Sequence[Request], capacity: int, order: str) -> Counter[str]:
    """Return the tokens of each tenant that are computed although an earlier request had them."""
    alone = order.startswith("alone")
    store = Store(capacity // 2 if order.endswith("half") else capacity, order)
    seen: set[int] = set()
    lost: Counter[str] = Counter()
    for request in requests:
        if alone and request.tenant != STEADY:
            continue
        there = store.use(request)
        if request.chain in seen:
            lost[request.tenant] += (request.blocks - there) * BLOCK
        seen.add(request.chain)
    return lost


def lines(requests: int = 4000, capacities: Sequence[float] = CAPACITIES) -> Iterator[str]:
    """Yield a table: million tokens that the steady tenant computes again, under each order."""
    yield "other  capacity" + "".join(f"{order:>13}" for order in ORDERS) + "   of the other: LRU, shares"
    for kind in ("flood", "scan"):
        for capacity in (int(one * PROMPTS * PROMPT) for one in capacities):
            sent = trace(capacity, kind, requests)
            counts = {order: computed_again(sent, capacity, order) for order in ORDERS}
            cells = "".join(f"{counts[order][STEADY] / 1e6:13.2f}" for order in ORDERS)
            others = ", ".join(f"{counts[order][OTHER] / 1e6:.1f}" for order in ("LRU", "shares"))
            yield f"{kind:5}  {capacity / PROMPTS / PROMPT:8.1f}{cells}   {others}"


def cost(blocks: int) -> Iterator[str]:
    """Yield the processor's microseconds for each deleted block, with one block of 33 to be deleted at once."""
    some = Shares(86_400.0)
    kinds = {"LRU": Shares(), "LRU, by samples": Shares()}
    kinds |= {"shares, 2 salts": some, "shares, a salt for each block": some}
    for kind, shares in kinds.items():
        with tempfile.TemporaryDirectory() as root:
            os.chmod(root, 0o700)  # noqa: PTH101 - as a store's root must be
            layout = Layout(root, "n")
            layout.make()
            for number in range(blocks):
                salt = f"{number}" if kind.endswith("block") else f"{number % 2}"
                path = Path(layout.block(BlockKey(tagged(key(number), tag_of_salt(salt)))))
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"x" * 100)
            sample = 1000 if kind.endswith("samples") else SAMPLE_BLOCKS
            found, times, deleted = scan(root, sample), list[float](), 0
            for _ in range(8):
                began = time.process_time()
                if shares.seconds or not found.exact:  # as in ``ucm.store.posix.space``
                    found = scan(root, sample)
                count, _ = evict_unpinned(root, found, blocks // 33 * 100, lambda _: None, shares=shares)
                times.append(time.process_time() - began)
                deleted += count
            yield f"{blocks:8} blocks  {kind:30} {sum(times) / deleted * 1e6:6.0f} µs"


if __name__ == "__main__":
    for line in (*lines(), *cost(20_000)):
        sys.stdout.write(f"{line}\n")
