"""The same engine with vLLM's own scheduler and our whole connector; only the model and its runner are simulated.

Imported only where vLLM is installed. vLLM's own code makes its model runner's calls around a forward.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, partialmethod
from math import gcd, lcm
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.ucm.integration.vllm.connector.simulation.engine import IDLE, PATIENCE
from tests.ucm.integration.vllm.connector.simulation.faults import FaultyStore
from tests.ucm.integration.vllm.connector.simulation.memory import Chunk, embedded, forward
from tests.ucm.integration.vllm.connector.simulation.truth import CELL, END, RING, VOCABULARY, next_token
from tests.ucm.integration.vllm.connector.torch_tensors import all_as_torch
from tests.ucm.stepping.vllm_objects import Requests, engine_config, make_scheduler, runner_output
from ucm.integration.vllm.connector import identity, sides
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.sparse.base import Role
from ucm.sparse.topk.drafts import CUSTOM, DRAFTER, SparseDrafts
from ucm.store.factory import OpeningStore, open_store
from ucm.store.memory.slab import SlabReader

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.memory import KVMemory
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from ucm.clock import Clock
    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.store.base import KVStore

LENGTH = 256


@dataclass
class Work:
    """The work of a step for one request."""

    request_id: str
    start: int
    count: int
    tokens: list[int] | None
    block_ids: list[list[int]]
    begins: bool


class VllmEngine:
    """An engine with vLLM's scheduler.

    Args:
        setting: The engine's settings: blocks of one size; drafts are those of `SparseDrafts`, whose KV is wrong; the
            connector chooses how to load.
        directory: The directory of its blocks.
        chance: The source of random choices.
        truth: The expected results.
        clock: Time and threads.

    Attributes:
        kind: The connector's class.
    """

    kind: type = UCMConnector

    def __init__(
        self, setting: Setting, directory: Path, chance: random.Random, truth: Truth, clock: SimulatedClock
    ) -> None:
        self.clock = clock
        self.setting = setting
        self.truth = truth
        self.chance = chance
        self.store_directory = directory / "store"
        self.store_directory.mkdir(exist_ok=True)
        self.happened: Counter[str] = Counter()
        self.stores: dict[str, FaultyStore] = {}  # by the rank and group in their namespaces
        self.known: dict[bytes, tuple[int, ...]] = {}
        groups = setting.cache_groups()
        every = sorted((*groups.groups, *groups.rings), key=lambda group: group.index)
        self._size = lcm(*(group.block_size for group in every))
        hashed = setting.hash_tokens or gcd(*(group.block_size for group in groups.groups))
        self._new = Requests(hashed, stop=[END])
        config = self._configuration(write_model(MODEL))
        if groups.has_states:
            config.cache_config.mamba_cache_mode = "align"  # as vLLM sets it for such a model
        config.model_config.get_total_num_kv_heads = lambda: setting.heads * setting.ranks
        clock.advance(1.0)  # or the time in which files that were just written may change unseen would pass later
        page = max(group.block_size for group in every) * setting.heads * CELL.itemsize
        specs = [
            KVCacheGroupSpec(
                list(group.layer_names),
                _specification(
                    group, page, latent=setting.precisions, indexed=not groups.has_states, heads=setting.heads
                ),
            )
            for group in every
        ]
        caches = KVCacheConfig(setting.blocks, [], specs)
        # As vLLM: for its scheduler, layers of a uniform type have the specification of the first of them.
        shown = generate_scheduler_kv_cache_config([caches])
        self._looking: list[FaultyStore] = []
        self._patched = ExitStack()
        self._looks, begin = False, sides.SchedulerSide._begin

        def begin_to_look(side: sides.SchedulerSide, records: dict[int, dict[str, Any]]) -> None:
            self._looks = True
            begin(side, records)
            self._looks = False

        self._patched.enter_context(patch.object(sides.SchedulerSide, "_begin", begin_to_look))
        self._patched.enter_context(patch.object(sides, "opening_store", self._opening_store))
        # Which digests of the model the user's cache has would decide which thread waits for them.
        self._patched.enter_context(patch.dict(os.environ, {"XDG_CACHE_HOME": str(directory)}))
        if setting.loads == "direct":  # as if the workers were on other hosts
            self._patched.enter_context(patch.object(SlabReader, "attach", lambda *_: False))
        if setting.staged:
            device = SimpleNamespace(device=SimpleNamespace(type="a device"))
            self._patched.enter_context(patch.object(sides, "tensors_of", lambda _: (device,)))
        # vLLM's factory gives connectors no clock.
        self._patched.enter_context(
            patch.object(self.kind, "__init__", partialmethod(self.kind.__init__, clock=clock))  # type: ignore[misc]
        )
        self.scheduler = self._scheduler(config, shown, hashed)
        self.connector: Any = self.scheduler.connector
        self._config = config
        self.memories = [setting.memory(rank) for rank in range(setting.ranks)]
        self.workers = [self._worker(config, caches, memory) for memory in self.memories]
        self._aggregator = KVOutputAggregator.from_connector(self.workers[0], setting.ranks)
        self._planned: deque[tuple[Any, list[Work]]] = deque()
        self._executed: deque[tuple[Any, Any]] = deque()
        self._tokens: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}  # by the last executed step
        self._requests: list[Any] = []

    # From outside

    def submit(self, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None = None) -> None:
        """Add a request, with its ``kv_transfer_params``."""
        request = self._new.make(prompt, max_tokens)
        request.kv_transfer_params = transfer
        self._requests.append(request)
        self.scheduler.add_request(request)

    def turn(self) -> None:
        """Run one iteration of the engine's loop."""
        if self.chance.random() < self.setting.losses:
            self._lose_blocks()
        if self.chance.random() < self.setting.resets:
            self._reset()
        in_flight = len(self._planned) + len(self._executed)
        batches = 2 if self.setting.asynchronous else 1
        if in_flight < batches and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._planned.append((output, self._work(output)))
            self.happened["steps"] += 1
            self.happened["loads"] += sum(len(moves.keys) for moves in output.kv_connector_metadata.plan.loads)
            if not output.total_num_scheduled_tokens:
                self.clock.sleep(IDLE)
            elif self.chance.random() < 0.7:
                return
        if self.chance.random() < self.setting.aborts:
            alive = [request for request in self._requests if not request.is_finished()]
            if alive:
                victim = self.chance.choice(alive).request_id
                self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                self.happened["aborts"] += 1
        while self._planned and (not self._executed or self.chance.random() < 0.5):
            self._execute(*self._planned.popleft())
        if self._executed:
            self._take_in(*self._executed.popleft())

    def drain(self) -> None:
        """Run until every request has ended and every output is processed."""
        until = self.clock.monotonic() + PATIENCE
        while self.scheduler.has_requests() or self._planned or self._executed:
            self.turn()
            assert self.clock.monotonic() < until, "the engine does not get on"

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()
        self._patched.close()
        assert not any(store.overwritten for store in self.stores.values())
        self.happened["injected"] += sum(store.failed for store in self._looking)

    # Within

    def _lose_blocks(self) -> None:
        """Delete some blocks of one group, as if they were evicted before those of the others."""
        spaces = {path.parents[1] for path in self.store_directory.glob("*/*/*") if _is_block(path)}
        if spaces:
            space = self.chance.choice(sorted(spaces))
            found = [path for path in sorted(space.glob("*/*")) if _is_block(path)]
            for path in self.chance.sample(found, min(len(found), self.chance.randint(1, 8))):
                path.unlink(missing_ok=True)
                self.happened["lost"] += 1

    def _reset(self) -> None:
        """Reset vLLM's prefix cache, as a server's client asks for; vLLM refuses it while blocks are being loaded."""
        try:
            done = self.scheduler.reset_prefix_cache(
                reset_running_requests=self.chance.random() < 0.6, reset_connector=self.chance.random() < 0.3
            )
        except RuntimeError:
            done = False
        self.happened["resets"] += done

    def _configuration(self, model: Path) -> Any:
        setting = self.setting
        transfer = KVTransferConfig(
            kv_connector=self.kind.__name__,
            kv_role="kv_both",
            kv_connector_module_path=self.kind.__module__,
            kv_connector_extra_config=self._settings(),
        )
        config = engine_config(model, setting, self._size, LENGTH, setting.ranks, kv_transfer_config=transfer)
        if setting.drafts:
            config.speculative_config = SpeculativeConfig(
                method=CUSTOM,
                model=DRAFTER,
                num_speculative_tokens=setting.drafts,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        return config

    def _scheduler(self, config: Any, caches: Any, hash_tokens: int) -> Any:
        # The process may be older than the model, and then a real engine would not trust the model's files.
        with patch.object(identity, "process_started", lambda: float("inf")):
            scheduler = make_scheduler(config, caches, hash_tokens)
        if self.setting.drafts:
            SparseDrafts(config, Role.SCHEDULER, {}).scheduler_started(scheduler)
        return scheduler

    def _settings(self) -> dict[str, Any]:
        return {
            "connector": "layerwise" if self.setting.layerwise else "direct",
            "chunk_tokens": self.setting.stored_tokens,
            "kv_head_shards": self.setting.slices,
            "store": {
                "pipeline": "Posix",
                "directories": [str(self.store_directory)],
                "save_nice": 0,
                **({"posix_capacity": f"{self.setting.capacity}KiB"} if self.setting.capacity else {}),
            },
            "staging_deadline": PATIENCE,
            "metrics_log_interval": 0,
        }

    def _worker(self, config: Any, caches: Any, memory: KVMemory) -> Any:
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = memory.rank
        worker = self.kind(mine, KVConnectorRole.WORKER, caches)
        worker.register_kv_caches(all_as_torch(memory.caches))
        return worker

    def _opening_store(self, config: Any, namespace: str, geometry: Any, *, clock: Clock) -> OpeningStore:
        make = self._open_to_look if self._looks else self._open
        return OpeningStore(partial(make, config, namespace, geometry), config.stuck_seconds, clock=clock)

    def _open(self, config: Any, namespace: str, geometry: Any) -> FaultyStore:
        inner = open_store(config, namespace, geometry, clock=self.clock)
        setting = self.setting
        store = FaultyStore(inner, self.clock, self.chance, setting.failing_loads, setting.failing_saves, setting.late)
        self.stores[namespace.rpartition("/")[2]] = store
        return store

    def _open_to_look(self, config: Any, namespace: str, geometry: Any) -> KVStore:
        """Open a store in the scheduler's process; nothing is read where the geometry is not known."""
        inner = open_store(config, namespace, geometry, clock=self.clock)
        if geometry is None:
            return inner
        store = FaultyStore(inner, self.clock, self.chance, self.setting.failing_loads, 0.0, self.setting.late)
        self._looking.append(store)
        return store

    def _work(self, output: Any) -> list[Work]:
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        resumed = set(cached.resumed_req_ids)
        for data in output.scheduled_new_reqs:
            starts[data.req_id] = data.num_computed_tokens
            resumed.add(data.req_id)
        found = []
        for request_id, count in output.num_scheduled_tokens.items():
            known = request_id in resumed or not self.setting.asynchronous
            tokens = list(self.scheduler.requests[request_id].all_token_ids) if known else None
            blocks = [list(row) for row in self.scheduler.kv_cache_manager.get_block_ids(request_id)]
            found.append(Work(request_id, starts[request_id], count, tokens, blocks, request_id in resumed))
        return found

    def _execute(self, output: Any, work: list[Work]) -> None:
        metadata = pickle.dumps(output.kv_connector_metadata)
        chunks = []
        for found in work:
            if found.tokens is not None:
                self._tokens[found.request_id] = found.tokens
            drafts = output.scheduled_spec_decode_tokens.get(found.request_id, [])
            self.happened["drafts"] += len(drafts)
            tokens = [*self._tokens[found.request_id], *drafts]
            chunks.append(Chunk(found.start, tokens[found.start : found.start + found.count], found.block_ids))
        runs = [
            self._begin(*one, copy.copy(output), metadata, list(zip(work, chunks, strict=True)))
            for one in zip(self.workers, self.memories, strict=True)
        ]
        hidden = embedded(chunks)
        for layer, name in enumerate(self.memories[0].layers) if chunks else ():
            for worker in self.workers:
                worker.wait_for_layer_load(name)
            hidden = forward(self.memories, layer, chunks, hidden, self.truth)
            for worker in self.workers:
                worker.save_kv_layer(name, None, None)
        sampled = {}
        for found, values in zip(work, hidden, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(found.request_id, [])
            if found.start + found.count == len(self._tokens[found.request_id]) + len(drafts):
                sampled[found.request_id] = self._sample(found, drafts, values[-1 - len(drafts) :])
        self._drafts = {found.request_id: self._draft(found) for found in work if found.request_id in sampled}
        outputs = [self._end(*run) for run in runs]
        results = [runner_output(output, sampled, kv_connector_output=outcome) for outcome in outputs]
        self._executed.append((output, self._aggregator.aggregate(results)))

    def _begin(
        self, worker: Any, memory: KVMemory, output: Any, metadata: bytes, work: list[tuple[Work, Chunk]]
    ) -> tuple[Any, Any]:
        """Do vLLM's work before the forward; return its entered context manager, and the output that it fills."""
        output.kv_connector_metadata = pickle.loads(metadata)  # noqa: S301 - our own, as vLLM does
        if not self.setting.announced_late:
            worker.handle_preemptions(output.kv_connector_metadata)
        memory.prepare(getattr(output, "new_block_ids_to_zero", None) or ())
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        memory.copy([(one.src_block_id, one.dst_block_id) for one in copies])
        self.happened["copies"] += len(copies)
        for found, chunk in work:
            memory.move_state(found.request_id, chunk, begins=found.begins)
        if self.setting.announced_late:
            worker.handle_preemptions(output.kv_connector_metadata)
        with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker):
            manager = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)
            with set_forward_context({}, self._config):
                return manager, manager.__enter__()

    def _end(self, manager: Any, output: Any) -> Any:
        with set_forward_context(None, self._config):
            manager.__exit__(None, None, None)
        return output

    def _sample(self, work: Work, drafts: Sequence[int], hidden: Sequence[int]) -> list[int]:
        """Return the tokens of the drafts that are right, and the one behind them; they are known from now on."""
        found = [next_token(hidden[0])]
        for draft, value in zip(drafts, hidden[1:], strict=True):
            if draft != found[-1]:
                break
            found.append(next_token(value))
        self._tokens[work.request_id] = [*self._tokens[work.request_id], *found]
        return found

    def _draft(self, work: Work) -> list[int]:
        """Draft tokens of a request, most of them right; each writes wrong KV behind the request's newest token."""
        drafts: list[int] = []
        tokens = self._tokens[work.request_id]
        for number in range(self.chance.randint(0, self.setting.drafts)):
            place = len(tokens) - 1 + number
            for memory in self.memories:
                for layer, name in enumerate(memory.layers):
                    worker = self.workers[memory.rank]
                    worker.wait_for_layer_load(name)
                    memory.write(layer, Chunk(place, [0], work.block_ids), [0])
                    worker.save_kv_layer(name, None, None)
            right = self.truth.following([*tokens, *drafts])
            drafts.append(right if self.chance.random() < 0.7 else self.chance.randrange(VOCABULARY))
        return drafts

    def _take_in(self, output: Any, result: Any) -> None:
        told = result.kv_connector_output
        self.happened["invalid"] += len(told.invalid_block_ids or ()) + len(getattr(told, "failed_recving", ()))
        self.scheduler.update_from_output(output, result)
        if self._drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(self._drafts), list(self._drafts.values())))
        for request in [request for request in self._requests if request.is_finished()]:
            self._requests.remove(request)
            self._check(request)

    def _check(self, request: Any) -> None:
        """Check that its tokens are those that follow from its prompt."""
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == self.truth.following(tokens), "a wrong token was served"
            tokens.append(token)
        keys = self.connector._scheduler._block_keys
        for size in {group.chunk_tokens for group in self.setting.cache_groups().groups}:
            for place, key in enumerate(keys.of(request, size) or [], 1):
                self.known[key] = tuple(tokens[: place * size])
        keys.forget(request.request_id)
        self.happened["finished"] += 1


def _is_block(path: Path) -> bool:
    return path.is_file() and re.fullmatch("[0-9a-f]{32,}", path.parent.name + path.name) is not None


def _specification(group: CacheGroup, page: int, *, latent: bool, indexed: bool, heads: int) -> Any:
    """Return a specification with 8 bytes per token and head, or per state, in pages of so many bytes."""
    if group.is_recurrent:
        return MambaSpec(
            block_size=group.block_size,
            shapes=((1, 1),),
            dtypes=(torch.int64,),
            page_size_padded=page,
            mamba_cache_mode="align",
        )
    cells = {"block_size": group.block_size, "num_kv_heads": heads, "dtype": torch.int64, "page_size_padded": page}
    if group.window is None and latent and not indexed:
        return MLAAttentionSpec(**cells, head_size=1)
    if group.window is None and latent:  # and an indexer's keys beside them
        kinds = [
            {"head_size": 1},
            {"head_size": CELL.itemsize, "dtype": torch.uint8, "page_size_padded": page + CELL.itemsize},
        ]
        layers = {name: MLAAttentionSpec(**{**cells, **kinds[at % 2]}) for at, name in enumerate(group.layer_names)}
        return UniformTypeKVCacheSpecs(block_size=group.block_size, kv_cache_specs=layers)
    cells |= {"head_size": 1, "head_size_v": 0}
    if group.window is None:
        return FullAttentionSpec(**cells)
    if group.window == RING:
        return kv_cache_interface.CircularBufferSpec(**cells)
    if group.is_local:
        return ChunkedLocalAttentionSpec(attention_chunk_size=group.window, **cells)
    kind = kv_cache_interface.SlidingWindowMLASpec if latent else SlidingWindowSpec
    return kind(sliding_window=group.window, **cells)
