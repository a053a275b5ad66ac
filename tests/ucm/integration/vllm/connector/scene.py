"""The scheduler side with a set of keys as its store, and requests and steps made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.ucm.integration.vllm.connector.simulation.pool import Blocks
from tests.ucm.integration.vllm.connector.simulation.request import Request
from tests.ucm.integration.vllm.connector.simulation.truth import STATE, Keys
from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups, in_chunks
from ucm.integration.vllm.connector.prefix_cache import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.store.base import BlockCorruptError, BlockGeometry, KVStore, TransferTask
from ucm.store.memory.slab import PAGE, Slab

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.clock import SimulatedClock
    from ucm.clock import Event
    from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
    from ucm.store.base import BlockKey, BlockTransfer, Task, TaskResult, TierStats

SIZE = 4
#: Four blocks and a half.
TOKENS = list(range(18))
BLOCK = BlockGeometry((8, 8), b"f" * 16)


class Answered(TransferTask):
    """A transfer whose end is learnt once the medium answers."""

    answers: Event

    def wait(self) -> TaskResult:
        self.answers.wait()
        return super().wait()


class KeyStore(KVStore):
    """Looks up keys and reads blocks, whose content is the start of their keys; does nothing else."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.keys: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.lookups = 0
        self.read: list[bytes] = []
        self.renewed: list[list[bytes]] = []
        self.retained: list[tuple[list[bytes], float]] = []
        self.depths: list[int] = []  # of the last call
        #: While it is not set, no call to the medium returns.
        self.answers = clock.event()
        self.answers.set()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.answers.wait()
        self.lookups += 1
        return [key in self.keys for key in keys]

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        self.answers.wait()
        self.lookups += 1
        return next((place for place, key in enumerate(keys) if key not in self.keys), len(keys))

    def renew(self, depths: Mapping[BlockKey, int]) -> None:
        self.renewed.append(list(depths))
        self.depths = list(depths.values())

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        assert not pinned
        self.retained.append((list(depths), until))

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        task = Answered(len(blocks), clock=self._clock)
        task.answers = self.answers
        for block in blocks:
            self.read.append(block.key)
            if block.key in self.keys - self.damaged:
                for layer_slice in block.slices:
                    layer_slice[:] = block.key[:1] * layer_slice.nbytes
                task.succeeded(block.key, "posix", BLOCK.nbytes)
            else:
                task.failed(block.key, BlockCorruptError("damaged"))
        return task

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        raise NotImplementedError

    def stats(self) -> Mapping[str, TierStats]:
        return {}

    def close(self) -> None:
        pass


class Counted(ConnectorCounters):
    """Counters that record lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []
        self.failures: list[str] = []
        self.hints: list[str] = []

    def looked_up(self, queried_tokens: int, hit_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append((queried_tokens, hit_tokens))

    def hinted(self, outcome: str) -> None:
        self.hints.append(outcome)

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        self.failures += [f"{operation}.{cause}"] * blocks


class Scene:
    """The scheduler side of an engine; the test acts as the scheduler.

    Args:
        clock: Time and threads.
        windows: The window of each KV-cache group; `STATE` for recurrent layers.
        begins: Whether the namespace is known from the start.
        rows: How many blocks may be staged; 0 if the workers read the store directly.
        ranks: The number of ranks.
        seconds: The deadline of a lookup.
        stored_tokens: The tokens of a stored chunk; 0: each block is stored alone.
        options: Settings other than the defaults.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        *windows: int | None,
        begins: bool = True,
        rows: int = 64,
        ranks: int = 1,
        seconds: float = 60.0,
        stored_tokens: int = 0,
        **options: Any,
    ) -> None:
        self.clock = clock
        groups = [
            CacheGroup(index, SIZE, window or None, {}, (), is_recurrent=window == STATE)
            for index, window in enumerate(windows or (None,))
        ]
        self.groups = in_chunks(CacheGroups(tuple(groups)), stored_tokens)
        self.stores = {group.index: [KeyStore(clock) for _ in range(ranks)] for group in groups}
        self.store = self.stores[0][0]
        self.keys = Keys()
        self.counted = Counted()
        self.slab = Slab(rows * PAGE * ranks, ranks, clock=clock) if rows else None
        self.stager = Stager(self.groups, self.slab, seconds, 3600.0, clock=clock)
        self.options = PlanningOptions(**{"batches": 1, **options})
        self.side = PrefixCacheScheduler(self.groups, self.keys, self.stager, self.counted, self.options, clock=clock)
        if begins:
            self.begin()
        self._next_block = 1

    def begin(self) -> None:
        """Set the namespace."""
        self.side.namespace = "model"
        self.stager.begin(self.stores, {group: [BLOCK] * len(stores) for group, stores in self.stores.items()})

    @property
    def used(self) -> int:
        """The number of staged blocks in use."""
        assert self.slab is not None
        return sum(row.users > 0 for row in self.slab._table.values())

    def staged(self, place: int) -> bytes:
        """Return the bytes of a staged block of the first rank."""
        assert self.slab is not None
        return bytes(self.slab._memory[place : place + BLOCK.nbytes])

    def matched(self, request: Request, computed: int = 0) -> int:
        """Return the final number of hit tokens."""
        found: list[int] = []

        def answered() -> bool:
            answer = self.side.matched_tokens(request, computed)
            found.extend([] if answer is None else [answer])
            return bool(found)

        self.clock.run_until(answered)
        return found[0]

    def keep(self, tokens: Sequence[int], group: int = 0) -> list[bytes]:
        """Put blocks into the store; return their keys."""
        chain = self.keys.chain(tokens, SIZE)
        for store in self.stores[group]:
            store.keys.update(chain)
        return chain

    def admit(self, request: Request, computed: int = 0, had: Sequence[int] = ()) -> int:
        """Look a request up and allocate its blocks, existing ones first; return the tokens to load."""
        external = self.matched(request, computed)
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
        **more: Any,
    ) -> StepPlan:
        """Plan a step; ``more`` is what else vLLM says of it."""
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
            **more,
        )
        return self.side.plan(output)

    def run(
        self,
        request: Request,
        count: int,
        rows: list[list[int]] | None = None,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """Plan a step that computes tokens of one request, with its blocks if it is new; count them as computed.

        Args:
            request: The request.
            count: Its tokens in the step.
            rows: Its blocks, if it is new.
            states: The states that the step leaves: group, block, and tokens up to there.
        """
        told = SimpleNamespace(boundary_state_offloads={request.request_id: list(states)})
        admitted = [] if rows is None else [(request, rows)]
        plan = self.step({request.request_id: count}, admitted, kv_connector_block_state=told)
        request.num_computed_tokens += count
        return plan

    def run_ahead(self) -> Request:
        """Run a request until its second block is full, the last token of which the scheduler does not know yet."""
        new = request(TOKENS[:7])
        self.admit(new)
        self.run(new, 7, self.rows)
        assert self.run(new, 1).saves == []
        return new


def request(tokens: Sequence[int], request_id: str = "r", **more: Any) -> Request:
    found = Request(request_id, list(tokens), 100)
    for name, value in more.items():
        setattr(found, name, value)
    return found


def moved(moves: list[BlockMoves]) -> list[tuple[bytes, int]]:
    return [pair for found in moves for pair in zip(found.keys, found.block_ids, strict=True)]


def finish_computing(scene: Scene, count: int) -> Any:
    """Compute the first blocks of a request in one step; return the step's plan."""
    new = request(TOKENS)
    scene.admit(new)
    return scene.run(new, count, scene.rows)
