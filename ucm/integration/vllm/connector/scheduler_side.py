"""The scheduler side of the connector."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.background import call_within
from ucm.config.load import wait_for_looks
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.file_contents import DigestCache, FileChangedError, FileContents, process_started
from ucm.hashing.model_identity import model_identity, namespace
from ucm.hashing.rank_geometry import rank_tags
from ucm.integration.vllm.config import KEY, sparse_method_config
from ucm.integration.vllm.connector.engine_facts import (
    asks_again,
    drafts_look_ahead,
    load_policy,
    outer_transfer,
    ranks,
    refuse_method_without_hooks,
    refuse_what_cannot_work,
    refuse_wrong_rotation,
)
from ucm.integration.vllm.connector.events import store_events
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.metadata import WeightsReport, geometries_of
from ucm.integration.vllm.connector.scheduler import PlanningOptions, PrefixCacheScheduler, all_tokens
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.metrics import create_counters
from ucm.logger import get_logger
from ucm.sparse.blocks import batches_in_flight
from ucm.sparse.factory import method_class
from ucm.store.factory import key_fingerprint, open_store
from ucm.store.memory.slab import Slab, default_bytes
from ucm.store.posix.layout import write_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.file_contents import Digests
    from ucm.hashing.model_identity import ModelIdentity
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.store.base import KVStore

#: Weights up to this many bytes are read before the engine continues, in less than a tenth of a second. At most
#: ``START_SECONDS`` are spent waiting for a medium that does not answer.
AT_ONCE, START_SECONDS = 64 << 20, 10.0
#: How many seconds ``close`` waits for a medium that does not answer.
CLOSE_SECONDS = 5.0


def engine_identity(
    vllm_config: Any, settings: ConnectorConfig, geometry: Mapping[str, Any] | None = None
) -> ModelIdentity:
    """Return the facts that the engine's blocks depend on, as far as known without reading the weights.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        settings: The connector's settings.
        geometry: The KV-cache groups and the layout of their KV.

    Raises:
        ConfigError: As for ``model_identity``, and if there is no such sparse method, or the key that authenticates
            blocks cannot be used.
    """
    # A sparse method changes which tokens later ones attend to, and so their KV.
    more = {**method_identity(vllm_config), "geometry": dict(geometry or {})}
    fingerprint = key_fingerprint(settings.store.as_store_config())
    if fingerprint:  # engines with other keys, or none, refuse each other's blocks
        more["authentication"] = fingerprint
    return model_identity(vllm_config, weights_id=settings.weights_id, more=more)


class WeightReader:
    """Identifies the weights that the engine serves, and with them the namespace of its blocks.

    A thread reads the files in the background, while they are in the page cache. Facts that need no reading, or a short
    one, are waited for.

    Args:
        identity: The engine's identity, with the files still to be read.
        settle: Prepares the namespace of a complete identity, and returns its name.
        since: When the engine may have begun to read the files, in seconds since the epoch.
    """

    def __init__(
        self, identity: ModelIdentity, settle: Callable[[ModelIdentity], str], since: float | None = None
    ) -> None:
        self._identity = identity
        self._settle = settle
        self._contents = FileContents(process_started() if since is None else since, DigestCache())
        self._namespace = ""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_alone = False  # whether no caller waits for the thread any more
        try:
            found = self._contents.look_up(identity.unread.values())
        except (OSError, FileChangedError) as error:
            self._refuse(error)
            return
        nbytes = sum(path.stat().st_size for path in found.unread)
        self._is_alone = nbytes > AT_ONCE
        if self._is_alone:
            get_logger(__name__).info(
                "[UCM.Hasher] %.1f GB of weights are read in the background to identify them; nothing is loaded or "
                "saved until then",
                nbytes / 1e9,
            )
        self._thread = threading.Thread(target=self._read, args=(found,), name="ucm-identity", daemon=True)
        self._thread.start()
        if not self._is_alone:
            self._wait(self._thread)

    @property
    def namespace(self) -> str:
        """The namespace of the engine's blocks; empty until it is known."""
        return self._namespace

    def close(self) -> None:
        """Stop reading; a thread that is stuck in a medium is abandoned."""
        self._contents.close()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _wait(self, thread: threading.Thread) -> None:
        thread.join(START_SECONDS)
        self._is_alone = True
        if self._failure is not None:
            raise self._failure
        if thread.is_alive():
            get_logger(__name__).warning(
                "[UCM.Hasher] the store's directories or the files of the weights have not answered for %.0f s: "
                "nothing is loaded or saved until they do",
                START_SECONDS,
            )

    def _read(self, found: Digests) -> None:
        try:
            found = self._contents.read(found)
            where = self._settle(self._identity.with_contents(found.of))
        except (OSError, FileChangedError) as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001 - raised to the waiting caller, or logged
            self._failure = error
            if self._is_alone:
                get_logger(__name__).exception("[UCM.Hasher] this engine runs without the store")
        else:
            if found.of:
                get_logger(__name__).info(
                    "[UCM.Hasher] the weights were identified after %.2f s: %s", found.seconds, found
                )
            self._namespace = where

    def _refuse(self, error: Exception) -> None:
        get_logger(__name__).warning(
            "[UCM.Hasher] this engine loads and saves nothing, because its weights cannot be identified: %s", error
        )


class SchedulerSide:
    """The connector in the scheduler process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in releases that do not pass it.
        settings: The connector's settings.
        connector_base: vLLM's connector class.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorConfig, connector_base: type) -> None:
        refuse_what_cannot_work(vllm_config, kv_cache_config)
        refuse_wrong_rotation(vllm_config)
        refuse_method_without_hooks(vllm_config)
        transfer, outer = vllm_config.kv_transfer_config, outer_transfer(vllm_config)
        engines = outer or transfer
        if hasattr(engines, "kv_load_failure_policy"):
            # vLLM's default ends a request whose blocks cannot be loaded; ours recomputes them.
            engines.kv_load_failure_policy = settings.load_failure
        groups = cache_groups(vllm_config, kv_cache_config)
        identity = engine_identity(vllm_config, settings, groups.facts)
        self._config = settings.store.as_store_config()
        self._authentication = key_fingerprint(self._config)
        self._tags = {group.index: rank_tags(vllm_config, group.index, spec=group.spec) for group in groups.groups}
        self._stores: dict[int, list[KVStore]] = {}
        self.block_pool: Any = None
        self._table: Any = None
        self._outlived = False  # whether vLLM's prefix cache may hold blocks from before the current keys
        self.hears_workers = hasattr(connector_base, "build_connector_worker_meta")
        self.counters = create_counters(vllm_config, settings)
        self.events = store_events(
            vllm_config,
            {group: len(tags) for group, tags in self._tags.items()},
            wanted=settings.kv_events,
            takes_events=hasattr(connector_base, "take_events"),
            hears_workers=self.hears_workers,
        )
        self._keys = BlockKeys(vllm_config, identity.seed, trust_media_names=settings.trust_media_names)
        self.policy = load_policy(connector_base, len(groups.groups), settings.connector)
        self._batches = batches_in_flight(vllm_config)
        self._ranks = ranks(vllm_config)
        # Where workers send nothing to the scheduler, several ranks agree through the slab on changed weights.
        needs_slab = transfer.is_kv_consumer or (self._ranks > 1 and not self.hears_workers)
        self._slab = Slab(settings.staging or default_bytes(), self._ranks) if needs_slab else None
        self._offered = 0  # the first step that sent the slab's address to the ranks
        self._opening: threading.Thread | None = None
        self._opened: Callable[[], None] | None = None
        self._ready_by = 0.0  # when requests stop waiting for the stores, as ``time.monotonic()``
        self._new_stager = partial(
            Stager, groups, seconds=settings.staging_deadline, rest_seconds=self._config.rest_seconds
        )
        self.scheduler = PrefixCacheScheduler(
            groups,
            self._keys,
            self._new_stager(self._slab),
            self.counters,
            PlanningOptions(
                batches=self._batches,
                min_hit_tokens=settings.min_hit_tokens,
                hit_ratio=settings.hit_ratio,
                save_decode_blocks=settings.save_decode_blocks,
                lasting_tokens=lasting_tokens(vllm_config),
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                reloads_preempted=self.policy.reloads_preempted,
                drops_last_block=drafts_look_ahead(vllm_config),
                asks_again=asks_again(connector_base),
                others=outer is not None,
                confirms=self._ranks > 1,
                room=kv_cache_config.num_blocks - 1 if self.policy.between_steps else None,
            ),
        )
        self.scheduler.events = self.events
        self._weights = WeightReader(identity, self._settle)
        self.poll()

    @property
    def namespace(self) -> str:
        """The namespace of the engine's blocks; empty until the weights are identified."""
        return self.scheduler.namespace

    def bind(self, block_pool: Any) -> None:
        """Keep vLLM's block pool and note its prefix cache."""
        self.block_pool = block_pool
        self.poll()

    def poll(self) -> None:
        """Begin lookups and saves once the namespace is known; called in each step.

        A change of weights empties vLLM's prefix cache, which then has another table. If that happens late, requests
        may have found blocks of the old weights there and saved them, and blocks computed from them, under new keys.
        """
        table = getattr(self.block_pool, "cached_block_hash_to_block", None)
        if table is not self._table:
            if self._outlived:
                self.start_anew()
            if self._table is not None:
                self.scheduler.doubt(waits=self.hears_workers and not self.policy.between_steps)
                self.scheduler.forget_others()
                if self.events is not None:
                    self.events.forget()
            self._table, self._outlived = table, False
        if not self.scheduler.namespace and self._weights.namespace:
            self.scheduler.namespace = self._weights.namespace
            self.scheduler.prepares = self._slab is not None
            if self._slab is None:
                where = self.scheduler.namespace
                get_logger(__name__).info("[UCM.Connector] namespace %s, nothing is looked up", where)
        if self.scheduler.prepares or self._opened is not None:
            self._prepare()

    def plan(self, scheduler_output: Any) -> StepPlan:
        """Return the workers' part of a step."""
        self.poll()
        if not self.hears_workers and self._slab is not None:
            self.reported(WeightsReport.of_records(self._slab.reports().values(), self._ranks))
        plan = self.scheduler.plan(scheduler_output)
        plan.authentication = self._authentication
        if self._slab is not None and self._opening is None:
            plan.slab = self._slab.address
            self._offered = self._offered or plan.step
        return plan

    def _prepare(self) -> None:
        """Open the stores once every rank has reported its block geometry."""
        if self._opened is not None:
            self.scheduler.prepares = False
            self._opened()
        if self._opening is not None:
            # No request waits for a medium that cannot be opened or does not answer.
            over = not self._opening.is_alive() or time.monotonic() >= self._ready_by
            self.scheduler.prepares = self.scheduler.prepares and not over
            return
        if self._slab is None:
            return
        records = self._slab.records()
        others = [rank for rank, record in records.items() if record.get("authentication", "") != self._authentication]
        if others:  # their logs name the keys
            self.scheduler.saves = self.scheduler.prepares = False
            get_logger(__name__).warning(
                "[UCM.Connector] nothing is loaded or saved, because ranks %s have another authentication key than the "
                "scheduler",
                others,
            )
        elif len(records) == self._ranks:
            self._begin_opening(records)
        elif self._offered and self.scheduler.step - self._batches >= self._offered:
            # Every rank has run a step that sent it the address.
            self._do_without_slab(set(range(self._ranks)) - set(records))

    def _do_without_slab(self, missing: set[int]) -> None:
        if self._ranks > 1 and not self.hears_workers:
            self.scheduler.saves = False
            get_logger(__name__).warning(
                "[UCM.Save] nothing is saved: in this vLLM release ranks %s on other hosts cannot tell the scheduler "
                "that their weights changed; use vLLM 0.18.0 or newer, or all ranks on one host",
                sorted(missing),
            )
        if not self.policy.between_steps:
            get_logger(__name__).warning(
                "[UCM.Load] ranks %s do not share this host's memory: nothing is loaded, because a load that fails "
                "could not be recomputed here; set connector: direct, with vLLM 0.11.1 or newer",
                sorted(missing),
            )
            self.scheduler.prepares = False
            return
        get_logger(__name__).warning(
            "[UCM.Load] ranks %s do not share this host's memory: every rank reads the store itself, and blocks are "
            "promised before they are verified",
            sorted(missing),
        )
        self._slab = None
        self.scheduler.stager.close()
        self.scheduler.stager = self._new_stager(None)
        self._begin_opening({})

    def _begin_opening(self, records: dict[int, dict[str, Any]]) -> None:
        where = self.scheduler.namespace

        def work() -> None:
            try:
                places = {group: len(tags) for group, tags in self._tags.items()}
                geometries = geometries_of(records, places) if records else None
                stores = {}
                for group, tags in self._tags.items():
                    of_group = [None] * len(tags) if geometries is None else geometries[group]
                    stores[group] = [
                        open_store(self._config, f"{where}/{tag}", geometry)
                        for tag, geometry in zip(tags, of_group, strict=True)
                    ]
            except Exception:  # noqa: BLE001 - the engine continues after any error
                get_logger(__name__).exception("[UCM.Load] nothing is loaded")
                return

            def begin() -> None:
                self._stores, self._opened = stores, None
                opened = [store for of_group in stores.values() for store in of_group]
                for store in opened:
                    self.counters.watch(store)
                count = f"{len(opened)} {'store' if len(opened) == 1 else 'stores'}"
                get_logger(__name__).info("[UCM.Connector] namespace %s, %s to look up", where, count)
                self.scheduler.stager.begin(stores, geometries)

            self._opened = begin

        self._ready_by = time.monotonic() + self.scheduler.stager.seconds
        self._opening = threading.Thread(target=work, name="ucm-open", daemon=True)
        self._opening.start()

    def _settle(self, identity: ModelIdentity) -> str:
        """Check that an identity's blocks can be stored, and write the identity there; callable from any thread."""
        where = namespace(identity)
        wait_for_looks((*self._config.directories, self._config.dram_directory))
        for tag in dict.fromkeys(tag for of_group in self._tags.values() for tag in of_group):
            open_store(self._config, f"{where}/{tag}", None).close()
            write_identity(self._config, f"{where}/{tag}", identity.to_json())
        return where

    def reported(self, report: WeightsReport) -> None:
        """Process the workers' report of their weights."""
        for number in report.adapters:
            self._keys.adapter_replaced(number)
        if self.scheduler.reported(report):
            self.start_anew()

    def start_anew(self) -> None:
        """Use keys from now on that were never used before."""
        self._outlived = getattr(self.block_pool, "cached_block_hash_to_block", None) is self._table
        self._keys.start_anew()
        self.scheduler.start_anew()
        if self.events is not None:
            if not self._outlived:  # vLLM announces that all blocks are gone
                self.events.forget()
            self.events.start_anew()

    def take_stats(self) -> Any:
        """Return the counts since the last call; None if there are none."""
        return self.counters.take()

    def close(self) -> None:
        """Close the stores."""
        self._weights.close()
        self._keys.close()
        if self._opening is not None:
            self._opening.join(CLOSE_SECONDS)
            self._prepare()
        self.scheduler.stager.close()
        self.counters.close()
        call_within(self._close_stores, "ucm-close", CLOSE_SECONDS)

    def _close_stores(self) -> None:
        for of_group in self._stores.values():
            for store in of_group:
                store.close()


#: The module that defines vLLM's requests; every process with a scheduler has imported it.
REQUESTS = "vllm.v1.request"


def method_identity(vllm_config: Any) -> dict[str, Any]:
    """Return the identity of the configured method; empty without one, or if prompts are computed as without it.

    KV that was computed under a method belongs to the method: its class, its options and the block size are part of
    the engine's identity. But where a method leaves prompts dense, as `BlockTopK` does, the blocks of prompts are those
    that an engine without a method computes, and are shared with it. Then KV that was computed under the method must
    not have such a name, neither in the store nor in vLLM's own prefix cache, because the next prompt would be computed
    on top of it. So blocks of generated tokens have no name in the store, and in vLLM's cache a name of their request's
    own (`ucm.sparse.blocks`).

    Raises:
        ConfigError: If there is no such method, or an option is wrong.
    """
    found = sparse_method_config(vllm_config)
    if found is None:
        return {}
    name, options = found
    method = method_class(name)
    identity = method.identity(options)
    if method.prompts_are_dense(options) and _generated_blocks_are_kept_apart(vllm_config):
        return {}
    return {KEY: {**identity, "block_size": vllm_config.cache_config.block_size}}


def lasting_tokens(vllm_config: Any) -> Callable[[int], int]:
    """Return a function from a prompt's length to how many of the tokens have KV that depends on tokens only."""
    found = sparse_method_config(vllm_config)
    if found is None:
        return all_tokens
    name, options = found
    return partial(method_class(name).lasting_tokens, options)


def _generated_blocks_are_kept_apart(vllm_config: Any) -> bool:
    """Return whether no other request finds generated blocks; up to 0.10.0 requests have no hasher of their own."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return True
    requests = sys.modules.get(REQUESTS)
    return requests is None or "block_hasher" in inspect.signature(requests.Request.__init__).parameters
