"""The engine: requests arrive, end and are aborted while steps are in flight and blocks vanish from the store."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.simulation.faults import FaultyStore
from tests.ucm.integration.vllm.connector.simulation.memory import Chunk, embedded, forward
from tests.ucm.integration.vllm.connector.simulation.pool import Pool
from tests.ucm.integration.vllm.connector.simulation.rank import Rank
from tests.ucm.integration.vllm.connector.simulation.request import Request
from tests.ucm.integration.vllm.connector.simulation.scheduler import Scheduler
from tests.ucm.integration.vllm.connector.simulation.truth import END, VOCABULARY, next_token
from ucm.integration.vllm.connector.prefix_cache import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.slab import PAGE, Slab

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.step import Step, Work
    from tests.ucm.integration.vllm.connector.simulation.truth import Keys, Truth
    from ucm.store.base import BlockGeometry, KVStore

#: How long an engine without work sleeps for the threads that it waits for, and its limit without progress, in
#: simulated seconds.
IDLE, PATIENCE = 0.0002, 120.0


def open_blocks(
    clock: SimulatedClock, directory: Path, part: int, group: int, geometry: BlockGeometry | None
) -> KVStore:
    """Return the store of one part of a group's blocks: a rank's, or a slice of heads."""
    config = StoreConfig(directories=(str(directory),), rest_seconds=0, save_nice=0)
    return open_store(config, f"model/part{part}-g{group}", geometry, clock=clock)


class Engine:
    """An engine on a store in a directory.

    Args:
        setting: The engine's settings.
        directory: The directory of its blocks.
        chance: The source of random choices.
        truth: The expected results.
        keys: The block keys.
        clock: Time and threads.
    """

    def __init__(
        self,
        setting: Setting,
        directory: Path,
        chance: random.Random,
        truth: Truth,
        keys: Keys,
        clock: SimulatedClock,
    ) -> None:
        self.clock = clock
        self.setting = setting
        self.truth = truth
        self.keys = keys
        self.chance = chance
        self.directory = directory
        self.happened: Counter[str] = Counter()
        self.stores: list[FaultyStore] = []
        groups = setting.cache_groups()
        self.ranks = [Rank(number, groups, setting, self._faulty, clock) for number in range(setting.ranks)]
        geometries = {
            group.index: [rank.geometries[group.index] for rank in self.ranks for _ in group.parts]
            for group in groups.groups
        }
        row = max(sum(-(-geometry.nbytes // PAGE) * PAGE for geometry in of_group) for of_group in geometries.values())
        slab = None if setting.loads == "direct" else Slab(setting.rows * row, setting.ranks, clock=clock)
        # Opened as in the scheduler's process; the workers' stores are separate.
        self._looking: dict[int, list[FaultyStore]] = {
            group: [self._faulty(part, group, geometry) for part, geometry in enumerate(of_group)]
            for group, of_group in geometries.items()
        }
        stager = Stager(groups, slab, 60.0, 0.0, clock=clock)
        self.prefix_cache = prefix_cache = PrefixCacheScheduler(
            groups,
            keys,
            stager,
            ConnectorCounters(),
            PlanningOptions(
                batches=setting.batches,
                save_decode_blocks=setting.save_decode_blocks,
                room=setting.blocks - 1 if setting.between_steps else None,
            ),
            clock=clock,
        )
        prefix_cache.namespace = "model"
        stager.begin(self._looking, None if slab is None else geometries)
        if slab is not None:
            assert all(rank.slab.attach(slab.address, rank.number, {}) for rank in self.ranks)
        blocks = replace(setting, stored_tokens=0).cache_groups()  # vLLM knows no chunks
        pool = Pool(setting.blocks, blocks, keys, caching=setting.caching)
        self.scheduler = Scheduler(pool, prefix_cache, setting)
        self._planned: deque[Step] = deque()
        self._executed: deque[tuple[Step, dict[str, list[int]], set[int], set[str]]] = deque()
        self._tokens: dict[str, list[int]] = {}
        self._drafted: dict[str, list[int]] = {}
        self._number = 0
        self._requests: list[Request] = []
        self._loaded: Counter[str] = Counter()

    # From outside

    def submit(self, prompt: list[int], max_tokens: int) -> Request:
        self._number += 1
        request = Request(str(self._number), prompt, max_tokens)
        self._requests.append(request)
        self.scheduler.add(request)
        return request

    def turn(self) -> None:
        """Run one iteration of the engine's loop: schedule a step if allowed, else process the output of one."""
        chance, setting = self.chance, self.setting
        if chance.random() < setting.losses:
            self._lose_blocks()
        in_flight = len(self._planned) + len(self._executed)
        if in_flight < setting.batches and (self.scheduler.busy or not in_flight):
            step = self.scheduler.schedule()
            self.happened["steps"] += 1
            self.happened["loads"] += sum(len(moves.keys) for moves in step.plan.loads)
            self._planned.append(step)
            # An empty step also goes to the workers.
            if not step.work:
                self.clock.sleep(IDLE)
            elif chance.random() < 0.7:
                return
        if chance.random() < setting.aborts and self.scheduler.requests:
            self.scheduler.finish(chance.choice(list(self.scheduler.requests.values())))
            self.happened["aborts"] += 1
        while self._planned and (not self._executed or chance.random() < 0.5):
            self._execute(self._planned.popleft())
        if self._executed:
            self._take_in(*self._executed.popleft())

    def drain(self) -> None:
        """Run until every request has ended and every output is processed."""
        until = self.clock.monotonic() + PATIENCE
        while self.scheduler.busy or self._planned or self._executed:
            self.turn()
            assert self.clock.monotonic() < until, "the engine does not get on"
        assert self.scheduler.pool.in_use == 0

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
            rank.slab.close()
        assert not any(store.overwritten for store in self.stores)
        self.prefix_cache.stager.close()
        for of_group in self._looking.values():
            for store in of_group:
                store.close()

    # Within

    def _execute(self, step: Step) -> None:
        plan = pickle.dumps(step.plan)
        inputs = [(work, *self._inputs(work)) for work in step.work]
        chunks = [Chunk(start, tokens, work.block_ids) for work, start, tokens, _ in inputs]
        invalid: set[int] = set()
        loads_last = self.setting.between_steps and self.chance.random() < 0.5
        for rank in self.ranks:
            rank.begin(pickle.loads(plan), loads_last=loads_last)  # noqa: S301 - our own, as vLLM does
        memories, hidden = [rank.memory for rank in self.ranks], embedded(chunks)
        for layer, name in enumerate(memories[0].layers):
            for rank in self.ranks:
                rank.worker.wait_for_layer(name)
            hidden = forward(memories, layer, chunks, hidden, self.truth)
        for rank in self.ranks:
            failed, loaded = rank.end(self.truth, self.keys)
            invalid |= failed
            self._loaded.update(loaded)
        everywhere = {request_id for request_id, count in self._loaded.items() if count == len(self.ranks)}
        for request_id in everywhere:
            del self._loaded[request_id]
        sampled = {}
        for (work, _, tokens, ends), values in zip(inputs, hidden, strict=True):
            if ends:
                sampled[work.request_id] = self._sample(work, tokens, values)
        self.happened["invalid"] += len(invalid)
        self._executed.append((step, sampled, invalid, everywhere))

    def _inputs(self, work: Work) -> tuple[int, list[int], bool]:
        """Return the real start of a chunk, its tokens, and whether a token is sampled after it."""
        count = work.count - work.drafts
        if work.known is not None:
            tokens = work.known[: len(work.known) - work.drafts]
            drafts = work.known[len(tokens) :]
        else:
            tokens = self._tokens[work.request_id]
            drafts = self._drafted[work.request_id][: work.drafts] if work.drafts else []
        self._tokens[work.request_id] = tokens
        start = min(work.start, len(tokens) - count)
        return start, (tokens + drafts)[start : start + work.count], start + count == len(tokens)

    def _sample(self, work: Work, tokens: list[int], hidden: list[int]) -> list[int]:
        first = work.count - work.drafts - 1
        found: list[int] = []
        for place in range(first, work.count):
            found.append(next_token(hidden[place]))
            if place + 1 < work.count and tokens[place + 1] != found[-1]:
                break
        after = self._tokens[work.request_id] = self._tokens[work.request_id] + found
        drafts: list[int] = []
        for _ in range(self.setting.drafts):
            right = self.truth.following(after + drafts)
            drafts.append(right if self.chance.random() < 0.7 else self.chance.randrange(VOCABULARY))
        self._drafted[work.request_id] = drafts
        return found

    def _take_in(self, step: Step, sampled: dict[str, list[int]], invalid: set[int], loaded: set[str]) -> None:
        self.scheduler.update(step, sampled, invalid, loaded)
        if self.setting.drafts and not self.setting.asynchronous:
            self.scheduler.draft({i: self._drafted[i][: self.chance.randint(0, self.setting.drafts)] for i in sampled})
        for request in [request for request in self._requests if request.status == "finished"]:
            self._requests.remove(request)
            self.check(request)

    def check(self, request: Request) -> None:
        """Check that its tokens are those that follow from its prompt."""
        tokens = list(request.prompt)
        for token in request.output:
            assert token == self.truth.following(tokens), "a wrong token was served"
            tokens.append(token)
        assert END not in request.output[:-1]
        self.happened["finished"] += 1

    def _lose_blocks(self) -> None:
        """Delete blocks, as if evicted by another engine."""
        found = [path for path in sorted(self.directory.rglob("*")) if path.is_file() and self._is_block(path)]
        for path in self.chance.sample(found, min(len(found), self.chance.randint(1, 8))):
            path.unlink()
            self.happened["lost"] += 1

    def _is_block(self, path: Path) -> bool:
        try:
            return bytes.fromhex(path.parent.name + path.name) in self.keys.tokens
        except ValueError:
            return False

    def _faulty(self, part: int, group: int, geometry: BlockGeometry) -> FaultyStore:
        setting = self.setting
        store = FaultyStore(
            open_blocks(self.clock, self.directory, part, group, geometry),
            self.clock,
            self.chance,
            setting.failing_loads,
            setting.failing_saves,
            setting.late,
        )
        self.stores.append(store)
        return store
