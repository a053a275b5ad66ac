"""The start of the scheduler side: the load-failure policy, and the namespace that it looks up."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import nullcontext
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig, write_model
from tests.ucm.store.conftest import SHARED_MEMORY
from tests.ucm.store.frozen import FrozenDirectory
from tests.ucm.store.keys import key_file, secret
from ucm.clock import SYSTEM
from ucm.config import load
from ucm.config.load import load_connector_config
from ucm.errors import ConfigError
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.file_contents import FileContents
from ucm.integration.vllm.blend.scheduler import OF_PIECES
from ucm.integration.vllm.blend.sides import BlendSchedulerSide
from ucm.integration.vllm.connector import identity, sides
from ucm.integration.vllm.connector.events import StoreEvents
from ucm.integration.vllm.connector.metadata import WeightsReport, geometry_record
from ucm.integration.vllm.connector.sides import SchedulerSide
from ucm.integration.vllm.connector.staging import Query
from ucm.logger import get_logger
from ucm.store import factory
from ucm.store.authentication import Authenticator
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.factory import open_store
from ucm.store.memory.slab import PAGE, SlabReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.hashing.file_contents import Digests
    from ucm.store.base import KVStore
    from ucm.store.config import StoreConfig


#: The KV of the longest request on two ranks, in bytes.
LONGEST = 2 * 4096 // 16 * 1024


class Base:
    """vLLM's connector class, as of 0.19.1."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def requires_piecewise_for_cudagraph(self) -> bool:
        return False

    def bind_gpu_block_pool(self, pool: object) -> None:
        raise NotImplementedError(pool)


class FullAttentionSpec:
    """The part of vLLM's specification that is read."""

    block_size = 16
    page_size_bytes = 1024


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    get_logger().addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, "ucm")
    yield caplog
    get_logger().removeHandler(caplog.handler)


def create(  # noqa: PLR0913 - what tests vary
    clock: SimulatedClock,
    model: Path,
    directory: Path,
    connector: str = "direct",
    *,
    asynchronous: bool = False,
    loads: bool = True,
    stuck_seconds: float = 10.0,
    ranks: int = 1,
    key: str | None = None,
    store: Mapping[str, Any] | None = None,
    chunk_tokens: int = 0,
    kind: type[SchedulerSide] = SchedulerSide,
) -> SchedulerSide:
    """Create the scheduler side."""
    stored: dict[str, Any] = {"stuck_seconds": stuck_seconds, **(store or {})}
    if "Posix" in stored.get("pipeline", "Posix"):
        stored["directories"] = str(directory / "store")
    if key is not None:
        stored["authentication_key_file"] = key
    extra = {"store": stored, "connector": connector, "metrics": False, "chunk_tokens": chunk_tokens}
    engine: Any = VllmConfig(ModelConfig(str(model)))
    engine.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
    engine.parallel_config.tensor_parallel_size = ranks
    engine.kv_transfer_config = SimpleNamespace(
        kv_connector="UCMConnector", kv_connector_extra_config=extra, is_kv_consumer=loads, is_kv_producer=True
    )
    engine.cache_config.enable_prefix_caching = True
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=FullAttentionSpec())
    kv_cache = SimpleNamespace(num_blocks=9, kv_cache_groups=[group])
    return kind(engine, kv_cache, load_connector_config(extra, clock=clock), Base, clock=clock)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the process start after the test's files, with its own digest cache."""
    monkeypatch.setattr(identity, "process_started", lambda: time.time() + 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("later")
def test_a_small_model_is_known_at_once(clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.INFO, "ucm")
    model = write_model(tmp_path / "model")
    names = []
    for _ in range(2):
        side = create(clock, model, tmp_path)
        names.append(side.namespace)
        side.close()
    assert names[0] == names[1] != ""
    said = [text for text in log.messages if "weights were identified after" in text]
    assert ["GB read" in text for text in said] == [True, False]  # the second engine has it from the cache
    write_model(tmp_path / "model", b"W" + b"w" * 299_999)
    side = create(clock, model, tmp_path)
    assert side.namespace not in {*names, ""}
    side.close()


@pytest.mark.usefixtures("later")
def test_a_large_model_is_read_beside_the_engines_work(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.set_level(logging.INFO, "ucm")
    monkeypatch.setattr(identity, "AT_ONCE", 0)
    go_on, read = clock.event(), FileContents.read

    def slowly(self: FileContents, found: Digests) -> Digests:
        go_on.wait()
        return read(self, found)

    monkeypatch.setattr(FileContents, "read", slowly)
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    side.poll()
    assert side.namespace == ""
    assert list((tmp_path / "store").iterdir()) == []
    assert any("read in the background to identify them" in text for text in log.messages)
    go_on.set()
    clock.advance(1.0)  # a file that was just written is read once its file system's clock has gone on
    side.poll()
    assert side.namespace.startswith("model-")
    assert list((tmp_path / "store").iterdir()) != []
    side.close()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("gone", [True, False])
def test_weights_that_change_meanwhile_are_neither_looked_up_nor_saved(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """Changed while they are read, or since the process started; in both cases the engine runs without the store."""
    model = write_model(tmp_path / "model")
    if gone:
        read = FileContents.read

        def after_a_change(self: FileContents, found: Digests) -> Digests:
            (model / "config.json").unlink()
            return read(self, found)

        monkeypatch.setattr(FileContents, "read", after_a_change)
    else:
        monkeypatch.setattr(identity, "process_started", lambda: time.time() - 3600)
    side = create(clock, model, tmp_path)
    assert side.namespace == ""
    warned = [text for text in log.messages if "saves nothing, because its weights cannot be identified" in text]
    assert len(warned) == 1
    side.close()


@pytest.mark.usefixtures("later")
def test_an_engine_may_end_before_its_weights_are_known(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them would take longer than the test."""
    monkeypatch.setattr(identity, "AT_ONCE", 0)
    model = write_model(tmp_path / "model")
    with (model / "large.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    create(clock, model, tmp_path).close()


@pytest.mark.usefixtures("later")
def test_an_engine_ends_beside_a_medium_that_does_not_answer(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "AT_ONCE", 0)
    answers = clock.event()

    def late(config: StoreConfig, namespace: str, geometry: BlockGeometry | None, *, clock: Clock = SYSTEM) -> KVStore:
        answers.wait()
        return open_store(config, namespace, geometry, clock=clock)

    monkeypatch.setattr(sides, "open_store", late)
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    clock.advance(1.0)  # a file that was just written is read once its file system's clock has gone on
    assert "ucm-identity" in clock.alive
    begun = clock.monotonic()
    side.close()
    assert clock.monotonic() - begun == identity.CLOSE_SECONDS
    answers.set()
    clock.run_until_idle()
    assert clock.alive == []


@pytest.mark.usefixtures("later")
def test_an_engine_starts_beside_a_directory_that_does_not_answer(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is made once it does, also if the thread that opens it is first."""
    model = write_model(tmp_path / "model")
    frozen = FrozenDirectory(monkeypatch, str(tmp_path / "store"), clock=clock)
    monkeypatch.setattr(load, "_silent", set())
    begun = clock.monotonic()
    side = create(clock, model, tmp_path, stuck_seconds=7.0)
    assert clock.monotonic() - begun == 7.0 + identity.START_SECONDS
    side.poll()
    assert side.namespace == ""
    assert any("nothing is loaded or saved until they do" in text for text in log.messages)
    frozen.thawed.set()
    clock.advance(0.5)
    side.poll()
    assert side.namespace.startswith("model-")
    side.close()


@pytest.mark.usefixtures("later")
def test_a_store_that_cannot_be_opened_refuses_the_start_of_a_small_model(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write"):
        create(clock, model, tmp_path)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("requests_before", [0, 2])
def test_an_empty_table_of_vllms_own_cache_puts_the_weights_in_doubt(
    clock: SimulatedClock, tmp_path: Path, requests_before: int
) -> None:
    """A program that changes weights calls ``reset_prefix_cache``, which connectors are not notified of."""
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    step = SimpleNamespace(
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=[],
    )
    said = []
    tables: list[dict[str, str]] = [{}, {}]
    before_the_reset = [tables[0]] * requests_before
    pool = SimpleNamespace(cached_block_hash_to_block=tables[0])
    side.bind(pool)
    for table in (*before_the_reset, tables[1], tables[1]):
        pool.cached_block_hash_to_block = table
        side.poll()
        said.append(side.plan(step).verify)
    assert said == [*[False] * requests_before, True, False]
    side.close()


@pytest.mark.usefixtures("later")
def test_the_keys_hear_which_encodings_vllm_drops(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[str]] = []

    def next_step(self: BlockKeys, freed_encodings: Sequence[str] = ()) -> None:
        del self
        heard.append(list(freed_encodings))

    monkeypatch.setattr(BlockKeys, "next_step", next_step)
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    step = SimpleNamespace(
        num_scheduled_tokens={}, total_num_scheduled_tokens=0, scheduled_new_reqs=[], scheduled_cached_reqs=[]
    )
    side.plan(step)
    step.free_encoder_mm_hashes = ["x", "y"]
    side.plan(step)
    assert heard == [[], ["x", "y"]]
    side.close()


@pytest.mark.usefixtures("later")
def test_news_of_changed_weights_starts_anew(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    side.reported(WeightsReport(looked=3))
    assert not any("not found by other engines" in text for text in log.messages)
    side.reported(WeightsReport(changed=0))
    assert any("not found by other engines" in text for text in log.messages)
    side.close()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("late", [True, False])
def test_blocks_that_outlived_their_weights_in_vllms_cache_lose_the_names_they_were_saved_under(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture, *, late: bool
) -> None:
    """With ``late``, requests ran between the change of the weights and the reset of the prefix cache."""
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    pool = SimpleNamespace(cached_block_hash_to_block={})
    side.bind(pool)
    started = []
    for resets, starts_anew in ((False, late), (True, not late), (False, False), (True, False)):
        if resets:
            pool.cached_block_hash_to_block = {}
        if starts_anew:
            side.start_anew()
        side.poll()
        started.append(sum("not found by other engines" in text for text in log.messages))
    assert started == ([1, 2, 2, 2] if late else [0, 1, 1, 1])
    side.close()


@pytest.mark.usefixtures("later")
def test_what_vllm_takes_back_itself_may_be_announced_again_and_is_not_taken_back(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    pool = SimpleNamespace(cached_block_hash_to_block={})
    side.bind(pool)
    events: Any = create_autospec(StoreEvents, instance=True)
    side.events = events
    side.start_anew()
    assert [call[0] for call in events.method_calls] == ["start_anew"]
    side.poll()
    pool.cached_block_hash_to_block = {}  # by reset_prefix_cache
    events.reset_mock()
    side.poll()
    assert events.method_calls[-1][0] == "forget"
    pool.cached_block_hash_to_block = {}  # by reset_prefix_cache with reset_connector
    events.reset_mock()
    side.start_anew()
    assert [call[0] for call in events.method_calls] == ["forget", "start_anew"]
    side.close()


STEP = SimpleNamespace(
    num_scheduled_tokens={}, total_num_scheduled_tokens=0, scheduled_new_reqs=[], scheduled_cached_reqs=[]
)
GEOMETRY = BlockGeometry((512, 512), b"f" * 16)


def plan_until(clock: SimulatedClock, side: SchedulerSide, happened: Callable[[], bool]) -> None:
    """Plan steps, and let the threads run between them; no time passes."""
    for _ in range(10):
        side.plan(STEP)
        clock.run_until_idle()
    assert happened()


@pytest.mark.usefixtures("later")
def test_blocks_are_staged_once_every_rank_has_answered(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    log.set_level(logging.INFO, "ucm")
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    first = side.plan(STEP)
    assert first.slab is not None
    waits = [side.prepares]
    reader = SlabReader(clock=clock)
    assert reader.attach(first.slab, 0, {"groups": {"0": geometry_record([0], GEOMETRY)}})
    plan_until(clock, side, lambda: side.stager.has_begun)
    assert [*waits, side.prepares] == [True, False]
    assert side.stager.shares
    assert side.plan(STEP).slab is None
    assert any("1 store to look up" in text for text in log.messages)
    side.close()
    side.close()  # vLLM may close it twice
    reader.close()


@pytest.mark.usefixtures("later")
def test_nothing_is_promised_if_a_rank_has_another_authentication_key(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    key = key_file(tmp_path / "key", secret("k"))
    side = create(clock, write_model(tmp_path / "model"), tmp_path, ranks=2, key=key)
    first = side.plan(STEP)
    assert first.slab is not None
    assert first.authentication == Authenticator(secret("k")).fingerprint.hex()
    readers = [SlabReader(clock=clock), SlabReader(clock=clock)]
    for rank, (reader, theirs) in enumerate(zip(readers, (first.authentication, "0123456789abcdef"), strict=True)):
        record = {"groups": {"0": geometry_record([rank], GEOMETRY)}, "authentication": theirs}
        assert reader.attach(first.slab, rank, record)
    plan_until(clock, side, lambda: not side.prepares)
    assert (side.saves, side.stager.has_begun) == (False, False)
    assert [side.plan(STEP).slab for _ in range(3)] == [None] * 3
    (said,) = [text for text in log.messages if "another authentication key" in text]
    assert "ranks [1]" in said
    side.close()
    for reader in readers:
        reader.close()


@pytest.mark.usefixtures("later")
def test_ranks_on_other_hosts_read_the_store_themselves(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    plan_until(clock, side, lambda: side.stager.has_begun)
    assert not side.stager.shares
    assert [text for text in log.messages if "ranks [0] do not share this host's memory: every rank reads" in text]
    side.close()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(("outer", "refused"), [("MultiConnector", True), ("UCMConnector", False)])
def test_blending_is_refused_beside_other_connectors(
    clock: SimulatedClock, tmp_path: Path, outer: str, *, refused: bool
) -> None:
    """They see the same requests and blocks, but do not know that some are approximate."""

    def create_several(vllm_config: Any) -> None:
        assert vllm_config.kv_transfer_config.kv_connector == outer
        create(clock, write_model(tmp_path / "model"), tmp_path, kind=BlendSchedulerSide).close()

    engine = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=outer, kv_load_failure_policy="fail"))
    with pytest.raises(ConfigError, match="blended KV as exact") if refused else nullcontext():
        create_several(engine)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("shares_memory", [True, False])
def test_blending_begins_with_all_ranks_and_ends_where_one_refuses_its_model(
    clock: SimulatedClock, tmp_path: Path, *, shares_memory: bool
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path, ranks=2, kind=BlendSchedulerSide)
    assert isinstance(side, BlendSchedulerSide)
    first = side.plan(STEP)
    assert first.slab is not None
    assert first.blend is not None
    assert first.blend.slab not in {None, first.slab}
    if not shares_memory:
        plan_until(clock, side, lambda: side.blending.off == "no slab")
        assert not side._chunks.has_begun
        side.close()
        return
    readers = [SlabReader(clock=clock), SlabReader(clock=clock)]
    for rank, reader in enumerate(readers):
        assert not side._chunks.has_begun
        groups = dict.fromkeys(("0", str(OF_PIECES)), geometry_record([rank], GEOMETRY))
        assert reader.attach(first.slab, rank, {"groups": groups})
    plan_until(clock, side, lambda: side._chunks.has_begun)
    plan = side.plan(STEP)
    assert plan.blend is not None
    assert plan.blend.slab is None
    assert side.blending.off == ""
    side.reported(WeightsReport(refused=True))
    assert side.blending.off == "gate"
    side.close()
    for reader in readers:
        reader.close()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("loads", [True, False])
def test_ranks_whose_vllm_brings_no_reports_agree_through_the_slab(
    clock: SimulatedClock, tmp_path: Path, *, loads: bool
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path, loads=loads, ranks=2)
    first = side.plan(STEP)
    assert (first.confirmed, first.epoch) == (0, 0)
    assert first.slab is not None
    readers = [SlabReader(clock=clock), SlabReader(clock=clock)]
    for rank, reader in enumerate(readers):
        assert reader.attach(first.slab, rank, {"groups": {"0": geometry_record([rank], GEOMETRY)}})
    plan_until(clock, side, lambda: not side.prepares)
    readers[0].report(WeightsReport(looked=2).to_record())
    assert side.plan(STEP).confirmed == 0
    readers[1].report(WeightsReport(looked=1).to_record())
    assert side.plan(STEP).confirmed == 1
    readers[1].report(WeightsReport(changed=0, looked=3, adapters=frozenset({7})).to_record())
    plan = side.plan(STEP)
    assert (plan.confirmed, plan.epoch) == (1, 1)
    assert side.plan(STEP).epoch == 1
    assert side.saves
    side.close()
    for reader in readers:
        reader.close()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("connector", ["direct", "layerwise"])
def test_ranks_that_cannot_agree_on_changed_weights_save_nothing(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture, connector: str
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path, connector, ranks=2)
    plan_until(clock, side, lambda: not side.saves)
    assert [text for text in log.messages if "nothing is saved: in this vLLM release ranks [0, 1] on other" in text]
    side.close()


@pytest.mark.usefixtures("later")
def test_where_a_load_must_not_fail_nothing_is_loaded_without_shared_memory(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path, "layerwise")
    plan_until(clock, side, lambda: not side.prepares)
    assert not side.stager.has_begun
    assert [text for text in log.messages if "nothing is loaded, because a load that fails" in text]
    side.close()


@pytest.mark.usefixtures("later")
def test_ranks_that_cannot_be_understood_cost_the_loads_and_not_the_engine(
    clock: SimulatedClock, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    address = side.plan(STEP).slab
    assert address is not None
    reader = SlabReader(clock=clock)
    assert reader.attach(address, 0, {"groups": {"0": geometry_record([7], GEOMETRY)}})
    plan_until(clock, side, lambda: any("nothing is loaded" in text for text in log.messages))
    plan_until(clock, side, lambda: not side.prepares)
    assert not side.stager.has_begun
    assert side.plan(STEP).slab is None
    side.close()
    reader.close()


@pytest.mark.usefixtures("later")
def test_stores_that_take_long_to_open_keep_no_request_waiting(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance on a mount whose server does not answer; they are used once they are open."""
    answers, query = clock.event(), Query(([BlockKey(bytes(16))],), 0, 16)

    def late(config: StoreConfig, namespace: str, geometry: BlockGeometry | None, *, clock: Clock = SYSTEM) -> KVStore:
        if geometry is not None:
            answers.wait()
        return open_store(config, namespace, geometry, clock=clock)

    monkeypatch.setattr(factory, "open_store", late)
    side = create(clock, write_model(tmp_path / "model"), tmp_path)
    address = side.plan(STEP).slab
    assert address is not None
    reader = SlabReader(clock=clock)
    assert reader.attach(address, 0, {"groups": {"0": geometry_record([0], GEOMETRY)}})
    stager = side.stager
    plan_until(clock, side, lambda: stager.has_begun)
    assert not side.prepares
    lookup = stager.submit(query)
    clock.run_until_idle()
    assert not stager.poll(lookup)
    clock.advance(stager.seconds)
    assert stager.poll(lookup)
    assert stager.submit(query).finished, "the store is not asked meanwhile"
    answers.set()
    clock.run_until_idle()
    again = stager.submit(query)
    assert not again.finished
    clock.run_until_idle()
    assert stager.poll(again)
    side.close()
    reader.close()


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory in a tmpfs."""
    parent = mkdtemp(dir=SHARED_MEMORY)
    yield f"{parent}/tier"
    shutil.rmtree(parent)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    ("store", "pages"),
    [
        ({}, LONGEST // PAGE),
        ({"posix_capacity": "64KiB"}, 16),
        ({"pipeline": "Dram", "dram_capacity": "64KiB"}, 16),
        ({"pipeline": "Cache|Posix", "dram_capacity": "64KiB", "posix_capacity": "128KiB"}, 48),
        ({"pipeline": "Cache|Posix", "dram_capacity": "64KiB"}, LONGEST // PAGE),
    ],
)
def test_memory_for_the_longest_request_is_there_before_the_first(
    clock: SimulatedClock, tmp_path: Path, memory: str, store: dict[str, str], pages: int
) -> None:
    """But not for more than the store holds."""
    if "dram_capacity" in store:
        store = {**store, "dram_directory": memory}
    side = create(clock, write_model(tmp_path / "model"), tmp_path, ranks=2, store=store)
    address = side.plan(STEP).slab
    assert address is not None
    assert os.fstat(address.descriptor).st_blocks * 512 // PAGE == pages + 3  # and one of the address, two of records
    side.close()


def test_a_chunk_that_no_request_fills_is_refused(clock: SimulatedClock, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    create(clock, model, tmp_path, chunk_tokens=4096).close()
    with pytest.raises(ConfigError, match="4112 tokens, and a request at most 4096"):
        create(clock, model, tmp_path, chunk_tokens=4097)
