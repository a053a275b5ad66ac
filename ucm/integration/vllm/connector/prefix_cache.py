"""Look up blocks in the store on the scheduler side, and plan what the workers load and save in each step."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, cast

from ucm.clock import SYSTEM
from ucm.compat import (
    adapter_number,
    admitted_requests,
    block_ids_by_group,
    boundary_states,
    grown_requests,
    is_streaming,
    needs_all_outputs,
    optional,
    preemptions,
    prepared_blocks,
)
from ucm.integration.vllm.connector.kv_cache import NO_BLOCK
from ucm.integration.vllm.connector.metadata import (
    BlockMoves,
    HintError,
    StepPlan,
    comes_from_afar,
    retain_seconds,
    saved_tokens,
)
from ucm.integration.vllm.connector.staging import Lookup, Query, Use
from ucm.logger import get_logger
from ucm.store.tier import DEEPEST, used_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from ucm.clock import Clock
    from ucm.hashing.block_keys import BlockKeys
    from ucm.integration.vllm.connector.events import StoreEvents
    from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups
    from ucm.integration.vllm.connector.metadata import WeightsReport
    from ucm.integration.vllm.connector.staging import Stager
    from ucm.integration.vllm.metrics import ConnectorCounters
    from ucm.store.base import BlockKey
    from ucm.vllm_types import Request, SchedulerOutput

logger = get_logger(__name__)

#: If vLLM cannot ask again, the scheduler's thread waits this many seconds for a lookup.
PATIENCE_SECONDS = 0.05
#: How many seconds a step without work waits for lookups, so that an idle engine does not spin; and the first lookup of
#: a step in an idle engine, because a step without work takes longer than most of them.
IDLE_SECONDS = 0.002


def all_tokens(num_prompt_tokens: int) -> int:
    """Return more tokens than any request has."""
    del num_prompt_tokens
    return sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """The operator's settings and the properties of the engine.

    Args:
        batches: Steps that may be scheduled before the outcome of the first of them is known.
        min_hit_tokens: The fewest tokens of a hit that are worth a load.
        hit_ratio: The largest share of a request's tokens that may come from caches; 1 for all.
        save_decode_blocks: Whether blocks of generated tokens are stored as well.
        lasting_tokens: From a prompt's length to how many of the request's tokens have KV that another request with the
            same tokens has, too; blocks beyond them are neither stored nor looked up.
        loads: Whether the engine's role allows loads (vLLM's ``kv_consumer`` or ``kv_both``).
        saves: Whether it allows saves (``kv_producer`` or ``kv_both``).
        prefix_caching: Whether vLLM's own prefix cache is on; vLLM turns it off for models that need all outputs.
        reloads_preempted: Whether this release can safely load for a preempted request.
        drops_last_block: Whether a draft model's KV in the last slot of a block depends on the next token, so that the
            last block of a hit is computed, as with vLLM's own prefix cache.
        confirms: Whether there are several ranks that report their checks of the weights; the saves of a step are then
            committed once all ranks have checked.
        others: Whether other connectors may load as well, as in vLLM's ``MultiConnector``.
        asks_again: Whether vLLM asks again after a lookup that is not finished, as it does from 0.10.2 on.
        room: The KV cache's number of blocks, if requests wait for their loads between steps; else None.
        touch_seconds: How often the stores renew the times of last use.
        lease_seconds: The longest time for which a request can have its blocks retained.
        frees_blocks: Whether a sparse method frees blocks of running requests. No connector is told which, so only the
            blocks that a step fills are saved.
    """

    batches: int
    min_hit_tokens: int = 0
    hit_ratio: float = 1.0
    save_decode_blocks: bool = True
    lasting_tokens: Callable[[int], int] = all_tokens
    loads: bool = True
    saves: bool = True
    prefix_caching: bool = True
    reloads_preempted: bool = True
    drops_last_block: bool = False
    confirms: bool = False
    others: bool = False
    asks_again: bool = True
    room: int | None = None
    touch_seconds: float = 60.0
    lease_seconds: float = 0.0
    frees_blocks: bool = False


@dataclass(slots=True)
class PendingLoad:
    """A load that will be part of the next step.

    Args:
        start: Computed tokens before the load.
        end: Computed tokens after it.
        block_ids: The blocks that the request had by then, per group.
    """

    start: int
    end: int
    block_ids: list[list[int]]


@dataclass(slots=True)
class RequestState:
    """The state of a request.

    Args:
        request: vLLM's request.
        block_ids: The block ids of each group, in order; entries below a sliding window may be out of date.
        saved: For each group, how many chunks from the start need no save any more.
        computed: Tokens whose KV was in vLLM's own prefix cache at its last lookup.
        known: Those tokens, and the tokens that we loaded after them.
        lookup: The lookup in the store, with its staged blocks; until the load, or a start without one.
        asked: When the first lookup began, as the clock's ``monotonic()``; None once one has ended and is counted.
        loaded: Tokens that were loaded for it, for the log.
        to_save: Chunks of it that the workers were told to save, for the log.
        confirmed: Whether the inputs that shape its KV are known to be those that its keys were made of.
        begun: The step that started or resumed it last.
        ran: The last step that computed tokens of it.
        excluded: Whether nothing is loaded or saved for it.
        used: The end of the span in which the stores were last told that it uses its blocks; see ``used_until``.
        states: The states to save, by block: the group, and the tokens up to the state.
        awaited: Tokens that a prefill engine says it has saved, until the first lookup has ended.
        found: The states that vLLM's own cache had, to save those that the stores have lost.
        retain: For how many seconds its blocks are to be retained after each use.
    """

    request: Request
    block_ids: list[list[int]]
    saved: list[int]
    computed: int = 0
    known: int = 0
    lookup: Lookup | None = None
    asked: float | None = None
    loaded: int = 0
    to_save: int = 0
    confirmed: bool = True
    begun: int = 0
    ran: int = 0
    excluded: bool = False
    used: int = 0
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    awaited: int = 0
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    retain: float = 0.0


def left_alone(late: Sequence[BlockMoves], written: AbstractSet[int], counters: ConnectorCounters) -> list[BlockMoves]:
    """Return late saves without chunks that the step may write before they are saved; count those as lost."""
    for moves in late:
        chunks = zip(moves.chunks(), moves.depths, strict=True)
        left = [(key, blocks, depth) for (key, blocks), depth in chunks if written.isdisjoint(blocks)]
        if len(left) < len(moves.keys):
            counters.failed("save", "other", len(moves.keys) - len(left))
            moves.keys, moves.depths = [key for key, _, _ in left], [depth for _, _, depth in left]
            moves.block_ids = [block for _, blocks, _ in left for block in blocks]
    return [moves for moves in late if moves.keys]


class PrefixCacheScheduler:
    """Decides what is loaded and saved; never touches KV itself.

    It waits for a medium only where nothing runs, or where vLLM cannot ask again, and for milliseconds.
    """

    def __init__(
        self,
        groups: CacheGroups,
        block_keys: BlockKeys,
        stager: Stager,
        counters: ConnectorCounters,
        options: PlanningOptions,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._groups, self._alignment, self._has_states = groups, groups.alignment, groups.has_states
        #: By vLLM's numbers.
        self._stored = {group.index: group for group in groups.groups}
        self._block_keys = block_keys
        self.stager = stager
        self.counters = counters
        self._options = options
        self._requests: dict[str, RequestState] = {}
        self._to_load: dict[str, PendingLoad] = {}
        #: Requests whose load has begun but which have not started yet, with each one's total number of blocks.
        self._loading: dict[str, int] = {}
        self._first = ""  # the request that waits for the loads of others and blocks further loads meanwhile
        self._late: list[BlockMoves] = []
        self._holds: list[tuple[int, Stager, Lookup]] = []
        self.others = OtherLoads()  #: to be told when vLLM's own prefix cache was emptied
        self._hint_refused = False
        self.step = 0  #: the last planned step
        self._waited = 0  # the last planned step after which a call has waited for a lookup
        self._epoch = 0
        self._doubted_at = 0  # the step that checks all weights
        self._waits = False
        self._confirmed = 0  # the last step before which no rank has found its weights changed
        self.events: StoreEvents | None = None  #: told of saves and loads, to announce the blocks
        self.loads = options.loads
        #: whether blocks are saved: the engine's role allows it, and all ranks can tell that their weights changed
        self.saves = options.saves
        self.namespace = ""  #: the namespace of the engine's blocks, for the workers; empty until it is known
        self.prepares = False  #: whether lookups will become possible within the next steps

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens beyond the computed ones the store can provide.

        Returns:
            The number of tokens; None if it is not known yet, or if the request must wait until others with promised
            blocks have started: vLLM asks again in the next step.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            if self._options.asks_again and not self._block_keys.is_ready(request):
                return None
            state = self._state(request)
        elif (
            self._options.asks_again
            and state.lookup is not None
            and state.lookup.query.computed == num_computed_tokens
            and not self.stager.poll(state.lookup)
        ):
            # Most calls for a slow medium end here; what else decides is checked once the answer is there.
            return None
        state.computed = state.known = num_computed_tokens
        found = self._found(state, num_computed_tokens)
        if found is None or (self._loading and self._must_wait(state, loads=found > 0)):
            return None
        return found

    def _found(self, state: RequestState, num_computed_tokens: int) -> int | None:
        request, lookup = state.request, state.lookup
        if self._is_excluded(state) or not self.loads:
            return 0
        if request.request_id in self._loading:
            # vLLM asks again because not even the first block was loaded. The next load might fail as well.
            return 0
        if self._options.others and comes_from_afar(request):
            # Blocks staged here would not be loaded. If the transport fails, vLLM asks again, without this mark.
            return 0
        if lookup is None or lookup.query.computed != num_computed_tokens:
            if self._must_compute(request):
                return 0
            lookup = None if self._waits else self._look_up(state, num_computed_tokens)
        if lookup is None or self._waits or not self._has_ended(lookup):
            return None
        found = lookup.end - num_computed_tokens
        if state.asked is not None:
            seconds, state.asked = self._clock.monotonic() - state.asked, None
            self.counters.looked_up(request.num_tokens - num_computed_tokens, found, seconds)
            state.awaited = 0
            if lookup.awaits:
                self.counters.failed("load", "awaited", max(1, (lookup.query.awaited - lookup.end) // self._alignment))
                logger.warning(
                    "[UCM.Load] request %s: %d tokens were handed over through the store, and only %d were there after "
                    "%.1f s; the others are computed",
                    request.request_id,
                    lookup.query.awaited,
                    lookup.end,
                    seconds,
                )
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "[UCM.Load] request %s: %d of %d tokens found after the first %d in %.1f ms, %s",
                    request.request_id,
                    found,
                    request.num_tokens,
                    num_computed_tokens,
                    seconds * 1000,
                    self._first_missing(lookup),
                )
        return found

    def _first_missing(self, lookup: Lookup) -> str:
        """Return the key with which a hit ends, for the log."""
        query = lookup.query
        if lookup.lacking is None:
            return "no block is missing" if query.keys else "nothing was looked up"
        place, chunk = lookup.lacking
        group = self._groups.groups[place]
        key = query.keys[place][chunk - query.computed // group.chunk_tokens]
        return f"then block {key.hex()[:16]} of KV-cache group {group.index} is missing"

    def allocated(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that a request got at its admission.

        Args:
            request: vLLM's request.
            blocks: Its ``KVCacheBlocks``, including those of computed tokens.
            num_external_tokens: Tokens to load into them.
        """
        state = self._state(request)
        if state.excluded:
            return
        start = 0 if state.lookup is None else state.lookup.query.computed
        self._use(state, start + num_external_tokens, start)
        if num_external_tokens > 0:
            load = PendingLoad(start, start + num_external_tokens, block_ids_by_group(blocks))
            self._to_load[request.request_id] = load
            # Those that it had before a preemption belong to others, and those of the load are not filled yet.
            state.block_ids = [[] for _ in state.block_ids]
            state.known = load.end
            state.loaded += num_external_tokens
            self._loading[request.request_id] = self._whole(state)
        else:
            self._let_go(state)

    def tiers(self, request: Request, num_tokens: int) -> Counter[str]:
        """Return from which tiers the first tokens come that a request loads, as far as this is known before the load.

        Args:
            request: vLLM's request, after `allocated` and before the step is planned.
            num_tokens: How many of these tokens.

        Returns:
            The number of tokens by tier, told by the blocks of the group that tells how long a prefix is.
        """
        load, state = self._to_load.get(request.request_id), self._requests.get(request.request_id)
        if load is None or state is None or state.lookup is None:
            return Counter()
        group = self._stored[self._groups.leading]
        rows, size = state.lookup.rows.get(group.index, {}), group.chunk_tokens
        begin, end = load.start, load.start + num_tokens
        first, last = begin // size, -(-end // size) - 1
        # Thousands of chunks may be found, and the scheduler waits: whole ones are counted, then the ends are cut off.
        chunks = Counter([row.tier for chunk, row in rows.items() if first <= chunk <= last])
        found = Counter({tier: size * number for tier, number in chunks.items()})
        if first in rows:
            found[rows[first].tier] -= begin - first * size
        if last in rows:
            found[rows[last].tier] -= (last + 1) * size - end
        return found

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Return the workers' part of a step."""
        self.step += 1
        while self._holds and self._holds[0][0] <= self.step - self._options.batches:
            _, stager, lookup = self._holds.pop(0)
            stager.release(lookup)
        plan = StepPlan(
            self.step,
            self.namespace,
            idle=not scheduler_output.total_num_scheduled_tokens,
            epoch=self._epoch,
            verify=self._doubted_at == self.step,
            confirmed=self._confirmed if self._options.confirms else None,
        )
        fresh = self._take_blocks(scheduler_output)
        self._take_answers()
        for request_id, load in self._to_load.items():
            plan.loads += self._loads(self._requests[request_id], load)
        self._to_load = {}
        fresh.update(block_id for moves in plan.loads for block_id in moves.block_ids if block_id != NO_BLOCK)
        scheduled = scheduler_output.num_scheduled_tokens
        running = [self._requests[name] for name in scheduled if name in self._requests]
        for state in running:
            if is_streaming(state.request):  # it may have got other inputs since
                self._block_keys.note(state.request)
        if self._has_states:
            self._take_states(scheduler_output, fresh)
        saving = set[tuple[int, bytes]]()
        for state in running:
            state.ran = self.step
            if self._may_save(state):
                computed = state.request.num_computed_tokens + scheduled[state.request.request_id]
                saves = self._saves(state, computed, saving) + self._state_saves(state, computed, saving)
                plan.saves += saves
                if saves and self._span_end() != state.used:  # the chain must not become older than its new end
                    self._use(state, state.request.num_computed_tokens)
        late, self._late = self._late, []
        plan.late_saves, plan.fresh_block_ids = left_alone(late, fresh, self.counters), fresh
        if plan.idle and not plan.loads and not self._runs():
            self._wait()
        return plan

    def _runs(self) -> bool:
        """Return whether a step with a request may still be in flight."""
        first = max(1, self.step + 1 - self._options.batches)
        return any(state.ran >= first for state in self._requests.values())

    def _wait(self) -> None:
        """Wait a little for lookups, or if there are none for keys."""
        pending = [state.lookup for state in self._requests.values() if state.lookup is not None]
        if pending:
            self.stager.wait(pending, IDLE_SECONDS)
        else:
            self._block_keys.wait(IDLE_SECONDS)

    def _take_blocks(self, scheduler_output: SchedulerOutput) -> set[int]:
        """Note the blocks of the scheduled requests; return the blocks that the step may write."""
        # A sparse method may use additional blocks that no request lists.
        fresh = set[int](optional(scheduler_output, "ucm_sparse_meta.taken_blocks", ()))
        fresh |= prepared_blocks(scheduler_output)
        admitted = list(admitted_requests(scheduler_output))
        if self._options.others:
            self._exclude_others(admitted)
        for request_id, ids, computed in admitted:
            for index, group_ids in enumerate(ids):
                group = self._stored.get(index)
                fresh.update(group_ids if group is None else group_ids[computed // group.block_size :])
            state = self._requests.get(request_id)
            if state is not None:
                state.block_ids = ids
                # vLLM hands over a state once, when it is computed; a store may lose it while vLLM's cache serves it.
                state.found = {
                    ids[group.index][computed // group.block_size - 1]: (group.index, computed)
                    for group in self._groups.groups
                    if group.is_recurrent and computed and not computed % self._alignment
                }
                self._loading.pop(request_id, None)
                # The engine may read an adapter's files in this step, even if it had read them before.
                state.confirmed, state.begun = not self._block_keys.may_change(state.request), self.step
        for request_id, new_ids in grown_requests(scheduler_output):
            state = self._requests.get(request_id)
            for number, group_ids in enumerate(new_ids):
                fresh.update(group_ids)
                if state is not None:
                    state.block_ids[number].extend(group_ids)
        return fresh

    def _exclude_others(self, admitted: Sequence[tuple[str, list[list[int]], int]]) -> None:
        """Exclude requests with blocks that another connector loaded, for them or for earlier requests."""
        # A hit of vLLM may end within a chunk, where the key of the whole chunk says more than the two have in common.
        size = gcd(*(group.block_size for group in self._groups.groups))
        found = [(self._requests[name], computed) for name, _, computed in admitted if name in self._requests]
        for state, computed in found:
            if computed > state.known:
                self.others.add(self._block_keys.of(state.request, size) or [], state.known // size)
                self.exclude(state.request)
        for state, _ in found:
            if not state.excluded:
                keys = self._block_keys.of(state.request, size) or []
                if self.others.may_be_in(keys[: -(-state.computed // size)]):
                    self.exclude(state.request)

    def finished(self, request: Request) -> int:
        """End a request; its full blocks that were not saved yet are saved with the next step.

        Returns:
            How many of its first tokens are saved by then, as far as the engine knows.
        """
        saved = 0
        state = self._requests.pop(request.request_id, None)
        self._loading.pop(request.request_id, None)
        if self._first == request.request_id:
            self._first = ""
        if state is not None:
            self._let_go(state)
            self._to_load.pop(request.request_id, None)
            if self._may_save(state, ended=True):
                computed, saving = request.num_computed_tokens, set[tuple[int, bytes]]()
                saved = self._to_store(state, computed) // self._alignment * self._alignment
                self._late += self._saves(state, computed, saving) + self._state_saves(state, computed, saving)
                if state.retain:  # the time counts from the end
                    self._use(state, computed)
            logger.debug(
                "[UCM.Save] request %s: ended after %d tokens, %d of them loaded; %d blocks to save",
                request.request_id,
                request.num_computed_tokens,
                state.loaded,
                state.to_save,
            )
        self._block_keys.forget(request.request_id)
        return saved

    def doubt(self, *, waits: bool) -> None:
        """Let the workers check all of their weights in the next step, because they may have changed.

        Args:
            waits: Promise no blocks until they have, because a promise could not be broken.
        """
        self._doubted_at, self._waits = self.step + 1, waits

    def reported(self, report: WeightsReport) -> bool:
        """Process the workers' report of their weights; return whether some changed in the current epoch.

        The reports of a step arrive together, so workers without a report found no change.
        """
        if report.looked >= self._doubted_at:
            self._waits = False
        if report.changed >= self._epoch:
            return True
        self._confirmed = max(self._confirmed, report.looked)
        return False

    def start_anew(self) -> None:
        """Exclude requests with computed or loaded blocks, because new keys are used from now on.

        Their old blocks must not be found under new keys.
        """
        self._epoch += 1
        self.others.rename()
        for request_id, state in self._requests.items():
            self._let_go(state)
            state.excluded |= request_id in self._loading or any(state.block_ids)
        self.stager.start_anew()
        self._late = []

    def hold(self, stager: Stager, lookup: Lookup) -> None:
        """Keep the staged blocks of a lookup until the step that loads them, the one that is planned, has ended."""
        self._holds.append((self.step, stager, lookup))

    def vouches_for(self, request: Request) -> bool:
        """Return whether KV of a request may be saved: its inputs are known, and so is the namespace."""
        return self.saves and bool(self.namespace) and not self._is_excluded(self._state(request))

    def blocks_of(self, request_id: str) -> list[int]:
        """Return a request's blocks in the first KV-cache group, after the admissions of the step that is planned."""
        state = self._requests.get(request_id)
        return [] if state is None else state.block_ids[0]

    def exclude(self, request: Request) -> None:
        """Stop loading and saving for a request, because its KV no longer follows from its tokens."""
        state = self._state(request)
        self._let_go(state)
        state.excluded = True

    def _may_save(self, state: RequestState, *, ended: bool = False) -> bool:
        """Return whether the request's KV matches its keys; known once the step that began it has surely run.

        Until then none of its blocks is saved; afterwards all are, or none.
        """
        if self._is_excluded(state) or state.confirmed:
            return not state.excluded
        ran = ended or state.begun <= self.step - self._options.batches
        if not ran or not state.begun:
            return False
        state.confirmed = self._block_keys.is_same(state.request)
        state.excluded = not state.confirmed
        return state.confirmed

    def _is_excluded(self, state: RequestState) -> bool:
        if not state.excluded and self._block_keys.is_invalidated(state.request):
            self._let_go(state)
            state.excluded = True
        return state.excluded

    def _state(self, request: Request) -> RequestState:
        request_id = request.request_id
        if request_id not in self._requests:
            self._requests[request_id] = self._new_state(request)
        return self._requests[request_id]

    def _new_state(self, request: Request) -> RequestState:
        count = len(self._groups.groups) + len(self._groups.rings)
        state = RequestState(request, [[] for _ in range(count)], [0] * count, awaited=saved_tokens(request))
        if is_streaming(request):
            # A streaming session replaces computed tokens, so its blocks have no lasting keys. But vLLM caches what it
            # computes under the names of its inputs, which are noted.
            self._block_keys.note(request)
            state.excluded = True
            return state
        begun = self._clock.monotonic()
        keys = self._block_keys.of(request, self._alignment)
        if keys is None:
            state.excluded = True
        else:
            self.counters.hashed(len(keys), self._clock.monotonic() - begun)
            state.retain = self._retained(request)
        return state

    def _retained(self, request: Request) -> float:
        """Return for how many seconds a request's blocks are retained; what it asks is bounded by the setting."""
        try:
            seconds = min(retain_seconds(request), self._options.lease_seconds)
        except HintError as error:
            self.counters.hinted("malformed")
            if not self._hint_refused:
                self._hint_refused = True
                logger.warning(
                    "[UCM.Save] request %s is not retained: %s; further such requests are only counted",
                    request.request_id,
                    error,
                )
            return 0.0
        if seconds:
            self.counters.hinted("retained")
        return seconds

    def _until(self, state: RequestState) -> float:
        """Return until when a request's blocks are retained; equal for all uses in one span, as their depth decides."""
        return self._span_end() / 1e9 + state.retain if state.retain else 0.0

    def _must_compute(self, request: Request) -> bool:
        """Return whether every token must be computed: outputs are requested, or a failed load would be fatal."""
        if preemptions(request) and not self._options.reloads_preempted:
            return True
        return needs_all_outputs(request, prefix_caching=self._options.prefix_caching)

    def _limit(self, state: RequestState) -> int:
        """Return the most tokens that may come from caches."""
        step, request = self._alignment, state.request
        # At least one token must be computed, for the logits of the next one.
        limit = min(request.num_tokens - 1, int(self._options.hit_ratio * request.num_tokens))
        return int(min(limit, self._options.lasting_tokens(request.num_prompt_tokens))) // step * step

    def _look_up(self, state: RequestState, computed: int) -> Lookup | None:
        """Start a request's lookup; return None while the stores are being opened."""
        self._let_go(state)
        limit = self._limit(state)
        if not self.stager.has_begun:
            if self.prepares and self._options.asks_again and limit > computed:
                return None
            limit = 0
        now = self._clock.monotonic()
        if state.asked is None:
            state.asked = now
        elif now >= state.asked + self.stager.seconds:
            state.awaited = 0  # vLLM's own cache has grown meanwhile, and the request has waited long enough
        state.lookup = self.stager.submit(self._query(state, computed, limit))
        return state.lookup

    def _has_ended(self, lookup: Lookup) -> bool:
        """Return whether a lookup has ended; wait a little if nothing runs. End it here if vLLM cannot ask again."""
        if self.stager.poll(lookup):
            return True
        if self._options.asks_again:
            if self._waited == self.step or self._runs():
                return False
            self._waited = self.step
            return self.stager.wait([lookup], IDLE_SECONDS)
        if not self.stager.wait([lookup], PATIENCE_SECONDS):
            self.stager.give_up(lookup)
        return True

    def _query(self, state: RequestState, computed: int, limit: int) -> Query:
        keys = (
            [
                self._keys(state.request, group, computed // group.chunk_tokens, limit // group.chunk_tokens)
                for group in self._groups.groups
            ]
            if limit > computed
            else []
        )
        # Of a block that is not full, nothing ever comes.
        options, awaited = self._options, min(state.awaited, limit) // self._alignment * self._alignment
        return Query(tuple(keys), computed, limit, options.min_hit_tokens, options.drops_last_block, awaited)

    def _keys(self, request: Request, group: CacheGroup, first: int, last: int) -> list[BlockKey]:
        """Return the known keys of a group's chunks from ``first`` up to, but not including, ``last``."""
        keys = self._block_keys.of(request, group.chunk_tokens, first) or []
        return cast("list[BlockKey]", keys[: last - first])

    def _parent(self, request: Request, group: CacheGroup, first: int) -> BlockKey | None:
        """Return the key of the chunk before ``first``; None if there is none."""
        return next(iter(self._keys(request, group, first - 1, first)), None) if first else None

    def _must_wait(self, state: RequestState, *, loads: bool) -> bool:
        """Return whether a request must wait until other loads have ended, because the KV cache might not hold all.

        Requests that load hold blocks. vLLM starts them when it reaches them in its queue, and stops there at the first
        request that it cannot allocate. If that one came before them, all would wait for ever. A request that vLLM is
        told to ask for again is skipped instead. Until it has started no further load begins, or it might starve.
        """
        request_id = state.request.request_id
        others = sum(blocks for name, blocks in self._loading.items() if name != request_id)
        if not others or self._options.room is None:
            waits = False
        elif others + self._whole(state) > self._options.room:
            waits, self._first = True, self._first or request_id
        else:
            waits = loads and self._first not in {"", request_id}
        if not waits and self._first == request_id:
            self._first = ""
        return waits

    def _whole(self, state: RequestState) -> int:
        """Return the number of blocks of a whole request."""
        stored = sum(group.most_blocks(state.request.num_tokens) for group in self._groups.groups)
        return stored + len(self._groups.rings)

    def _let_go(self, state: RequestState) -> None:
        if state.lookup is not None:
            self.stager.release(state.lookup)
            state.lookup = None

    def _use(self, state: RequestState, num_tokens: int, num_computed_tokens: int = 0) -> None:
        """Tell the stores that a request uses the blocks of its first tokens, so that these stay.

        vLLM's own prefix cache serves most of a prompt that many requests share: the stores see nothing of those hits.
        An engine that saves nothing renews, too: others may save what is lost of a chain again.

        Args:
            state: The request.
            num_tokens: The number of tokens.
            num_computed_tokens: How many of these the engine had already. Their blocks are not saved, unless the stores
                turn out to have lost some.
        """
        state.used = self._span_end()
        request = state.request
        lasting = self._options.lasting_tokens(request.num_prompt_tokens)
        for group in self._groups.groups if self.stager.has_begun else ():
            chunks = min(num_tokens, lasting) // group.chunk_tokens
            if not chunks:
                continue
            keys = self._keys(request, group, 0, chunks)
            last = min(num_computed_tokens, lasting) // group.chunk_tokens
            begin = group.first_needed(num_computed_tokens) // group.chunk_blocks
            expected = range(min(begin, last), last) if self.saves else range(0)
            state.saved[group.index] = max(state.saved[group.index], last)
            self.stager.use(Use(request.request_id, group, keys, expected, self._until(state)))

    def _span_end(self) -> int:
        """Return the end of the current span of ``touch_seconds``, in which a use counts once, as the tiers do."""
        return used_until(self._clock.time(), self._options.touch_seconds, DEEPEST)

    def _take_answers(self) -> None:
        for request_id, group, missing in self.stager.answers():
            state = self._requests.get(request_id)
            if state is not None:
                state.saved[group] = min(state.saved[group], missing)
                place = group, (missing + 1) * self._stored[group].block_size
                state.states |= {block: found for block, found in state.found.items() if found == place}
        for cause in self.stager.failures():
            self.counters.failed("load", cause)

    def _loads(self, state: RequestState, load: PendingLoad) -> list[BlockMoves]:
        moves = []
        lookup, state.lookup = state.lookup, None
        for group in self._groups.groups:
            chunks = group.needed(load.start, load.end)
            if chunks:
                keys = self._keys(state.request, group, chunks.start, chunks.stop)
                found = BlockMoves(
                    state.request.request_id,
                    group.index,
                    keys,
                    group.to_load(load.block_ids[group.index], load.start, load.end),
                    [group.depth(chunk) for chunk in chunks],
                    chunk_blocks=group.chunk_blocks,
                    adapter=adapter_number(state.request),
                )
                if lookup is not None and self.stager.shares:
                    rows = [lookup.rows[group.index][place] for place in chunks]
                    found.places, found.shares = self.stager.offsets(rows), self.stager.shares[group.index]
                    found.tiers = [row.tier for row in rows]
                    if self.events is not None:
                        parent = self._parent(state.request, group, chunks.start)
                        self.events.loading(state.request, group, chunks.start, keys, parent, found.tiers)
                moves.append(found)
            state.saved[group.index] = max(state.saved[group.index], load.end // group.chunk_tokens)
        if lookup is not None:
            self.hold(self.stager, lookup)
        return moves

    def _saves(self, state: RequestState, num_tokens: int, saving: set[tuple[int, bytes]]) -> list[BlockMoves]:
        """Return saves of the chunks that are full after ``num_tokens`` tokens, as far as their tokens are known."""
        moves: list[BlockMoves] = []
        request, num_tokens = state.request, self._to_store(state, num_tokens)
        for group in self._groups.groups:
            block_ids = state.block_ids[group.index]
            # After a failed load, or a preemption, fewer tokens are computed than before.
            computed = request.num_computed_tokens // group.chunk_tokens
            done = computed if self._options.frees_blocks else min(state.saved[group.index], computed)
            filled = min(num_tokens, len(block_ids) * group.block_size)
            chunks = group.to_save(done, request.num_computed_tokens, filled)
            first, last = chunks.start, chunks.stop
            state.saved[group.index] = max(first, last)
            if chunks:
                found = self._save_of(state, group)
                keys = self._keys(request, group, first, last)
                if self.events is not None:
                    self.events.saving(request, group, first, keys, self._parent(request, group, first))
                for chunk, key in zip(chunks, keys, strict=False):
                    if group.is_reached(chunk, self._alignment) and (group.index, key) not in saving:
                        saving.add((group.index, key))
                        found.keys.append(key)
                        found.depths.append(group.depth(chunk))
                        found.block_ids += group.blocks_of(block_ids, chunk)
                if found.keys:
                    moves.append(found)
                    state.to_save += len(found.keys)
        return moves

    def _take_states(self, scheduler_output: SchedulerOutput, fresh: AbstractSet[int]) -> None:
        """Note the states that a step leaves, except those that vLLM found or we loaded; forget those it may overwrite.

        A block keeps its state until vLLM writes it, even if the request no longer holds it; or another connector does,
        into any free block. A state at which no hit can end is left out.
        """
        for state in self._requests.values():
            for states in (state.states, state.found):
                for block_id in set(states) if self._options.others else fresh & states.keys():
                    del states[block_id]
        for request_id, offered in boundary_states(scheduler_output).items():
            found = self._requests.get(request_id)
            if found is not None and self.saves and not found.excluded:
                for index, block_id, tokens in offered:
                    if tokens > found.known and not tokens % self._alignment:
                        found.states[block_id] = index, tokens

    def _state_saves(self, state: RequestState, num_tokens: int, saving: set[tuple[int, bytes]]) -> list[BlockMoves]:
        """Return saves of the states that vLLM has left at the ends of blocks, up to ``num_tokens`` tokens."""
        moves: list[BlockMoves] = []
        if not self.namespace:
            return moves
        request, num_tokens = state.request, self._to_store(state, num_tokens)
        for block_id, (index, tokens) in state.states.items():
            group = self._stored[index]
            block = tokens // group.block_size - 1
            keys = self._keys(request, group, block, block + 1) if tokens <= num_tokens else []
            if not keys or (index, keys[0]) in saving:
                continue
            saving.add((index, keys[0]))
            state.to_save += 1
            found = self._save_of(state, group)
            found.keys, found.block_ids, found.depths = keys, [block_id], [tokens]
            moves.append(found)
        state.states = {}
        return moves

    def _save_of(self, state: RequestState, group: CacheGroup) -> BlockMoves:
        """Return a save for a request in a group, with no chunks yet."""
        return BlockMoves(
            state.request.request_id,
            group.index,
            [],
            [],
            [],
            chunk_blocks=group.chunk_blocks,
            step=state.ran,
            adapter=adapter_number(state.request),
            retain_until=self._until(state),
        )

    def _to_store(self, state: RequestState, num_tokens: int) -> int:
        """Return how many of a request's first tokens may be stored, of so many computed ones."""
        request, options = state.request, self._options
        if not self.saves or not self.namespace:
            return 0
        known = request.num_tokens if options.save_decode_blocks else request.num_prompt_tokens
        return min(num_tokens, known, request.num_tokens, options.lasting_tokens(request.num_prompt_tokens))


#: The most loads that are remembered; beyond that, any block of vLLM's own prefix cache may be one of theirs.
MOST = 100_000


class OtherLoads:
    """Tracks blocks that another connector loaded, where vLLM's ``MultiConnector`` has several.

    The content of such blocks is unknown: it may come from other weights, or be approximate. vLLM keeps them in its own
    prefix cache like blocks that it computed, so other requests find them there. Where a load began is remembered by
    the block's key, which identifies its whole prefix.
    """

    def __init__(self) -> None:
        self._first: set[bytes] = set()
        self._any = False

    def add(self, keys: Sequence[bytes], block: int) -> None:
        """Note that another connector loaded blocks of a request.

        Args:
            keys: The keys of the request's full blocks.
            block: The index of the first block that is not entirely ours. A block that is not full yet has no key, so
                the block before is recorded instead.
        """
        begins = keys[block : block + 1] or keys[max(block - 1, 0) : block]
        self._first.update(begins)
        self._any |= not begins or len(self._first) > MOST

    def may_be_in(self, keys: Sequence[bytes]) -> bool:
        """Return whether another connector may have loaded some of these blocks, found in vLLM's prefix cache."""
        return bool(keys) and (self._any or not self._first.isdisjoint(keys))

    def rename(self) -> None:
        """Note that blocks get other keys from now on."""
        self._any |= bool(self._first)
        self._first.clear()

    def forget(self) -> None:
        """Note that vLLM's own prefix cache is empty."""
        self._first.clear()
        self._any = False
