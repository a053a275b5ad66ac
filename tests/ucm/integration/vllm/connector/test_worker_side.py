"""The worker side, between vLLM's calls and the transfers: it starts, and refuses, as planned."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec, patch

import pytest

from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig
from tests.ucm.integration.vllm.connector.tensors import tensor
from tests.ucm.integration.vllm.connector.test_transfer_worker import Counts
from tests.ucm.store.frozen import FrozenDirectory
from tests.ucm.store.keys import key_file, secret
from ucm.config.load import load_connector_config
from ucm.integration.vllm import hooks
from ucm.integration.vllm.blend.scheduler import Blend, BlendPlan
from ucm.integration.vllm.blend.sides import BlendWorkerSide
from ucm.integration.vllm.blend.worker import BlendWorker
from ucm.integration.vllm.connector import kv_cache, sides
from ucm.integration.vllm.connector.identity import LiveAdapters, LiveWeights
from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups, HostMemory
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan, WeightsReport
from ucm.integration.vllm.connector.sides import WorkerSide
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.integration.vllm.metrics import ConnectorCounters, create_counters
from ucm.logger import get_logger
from ucm.sparse.base import SparseMethod
from ucm.store.authentication import Authenticator
from ucm.store.base import BlockKey
from ucm.store.memory.slab import SlabAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.store.base import TierStats

MOVES = [BlockMoves("r", 0, [], [], [])]
BLEND = Blend("r", 0, 16, [], [], [], [], 0)


class Side:
    """A worker side with the test's weights and transfers."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        extra = {"store": {"directories": str(directory / "store")}, "metrics": False}
        engine = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        self.side = WorkerSide(engine, None, load_connector_config(extra), object)
        self.worker: Any = create_autospec(TransferWorker, instance=True)
        self.weights: Any = create_autospec(LiveWeights, instance=True)
        self.weights.changed.return_value = False
        monkeypatch.setattr(self.side, "_create_worker", self._made)
        self.side._weights = self.weights
        self.namespaces: list[str] = []

    def _made(self, namespace: str) -> Any:
        self.namespaces.append(namespace)
        return self.worker


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Side:
    return Side(tmp_path, monkeypatch)


def test_nothing_is_moved_until_it_is_known_whose_blocks_these_are(made: Side) -> None:
    made.side.begin(StepPlan(1))
    made.worker.begin.assert_not_called()
    made.side.begin(StepPlan(2, "model-1"))
    made.side.begin(StepPlan(3, "model-1"))
    assert made.namespaces == ["model-1"]
    assert made.worker.begin.call_count == 2
    assert made.side.worker is made.worker


def test_the_slab_of_chunks_is_opened_before_it_is_known_whose_they_are(tmp_path: Path) -> None:
    """Its address comes with that of the other one, which is not sent any more once the namespace is known."""
    extra = {"store": {"directories": str(tmp_path / "store")}, "metrics": False}
    engine = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    side: Any = BlendWorkerSide(engine, None, load_connector_config(extra), object)
    side._blending = create_autospec(BlendWorker, instance=True)
    address = SlabAddress(1, 2, b"token", 4096)
    side.begin(StepPlan(1, blend=BlendPlan(slab=address)))
    side._blending.attach.assert_called_once_with(address)


@contextmanager
def forward(side: WorkerSide, plan: StepPlan) -> Iterator[None]:
    """Enclose a forward as vLLM does."""
    side.begin(plan)
    try:
        yield
    finally:
        side.save(plan)


def test_a_step_whose_forward_was_left_saves_nothing(made: Side) -> None:
    """By an error or a signal: vLLM asks for the saves all the same, of blocks that have no KV yet."""
    plans = [StepPlan(step, "m", saves=MOVES) for step in (1, 2)]
    with pytest.raises(SystemExit), forward(made.side, plans[0]):
        sys.exit()
    made.worker.save.assert_not_called()
    try:
        int("none")
    except ValueError:  # an engine in the process of a client, which may handle an error of its own
        with forward(made.side, plans[1]):
            pass
    made.worker.save.assert_called_once_with(plans[1])


def test_weights_are_looked_at_only_where_blocks_are_moved(made: Side) -> None:
    made.side.begin(StepPlan(1, "m"))
    made.weights.changed.assert_not_called()
    for step, kind in enumerate(("loads", "saves", "late_saves"), 2):
        plan = StepPlan(step, "m", **{kind: MOVES})  # type: ignore[arg-type]
        made.side.begin(plan)
        made.side.begin(plan)  # vLLM calls in two places
        assert made.weights.changed.call_count == step - 1
    made.weights.changed.assert_called_with(wholly=False)
    made.worker.refuse.assert_not_called()
    assert made.side.take_report() is None


def test_a_plan_of_changed_weights_is_refused_until_the_scheduler_starts_anew(made: Side) -> None:
    made.weights.changed.side_effect = [True, False, False]
    plans = [StepPlan(step, "m", loads=MOVES, epoch=epoch) for step, epoch in enumerate((0, 0, 1), 1)]
    for plan in plans:
        made.side.begin(plan)
    assert [call.args[0] for call in made.worker.refuse.call_args_list] == plans[:2]
    assert made.side.take_report() == WeightsReport(changed=0)
    assert made.side.take_report() is None


def test_moves_of_a_replaced_adapter_are_refused_for_good_and_reported_once(made: Side) -> None:
    adapters = made.side._adapters = create_autospec(LiveAdapters, instance=True)
    adapters.replaced.side_effect = [frozenset(), frozenset({7}), frozenset({7})]
    plans = [StepPlan(step, "m", saves=MOVES) for step in (1, 2, 3)]
    told = []
    for plan in plans:
        made.side.begin(plan)
        told.append(made.side.take_report())
    assert [call.args for call in made.worker.refuse.call_args_list] == [(plan, {7}) for plan in plans[1:]]
    assert told == [None, WeightsReport(adapters=frozenset({7})), None]


@pytest.mark.parametrize("watched", [True, False])
def test_a_look_at_all_weights_is_reported(made: Side, *, watched: bool) -> None:
    if not watched:
        made.side._weights = None
    made.side.begin(StepPlan(7, "m", verify=True))
    assert made.side.take_report() == WeightsReport(looked=7)
    if watched:
        made.weights.changed.assert_called_once_with(wholly=True)


@pytest.mark.parametrize("watched", [True, False])
def test_each_look_is_reported_where_ranks_wait_for_each_other(made: Side, *, watched: bool) -> None:
    if not watched:
        made.side._weights = None
    told = []
    for plan in (
        StepPlan(1, "m", saves=MOVES, confirmed=0),
        StepPlan(2, "m", confirmed=0),
        StepPlan(3, "m", blend=BlendPlan([BLEND]), confirmed=1),
        StepPlan(4, "m", saves=MOVES),
    ):
        made.side.begin(plan)
        told.append(made.side.take_report())
    assert told == [WeightsReport(looked=1), None, WeightsReport(looked=3), None]
    assert made.weights.changed.call_count == (3 if watched else 0)


def test_weights_are_looked_at_before_it_is_known_whose_blocks_these_are(made: Side) -> None:
    """Reading a large model takes minutes: a pause or a reset of the prefix cache in that time counts, too."""
    made.side.begin(StepPlan(1))
    made.weights.step.assert_called_once_with()
    made.side.begin(StepPlan(2, verify=True))
    made.weights.changed.assert_called_once_with(wholly=True)
    assert made.side.take_report() == WeightsReport(looked=2)
    assert made.side.worker is not made.worker


@pytest.mark.parametrize(
    ("eplb", "group", "model", "watches"),
    [(False, 0, "model", True), (True, 0, "model", False), (False, 8, "model", False), (False, 0, None, False)],
)
def test_weights_are_watched_where_they_can_be(
    made: Side, monkeypatch: pytest.MonkeyPatch, *, eplb: bool, group: int, model: str | None, watches: bool
) -> None:
    """Experts that move between ranks constantly change their weights, and so do layers that share a buffer."""
    config: Any = made.side._vllm_config
    config.parallel_config = SimpleNamespace(enable_eplb=eplb)
    config.offload_config = SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=group))
    made.side._weights = None
    monkeypatch.setattr(sides, "running_model", lambda: model)
    monkeypatch.setattr(sides, "LiveWeights", create_autospec(LiveWeights))
    made.side._watch_weights()
    assert (made.side._weights is not None) == watches


def test_weights_without_memory_of_their_own_are_not_watched(made: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance torchao's, whose memory torch does not expose."""
    config: Any = made.side._vllm_config
    config.parallel_config = SimpleNamespace()
    made.side._weights = None
    monkeypatch.setattr(sides, "running_model", lambda: "model")
    refuses = create_autospec(LiveWeights, side_effect=RuntimeError("invalid python storage"))
    monkeypatch.setattr(sides, "LiveWeights", refuses)
    made.side._watch_weights()
    assert made.side._weights is None


@pytest.mark.parametrize(("rank", "counted"), [(0, {"ucm:sparse_rows_total": {"": 5}}), (1, None)])
def test_the_first_rank_tells_what_a_sparse_method_has_counted(
    rank: int, counted: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank), additional_config={"ucm_sparse_config": {"Probe": {}}}
    )
    method: Any = create_autospec(SparseMethod, instance=True)
    method.figures.return_value = {"rows": 5}
    methods = create_autospec(hooks.worker_method, return_value=method)
    monkeypatch.setattr(hooks, "worker_method", methods)
    made = create_autospec(create_counters, return_value=ConnectorCounters())
    monkeypatch.setattr(sides, "create_counters", made)
    side = WorkerSide(engine, None, load_connector_config({"store": {"directories": str(tmp_path)}}), object)
    assert side.counters.take_data() == counted
    methods.assert_called_once_with(engine)


class Watching(Counts):
    """Counters that record what they read of stores."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[Callable[[], Mapping[str, TierStats]]] = []

    def watch(self, stats: Callable[[], Mapping[str, TierStats]]) -> None:
        self.watched.append(stats)

    def close(self) -> None:
        pass


class Begun:
    """A worker side with its own blocks, whose steps take no time."""

    def __init__(
        self, clock: SimulatedClock, directory: Path, base: type = object, *, kv_events: bool = False, **more: Any
    ) -> None:
        self.clock = clock
        store = {"directories": str(directory), "save_nice": 0, **more}
        extra = {"store": store, "metrics": False, "kv_events": kv_events}
        engine: Any = VllmConfig(ModelConfig("model"))
        engine.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
        self.settings = load_connector_config(extra, clock=clock)
        self.side = WorkerSide(engine, None, self.settings, base, clock=clock)
        self.counts = Watching()
        self.side.counters = self.counts
        group = CacheGroup(0, 4, None, {}, ("layer",))
        self.cache = tensor((2, 4, 4, 8))
        with patch.object(kv_cache, "_storage", lambda found: memoryview(found.raw)):
            self.side._memories = [HostMemory(group, {"layer": self.cache}, 4, {})]
        self.side._groups = CacheGroups((group,))
        self._step = 0

    def step(self, *blocks: int, authentication: str = "") -> None:
        """Run a step that saves some blocks, for a scheduler whose key has this fingerprint."""
        self._step += 1
        keys = [BlockKey(block.to_bytes(16, "big")) for block in blocks]
        plan = StepPlan(
            self._step, "model-1", saves=[BlockMoves("r", 0, keys, list(blocks), list(blocks), step=self._step)]
        )
        plan.authentication = authentication
        begun = self.clock.monotonic()
        self.side.begin(plan)
        self.side.worker.load(plan)
        self.side.worker.save(plan)
        assert self.clock.monotonic() == begun, "it waits for the medium"


class TakesReports:
    """vLLM's connector class of a release that takes reports of workers."""

    def build_connector_worker_meta(self) -> None:
        """Report nothing."""


@pytest.mark.parametrize(("base", "collected"), [(object, False), (TakesReports, True)])
def test_stored_blocks_are_collected_only_where_vllm_takes_them(
    clock: SimulatedClock, tmp_path: Path, base: type, collected: bool
) -> None:
    worker = Begun(clock, tmp_path, base, kv_events=True)
    worker.step()
    assert worker.side.worker.reports_stored is collected
    worker.side.close()


def test_tokens_are_counted_where_a_hit_loads_all_of_its_blocks(clock: SimulatedClock, tmp_path: Path) -> None:
    """Not by the states of recurrent layers, which come first in many models: a hit loads one, however long it is."""
    worker = Begun(clock, tmp_path)
    states = CacheGroup(0, 4, None, {}, ("layer",), is_recurrent=True)
    worker.side._groups = CacheGroups((states, CacheGroup(1, 4, None, {}, ("layer",))))
    with patch.object(kv_cache, "_storage", lambda found: memoryview(found.raw)):
        worker.side._memories = [
            HostMemory(group, {"layer": worker.cache}, 4, {}) for group in worker.side._groups.groups
        ]
    worker.step()
    assert worker.side.worker.counted_group == 1
    worker.side.close()


def test_a_directory_that_cannot_be_opened_costs_blocks_and_no_step(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance an NFS server that goes away between the engine's start and its first step."""
    root = tmp_path / "store"
    root.mkdir()
    worker = Begun(clock, root)
    frozen = FrozenDirectory(monkeypatch, str(root), clock=clock)
    worker.step(0, 1)
    clock.run_until_idle()
    assert frozen.held.is_set()
    worker.step()
    assert worker.counts.blocks == {}
    clock.advance(worker.settings.store.stuck_seconds)
    worker.step()
    assert worker.counts.blocks == {"save.timeout": 2}
    frozen.thawed.set()
    clock.run_until_idle()
    [stats] = worker.counts.watched
    assert stats(), "it is open"
    worker.step(2, 3)
    worker.side.close()
    assert worker.counts.blocks == {"save.timeout": 2, "saved": 2}
    stored = {path.name for path in root.glob("*/00/*")}
    assert stored == {block.to_bytes(16, "big").hex()[2:] for block in (2, 3)}


@pytest.mark.parametrize(
    ("store", "waiting"),
    [({}, 4), ({"posix_capacity": "256B"}, 2), ({"posix_capacity": "256B", "save_queue": "128B"}, 1)],
)
def test_no_more_blocks_wait_than_the_store_can_hold(
    clock: SimulatedClock, tmp_path: Path, store: dict[str, Any], waiting: int
) -> None:
    """Further ones would only evict them."""
    worker = Begun(clock, tmp_path / "store", **store)
    worker.step(0, 1, 2, 3)
    [transfer] = worker.side.worker.groups.values()
    assert transfer.room.taken_bytes == waiting * transfer.chunk_bytes == waiting * 128
    worker.side.close()


def test_what_is_saved_is_written_at_once(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room may be much smaller than `save_queue`: else most of what an engine computes has none."""
    monkeypatch.setattr(sides, "default_bytes", lambda: 4 * 128)
    worker = Begun(clock, tmp_path)
    worker.step()
    clock.run_until_idle()
    worker.step(0, 1, 2, 3)
    clock.run_until_idle()
    assert len(list(tmp_path.glob("*/00/*"))) == 4
    worker.side.close()


class Recomputes:
    """vLLM's connector class of a release that recomputes blocks that could not be loaded."""

    def get_block_ids_with_load_errors(self) -> None:
        """Report nothing."""


@pytest.mark.parametrize(
    ("ours", "schedulers", "stored"),
    [("a", "a", True), ("a", "b", False), ("a", "", False), ("", "a", False), ("", "", True)],
)
def test_a_worker_whose_key_is_not_the_schedulers_neither_loads_nor_saves(
    clock: SimulatedClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: str, schedulers: str, *, stored: bool
) -> None:
    """Its blocks would be in the namespace of the scheduler's key, and all others would refuse them."""
    get_logger().addHandler(caplog.handler)
    root = tmp_path / "store"
    root.mkdir()
    more: dict[str, Any] = {"authentication_key_file": key_file(tmp_path / "key", secret(ours))} if ours else {}
    prints = {name: Authenticator(secret(name)).fingerprint.hex() if name else "" for name in (ours, schedulers)}
    worker = Begun(clock, root, Recomputes, **more)
    for blocks in ((0, 1), (2,), ()):
        worker.step(*blocks, authentication=prints[schedulers])
    plan = StepPlan(9, "model-1", loads=[BlockMoves("r", 0, [BlockKey(bytes(16))], [3], [0], step=9)])
    plan.authentication = prints[schedulers]
    worker.side.begin(plan)
    if not stored:
        assert worker.side.worker.take_failed_blocks() == {3}
    worker.side.close()
    get_logger().removeHandler(caplog.handler)
    assert bool(list(root.glob("*/00/*"))) is stored
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (not stored)
    assert all((prints[name] or "none") in error for error in errors for name in (ours, schedulers))
