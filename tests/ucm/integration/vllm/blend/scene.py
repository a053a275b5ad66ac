"""The scheduler side of blending with a real store and slab, vLLM's calls, and a rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.blend import Chunk, ChunkNames
from ucm.config.settings import BlendSettings
from ucm.integration.vllm.blend.scheduler import AT_ONCE, PIECES, BlendScheduler
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.metrics import BLEND_REQUESTS, FAILURES, ConnectorCounters
from ucm.store.base import BlockGeometry, BlockTransfer
from ucm.store.config import StoreConfig
from ucm.store.factory import OpeningStore, open_store
from ucm.store.memory.slab import Slab

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

    from tests.clock import SimulatedClock
    from ucm.clock import Event
    from ucm.integration.vllm.blend.scheduler import BlendPlan
    from ucm.integration.vllm.connector.metadata import BlockMoves
    from ucm.integration.vllm.connector.staging import Lookup
    from ucm.integration.vllm.metrics import Metric
    from ucm.store.base import BlockKey, KVStore

BLOCK = 16
#: Two layers of 4096 bytes per piece.
GEOMETRY = BlockGeometry((4096, 4096), b"geometry of test")


def chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return a block's hash, as vLLM computes it."""
    return hashlib.sha256(before + repr(list(tokens)).encode()).digest()


@dataclass(eq=False)
class Request:
    """The part of vLLM's ``Request`` that is read."""

    request_id: str
    all_token_ids: list[int]
    chunks: Any = None
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.kv_transfer_params = None if self.chunks is None else {"ucm_chunks": self.chunks}
        for name, value in self.more.items():
            setattr(self, name, value)
        self.name_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def name_blocks(self) -> None:
        """Hash the full blocks that have no hash."""
        while (len(self.block_hashes) + 1) * BLOCK <= self.num_tokens:
            start = len(self.block_hashes) * BLOCK
            before = self.block_hashes[-1] if self.block_hashes else b""
            self.block_hashes.append(chained(before, self.all_token_ids[start : start + BLOCK]))

    def generate(self, tokens: Sequence[int]) -> None:
        """Append tokens, like a decode step."""
        self.all_token_ids.extend(tokens)
        self.name_blocks()


class Counted(ConnectorCounters):
    """Counters that record outcomes, and causes of failed reads, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[str] = []
        self.failures: list[str] = []

    def add(self, metric: Metric, value: float = 1, key: str = "") -> None:
        assert (metric, value) in {(BLEND_REQUESTS, 1), (FAILURES, 1)}
        (self.failures if metric is FAILURES else self.outcomes).append(key)


class Exact:
    """The part of the scheduler of exact prefixes that blending asks."""

    loads = True

    def __init__(self) -> None:
        self.counters = Counted()
        self.step = 0
        self.blocks: dict[str, list[int]] = {}
        self.excluded: list[Request] = []
        self._held: list[tuple[Stager, Lookup]] = []

    def blocks_of(self, request_id: str) -> list[int]:
        return self.blocks.get(request_id, [])

    def vouches_for(self, request: Request) -> bool:
        return request not in self.excluded

    def hold(self, stager: Stager, lookup: Lookup) -> None:
        self._held.append((stager, lookup))

    def plan(self) -> None:
        """Begin the next step, so that the one before has ended."""
        self.step += 1
        held, self._held = self._held, []
        for stager, lookup in held:
            stager.release(lookup)


class Scene:
    """One engine."""

    def __init__(
        self, clock: SimulatedClock, directory: Path, ranks: int = 1, seconds: float = 60.0, **settings: Any
    ) -> None:
        self.clock = clock
        self.settings = BlendSettings(**{"min_tokens": 32, **settings})
        self.exact = Exact()
        self.counted, self.excluded = self.exact.counters, self.exact.excluded
        self.slab = Slab(1 << 24, ranks, clock=clock)
        self.stager = Stager(PIECES, self.slab, seconds, 3600.0, threads=AT_ONCE, clock=clock)
        self.saves: list[BlockMoves] = []  #: of the last step
        self.scheduler = BlendScheduler(self.settings, BLOCK, self.stager, self.exact)  # type: ignore[arg-type]
        directory.mkdir(exist_ok=True)
        config = StoreConfig(directories=(str(directory),))
        self.stores = [open_store(config, f"test/chunks/{rank}", GEOMETRY, clock=clock) for rank in range(ranks)]

    def open_late(self, opens: Event, error: Exception | None = None) -> None:
        """Let the store of the only rank open, or fail to, when ``opens`` is set."""

        def late() -> KVStore:
            opens.wait()
            if error is not None:
                raise error
            return self.stores[0]

        self._begin([OpeningStore(late, 30.0, clock=self.clock)])

    def begin(self) -> None:
        """All ranks have reported their piece geometry."""
        self._begin(self.stores)

    def _begin(self, stores: Sequence[KVStore]) -> None:
        self.stager.begin({0: stores}, {0: [GEOMETRY] * len(stores)})

    def put(self, tokens: Sequence[int], ranks: Sequence[int] = (0,), salt: str | None = None) -> list[BlockKey]:
        """Put a chunk into the stores of some ranks; return its keys."""
        keys = ChunkNames(b"").pieces(list(tokens), salt)
        for rank in ranks:
            store = self.stores[rank]
            transfers = [
                BlockTransfer(key, [memoryview(bytearray([number + 1]) * size) for size in GEOMETRY.slice_sizes])
                for number, key in enumerate(keys)
            ]
            assert not store.save(transfers).wait().failed
        return keys

    def matched(self, request: Request, computed: int = 0, exact: int = 0) -> int:
        """Return the final answer to vLLM, which asks again until there is one."""
        found: list[int] = []

        def answered() -> bool:
            answer = self.scheduler.matched(request, computed, exact)
            found.extend([] if answer is None else [answer])
            return bool(found)

        self.clock.run_until(answered)
        return found[0]

    def admit(self, request: Request, computed: int, tokens: int, block_ids: list[int]) -> bool:
        """Allocate blocks to a request, like vLLM."""
        self.exact.blocks[request.request_id] = block_ids
        return self.scheduler.allocated(request, tokens)

    def step(self, *admitted: tuple[Request, list[int], int, int]) -> BlendPlan:
        """Plan a step with new requests: their blocks, computed tokens, and tokens to compute."""
        for request, ids, computed, _ in admitted:
            request.num_computed_tokens = computed
            self.exact.blocks[request.request_id] = ids
        return self._plan({request.request_id: number for request, _, _, number in admitted})

    def idle(self) -> BlendPlan:
        """Plan a step without requests."""
        return self._plan({})

    def go_on(self, request: Request, number: int) -> BlendPlan:
        """Plan a step in which a running request computes this many tokens."""
        return self._plan({request.request_id: number})

    def _plan(self, scheduled: dict[str, int]) -> BlendPlan:
        output = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
        self.exact.plan()
        plan = self.scheduler.plan(output)
        self.saves = self.scheduler.saves(output)
        return plan

    def close(self) -> None:
        self.stager.close()
        for store in self.stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokens(start: int, number: int) -> list[int]:
    """Return tokens unique to this start."""
    return list(range(start * 1000, start * 1000 + number))


def marks(*chunks: Chunk) -> list[list[int]]:
    """Return chunk marks, as in a request."""
    return [[chunk.start, chunk.end] for chunk in chunks]
