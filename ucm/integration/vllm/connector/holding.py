"""Blocks that are read, verified and held before vLLM is promised them.

Where vLLM cannot compute the tokens of a block that failed to load (``load_policy`` knows where), a promise must not be
broken: each rank's copy of each block is read once and checked, and a lease keeps it from being evicted until it was
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ucm.errors import ConfigError
from ucm.store.leases import Lease, LeasingStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.store.base import BlockKey, KVStore


@dataclass(slots=True)
class Hold:
    """The leases behind one request's hit: for each group one per rank, in the ranks' order."""

    leases: dict[int, list[Lease]] = field(default_factory=dict)

    def tokens(self, group: int) -> tuple[str, ...]:
        """What names the leases of a group to the ranks."""
        return tuple(lease.token for lease in self.leases.get(group, ()))


class BlockHolder:
    """Takes leases and gives them back.

    Args:
        stores: For each group, the stores of all ranks.

    Raises:
        ConfigError: If one of them cannot give leases.
    """

    def __init__(self, stores: Mapping[int, Sequence[KVStore]]) -> None:
        for of_group in stores.values():
            for store in of_group:
                if not isinstance(store, LeasingStore):
                    raise ConfigError(
                        "this vLLM release, or this model, cannot recompute blocks that fail to load, so they have to "
                        f"be held before they are promised, and {type(store).__name__} cannot do that",
                        where="store.pipeline",
                        fix="use Posix, Dram or Cache|Posix",
                    )
        self._stores = cast("Mapping[int, Sequence[LeasingStore]]", stores)

    def hold(self, wanted: Mapping[int, Sequence[BlockKey]]) -> tuple[Hold, dict[int, set[BlockKey]]]:
        """Verify and hold blocks.

        Args:
            wanted: Keys by group.

        Returns:
            The leases, and by group the keys that every rank has whole.
        """
        hold = Hold()
        whole: dict[int, set[BlockKey]] = {}
        for group, keys in wanted.items():
            held = set(keys)
            for store in self._stores[group]:
                lease = store.lease([key for key in keys if key in held], verify=True)
                hold.leases.setdefault(group, []).append(lease)
                held &= lease.keys
            whole[group] = held
        return hold, whole

    def release(self, hold: Hold) -> None:
        """Let the blocks go."""
        for group, leases in hold.leases.items():
            for store, lease in zip(self._stores[group], leases, strict=True):
                store.release(lease)
