"""Find how much of a request the store has, stage it in host memory, verify it there, and then promise it.

The scheduler submits a ``Query``. Threads look it up for all ranks, read the found blocks into the slab, and shrink the
hit to what every rank has completely. The scheduler polls the outcome in each step, and at the deadline takes what is
verified by then. A medium that does not answer delays no other request: it is not used for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.integration.vllm.connector.failures import FailureLog
from ucm.integration.vllm.connector.kv_cache import lacking, longest_hit
from ucm.logger import get_logger
from ucm.store.base import BlockTransfer
from ucm.store.memory.slab import PAGE, Slab, State, jobs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.clock import Clock, Queue, Thread
    from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups
    from ucm.store.base import BlockGeometry, BlockKey, KVStore, Task
    from ucm.store.memory.slab import Row

#: The size of one request to the stores in bytes, and how many such requests may be in progress per lookup.
CHUNK_BYTES, CHUNKS = 8 << 20, 4
#: Threads that wait for the stores, unless a stager has another number; if so many are stuck, no more lookups start.
MOST_THREADS = 8
#: How often, in seconds, a thread that waits for another thread's read checks whether it is still needed.
_LOOKS_SECONDS = 0.02
#: How many seconds pass before a lookup looks again for blocks that another engine still saves.
AGAIN_SECONDS = 0.02
#: For how many seconds the stores are not asked again for what they had and many requests use: S3 has no request for
#: several names.
STORED_SECONDS = 3.0
#: How many seconds ``close`` waits for a medium.
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)  # not frozen: that would triple the time to make one
class Query:
    """A request's lookup, as submitted by the scheduler; never changed.

    Args:
        keys: For each group, the keys of the request's chunks that do not hold computed tokens alone.
        computed: The number of computed tokens, a multiple of the groups' block sizes.
        limit: The most tokens to look for, a multiple of the groups' alignment.
        least: The fewest tokens beyond the computed ones that are worth a load.
        drops_last_block: Whether the last block of a hit must be computed.
        awaited: Tokens that another engine says it has saved: the lookup goes on until they are there, or its deadline.
    """

    keys: tuple[list[BlockKey], ...]
    computed: int
    limit: int
    least: int = 1
    drops_last_block: bool = False
    awaited: int = 0


@dataclass(slots=True)
class Lookup:
    """A query in progress, and its outcome.

    Args:
        query: The query.
        deadline: The latest time of the outcome, as the clock's ``monotonic()``.
    """

    query: Query
    deadline: float
    end: int = 0  #: the number of tokens up to which KV is available
    rows: dict[int, dict[int, Row]] = field(default_factory=dict)  #: the held rows, by group and chunk index
    finished: bool = False  #: the outcome is final
    progressed: bool = False  #: a medium has answered
    lacking: tuple[int, int] | None = None  #: the place of a group and its chunk with which the hit ended
    awaits: bool = False  #: the stores did not have all awaited tokens yet
    again_at: float | None = None  #: when to look for those again, as the clock's ``monotonic()``; None while it runs


@dataclass(slots=True)
class Use:
    """A use of stored blocks by a request, as submitted by the scheduler; never changed.

    Args:
        request_id: vLLM's request id.
        group: The KV-cache group.
        keys: The chain of all chunks that the request uses, from its first one on.
        expected: The indexes of chunks that the engine had itself, and that the stores should have as well.
        retain_until: Until when to retain the chunks, in seconds since the epoch; 0: not at all.
    """

    request_id: str
    group: CacheGroup
    keys: list[BlockKey]
    expected: range
    retain_until: float = 0.0


class Stager:
    """Looks up requests and stages the blocks that they need.

    Args:
        groups: The model's KV-cache groups.
        slab: The slab for staged blocks; None if the workers read the store themselves and keys are promised.
        seconds: The longest duration of a lookup.
        rest_seconds: How long stores are not used after a lookup in which none of them answered.
        threads: The most threads that wait for the stores.
        clock: Time and threads.
    """

    def __init__(
        self,
        groups: CacheGroups,
        slab: Slab | None,
        seconds: float,
        rest_seconds: float,
        *,
        threads: int = MOST_THREADS,
        clock: Clock = SYSTEM,
    ) -> None:
        self.clock = clock
        self._groups, self._alignment = groups, groups.alignment
        self._by_index = {group.index: group for group in groups.groups}
        self._slab = Slab(0, 0, clock=clock) if slab is None else slab
        self._stages = slab is not None
        self.seconds = seconds
        self._rest_seconds = rest_seconds
        self._most_threads = threads
        self._stores: Mapping[int, Sequence[KVStore]] = {}
        self._sizes: dict[int, list[int]] = {}  # for each group, the bytes of the ranks' parts
        #: For each group, the offsets of the ranks' parts in a row; none if blocks are promised before they are read.
        self.shares: dict[int, tuple[int, ...]] = {}
        self._blocks_at_once = 1
        self._changed = clock.condition()
        self._jobs: Queue[Callable[[], None] | None] = clock.queue()
        self._threads: list[Thread] = []
        self._idle = 0  # threads without a job
        self._running: dict[int, Lookup] = {}  # by their ids
        self._rests_until = 0.0
        self._probe: Lookup | None = None
        self._uses: deque[Use] = deque()
        self._used_keys = 0  # of the queued uses
        self._stored: set[tuple[int, BlockKey]] = set()  # what all ranks had when they were asked last
        self._stored_until = 0.0
        self._answering = False
        self._answers: deque[tuple[str, int, int]] = deque()
        self._failures: deque[str] = deque()
        self._log = FailureLog("[UCM.Load]", "its tokens are recomputed")
        self._closed = False

    # Stores

    def begin(
        self, stores: Mapping[int, Sequence[KVStore]], geometries: Mapping[int, Sequence[BlockGeometry]] | None = None
    ) -> None:
        """Start to accept lookups in these stores.

        Args:
            stores: For each group, the stores of all ranks with different parts of it.
            geometries: For each group, the geometries of these parts, in the same order; None if the workers read the
                stores themselves after all.
        """
        if geometries is None or not self._stages:
            self._stages = False
            self._slab.close()
            self._slab = Slab(0, 0, clock=self.clock)
        else:
            row_bytes = 0
            for group, of_group in geometries.items():
                padded = [-(-geometry.nbytes // PAGE) * PAGE for geometry in of_group]
                self._sizes[group] = [geometry.nbytes for geometry in of_group]
                self.shares[group] = tuple(accumulate(padded[:-1], initial=0))
                row_bytes = max(row_bytes, sum(padded))
            if not self._slab.lay_out(row_bytes):
                get_logger(__name__).warning(
                    "[UCM.Load] nothing can be loaded: a stored block of all ranks has %d bytes, more than `staging`. "
                    "Raise `staging`, or lower `chunk_tokens`",
                    row_bytes,
                )
            self._blocks_at_once = max(1, CHUNK_BYTES // row_bytes)
        self._stores, self._stored_until = stores, 0.0
        if self._stages:
            self._keep_one_idle()

    @property
    def has_begun(self) -> bool:
        """Whether lookups are possible."""
        return bool(self._stores)

    def offsets(self, rows: Sequence[Row]) -> list[int]:
        """Return the offsets of staged blocks in the slab."""
        return [self._slab.offset(row) for row in rows]

    # For the scheduler's thread

    def submit(self, query: Query) -> Lookup:
        """Start a lookup; finish it at once if all its blocks are staged, or if the stores cannot be asked."""
        now = self.clock.monotonic()
        lookup = Lookup(query, now + self.seconds, end=query.computed)
        if query.limit - query.computed < max(query.least, 1):
            lookup.finished = True
            return lookup
        rests = self._rests(now)
        if self._stages and self._take_staged(lookup, partly=rests):
            return lookup
        if rests:
            lookup.finished = True
            return lookup
        if now >= self._rests_until > 0:
            self._probe = lookup
        self._start(lambda: self._run(lookup))
        return lookup

    def poll(self, lookup: Lookup) -> bool:
        """Return whether a lookup has ended; at its deadline, end it with the blocks that are verified by then.

        Awaited tokens are looked for again from here, so that no thread waits for another engine.
        """
        if not lookup.finished:
            now = self.clock.monotonic()
            if now >= lookup.deadline:
                self.give_up(lookup)
            elif lookup.again_at is not None and now >= lookup.again_at:
                lookup.again_at = None
                self._start(lambda: self._run(lookup))
        return lookup.finished

    def wait(self, lookups: Sequence[Lookup], seconds: float) -> bool:
        """Wait until one of the lookups has ended, and return whether one has."""
        with self._changed:
            return self._changed.wait_for(lambda: any(lookup.finished for lookup in lookups), seconds)

    def release(self, lookup: Lookup) -> None:
        """Release a lookup, finished or not, that is no longer needed."""
        with self._changed:
            lookup.finished = True  # a running one ends by itself and claims no more rows
            rows = self._keep(lookup, {})
        self.let_go(rows)

    def let_go(self, rows: Sequence[Row]) -> None:
        """Release staged blocks."""
        if rows:
            self._slab.release(rows)

    def start_anew(self) -> None:
        """Stop promising blocks that were staged before this call."""
        self._slab.clear()

    def use(self, use: Use) -> None:
        """Renew the blocks of a chain, and find out which of them all ranks have; see ``answers``."""
        if self._rests(self.clock.monotonic()):
            return
        with self._changed:
            if self._uses and self._used_keys + len(use.keys) > _MOST_USED_KEYS:
                return
            self._uses.append(use)
            self._used_keys += len(use.keys)
            if self._answering:
                return
            self._answering = True
        self._start(self._answer)

    def answers(self) -> list[tuple[str, int, int]]:
        """Return which expected blocks are missing: request id, group, and the first one's index."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def failures(self) -> list[str]:
        """Return the causes of failed reads since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self) -> None:
        """End the threads; abandon those that are stuck in a medium. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        until = self.clock.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - self.clock.monotonic()))
        self._slab.close()

    # Hits

    def _all_needed(self, query: Query, end: int) -> dict[int, range]:
        return {group.index: group.needed(query.computed, end) for group in self._groups.groups}

    def _reach(self, query: Query, present: list[list[bool]]) -> int:
        groups, step = self._groups.groups, self._alignment
        end = longest_hit(groups, present, query.limit, step)
        if query.drops_last_block and end > query.computed:
            # Recompute the hit instead of shortening it: from there, a sliding window reads other blocks.
            end = longest_hit(groups, present, end - step, step)
        return end if end - query.computed >= max(query.least, 1) else query.computed

    def _published(self, query: Query, present: list[list[bool]]) -> int:
        """Return how many tokens the stores have. States do not count: an engine saves them at few places."""
        groups = [group for group in self._groups.groups if not group.is_recurrent]
        rows = [row for group, row in zip(self._groups.groups, present, strict=True) if not group.is_recurrent]
        return longest_hit(groups, rows, query.limit, self._alignment)

    def _with_computed(self, group: CacheGroup, query: Query, row: list[bool]) -> list[bool]:
        return [True] * (query.computed // group.chunk_tokens) + row

    def _take_staged(self, lookup: Lookup, *, partly: bool) -> bool:
        """Answer from the slab alone, if it has all blocks of the query, or (``partly``) if the stores rest."""
        slab, query, by_group = self._slab, lookup.query, list(zip(self._groups.groups, lookup.query.keys, strict=True))
        if query.drops_last_block and not partly:
            return False
        end = query.limit
        if not partly:
            for group, keys in by_group:  # prompts that begin alike differ at their ends
                wanted = query.limit // group.chunk_tokens - query.computed // group.chunk_tokens
                if len(keys) != wanted or not slab.knows(group.index, keys[-1]):
                    return False
        else:
            present = []
            for group, keys in by_group:
                if group.needs_all:
                    row = [True] * slab.holds(group.index, keys)
                else:
                    row = [bool(slab.holds(group.index, [key])) for key in keys]
                present.append(self._with_computed(group, query, row))
            end = self._reach(query, present)
        for group, keys in by_group:
            needed, first = group.needed(query.computed, end), query.computed // group.chunk_tokens
            rows = slab.hold(group.index, keys[needed.start - first : needed.stop - first])
            if rows is None:
                self.let_go(self._keep(lookup, {}))
                return False
            lookup.rows[group.index] = dict(zip(needed, rows, strict=True))
        lookup.end, lookup.finished = end, True
        return True

    def _rests(self, now: float) -> bool:
        probes = self._probe is not None and not self._probe.finished
        stuck = sum(lookup.finished for lookup in list(self._running.values()))  # given up, or released
        return now < self._rests_until or stuck + self._answering >= self._most_threads or probes

    def give_up(self, lookup: Lookup) -> None:
        """End a lookup with the blocks that are verified by now."""
        query = lookup.query
        with self._changed:
            if lookup.finished:
                return
            lookup.finished = True
            present = []
            for group, keys in zip(self._groups.groups, query.keys, strict=True):
                rows, first = lookup.rows.get(group.index, {}), query.computed // group.chunk_tokens
                row = [place in rows and rows[place].state is State.WHOLE for place in range(first, first + len(keys))]
                present.append(self._with_computed(group, query, row))
            if self._stages:
                lookup.end = self._reach(query, present)
            surplus = self._keep(lookup, self._all_needed(query, lookup.end))
            if id(lookup) in self._running and not lookup.progressed:
                self._rests_until = self.clock.monotonic() + self._rest_seconds
                get_logger(__name__).warning(
                    "[UCM.Load] the store has not answered for %.1f s: it is not used for %.0f s, and tokens of its "
                    "blocks are recomputed",
                    self.seconds,
                    self._rest_seconds,
                )
        self.let_go(surplus)

    def _keep(self, lookup: Lookup, kept: Mapping[int, range]) -> list[Row]:
        """Remove and return a lookup's rows, except ``kept`` ones; a thread that fills a row still holds it."""
        surplus: list[Row] = []
        for group, rows in lookup.rows.items():
            wanted = kept.get(group)
            if wanted:
                surplus += [rows.pop(place) for place in list(rows) if place not in wanted]
            else:
                surplus += rows.values()
                rows.clear()
        return surplus

    # Threads

    def _start(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        if not self._threads:
            self._keep_one_idle()
        self._jobs.put(job)

    def _keep_one_idle(self) -> None:
        """Start a thread for the next job, so that the scheduler's thread does not spend that time."""
        with self._changed:
            if self._idle or self._closed or len(self._threads) == self._most_threads:
                return
            thread = self.clock.started(self._work, f"ucm-stage-{len(self._threads)}")
            if thread is not None:  # else the others do the work
                self._threads.append(thread)
                self._idle += 1

    def _work(self) -> None:
        enter_background()
        for job in jobs_of(self._jobs, self._slab):
            with self._changed:
                self._idle -= 1
            self._keep_one_idle()
            job()
            with self._changed:
                self._idle += 1

    def _run(self, lookup: Lookup) -> None:
        with self._changed:
            if lookup.finished:
                return
            self._running[id(lookup)] = lookup
        try:
            end = self._find(lookup)
        except Exception:  # noqa: BLE001 - the request continues after any error
            get_logger(__name__).exception("[UCM.Load] a lookup failed unexpectedly")
            end, lookup.awaits = lookup.query.computed, False
        with self._changed:
            del self._running[id(lookup)]
            self._rests_until = 0.0  # the medium answers
            surplus = []
            if not lookup.finished and lookup.awaits:
                lookup.end = end
                lookup.again_at = self.clock.monotonic() + AGAIN_SECONDS
                self._probe = None if self._probe is lookup else self._probe
            elif not lookup.finished:
                lookup.end, lookup.finished = end, True
                surplus = self._keep(lookup, self._all_needed(lookup.query, end))
            self._changed.notify_all()
        self.let_go(surplus)

    def _find(self, lookup: Lookup) -> int:
        query = lookup.query
        present = [
            self._with_computed(group, query, self._found(group, keys, query.computed // group.chunk_tokens))
            for group, keys in zip(self._groups.groups, query.keys, strict=True)
        ]
        lookup.awaits = bool(query.awaited) and self._published(query, present) < query.awaited
        while True:
            end = self._reach(query, present)
            lookup.lacking = lacking(self._groups, present, end, query.limit)
            if not self._stages or end == query.computed:
                return end
            claimed = self._claim(lookup, end, present)
            if claimed is None:
                return end  # the lookup was given up or released
            mine, others = claimed
            for number, place in self._read(lookup, mine):
                present[number][place] = False
            again = self._await(lookup, others)
            if lookup.finished or (not again and self._reach(query, present) == end):
                return end

    def _await(self, lookup: Lookup, others: list[tuple[int, int, Row]]) -> bool:
        """Wait for rows that other lookups fill; return whether some failed and must be claimed again."""
        slab, again = self._slab, False
        for number, place, row in others:
            with slab.changed:
                while row.state is State.READING and not lookup.finished:
                    slab.changed.wait(_LOOKS_SECONDS)
            with self._changed:
                if row.state is State.FAILED and not lookup.finished:
                    del lookup.rows[self._groups.groups[number].index][place]
                    slab.release([row])
                    again = True
        return again

    def _found(self, group: CacheGroup, keys: list[BlockKey], first: int) -> list[bool]:
        """Return which chunks are staged or, behind those, as ``_present`` says; a request to a medium costs more."""
        staged = self._slab.holds(group.index, keys)
        return [True] * staged + self._present(group, keys[staged:], first + staged)

    def _present(self, group: CacheGroup, keys: list[BlockKey], first: int) -> list[bool]:
        """Return which chunks of a group, from ``first`` on, all ranks have, or no hit needs."""
        stores = self._stores[group.index] if keys else ()
        if group.needs_all:
            count = len(keys)
            for store in stores:
                count = store.lookup_on_prefix(keys[:count])
            return [True] * count
        reached = self._reached(group, keys, first)
        rows = [store.lookup([keys[place] for place in reached]) for store in stores]
        there = dict(zip(reached, map(all, zip(*rows, strict=True)), strict=True))
        return [there.get(place, True) for place in range(len(keys))]

    def _reached(self, group: CacheGroup, keys: Sequence[BlockKey], first: int) -> list[int]:
        """Return the places, among keys of chunks from ``first`` on, of those that a hit can need."""
        return [place for place in range(len(keys)) if group.is_reached(first + place, self._alignment)]

    def _claim(
        self, lookup: Lookup, end: int, present: list[list[bool]]
    ) -> tuple[list[tuple[int, int, Row]], list[tuple[int, int, Row]]] | None:
        """Hold a row for each block that a hit needs; a block without room counts as missing.

        Returns:
            The rows to fill here and those that others fill, each with its group's and its block's index; None if the
            lookup is no longer needed.
        """
        slab, query, groups = self._slab, lookup.query, self._groups.groups
        needed = self._all_needed(query, end)
        # Windows and states come first: they need few blocks, and without them the rest is useless.
        wanted = sorted(
            (group.needs_all, (place + 1) * group.chunk_tokens, number, place)
            for number, group in enumerate(groups)
            for place in needed[group.index]
        )
        mine: list[tuple[int, int, Row]] = []
        others: list[tuple[int, int, Row]] = []
        with self._changed:
            surplus = [] if lookup.finished else self._keep(lookup, needed)
        self.let_go(surplus)
        for _, _, number, place in wanted:
            group, claimed = groups[number], None
            with self._changed:  # for each block, so that the scheduler's thread never waits for more than one
                rows = lookup.rows.setdefault(group.index, {})
                if not lookup.finished and place not in rows:
                    key = query.keys[number][place - query.computed // group.chunk_tokens]
                    claimed = slab.claim(group.index, key)
                    if claimed is not None:
                        rows[place] = claimed[0]
                row = None if lookup.finished else rows.get(place)
            if lookup.finished and row is None:
                for _, _, taken in mine:
                    slab.failed(taken)
                return None
            if row is None:
                present[number][place] = False
                break
            if row.state is State.READING:
                (mine if claimed is not None and claimed[1] else others).append((number, place, row))
            elif row.state is State.FAILED:
                present[number][place] = False
        return mine, others

    def _read(self, lookup: Lookup, rows: list[tuple[int, int, Row]]) -> list[tuple[int, int]]:
        """Fill rows; return the blocks that could not be read."""
        lost: list[tuple[int, int]] = []
        reading: deque[tuple[list[tuple[int, int, Row]], list[tuple[KVStore, Task | None]]]] = deque()
        left = deque(rows)
        try:
            while left and not lookup.finished:
                chunk = [left.popleft() for _ in range(min(self._blocks_at_once, len(left)))]
                reading.append((chunk, []))
                self._load(*reading[-1])
                if len(reading) == CHUNKS:
                    lost += self._fill(*reading.popleft(), lookup)
        finally:
            while reading:
                lost += self._fill(*reading.popleft(), lookup)
            lost += self._fill(list(left), [], lookup)
        return lost

    def _load(self, chunk: list[tuple[int, int, Row]], tasks: list[tuple[KVStore, Task | None]]) -> None:
        """Start to read all ranks' parts of some blocks."""
        slab = self._slab
        by_group: dict[int, list[tuple[int, Row]]] = {}
        for _, place, row in chunk:
            by_group.setdefault(row.name[0], []).append((place, row))
        for group, rows in by_group.items():
            depth = self._by_index[group].depth
            parts = zip(self._stores[group], self._sizes[group], self.shares[group], strict=True)
            for store, nbytes, share in parts:
                transfers = [
                    BlockTransfer(row.name[1], [slab.memory(row, share, nbytes)], depth=depth(place))
                    for place, row in rows
                ]
                try:
                    tasks.append((store, store.load(transfers)))
                except Exception:  # noqa: BLE001 - a third-party store, which may write to the rows all the same
                    get_logger(__name__).exception("[UCM.Load] a store failed unexpectedly")
                    tasks.append((store, None))

    def _fill(
        self, chunk: list[tuple[int, int, Row]], tasks: list[tuple[KVStore, Task | None]], lookup: Lookup
    ) -> list[tuple[int, int]]:
        """Wait until some blocks are read; return those that are incomplete."""
        slab, lost = self._slab, []
        results, at_rest = {}, True
        for store, task in tasks:
            try:
                result = None if task is None else task.wait()
            except Exception:  # noqa: BLE001 - as in `_load`
                get_logger(__name__).exception("[UCM.Load] a store failed unexpectedly")
                result = None
            if result is None:
                at_rest = False
                continue
            results[id(store)] = result.done
            if result.failed:
                self._log.record(result.failed)
                self._failures.extend(error.cause for error in result.failed.values())
        lookup.progressed = lookup.progressed or bool(results)
        for number, place, row in chunk:
            group, key = row.name
            tiers = [results.get(id(store), {}).get(key) for store in self._stores[group]]
            if None in tiers:
                slab.failed(row, at_rest=at_rest)
                lost.append((number, place))
            else:
                slab.filled(row, str(tiers[0]))
        return lost

    def _answer(self) -> None:
        while True:
            with self._changed:
                if not self._uses or self._closed:
                    self._answering = False
                    return
                use = self._uses.popleft()
                self._used_keys -= len(use.keys)
            missing: int | None = use.expected.start
            try:
                depths = {use.keys[place]: use.group.depth(place) for place in self._reached(use.group, use.keys, 0)}
                for store in self._stores[use.group.index]:
                    store.renew(depths)
                    if use.retain_until:
                        store.retain(depths, use.retain_until)
                missing = self._first_missing(use)
            except Exception:  # noqa: BLE001 - blocks that cannot be looked up count as missing
                get_logger(__name__).exception("[UCM.Save] a lookup failed unexpectedly")
            if use.expected and missing is not None:
                self._answers.append((use.request_id, use.group.index, missing))

    def _first_missing(self, use: Use) -> int | None:
        """Return the index of the first expected block that a rank lacks; None if there is none."""
        if not use.expected:
            return None
        now = self.clock.monotonic()
        if now >= self._stored_until or len(self._stored) > _MOST_STORED:
            self._stored, self._stored_until = set(), now + STORED_SECONDS
        group, keys = use.group.index, use.keys[use.expected.start : use.expected.stop]
        known = next((place for place, key in enumerate(keys) if (group, key) not in self._stored), len(keys))
        there = self._present(use.group, keys[known:], use.expected.start + known)
        count = known + (there.index(False) if False in there else len(there))
        self._stored.update((group, key) for key in keys[known:count])
        return use.expected.start + count if count < len(use.expected) else None


#: The most keys of queued uses; beyond that, uses are dropped, with their leases. Thousands of requests may end in one
#: step.
_MOST_USED_KEYS = 1 << 20
#: The most chunks that are known to be stored.
_MOST_STORED = 1 << 16
