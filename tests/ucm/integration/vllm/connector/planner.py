"""The scheduler's side with a set of keys for a store, and requests and steps made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.ucm.integration.vllm.connector.simulation.pool import Blocks
from tests.ucm.integration.vllm.connector.simulation.request import Request
from tests.ucm.integration.vllm.connector.simulation.truth import Keys
from ucm.integration.vllm.connector.groups import CacheGroup, CacheGroups
from ucm.integration.vllm.connector.lookup import PrefixLookup
from ucm.integration.vllm.connector.scheduler import PlanningOptions, PrefixCacheScheduler
from ucm.store.leases import Lease, LeasingStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.store.base import BlockKey, BlockTransfer, Task, TaskResult, TierStats

SIZE = 4


class KeyStore(LeasingStore):
    """Looks keys up, leases them, and does nothing else."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.lookups = 0
        self.leased: dict[str, frozenset[BlockKey]] = {}
        self._leases = 0

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.lookups += 1
        return [key in self.keys for key in keys]

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        self.lookups += 1
        return next((place for place, key in enumerate(keys) if key not in self.keys), len(keys))

    def lease(self, keys: Sequence[BlockKey], *, verify: bool = False) -> Lease:
        assert verify
        self._leases += 1
        lease = Lease(f"lease-{self._leases}", frozenset(keys) & self.keys - self.damaged)
        self.leased[lease.token] = lease.keys
        return lease

    def release(self, lease: Lease) -> None:
        del self.leased[lease.token]

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        raise NotImplementedError

    def load(self, blocks: Sequence[BlockTransfer], lease: str | None = None) -> Task:
        raise NotImplementedError

    def dump(self, blocks: Sequence[BlockTransfer]) -> Task:
        raise NotImplementedError

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        raise NotImplementedError

    def discard(self, keys: Sequence[BlockKey]) -> None:
        raise NotImplementedError

    def wait(self, task: Task) -> TaskResult:
        raise NotImplementedError

    def check(self, task: Task) -> bool:
        raise NotImplementedError

    def stats(self) -> Mapping[str, TierStats]:
        return {}

    def close(self) -> None:
        pass


class Counted:
    """What was looked up."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def looked_up(self, queried_tokens: int, hit_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append((queried_tokens, hit_tokens))

    def hashed(self, blocks: int, seconds: float) -> None:
        pass


class Planner:
    """The scheduler's side of an engine whose scheduler is the test.

    Args:
        windows: For each group of the model, its window.
        holder: Makes what verifies and holds, from the stores.
        options: Other than the defaults.
    """

    def __init__(self, *windows: int | None, holder: Any = None, **options: Any) -> None:
        groups = [CacheGroup(index, SIZE, window, {}, ()) for index, window in enumerate(windows or (None,))]
        self.groups = CacheGroups(tuple(groups))
        self.stores = {group.index: [KeyStore()] for group in groups}
        self.store = self.stores[0][0]
        self.keys = Keys()
        self.counted = Counted()
        held = None if holder is None else holder(self.stores)
        lookup = PrefixLookup(self.groups, self.stores, self.keys, held)
        self.side = PrefixCacheScheduler(lookup, self.counted, PlanningOptions(**{"batches": 1, **options}))
        self._next_block = 1

    def keep(self, tokens: Sequence[int], group: int = 0) -> list[bytes]:
        """Have blocks in the store."""
        chain = self.keys.chain(tokens, SIZE)
        for store in self.stores[group]:
            store.keys.update(chain)
        return chain

    def admit(self, request: Request, computed: int = 0, had: Sequence[int] = ()) -> int:
        """Look a request up and give it blocks, those it had first; returns the tokens to be loaded."""
        external = self.side.matched_tokens(request, computed)
        assert external is not None
        self.give(request, computed, external, had)
        return external

    def give(self, request: Request, computed: int, external: int, had: Sequence[int] = ()) -> list[list[int]]:
        count = -(-request.num_tokens // SIZE) - len(had)
        rows = [[*had, *self.fresh(count)] for _ in self.groups.groups]
        self.side.allocated(request, Blocks(tuple(rows)), external)
        request.num_computed_tokens = computed + external
        self.rows = rows
        return rows

    def fresh(self, count: int) -> list[int]:
        begin, self._next_block = self._next_block, self._next_block + count
        return list(range(begin, begin + count))

    def step(
        self,
        scheduled: Mapping[str, int],
        admitted: Sequence[tuple[Request, list[list[int]]]] = (),
        grown: Mapping[str, list[list[int]]] | None = None,
    ) -> StepPlan:
        """Plan a step."""
        grown = grown or {}
        output = SimpleNamespace(
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=tuple(rows), num_computed_tokens=request.num_computed_tokens
                )
                for request, rows in admitted
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(grown),
                new_block_ids=[tuple(rows) for rows in grown.values()],
                resumed_req_ids=set(),
                num_computed_tokens=[0] * len(grown),
            ),
        )
        return self.side.plan(output)

    def run(self, request: Request, count: int, rows: list[list[int]] | None = None) -> StepPlan:
        """Plan a step that computes tokens of one request, with its blocks if it begins; then they are computed."""
        plan = self.step({request.request_id: count}, [] if rows is None else [(request, rows)])
        request.num_computed_tokens += count
        return plan


def request(tokens: Sequence[int], request_id: str = "r", **more: Any) -> Request:
    found = Request(request_id, list(tokens), 100)
    for name, value in more.items():
        setattr(found, name, value)
    return found
