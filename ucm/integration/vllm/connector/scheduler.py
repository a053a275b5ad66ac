"""The scheduler's side: finds which blocks the store has, and plans what the workers load and dump at each step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ucm.integration.vllm.connector.holding import Hold
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
from ucm.integration.vllm.connector.request_state import PendingLoad, RequestState
from ucm.integration.vllm.connector.scheduled import admitted_requests, block_ids_by_group, grown_requests
from ucm.integration.vllm.connector.suspect_blocks import SuspectBlocks

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.lookup import PrefixLookup

#: A request that waits for room is asked about at every step; what the store said is good for this many seconds.
LOOKUP_KEEPS = 1.0


class LookupCounters(Protocol):
    """Where the scheduler's side counts what it looked for."""

    def looked_up(self, queried_tokens: int, hit_tokens: int, seconds: float) -> None:
        """A request's prefix was looked up."""

    def hashed(self, blocks: int, seconds: float) -> None:
        """A request's blocks were named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What the operator asked for, and what the engine is like.

    Args:
        batches: Steps that may be scheduled before the outcome of the first of them is known.
        min_hit_tokens: Shorter hits are not worth a load.
        hit_ratio: Largest share of a request's tokens that may come from caches; 1 for all.
        save_decode_blocks: Whether blocks of generated tokens are stored as well.
        loads: Whether the engine's role lets it load (vLLM's ``kv_consumer`` or ``kv_both``).
        saves: Whether it lets it save (``kv_producer`` or ``kv_both``).
        prefix_caching: Whether vLLM's own prefix cache is on; it turns it off for models that need all outputs.
        reloads_preempted: Whether a load of a request that was preempted is safe in this release.
        namespace: Where the engine's blocks are kept, for the workers.
        drops_last_block: Whether a draft model's KV in the last slot of a block depends on the token behind it, so
            that the last block of a hit is computed; as vLLM does in its own prefix cache.
        room: The blocks that may be promised to requests that wait for their loads between steps. None where vLLM
            itself keeps such requests from waiting for each other's blocks for ever.
    """

    batches: int
    min_hit_tokens: int = 0
    hit_ratio: float = 1.0
    save_decode_blocks: bool = True
    loads: bool = True
    saves: bool = True
    prefix_caching: bool = True
    reloads_preempted: bool = True
    drops_last_block: bool = False
    namespace: str = ""
    room: int | None = None


class PrefixCacheScheduler:
    """Decides what is loaded and dumped; never touches KV itself.

    Args:
        lookup: Finds requests in the stores.
        counters: What was looked up.
        options: What is wanted, and possible.
    """

    def __init__(self, lookup: PrefixLookup, counters: LookupCounters, options: PlanningOptions) -> None:
        self._lookup = lookup
        self._groups = lookup.groups
        self._counters = counters
        self._options = options
        self._requests: dict[str, RequestState | None] = {}
        self._to_load: dict[str, PendingLoad] = {}
        self._late: list[BlockMoves] = []
        self._ended: list[list[int]] = []
        self._holds: list[tuple[int, Hold]] = []
        self._suspects = SuspectBlocks(self._groups.groups[0].block_size)
        self._step = 0
        self._void = 0

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens beyond the computed ones whose KV the store can give.

        Args:
            request: vLLM's request.
            num_computed_tokens: Tokens whose KV the engine has itself.

        Returns:
            How many; None if the request must wait until others that were promised blocks have begun.
        """
        state = self._state(request)
        if state is None or not self._options.loads or self._must_compute(request):
            return 0
        if state.tried:
            # vLLM asks again because not even the first block came. It might not come the next time either.
            return 0
        now = time.monotonic()
        if state.looked_up is not None:
            computed, when, found = state.looked_up
            if computed == num_computed_tokens and now - when < LOOKUP_KEEPS:
                return self._promise(state, found)
        found = self._look_up(state, num_computed_tokens)
        state.looked_up = (num_computed_tokens, now, found)
        self._counters.looked_up(request.num_tokens - num_computed_tokens, found, time.monotonic() - now)
        return self._promise(state, found)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was given blocks at its admission.

        Args:
            request: vLLM's request.
            blocks: Its ``KVCacheBlocks``, those of computed tokens included.
            num_external_tokens: Tokens to load into them.
        """
        state = self._state(request)
        if state is None:
            return
        start = 0 if state.looked_up is None else state.looked_up[0]
        state.looked_up = None
        self._skip_stored(state, start)
        if num_external_tokens > 0:
            load = PendingLoad(start, start + num_external_tokens, block_ids_by_group(blocks))
            self._to_load[request.request_id] = load
            state.tried = True
        else:
            self._let_go(state)

    def plan(self, scheduler_output: Any) -> StepPlan:
        """The workers' part of a step.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step.
        """
        self._step += 1
        self._end_holds(self._step - self._options.batches)
        plan = StepPlan(
            self._step,
            self._options.namespace,
            idle=not scheduler_output.total_num_scheduled_tokens,
            settled=self._step - self._options.batches,
            void=self._void,
        )
        fresh = self._take_blocks(scheduler_output)
        for request_id, load in self._to_load.items():
            state = self._requests.get(request_id)
            if state is not None:
                plan.loads += self._loads(state, load)
        self._to_load = {}
        loaded = {block_id for moves in plan.loads for block_id in moves.block_ids}
        fresh |= loaded
        plan.failed_block_ids = self._suspects.begin(loaded, scheduler_output.num_scheduled_tokens, self._requests)
        dumping: set[tuple[int, bytes]] = set()
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and request_id not in self._suspects:
                plan.dumps += self._dumps(state, state.request.num_computed_tokens + num_scheduled, dumping)
        plan.late_dumps = [moves for moves in self._late if fresh.isdisjoint(moves.block_ids)]
        plan.fresh_block_ids, self._late, self._ended = fresh, [], []
        return plan

    def _take_blocks(self, scheduler_output: Any) -> set[int]:
        """Note which blocks the scheduled requests have; returns those that the step may write."""
        # A sparse method may have taken blocks of its own, which are in no request's row.
        fresh = set[int](getattr(getattr(scheduler_output, "ucm_sparse_metadata", None), "taken_blocks", ()))
        for request_id, ids, computed in admitted_requests(scheduler_output):
            for group, group_ids in zip(self._groups.groups, ids, strict=True):
                fresh.update(group_ids[computed // group.block_size :])
            state = self._requests.get(request_id)
            if state is not None:
                state.block_ids = ids
                state.tried = False
        for request_id, new_ids in grown_requests(scheduler_output):
            state = self._requests.get(request_id)
            for number, group_ids in enumerate(new_ids):
                fresh.update(group_ids)
                if state is not None:
                    state.block_ids[number].extend(group_ids)
        return fresh

    def finished(self, request: Any) -> None:
        """A request ended; blocks of it that were filled but not dumped yet are dumped with the next step."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._let_go(state)
            self._ended.append(state.block_ids[0])
            self._late += self._dumps(state, request.num_computed_tokens, set())
        self._lookup.key_source.forget(request.request_id)

    def load_failed(self, block_ids: set[int]) -> set[int]:
        """A rank reported blocks that failed to load: steps scheduled until now may have computed with them.

        Args:
            block_ids: The blocks, of a model with one KV-cache group.

        Returns:
            These blocks, and those behind them in the requests that have them.
        """
        lists = [state.block_ids[0] for state in self._requests.values() if state is not None]
        found = self._suspects.failed(block_ids, lists + self._ended)
        if found:
            self._void = self._step
        return found

    def start_anew(self) -> None:
        """Blocks that were computed or loaded until now must not be found under the names that are given from now on.

        So no more is loaded or dumped for requests that have such blocks.
        """
        for request_id, state in list(self._requests.items()):
            if state is not None:
                self._let_go(state)
                state.looked_up = None
                if state.tried or any(state.block_ids):
                    self._requests[request_id] = None
        self._late = []

    def _state(self, request: Any) -> RequestState | None:
        request_id = request.request_id
        if request_id not in self._requests:
            self._requests[request_id] = self._new_state(request)
        return self._requests[request_id]

    def _new_state(self, request: Any) -> RequestState | None:
        if getattr(request, "resumable", False):
            # A streaming session replaces tokens that it has computed, so its blocks have no lasting names.
            return None
        begun = time.monotonic()
        keys = self._lookup.key_source.of(request, self._groups.alignment)
        if keys is None:
            return None
        self._counters.hashed(len(keys), time.monotonic() - begun)
        count = len(self._groups.groups)
        return RequestState(request, [[] for _ in range(count)], [0] * count)

    def _must_compute(self, request: Any) -> bool:
        """Whether every token must be computed: its outputs are asked for, or vLLM could not mend a failed load."""
        if int(getattr(request, "num_preemptions", 0)) and not self._options.reloads_preempted:
            return True
        if getattr(request, "skip_reading_prefix_cache", False):
            return True
        if getattr(request, "pooling_params", None) is not None:
            # Poolers other than that of the last token need all; vLLM says which from 0.11.1 on.
            return not (self._options.prefix_caching and hasattr(request, "skip_reading_prefix_cache"))
        return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None

    def _look_up(self, state: RequestState, num_computed_tokens: int) -> int:
        step = self._groups.alignment
        # At least one token is computed: its logits give the next one.
        limit = (state.request.num_tokens - 1) // step * step
        limit = min(limit, int(self._options.hit_ratio * state.request.num_tokens) // step * step)
        self._let_go(state)
        if limit <= num_computed_tokens:
            return 0
        end, state.hold = self._lookup.find(state.request, num_computed_tokens, limit)
        if self._options.drops_last_block and end > num_computed_tokens:
            # Not merely less of what was found: a sliding window reads other blocks from there.
            self._let_go(state)
            end, state.hold = self._lookup.find(state.request, num_computed_tokens, end - step)
        if end - num_computed_tokens < max(self._options.min_hit_tokens, 1):
            self._let_go(state)
            return 0
        return end - num_computed_tokens

    def _promise(self, state: RequestState, found: int) -> int | None:
        """What was found, unless the requests that wait for loads might then not all get the rest of their blocks."""
        if found and self._options.room is not None:
            waiting = [other for other in self._requests.values() if other is not None and other.tried]
            if waiting and sum(self._whole(other) for other in [*waiting, state]) > self._options.room:
                return None
        return found

    def _whole(self, state: RequestState) -> int:
        """The blocks of a whole request, with one for the tokens to come."""
        return sum(state.request.num_tokens // group.block_size + 2 for group in self._groups.groups)

    def _let_go(self, state: RequestState) -> None:
        self._lookup.release(state.hold)
        state.hold = Hold()

    def _end_holds(self, settled: int) -> None:
        """Let go of what was loaded by a step that has ended."""
        while self._holds and self._holds[0][0] <= settled:
            self._lookup.release(self._holds.pop(0)[1])

    def _skip_stored(self, state: RequestState, num_computed_tokens: int) -> None:
        """Dump no block of what the engine had already, unless the store has lost the last one of them."""
        for group in self._groups.groups:
            last = num_computed_tokens // group.block_size
            keys = self._lookup.keys(state.request, group, max(last - 1, 0), last)
            if self._lookup.has(group, keys):
                state.saved[group.index] = max(state.saved[group.index], last)

    def _loads(self, state: RequestState, load: PendingLoad) -> list[BlockMoves]:
        moves = []
        for group, block_ids in zip(self._groups.groups, load.block_ids, strict=True):
            blocks = self._lookup.needed(group, load.start, load.end)
            if blocks:
                keys = self._lookup.keys(state.request, group, blocks.start, blocks.stop)
                ids = block_ids[blocks.start : blocks.stop]
                leases = state.hold.tokens(group.index)
                moves.append(BlockMoves(state.request.request_id, group.index, keys, ids, leases))
            state.saved[group.index] = max(state.saved[group.index], load.end // group.block_size)
        if state.hold.leases:
            self._holds.append((self._step, state.hold))
            state.hold = Hold()
        return moves

    def _dumps(self, state: RequestState, num_tokens: int, dumping: set[tuple[int, bytes]]) -> list[BlockMoves]:
        """The blocks that are full once ``num_tokens`` tokens are computed, as far as their tokens are known."""
        moves: list[BlockMoves] = []
        if not self._options.saves:
            return moves
        request = state.request
        num_tokens = min(num_tokens, request.num_tokens)
        if not self._options.save_decode_blocks:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        for group, block_ids in zip(self._groups.groups, state.block_ids, strict=True):
            # After a failed load, or a preemption, fewer tokens are computed than were before.
            done = min(state.saved[group.index], request.num_computed_tokens // group.block_size)
            first = max(done, group.first_needed(request.num_computed_tokens))
            last = min(num_tokens // group.block_size, len(block_ids))
            state.saved[group.index] = max(first, last)
            if first < last:
                found = BlockMoves(request.request_id, group.index, [], [])
                keys = self._lookup.keys(request, group, first, last)
                for key, block_id in zip(keys, block_ids[first:last], strict=False):
                    if (group.index, key) not in dumping:
                        dumping.add((group.index, key))
                        found.keys.append(key)
                        found.block_ids.append(block_id)
                if found.keys:
                    moves.append(found)
        return moves
