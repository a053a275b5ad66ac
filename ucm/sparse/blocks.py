"""The blocks of a request whose tokens do not all read them all: which are read, released, and hit by others.

What a token reads with sinks and a window depends only on its position (and on the prompt's length, if prompts are
dense). Positions are grouped into tiles of `TILE` tokens, counted from the request's start: the window of all tokens in
a tile begins at the same block. So an answer does not depend on the chunks in which a prompt was computed, on cache
hits, or on the other requests of a step. The scheduler side frees the blocks that the worker side will not read. To
ensure that they agree, both use the same function of the same integers.

Attention back ends take rows of any number of queries, which are at the end of the tokens that the row reads. So a row
is cut into pieces whose queries read the same blocks: a piece is such a row, with its own block table and length, and a
back end only needs other metadata for it.

Blocks of running requests are released to vLLM's pool as vLLM's own sliding-window manager does. A released block is
replaced by the pool's null block in ``req_to_blocks``, and its reference is dropped with ``BlockPool.free_blocks``: if
another request shares the block, that request keeps it. Positions, slot mapping and the length of the row do not
change, so everything that vLLM does with the request afterwards (allocation, prefix caching, preemption, freeing) works
as before. The row in a worker's block table keeps the old ids, which nothing reads.

Blocks are released under these conditions:

- The request is running and about to be allocated for a step, and neither this step nor a later one reads the block.
- The block lies within what the engine is *known* to have computed: the tokens that the request had before the oldest
  step whose outcome the scheduler may not know yet. With one step at a time these are all of its tokens; with steps in
  flight (asynchronous scheduling, pipeline parallelism) ``num_computed_tokens`` is ahead of them. The device would run
  steps in order anyway, but a KV connector writes to blocks outside the device's stream, and a released block may be
  the next one that it writes to. And a failed load is reported with the outcome of its step, so the request still
  holds the blocks to which vLLM then sets it back.
- The step of the request's admission has succeeded; a preempted request is admitted again.
- With prefix caching, the block is cached, and is not the last cached block: older releases take the parent's hash from
  that block, and cache no null blocks (up to 0.13.0 they would give the null block a hash).

vLLM hashes a full block by the tokens in it and before it. A token whose KV depends on more than these, such as a
generated token under a method with dense prompts, must not be hit by another request's prompt. From that token on
the hashes are unique to the request: it finds its blocks again after a preemption, and no other request does.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from ucm.compat import (
    batches_in_flight,
    block_hasher,
    cache_managers,
    cap_admission,
    is_streaming,
    optional,
    schedules_by_priority,
    tokens_per_hash,
)
from ucm.logger import get_logger
from ucm.sparse.attention import QuerySplit
from ucm.sparse.base import refuse
from ucm.sparse.outcomes import CountingMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucm.sparse.attention import StepBatch

#: The tokens of a tile: the number of queries that one thread block of an attention kernel handles at once.
TILE = 128

#: The manager and the specification of plain full attention, by name: a subclass may manage its blocks differently.
MANAGER = "FullAttentionManager"
SPECIFICATION = "FullAttentionSpec"


@dataclass(frozen=True, eq=False)
class QueryPieces:
    """Pieces in the order of the step's tokens; all arrays are on the host.

    Attributes:
        rows: ``[pieces]``, int64: the row of the step that contains it.
        begins: ``[pieces]``, int64: the position of its first token.
        ends: ``[pieces]``, int64: the position after its last token.
    """

    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of_rows(cls, batch: StepBatch) -> QueryPieces:
        """Return each row as one piece."""
        return cls(np.arange(len(batch.request_ids)), batch.num_computed_tokens, batch.seq_lens)

    def cut(self, cuts: Sequence[Sequence[int]]) -> QueryPieces:
        """Cut pieces into smaller ones.

        Args:
            cuts: The positions in each piece at which new pieces begin, in order.
        """
        counts = np.array([1 + len(of_piece) for of_piece in cuts], np.int64)
        firsts = zip(self.begins.tolist(), cuts, strict=True)
        begins = [position for first, of_piece in firsts for position in (first, *of_piece)]
        lasts = zip(cuts, self.ends.tolist(), strict=True)
        ends = [position for of_piece, last in lasts for position in (*of_piece, last)]
        return QueryPieces(self.rows.repeat(counts), np.array(begins, np.int64), np.array(ends, np.int64))

    @property
    def whole(self) -> bool:
        """Whether each row is one piece."""
        return not len(self.rows) or int(self.rows[-1]) + 1 == len(self.rows)

    @property
    def lasts(self) -> NDArray[np.int64]:
        """``[num_reqs]``, int64: the last piece of each row."""
        return np.flatnonzero(np.diff(self.rows, append=-1))

    def split(self, device: Any) -> QuerySplit | None:
        """Return the pieces in the form for a back end; None if each is a whole row."""
        if self.whole:
            return None
        import torch  # noqa: PLC0415 - vLLM brings it

        lengths = self.ends - self.begins
        starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        return QuerySplit(torch.from_numpy(starts).to(device), int(lengths.max()))


#: A token's position and the like, or those of some tokens: ``[n]``.
Positions = TypeVar("Positions", int, "NDArray[np.int64]")


@dataclass(frozen=True, slots=True)
class SinksAndWindow:
    """The first tokens of a request, and the last ones before a token's tile.

    Full blocks are read: at least these tokens, and up to ``block_size - 1`` more on either side.

    Args:
        sink_tokens: Tokens from the start that are always read.
        window_tokens: Tokens before a token's tile that are always read.
        dense_prefill: Whether prompt tokens read everything.
        tile: The tokens of a tile.
    """

    sink_tokens: int
    window_tokens: int
    dense_prefill: bool = False
    tile: int = TILE

    def sink_blocks(self, block_size: int) -> int:
        """Return the number of blocks with sinks."""
        return -(-self.sink_tokens // block_size)

    def skipped(self, position: Positions, num_prompt_tokens: Positions, block_size: int) -> Positions:
        """Return how many blocks after the sinks a token does not read; no later token reads them either.

        Args:
            position: The token's position, or ``[n]``, int64: those of some tokens.
            num_prompt_tokens: The prompt length of its request, or ``[n]``.
            block_size: Tokens per block.
        """
        first = (position // self.tile * self.tile - self.window_tokens) // block_size - self.sink_blocks(block_size)
        restricted = (position >= num_prompt_tokens) | (not self.dense_prefill)
        return first * ((first > 0) & restricted)

    def cut(self, batch: StepBatch, block_size: int) -> tuple[QueryPieces, NDArray[np.int64]]:
        """Cut a step's rows where the read blocks change.

        Args:
            batch: The step.
            block_size: Tokens per block.

        Returns:
            The pieces, and the number of blocks after the sinks that all tokens of each skip, int64.
        """
        whole = QueryPieces.of_rows(batch)
        first = self.skipped(whole.begins, batch.num_prompt_tokens, block_size)
        last = self.skipped(whole.ends - 1, batch.num_prompt_tokens, block_size)
        if (first == last).all():
            return whole, first
        cuts = []
        for begin, end, prompt in zip(
            whole.begins.tolist(), whole.ends.tolist(), batch.num_prompt_tokens.tolist(), strict=True
        ):
            tiles = {*range((begin // self.tile + 1) * self.tile, end, self.tile)}
            if self.dense_prefill and begin < prompt < end:
                tiles = {prompt, *(tile for tile in tiles if tile > prompt)}
            before, of_row = self.skipped(begin, prompt, block_size), []
            for tile in sorted(tiles):
                skipped = self.skipped(tile, prompt, block_size)
                if skipped != before:
                    of_row.append(tile)
                before = skipped
            cuts.append(of_row)
        pieces = whole.cut(cuts)
        return pieces, self.skipped(pieces.begins, batch.num_prompt_tokens[pieces.rows], block_size)

    def most_blocks(self, new_tokens: int, block_size: int) -> int:
        """Return the maximum blocks that a request holds after its first step, if it prefills in windows.

        Args:
            new_tokens: The maximum tokens that the steps in flight compute for it.
            block_size: Tokens per block.
        """
        # Plus one if the window starts within a block, and one for the last block that the prefix cache retains.
        tokens = self.window_tokens + self.tile - 1 + new_tokens
        return self.sink_blocks(block_size) + -(-tokens // block_size) + 2


def keep_apart(request: Any, first_token: int, cache_config: Any) -> None:
    """Give blocks with tokens from a position on hashes unique to their request, including already hashed blocks.

    Call it before the request's first allocation; further calls change nothing.

    Args:
        request: vLLM's ``Request``.
        first_token: The position.
        cache_config: vLLM's ``CacheConfig``, with the number of tokens that a hash covers.
    """
    name, hasher = block_hasher(request)
    if hasher is not None and not isinstance(hasher, _OwnNames):
        own = _OwnNames(hasher, request.block_hashes, first_token // tokens_per_hash(cache_config))
        setattr(request, name, own)
        request.block_hashes[:] = own.of(request.block_hashes, 0)


class _OwnNames:
    """A request's block hasher.

    Args:
        hasher: vLLM's hasher.
        hashes: The request's hashes, to which vLLM appends the returned ones.
        first: The first block with unique hashes.
    """

    def __init__(self, hasher: Callable[..., list[Any]], hashes: list[Any], first: int) -> None:
        self._hasher = hasher
        self._hashes = hashes
        self._first = first
        self._secret = os.urandom(16)

    def __call__(self, *request: Any) -> list[Any]:
        """Return the hashes of blocks that became full since the last call."""
        return self.of(self._hasher(*request), len(self._hashes))

    def of(self, hashes: Sequence[Any], start: int) -> list[Any]:
        """Return hashes from the block ``start`` on, unique from the first block with unique hashes on."""
        shared = max(0, self._first - start)
        return [*hashes[:shared], *(self._own(of) for of in hashes[shared:])]

    def _own(self, of: Any) -> Any:
        if isinstance(of, bytes):
            return hashlib.sha256(self._secret + of).digest()
        return of._replace(extra_keys=(of.extra_keys, self._secret))  # 0.10.1: a named tuple with the hash's parts


class DensePrompts(CountingMethod):
    """A method whose prompts are always dense: no other request finds the blocks that follow them."""

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return True."""
        del options
        return True

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return the prompt's tokens."""
        del options
        return num_prompt_tokens

    def before_allocation(self, request: Any) -> bool:
        """Keep generated blocks from being hit by prompts."""
        keep_apart(request, request.num_prompt_tokens, self.vllm_config.cache_config)
        return super().before_allocation(request)


class ReleasedBlocks:
    """Tracks, for the requests of one scheduler, up to where their blocks are released.

    Args:
        scheduler: vLLM's ``Scheduler``.
        window: The sinks and the window that tokens read.

    Raises:
        SparseMethodError: If this engine's blocks cannot be released.
    """

    def __init__(self, scheduler: Any, window: SinksAndWindow) -> None:
        self._manager = _manager(scheduler)
        self._scheduler = scheduler
        #: The requests to preempt in this step, with their own priorities, by id.
        self._giving_way: dict[str, tuple[Any, Any]] = {}
        self._pool = self._manager.block_pool
        self._window = window
        self.block_size = int(self._manager.block_size)
        self._sinks = window.sink_blocks(self.block_size)
        self._batches = batches_in_flight(scheduler.vllm_config)
        self._step = 0
        #: By request, the end of its released blocks; if it is not behind the sinks, there are none.
        self._ends: dict[str, int] = {}
        #: By request, the steps for which it was allocated and which may be in flight: number, and tokens before it.
        self._asked: dict[str, deque[tuple[int, int]]] = {}
        if not window.dense_prefill and scheduler.connector is None:
            # Admit prompts for which there is room after blocks are released. Not with a KV connector, because requests
            # that wait for loads hold all of their blocks.
            tokens = self._batches * int(scheduler.scheduler_config.max_num_batched_tokens)
            cap_admission(self._manager, window.most_blocks(tokens, self.block_size))

    def step_planned(self) -> None:
        """Count a scheduled step, which may be empty."""
        self._step += 1
        self._restore_priorities()

    def forget(self, request_id: str) -> None:
        """Forget a request that has lost its blocks, or is about to; one that gave way has its priority again."""
        if request_id in self._giving_way:
            self._restore_priorities()
        self._ends.pop(request_id, None)
        self._asked.pop(request_id, None)

    def release(self, request: Any) -> bool:
        """Release the blocks that can be released, before the request's allocation for a step.

        Args:
            request: vLLM's ``Request``.

        Returns:
            Whether the blocks that the step reads exist. They do not if vLLM set the request back to a position whose
            blocks are released, as it does if a KV connector reports a failed load long after its step.
        """
        request_id, running = request.request_id, request.status.name == "RUNNING"
        known = self._known_tokens(request_id, request.num_computed_tokens if running else 0)
        if not running:
            return True
        end = self._ends.get(request_id, self._sinks)
        prompt = request.num_prompt_tokens
        if self._sinks + self._window.skipped(request.num_computed_tokens, prompt, self.block_size) < end:
            return False
        if self._window.dense_prefill and is_streaming(request):
            return True  # its output becomes part of a longer prompt, which reads everything
        wanted = self._sinks + self._window.skipped(known, prompt, self.block_size)
        if wanted > end:
            self._release(request_id, end, wanted)
        return True

    def give_way(self, request: Any) -> None:
        """Make a running request the first one that vLLM preempts if blocks run out.

        Otherwise vLLM would preempt the latest requests, or those of the lowest priority, until it reaches this one.
        """
        running = self._scheduler.running
        if request.status.name != "RUNNING" or request not in running:
            return
        if schedules_by_priority(self._scheduler):
            self._giving_way.setdefault(request.request_id, (request, request.priority))
            request.priority = sys.maxsize
        else:
            running.remove(request)
            running.append(request)

    def _restore_priorities(self) -> None:
        for request, priority in self._giving_way.values():
            request.priority = priority
        self._giving_way.clear()

    def _known_tokens(self, request_id: str, num_computed_tokens: int) -> int:
        """Return the tokens that the request had before the oldest step in flight, including this step."""
        asked = self._asked.setdefault(request_id, deque())
        while asked and asked[0][0] <= self._step - self._batches:
            asked.popleft()
        if not asked or asked[-1][0] < self._step:
            asked.append((self._step, num_computed_tokens))
        return min(tokens for _, tokens in asked)

    def _release(self, request_id: str, begin: int, end: int) -> None:
        if self._pool.enable_caching:
            end = min(end, self._manager.num_cached_block.get(request_id, 0) - 1)
        if end <= begin:
            return
        blocks, null = self._manager.req_to_blocks[request_id], self._pool.null_block
        freed = blocks[begin:end]
        blocks[begin:end] = [null] * (end - begin)
        self._ends[request_id] = end
        # In reverse order, like vLLM, so that the end of a chain of cached blocks is evicted first.
        self._pool.free_blocks(reversed(freed))


def _manager(scheduler: Any) -> Any:
    """Return the manager of the engine's only kind of KV cache."""
    found = cache_managers(scheduler)
    other = {"this vLLM release manages its blocks in another way": found is None}
    refuse(other, "KVCacheManager", "use vLLM 0.9.1 or later")
    managers = found or []
    what = f"blocks are released only in models with one kind of KV cache, and this model has {len(managers)}"
    refuse({what: len(managers) != 1}, "kv_cache_config.kv_cache_groups")
    manager, spec = managers[0], managers[0].kv_cache_spec
    windows = ("sliding_window", "attention_chunk_size", "use_mla")
    plain = type(manager).__name__ == MANAGER and type(spec).__name__ == SPECIFICATION
    restricted = not plain or any(optional(spec, name) for name in windows)
    refuse({"blocks are released only with plain full attention": restricted}, f"{type(manager).__name__} for {spec}")
    refuse(
        {"the tokens of a block are spread over ranks (context parallelism)": manager.block_size != spec.block_size},
        f"blocks of {manager.block_size} tokens, {spec.block_size} of them on each rank",
        "run without context parallelism, or without ucm_sparse_config",
    )
    return manager


#: The groups of rewritten modules whose hooks the method needs. With the hooks of one side only, released blocks would
#: be read, or no blocks would be released.
NEEDED = ("ATTENTION", "SCHEDULER", "KV_CACHE_MANAGER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")

Releases = TypeVar("Releases", bound=ReleasedBlocks)


class ReleasingMethod(CountingMethod, Generic[Releases]):
    """Releases blocks in ``before_allocation``, and has requests computed again that have lost blocks.

    Attributes:
        tile: Tokens whose windows begin at the same block.
    """

    needed_hooks = NEEDED
    frees_blocks = True
    tile: ClassVar[int] = TILE
    _blocks: Releases  #: set in ``scheduler_started``

    @classmethod
    def identity(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Add the size of a tile."""
        return {**super().identity(options), "tile": cls.tile}

    def before_allocation(self, request: Any) -> bool:
        """Release blocks; if the request has lost blocks, make it the first one that vLLM preempts."""
        if self._blocks.release(request):
            return True
        get_logger(__name__).warning(
            "[UCM.Sparse] request %s is computed again: blocks of it were lost, or a failed load set it back to where "
            "they are released (token %d)",
            request.request_id,
            request.num_computed_tokens,
        )
        self._blocks.give_way(request)
        return False

    def request_preempted(self, request: Any) -> None:
        """Forget the request, which starts again without blocks."""
        self._blocks.forget(request.request_id)

    def request_freed(self, request: Any) -> None:
        """Forget the request, which has ended."""
        self._blocks.forget(request.request_id)
