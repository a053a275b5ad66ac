"""Share a capacity among the salts of requests: who holds the most for its weight loses its oldest block.

No share is computed, so none can be wrong. Whoever holds less than the capacity by its weight loses no block, because
then another one holds more than that; what it does not use, others use. One salt alone loses its least recently used
blocks.

What was not used for ``seconds`` is in nobody's share and goes before all else. Otherwise salts that nobody uses any
more would keep their part for ever.

Each salt has an *account*. If weights are given, those salts have accounts of their own, and all others have one
together: whoever may choose the salt of a request could else take as many shares as salts.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from ucm.salts import is_tag_name, tag_digits, tag_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucm.store.config import StoreConfig

T = TypeVar("T")

#: The account of all salts without a weight, if some have one.
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Shares:
    """How a capacity is shared.

    Args:
        seconds: How long a block is in its salt's share after its last use; 0: there are no shares.
        weights: The weight of each account, by ``tag_name`` or ``OTHERS``; empty: each salt has the weight 1.
    """

    seconds: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: StoreConfig) -> Shares:
        """Return the shares of a store."""
        return cls(config.share_seconds, config.share_weights)

    def account(self, tag: str) -> str:
        """Return the account of a tag, given its hexadecimal digits."""
        name = tag_name(tag)
        return name if not self.weights or name in self.weights else OTHERS

    def account_of(self, key: bytes) -> str:
        """Return the account of a block."""
        return self.account(tag_digits(key))

    def weight(self, account: str) -> float:
        """Return the weight of an account."""
        return self.weights.get(account, 1.0)

    def old(self, now: int) -> float:
        """Return the time of last use before which a block is in no share, in nanoseconds like ``now``."""
        return now - self.seconds * 1e9


def weights_problem(weights: Mapping[str, float]) -> str:
    """Return what is wrong with weights; empty if nothing is."""
    for account, weight in weights.items():
        if account != OTHERS and not is_tag_name(account):
            return f"{account!r} is neither a tag that `ucm store tag` prints nor {OTHERS!r}"
        if not 0 < weight < math.inf:
            return f"the weight of {account} is {weight}, which is not above 0"
    return ""


class Turns(Generic[T]):
    """Whose turn it is to lose something.

    Args:
        shares: How the capacity is shared.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._held: defaultdict[str, float] = defaultdict(float)
        self._queues: defaultdict[str, list[tuple[int, T, float]]] = defaultdict(list)
        self._age = count()

    def add(self, account: str, item: T, nbytes: float, *, may_go: bool = True) -> None:
        """Add something that an account holds; of all items, what was used last comes first.

        Args:
            account: The account; empty for what goes before all else.
            item: The item.
            nbytes: Its size.
            may_go: Whether it may be lost; if not, it only counts.
        """
        self._held[account] += nbytes
        if may_go:
            self._queues[account].append((next(self._age), item, nbytes))

    def __iter__(self) -> Iterator[tuple[str, T]]:
        """Yield accounts and their items in turn; each counts as lost."""
        first = self._queues.pop("", [])
        while first:
            yield "", first.pop()[1]
        heap = [self._turn(account) for account in self._queues]
        heapq.heapify(heap)
        while heap:
            account = heap[0][-1]
            _, item, nbytes = self._queues[account].pop()
            yield account, item
            self._held[account] -= nbytes
            if self._queues[account]:
                heapq.heapreplace(heap, self._turn(account))
            else:
                heapq.heappop(heap)

    def _turn(self, account: str) -> tuple[float, int, str]:
        """Return what orders accounts: what they hold for their weight, and between equals the age of the oldest."""
        return -self._held[account] / self._shares.weight(account), -self._queues[account][-1][0], account
