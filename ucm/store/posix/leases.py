"""Keep the lease of a block in its file's time of last use, so that it needs no record and survives every process.

The time is the moment until which the block is worth keeping: for a block in use soon after the current span of seconds
(``ucm.store.tier.used_until``), for a retained or pinned one the end of its lease. The evictor goes by the time as it
always does, so a retained block goes after all that have none, and leases end by themselves. A pinned block's time has
500 in its last three digits, in nanoseconds; every other time that is set is a multiple of 1000. The evictor does not
take it before its end. File systems with whole seconds drop the mark: there, a pinned block is only retained.

Two leases on one block become one with the later end, pinned if one of them is and has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig

#: What a pinned block's time of last use is modulo 1000.
_MARK = 500
#: How far a time may be ahead besides a lease, in seconds: the longest span, and what hosts' clocks may differ by.
_SLACK = 90_000.0


def pinned_until(stamp: int) -> int:
    """Return a time in nanoseconds with the mark of a pinned block."""
    return stamp // 1000 * 1000 + _MARK


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """What a time of last use means; all times are in nanoseconds since the epoch.

    Args:
        longest_ns: The longest time by which a file's time may be ahead. Times beyond it were set by a wrong clock.
    """

    longest_ns: int

    @classmethod
    def of(cls, config: StoreConfig) -> LeaseRules:
        """Return the rules of a store."""
        return cls(int((config.lease_seconds + _SLACK) * 1e9))

    def rank(self, stamp: int, now: int) -> int:
        """Return what orders blocks for eviction, smallest first; one with a wrong time would else stay for ever."""
        return stamp if stamp <= now + self.longest_ns else 0

    def is_pinned(self, stamp: int, now: int) -> bool:
        """Return whether a block is pinned now."""
        return stamp % 1000 == _MARK and now < stamp <= now + self.longest_ns

    def joined(self, old: int, new: int, now: int) -> int:
        """Return the time of a block that has one and is given another; never earlier, unless the old one is wrong."""
        if old > now + self.longest_ns:
            return new
        latest = max(old, new)
        return pinned_until(latest) if self.is_pinned(old, now) or self.is_pinned(new, now) else latest
