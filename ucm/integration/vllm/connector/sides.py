"""The connector's two sides: one in the scheduler's process, one in each worker's."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ucm.background import call_within
from ucm.clock import SYSTEM
from ucm.compat import (
    ConnectorAbilities,
    LoadPolicy,
    batches_in_flight,
    drafts_look_ahead,
    freed_encodings,
    load_policy,
    optional,
    outer_transfer,
    prefix_cache_table,
    rank_of,
    ranks,
    recompute_failed_loads,
    runs_micro_batches,
    weights_move,
)
from ucm.config.load import make_silent_directories
from ucm.errors import ConfigError
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.model_identity import namespace
from ucm.hashing.rank_geometry import must_save, part_tags, rank_tags
from ucm.integration.vllm import hooks
from ucm.integration.vllm.connector.events import store_events
from ucm.integration.vllm.connector.failures import (
    refuse_method_without_hooks,
    refuse_what_cannot_work,
    refuse_wrong_rotation,
)
from ucm.integration.vllm.connector.identity import (
    CLOSE_SECONDS,
    LiveAdapters,
    LiveWeights,
    WeightReader,
    engine_identity,
    frees_blocks,
    lasting_tokens,
    running_model,
)
from ucm.integration.vllm.connector.kv_cache import (
    CacheGroups,
    DeviceMemory,
    HostMemory,
    cache_groups,
    in_slices,
    tensors_of,
)
from ucm.integration.vllm.connector.metadata import WeightsReport, geometries_of, geometry_record
from ucm.integration.vllm.connector.prefix_cache import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.connector.transfer import STAGING_BYTES, GroupTransfer, HostTransfer, StagedTransfer
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.integration.vllm.metrics import create_counters
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.logger import get_logger
from ucm.store.factory import key_fingerprint, open_store, opening_store
from ucm.store.memory.slab import Slab, SlabReader, default_bytes
from ucm.store.posix.layout import write_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.model_identity import ModelIdentity
    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.store.base import KVStore
    from ucm.store.memory.slab import SlabAddress
    from ucm.vllm_types import KVCacheConfig, Request, SchedulerOutput, VllmConfig

#: The log line for each KV-cache group: its number of layers, and a block's tokens and bytes on this rank.
LAYERS = "{} layers in {} of {} tokens, {} bytes each"


def create_slab(
    vllm_config: VllmConfig, settings: ConnectorConfig, groups: CacheGroups, ranks: int, *, clock: Clock = SYSTEM
) -> Slab:
    """Create a slab that keeps memory for the longest request that the store can hold, before the engine serves any.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        settings: The connector's settings.
        groups: The model's KV-cache groups.
        ranks: The number of workers that write a record into the slab.
        clock: What time passes by.
    """
    parts = {group: len(tags) for group, tags in tags_of(vllm_config, groups).items()}
    longest = groups.staged_bytes(vllm_config.model_config.max_model_len, parts)
    capacity = settings.store.as_store_config().capacity_bytes
    if capacity is not None:
        longest = min(longest, capacity)
    # vLLM's UniProcExecutor, its default for one rank, runs the worker in the scheduler's process.
    private = optional(vllm_config.parallel_config, "distributed_executor_backend") == "uni"
    return Slab(settings.staging or default_bytes(), ranks, longest, private=private, clock=clock)


def tags_of(vllm_config: VllmConfig, groups: CacheGroups) -> dict[int, list[str]]:
    """Return for each group the tags of all parts of its blocks on all ranks, see `rank_tags`."""
    return {
        group.index: rank_tags(vllm_config, group.index, spec=group.spec, shards=groups.shards)
        for group in groups.groups
    }


def stored_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, settings: ConnectorConfig
) -> CacheGroups:
    """Return the KV-cache groups, with blocks in chunks and in slices of heads as the settings say.

    Where a sparse method frees blocks, each is stored alone, because the first ones of a chunk may be free when the
    last one is filled.

    Raises:
        ConfigError: If a chunk is longer than any request, so that nothing would ever be stored; or see `in_slices`.
        UnsupportedModelError: See `cache_groups` and `in_slices`.
    """
    tokens = 0 if frees_blocks(vllm_config) else settings.chunk_tokens
    groups = in_slices(cache_groups(vllm_config, kv_cache_config, tokens), settings.kv_head_shards, vllm_config)
    if tokens and groups.alignment > (longest := vllm_config.model_config.max_model_len):
        raise ConfigError(
            f"a chunk has {groups.alignment} tokens, and a request at most {longest}: nothing would be stored",
            where=f"chunk_tokens = {tokens}",
            fix="choose a chunk that is much shorter than prompts",
        )
    return groups


def when_loads_run(connector_base: type, groups: CacheGroups, settings: ConnectorConfig) -> LoadPolicy:
    """Return when loads run, which both sides decide from the same facts."""
    return load_policy(connector_base, groups.windows, settings.connector, has_states=groups.has_states)


class SchedulerSide(PrefixCacheScheduler):
    """The connector in the scheduler process: what plans, and the engine, the ranks and the stores that it plans for.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in releases that do not pass it.
        settings: The connector's settings.
        connector_base: vLLM's connector class.
        clock: Time and threads.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig | None,
        settings: ConnectorConfig,
        connector_base: type,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        refuse_what_cannot_work(vllm_config, kv_cache_config)
        refuse_wrong_rotation(vllm_config)
        refuse_method_without_hooks(vllm_config)
        transfer, outer = vllm_config.kv_transfer_config, outer_transfer(vllm_config)
        engines = outer or transfer
        #: Whether answers say what is saved. Beside another connector's answer, that ended engines before vLLM merged
        #: the two (its pull request 46777), and a transport's answer is enough.
        self.hands_over = outer is None
        recompute_failed_loads(engines, settings.load_failure)
        groups = stored_groups(vllm_config, kv_cache_config, settings)
        identity = engine_identity(vllm_config, settings, groups.facts)
        self._config = settings.store.as_store_config()
        self._authentication = key_fingerprint(self._config)
        self._tags = tags_of(vllm_config, groups)
        self._stores: dict[int, list[KVStore]] = {}
        self.block_pool: Any = None
        self._table: Any = None
        self._outlived = False  # whether vLLM's prefix cache may hold blocks from before the current keys
        can = ConnectorAbilities(connector_base)
        self.hears_workers = can.hears_workers
        self.policy = when_loads_run(connector_base, groups, settings)
        self._ranks = ranks(vllm_config)
        # Where workers send nothing to the scheduler, several ranks agree through the slab on changed weights.
        needs_slab = transfer.is_kv_consumer or (self._ranks > 1 and not self.hears_workers)
        self._slab = create_slab(vllm_config, settings, groups, self._ranks, clock=clock) if needs_slab else None
        self._offered = 0  # the first step that sent the slab's address to the ranks
        self._heard = 0  # the last step at which the ranks' reports were read from the slab
        super().__init__(
            groups,
            BlockKeys(vllm_config, identity.seed, trust_media_names=settings.trust_media_names, clock=clock),
            Stager(groups, self._slab, settings.staging_deadline, self._config.rest_seconds, clock=clock),
            create_counters(vllm_config, settings, clock=clock),
            PlanningOptions(
                batches=batches_in_flight(vllm_config),
                min_hit_tokens=settings.min_hit_tokens,
                hit_ratio=settings.hit_ratio,
                save_decode_blocks=settings.save_decode_blocks,
                lasting_tokens=lasting_tokens(vllm_config),
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                reloads_preempted=self.policy.reloads_preempted,
                drops_last_block=drafts_look_ahead(vllm_config),
                asks_again=can.asks_again,
                others=outer is not None,
                confirms=self._ranks > 1,
                touch_seconds=self._config.touch_seconds,
                lease_seconds=self._config.lease_seconds,
                frees_blocks=frees_blocks(vllm_config),
                room=kv_cache_config.num_blocks - 1 if kv_cache_config and self.policy.between_steps else None,
            ),
            clock=clock,
        )
        self.events = store_events(
            vllm_config,
            {group: len(tags) for group, tags in self._tags.items()},
            wanted=settings.kv_events,
            takes_events=can.takes_events,
            hears_workers=self.hears_workers,
            clock=clock,
        )
        self._weights = WeightReader(identity, self._settle, clock=clock)
        self.poll()

    def bind(self, block_pool: Any) -> None:
        """Keep vLLM's block pool and note its prefix cache."""
        self.block_pool = block_pool
        self.poll()

    def poll(self) -> None:
        """Begin lookups and saves once the namespace is known; called in each step.

        A change of weights empties vLLM's prefix cache, which then has another table. If that happens late, requests
        may have found blocks of the old weights there and saved them, and blocks computed from them, under new keys.
        """
        table = prefix_cache_table(self.block_pool)
        if table is not self._table:
            if self._outlived:
                self.start_anew()
            if self._table is not None:
                self.doubt(waits=self.hears_workers and not self.policy.between_steps)
                self.others.forget()
                self._block_keys.prefix_cache_emptied()
                if self.events is not None:
                    self.events.forget()
            self._table, self._outlived = table, False
        if not self.namespace and self._weights.namespace:
            self.namespace = self._weights.namespace
            self.prepares = self._slab is not None
            if self._slab is None:
                where = self.namespace
                get_logger(__name__).info("[UCM.Connector] namespace %s, nothing is looked up", where)
        if self.prepares:
            self._prepare()
        if not self.hears_workers and self._slab is not None and self._heard != self.step:
            # Once per step, and before it promises blocks, because not every load can be taken back.
            self._heard = self.step
            reports = [WeightsReport(**record) for record in self._slab.reports().values()]
            self.reported(WeightsReport.merged(reports, missing=len(reports) < self._ranks))

    def hit(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens of a hit beyond the computed ones, and whether they are loaded between two steps.

        None: vLLM asks again in the next step.
        """
        self.poll()
        tokens = self.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self.policy.between_steps

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Return the workers' part of a step."""
        self.poll()
        self._block_keys.next_step(freed_encodings(scheduler_output))
        plan = super().plan(scheduler_output)
        plan.authentication = self._authentication
        if self._slab is not None and (self.prepares or not self.namespace):
            plan.slab = self._slab.address
            self._offered = self._offered or plan.step
        return plan

    def _prepare(self) -> None:
        """Begin lookups once every rank has reported its block geometry."""
        if self._slab is None:
            return
        records = self._slab.records()
        others = [rank for rank, record in records.items() if record.get("authentication", "") != self._authentication]
        if others:  # their logs name the keys
            self.saves = self.prepares = False
            get_logger(__name__).warning(
                "[UCM.Connector] nothing is loaded or saved, because ranks %s have another authentication key than the "
                "scheduler",
                others,
            )
        elif len(records) == self._ranks:
            self._begin(records)
        elif self._offered and self.step - self._options.batches >= self._offered:
            # Every rank has run a step that sent it the address.
            self._do_without_slab(set(range(self._ranks)) - set(records))

    def _do_without_slab(self, missing: set[int]) -> None:
        if self._ranks > 1 and not self.hears_workers:
            self.saves = False
            get_logger(__name__).warning(
                "[UCM.Save] nothing is saved: in this vLLM release ranks %s on other hosts cannot tell the scheduler "
                "that their weights changed; use vLLM 0.18.0 or newer, or all ranks on one host",
                sorted(missing),
            )
        if not self.policy.between_steps:
            get_logger(__name__).warning(
                "[UCM.Load] ranks %s do not share this host's memory: nothing is loaded, because a load that fails "
                "could not be recomputed here; %s",
                sorted(missing),
                "set connector: direct, with vLLM 0.30.0 or newer for sliding windows or several groups, else 0.11.1",
            )
            self.prepares = False
            return
        get_logger(__name__).warning(
            "[UCM.Load] ranks %s do not share this host's memory: every rank reads the store itself, and blocks are "
            "promised before they are verified",
            sorted(missing),
        )
        self._slab = None
        self._begin({})

    def _begin(self, records: dict[int, dict[str, Any]]) -> None:
        """Begin lookups, which wait for the stores to open, as long as a lookup may take.

        Args:
            records: The ranks' records; empty if they read the stores themselves.
        """
        self.prepares = False
        where, geometries = self.namespace, None
        if records:
            try:
                geometries = geometries_of(records, {group: len(tags) for group, tags in self._tags.items()})
            except Exception:  # noqa: BLE001 - the engine continues after any error
                get_logger(__name__).exception("[UCM.Load] nothing is loaded")
                return
        for group, tags in self._tags.items():
            of_group = [None] * len(tags) if geometries is None else geometries[group]
            self._stores[group] = [
                opening_store(self._config, f"{where}/{tag}", geometry, clock=self._clock)
                for tag, geometry in zip(tags, of_group, strict=True)
            ]
        stores = [store for of_group in self._stores.values() for store in of_group]
        for store in stores:
            self.counters.watch(store.stats)
        count = f"{len(stores)} {'store' if len(stores) == 1 else 'stores'}"
        get_logger(__name__).info("[UCM.Connector] namespace %s, %s to look up", where, count)
        self.stager.begin(self._stores, geometries)

    def _settle(self, identity: ModelIdentity) -> str:
        """Check that an identity's blocks can be stored, and write the identity there; callable from any thread."""
        where = namespace(identity)
        make_silent_directories()
        for tag in dict.fromkeys(tag for of_group in self._tags.values() for tag in of_group):
            open_store(self._config, f"{where}/{tag}", None, clock=self._clock).close()
            write_identity(self._config, f"{where}/{tag}", identity.to_json())
        return where

    def reported(self, report: WeightsReport) -> bool:
        """Process the workers' report of their weights and models; use other keys if the weights changed."""
        for number in report.adapters:
            self._block_keys.adapter_replaced(number)
        changed = super().reported(report)
        if changed:
            self.start_anew()
        return changed

    def start_anew(self) -> None:
        """Use keys from now on that were never used before."""
        self._outlived = prefix_cache_table(self.block_pool) is self._table
        self._block_keys.start_anew()
        super().start_anew()
        if self.events is not None:
            if not self._outlived:  # vLLM announces that all blocks are gone
                self.events.forget()
            self.events.start_anew()

    def close(self) -> None:
        """Close the stores."""
        self._weights.close()
        self._block_keys.close()
        self.stager.close()
        self.counters.close()
        call_within(self._close_stores, "ucm-close", CLOSE_SECONDS, clock=self._clock)

    def _close_stores(self) -> None:
        for of_group in self._stores.values():
            for store in of_group:
                store.close()


class WorkerSide:
    """The connector in a worker process; its arguments are those of `SchedulerSide`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig | None,
        settings: ConnectorConfig,
        connector_base: type,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._connector_base, self._can = connector_base, ConnectorAbilities(connector_base)
        self.counters = create_counters(vllm_config, settings, clock=clock)
        if sparse_method_config(vllm_config) is not None:
            self.counters.watch_method(self._method_figures)
        self._memories: list[HostMemory | DeviceMemory] = []
        self._on_host = False
        #: Moves nothing until a plan has the namespace: graph capture and memory profiling happen before any step.
        self.worker = TransferWorker({}, self.counters, clock=clock)
        self._has_begun = False
        self._slab = SlabReader(clock=clock)
        self._offered: SlabAddress | None = None
        self._weights: LiveWeights | None = None
        self._adapters: LiveAdapters | None = None
        # Releases whose workers send nothing to the scheduler read their reports from the slab.
        self._reports_by_slab = not self._can.hears_workers
        self._authentication = key_fingerprint(settings.store.as_store_config())
        self._refusal_said = False
        self._step = 0
        self._handled: BaseException | None = None  # what is being handled where the step began
        self.report, self._reported = WeightsReport(), WeightsReport()

    @property
    def _rank(self) -> int:
        return rank_of(self._vllm_config) % ranks(self._vllm_config)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Locate the blocks in the KV caches.

        Raises:
            UnknownLayoutError: If a layer's blocks cannot be located.
            ConfigError: If the scheduler looks for another rank's blocks, see `is_replicated`.
        """
        # Without the configuration, a worker learns the number of blocks too late.
        num_blocks = None if self._kv_cache_config is None else self._kv_cache_config.num_blocks
        about = {"layout": str(optional(self._kv_cache_config, "kv_cache_layout"))}
        self._on_host = all(
            tensor.device.type == "cpu" for kv_cache in kv_caches.values() for tensor in tensors_of(kv_cache)
        )
        memory = HostMemory if self._on_host else DeviceMemory
        self._groups = stored_groups(self._vllm_config, self._kv_cache_config, self._settings)
        self._memories = [
            memory(part, kv_caches, num_blocks, about) for group in self._groups.groups for part in group.parts
        ]
        said = "; ".join(
            LAYERS.format(len(one.layouts), one.group.stored_as, one.group.chunk_tokens, one.geometry.nbytes)
            for one in self._memories
            if not one.group.place  # all slices are alike
        )
        get_logger(__name__).info("[UCM.Connector] %s: %s", self._settings.connector, said)
        for one in self._memories:
            self._place(one.group)  # refuses one that the scheduler would take for another
        self._adapters = LiveAdapters.of(running_model())
        self._watch_weights()

    def begin(self, plan: StepPlan) -> None:
        """Begin a step; transfers start with the first step whose plan has the namespace."""
        if plan.step != self._step:
            self._step, self._handled = plan.step, sys.exc_info()[1]
            self._look_at_weights(plan)
            if self._adapters is not None:
                self.report.adapters = self._adapters.replaced()
        if plan.slab is not None and plan.slab != self._offered:
            self._offered = plan.slab
            self._answer(plan.slab)
        if self._reports_by_slab and self._slab.attached:
            report = self.take_report()
            if report is not None and not self._slab.report(report.to_record()):
                self._reports_by_slab = False
                get_logger(__name__).warning(
                    "[UCM.Save] more LoRA adapters were replaced in place than this worker can report; from here on, "
                    "nothing that this engine computes is saved. Restart it to save again"
                )
        if not plan.namespace:
            return
        if not self._has_begun:
            self._has_begun, self.worker = True, self._create_worker(plan.namespace)
        if not self.is_valid(plan):
            self.worker.refuse(plan)
        elif self.report.adapters:
            self.worker.refuse(plan, self.report.adapters)
        self.worker.begin(plan)

    def is_valid(self, plan: StepPlan) -> bool:
        """Return whether the weights and the authentication key are those for which a step was planned."""
        return plan.epoch > self.report.changed and self._has_key_of(plan)

    def load(self, plan: StepPlan, forward_context: Any, **given: Any) -> None:
        """Load a step's blocks before its forward; the other arguments are those that vLLM gives."""
        del forward_context, given
        self.worker.load(plan)

    def save(self, plan: StepPlan) -> None:
        """Save the blocks that a step has filled, after its forward; nothing if an error or a signal has ended that.

        From 0.10.1.1 on, vLLM calls this in a ``finally``.
        """
        if sys.exc_info()[1] is self._handled:
            self.worker.save(plan)

    def _has_key_of(self, plan: StepPlan) -> bool:
        """Return whether the scheduler that made a plan has the same authentication key; log once if it has not.

        The key's file may differ on this host, or have changed between the starts of the processes. The namespace is
        that of the scheduler's key, so that all others would refuse this worker's blocks.
        """
        if plan.authentication == self._authentication:
            return True
        if not self._refusal_said:
            self._refusal_said = True
            get_logger(__name__).error(
                "[UCM.Connector] this worker neither loads nor saves: the fingerprint of its authentication key is %s, "
                "and the scheduler's is %s; give all hosts the same authentication_key_file and restart the engine",
                self._authentication or "none",
                plan.authentication or "none",
            )
        return False

    def _answer(self, address: SlabAddress) -> None:
        """Open the slab and write this rank's block geometries into it."""
        record = {"groups": self._geometries(), "authentication": self._authentication}
        if not self._slab.attach(address, self._rank, record):
            get_logger(__name__).info(
                "[UCM.Load] rank %d cannot open the memory in which blocks are staged", self._rank
            )

    def _geometries(self) -> dict[int, dict[str, Any]]:
        """Return the records of this rank's parts of the blocks, by group; see `geometry_record`."""
        return {
            memory.group.index: geometry_record([self._place(part) for part in memory.group.parts], memory.geometry)
            for memory in self._memories
        }

    def end(self) -> None:
        """End a step."""
        if self._weights is not None:
            self._weights.stepped()

    def take_report(self) -> WeightsReport | None:
        """Return the report about the weights if it has changed since the last call."""
        if self.report == self._reported:
            return None
        self._reported = replace(self.report)
        return self._reported

    def _watch_weights(self) -> None:
        """Begin to watch the weights; must be called by the runner, which has the model."""
        begun = self._clock.monotonic()
        model = None if weights_move(self._vllm_config) else running_model()
        transferred = optional(self._vllm_config, "weight_transfer_config") is not None
        reason = "vLLM moves them, or the connector cannot reach the model"
        try:
            self._weights = None if model is None else LiveWeights(model, thorough=transferred, clock=self._clock)
        except (RuntimeError, NotImplementedError) as error:  # tensor subclasses may have no storage of their own
            reason = str(error)
        if self._weights is None:
            get_logger(__name__).info(
                "[UCM.Connector] in-place changes of the weights are noticed only after reset_connector=True (%s)",
                reason,
            )
            return
        get_logger(__name__).info(
            "[UCM.Connector] weights are watched for in-place changes (%.2f s)", self._clock.monotonic() - begun
        )

    def _look_at_weights(self, plan: StepPlan) -> None:
        looks = plan.verify or plan.moves
        if looks and (plan.verify or plan.confirmed is not None):
            self.report.looked = plan.step
        if self._weights is None:
            return
        self._weights.step()
        if looks and self._weights.changed(wholly=plan.verify):
            self.report.changed = plan.epoch
            get_logger(__name__).warning(
                "[UCM.Connector] the weights were changed in place: nothing is loaded or saved under their old identity"
            )

    def _create_worker(self, namespace: str) -> TransferWorker:
        config, groups = self._vllm_config, self._groups
        transfers = {(one.group.index, one.group.place): self._transfer(one, namespace) for one in self._memories}
        # A layer of a micro-batch is computed before the same layer of the whole batch.
        batch_by_batch = runs_micro_batches(config) or groups.has_states
        worker = TransferWorker(
            transfers,
            self.counters,
            policy=when_loads_run(self._connector_base, groups, self._settings),
            layer_wise=self._settings.connector == "layerwise" and not batch_by_batch,
            clock=self._clock,
        )
        worker.settles = bool(optional(self._kv_cache_config, "needs_kv_cache_zeroing"))
        worker.reports_stored = self._settings.kv_events and self._can.hears_workers
        worker.counted_group = groups.leading if self._rank == 0 else None
        # Steps that load must not replay their layers as one graph; vLLM supports this request from 0.17.1 on.
        worker.overlaps = self._on_host or self._can.runs_piecewise
        return worker

    def _tag(self, group: CacheGroup) -> str:
        config, shards = self._vllm_config, self._groups.shards
        return part_tags(config, group.index, spec=group.spec, shards=shards)[group.place]

    def _place(self, group: CacheGroup) -> int:
        """Return the index of this rank's part of a group, or of one of them, among the different ones of all ranks."""
        tags = rank_tags(self._vllm_config, group.index, spec=group.spec, shards=self._groups.shards)
        return tags.index(self._tag(group))

    def _transfer(self, memory: HostMemory | DeviceMemory, namespace: str) -> GroupTransfer:
        """Create a group's transfer: in place for a KV cache in host memory, else through staging memory."""
        config = self._settings.store.as_store_config()
        # Every rank copies queued blocks of each group out of the KV cache, so they share the memory, and the store.
        most = default_bytes() if config.capacity_bytes is None else min(default_bytes(), config.capacity_bytes)
        slices = max(1, memory.group.slices)
        room = min(config.save_queue_bytes // slices, max(1, most // (ranks(self._vllm_config) * len(self._memories))))
        config = replace(config, save_queue_bytes=room)
        store = opening_store(config, f"{namespace}/{self._tag(memory.group)}", memory.geometry, clock=self._clock)
        self.counters.watch(store.stats)
        found: GroupTransfer
        if isinstance(memory, HostMemory):
            found = HostTransfer(memory, store, self._slab, room, clock=self._clock)
        else:
            staging = STAGING_BYTES // slices
            found = StagedTransfer(memory, store, self._slab, staging, save_queue_bytes=room, clock=self._clock)
        found.place = self._place(memory.group)
        found.saves = must_save(self._vllm_config, spec=memory.group.spec)
        return found

    def _method_figures(self) -> Mapping[str, float]:
        """Return the figures of a sparse method in this worker."""
        method = hooks.worker_method(self._vllm_config)
        if method is None or self._vllm_config.parallel_config.rank != 0:  # all ranks do the same with a request
            return {}
        return method.figures()

    def close(self) -> None:
        """Finish transfers and close everything."""
        if self._has_begun:
            self.worker.close()
        self._slab.close()
        self.counters.close()
