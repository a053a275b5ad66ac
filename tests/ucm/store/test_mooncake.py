"""The Mooncake tier with a real master and a real node: its data, and the store's behaviour when these fail."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from tests.system import MOONCAKE
from tests.ucm.store.line import MooncakeLine
from tests.ucm.store.remote_blocks import (
    ALL,
    KEYS,
    LONG,
    NAMESPACE,
    NEVER,
    SHORT,
    assert_one_deadline,
    causes,
    open_over,
    recover,
)
from tests.ucm.store.servers import MooncakeServer, Server
from ucm.doctor.config_checks import check_config
from ucm.doctor.findings import Status
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import namespace_digest
from ucm.store.remote.tiers import MooncakeOptions, MooncakeTier
from ucm.testing.blocks import EVEN, Memory, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.doctor.findings import Finding
    from ucm.store.base import BlockKey, KVStore, StoreError
    from ucm.store.remote.tiers import Client

PREFIX = f"ucm1:{namespace_digest(NAMESPACE).hex()}:"
#: Options with which an answer does not arrive in time.
HURRIED = {"timeout": SHORT, "transfer_timeout": 2 * SHORT}


def config(address: str, rest: float = 0.5, **options: Any) -> StoreConfig:
    tiers = {"Mooncake": {"address": address, "timeout": LONG, "transfer_timeout": LONG, **options}}
    return StoreConfig(pipeline="Mooncake", tiers=tiers, rest_seconds=rest, load_threads=1)


def name(block: BlockKey) -> str:
    return PREFIX + block.hex()


@pytest.fixture
def store(mooncake: MooncakeServer) -> Iterator[KVStore]:
    with open_store(config(mooncake.address), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def hurried(mooncake: MooncakeServer) -> Iterator[KVStore]:
    """A store with all blocks and short deadlines."""
    with open_store(config(mooncake.address, **HURRIED), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def client(mooncake: MooncakeServer) -> Any:
    """Mooncake's own client."""
    return mooncake.client()


# Stored values.


def test_a_block_is_one_value_under_its_format_namespace_and_key(store: KVStore, client: Any) -> None:
    assert client.batch_is_exist([name(block) for block in KEYS]) == [1] * len(KEYS)
    assert client.get(name(KEYS[0])).endswith(ALL[KEYS[0]])
    assert store.stats()["mooncake"].saved_blocks == len(KEYS)


def test_parts_of_blocks(store: KVStore) -> None:
    memories = [Memory(block, EVEN) for block in [*KEYS, key(99)]]
    result = store.load([memory.transfer(2, 3) for memory in memories]).wait()
    assert {block: error.cause for block, error in result.failed.items()} == {key(99): "missing"}
    begin, end = sum(EVEN.slice_sizes[:2]), sum(EVEN.slice_sizes[:5])
    for memory in memories[:-1]:
        assert memory.data[begin:end] == ALL[memory.key][begin:end]


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        *((damage, False) for damage in ("flip", "flip-header", "short", "long", "huge", "other", "version")),
        *((damage, True) for damage in ("flip", "flip-header", "short", "other")),
    ],
)
def test_a_damaged_value_is_a_miss_and_is_removed(store: KVStore, client: Any, damage: str, *, part: bool) -> None:
    value = bytearray(client.get(name(KEYS[0])))
    changed = {
        "flip": value[:60_000] + bytes([value[60_000] ^ 1]) + value[60_001:],
        "flip-header": value[:200] + bytes([value[200] ^ 1]) + value[201:],
        "short": value[:10_000],
        "long": value + b"?",
        "huge": bytes(1 << 22),
        "other": client.get(name(KEYS[1])),
        "version": value[:8] + bytes([value[8] ^ 8]) + value[9:],
    }[damage]
    assert client.remove(name(KEYS[0]), True) == 0
    assert client.put(name(KEYS[0]), bytes(changed)) == 0
    memories = [Memory(block, EVEN) for block in KEYS]
    failed = store.load([memory.transfer(*((2, 3) if part else ())) for memory in memories]).wait().failed
    assert {block: error.cause in {"corrupt", "foreign"} for block, error in failed.items()} == {KEYS[0]: True}
    assert client.is_exist(name(KEYS[0])) == 0
    assert store.stats()["mooncake"].quarantined_blocks == 1
    assert store.stats()["mooncake"].resting == 0
    recover(store)


def test_values_of_other_formats_are_neither_found_nor_touched(
    store: KVStore, mooncake: MooncakeServer, client: Any
) -> None:
    """A rolling upgrade: engines of two releases share a Mooncake Store."""
    mooncake.remove(".*")
    others = [f"ucm{version}:" + name(block).partition(":")[2] for version in ("0", "2", "10") for block in KEYS]
    for other in others:
        assert client.put(other, b"of another release") == 0
    assert store.lookup(KEYS) == [False] * len(KEYS)
    assert causes(store) == {"missing"}
    recover(store)
    assert {bytes(client.get(other)) for other in others} == {b"of another release"}
    assert store.stats()["mooncake"].quarantined_blocks == 0


def test_a_value_evicted_between_lookup_and_load_is_a_miss(store: KVStore, mooncake: MooncakeServer) -> None:
    assert store.lookup(KEYS) == [True] * len(KEYS)
    assert mooncake.remove(".*") == len(KEYS)
    assert causes(store) == {"missing"}
    assert store.stats()["mooncake"].quarantined_blocks == 0
    recover(store)


@contextmanager
def small_server(lease: int) -> Iterator[MooncakeServer]:
    """A server whose memory holds 16 MiB, 120 blocks."""
    found = MooncakeServer(16 << 20, lease)
    try:
        yield found
    finally:
        found.kill()


def test_the_master_evicts_what_was_not_used_for_longest() -> None:
    many = [key(number) for number in range(300)]
    with small_server(100) as server, open_store(config(server.address), NAMESPACE, EVEN) as store:
        deadline = time.monotonic() + LONG
        for begin in range(0, 300, 20):
            while save(store, many[begin : begin + 20], EVEN).failed:  # the master takes its time to make room
                assert time.monotonic() < deadline, store.stats()
        loaded, failed = fetch(store, many, EVEN)
        assert {error.cause for error in failed.values()} == {"missing"}
        assert all(data == content(block, EVEN) for block, data in loaded.items())
        assert many[0] in failed


def test_a_server_that_is_full_is_read_all_the_same() -> None:
    """What is leased is not evicted."""
    many = [key(number) for number in range(150)]
    with small_server(60_000) as server, open_store(config(server.address), NAMESPACE, EVEN) as store:
        recover(store)
        failed: dict[BlockKey, StoreError] = {}
        for block in many[len(KEYS) :]:
            failed |= save(store, [block], EVEN).failed
            store.lookup([block])
            if failed:
                break
        assert {error.cause for error in failed.values()} == {"full"}
        assert fetch(store, KEYS, EVEN)[0] == ALL
        assert store.stats()["mooncake"].resting == 0


class BeingWritten:
    """Mooncake's client, while somebody else writes each value.

    Args:
        client: The real client.
        tries: How often a value is refused until they have ended.
    """

    def __init__(self, client: Any, tries: int) -> None:
        self._client, self._left = client, tries

    def batch_put_from(self, names: list[str], *args: Any) -> list[int]:
        self._left -= 1
        return [-705] * len(names) if self._left >= 0 else self._client.batch_put_from(names, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.mark.parametrize("tries", [3, 1000])
def test_what_another_client_has_only_begun_to_write_is_not_done(
    mooncake: MooncakeServer, client: Any, clock: SimulatedClock, tries: int
) -> None:
    client.remove(name(KEYS[0]), True)
    simulated = config(mooncake.address)
    began = clock.monotonic()
    with (
        closing(over(BeingWritten(client, tries), simulated, clock)) as made,  # type: ignore[arg-type] # a line, too
        open_over(MooncakeTier, made, simulated, clock=clock) as store,
    ):
        result = save(store, KEYS[:1], EVEN)
        assert (set(result.done), store.stats()["mooncake"].resting) == ({KEYS[0]} if tries == 3 else set(), 0)
        assert store.lookup(KEYS[:1]) == [tries == 3]
    assert {error.cause for error in result.failed.values()} <= {"other"}
    assert clock.monotonic() - began < 2


# A master that fails.


@pytest.fixture
def line(clock: SimulatedClock, client: Any) -> MooncakeLine:
    """Between a store in simulated time and the master."""
    return MooncakeLine(clock, client)


def over(line: MooncakeLine, config: StoreConfig, clock: SimulatedClock) -> Client:
    """Return a client in simulated time whose calls go through a line."""
    from ucm.store.remote.mooncake_client import MooncakeClient  # noqa: PLC0415 - starts a Go runtime in the process

    options = MooncakeOptions.model_validate(config.tiers["Mooncake"])
    return MooncakeClient(options, "", config.failures_until_rest, config.rest_seconds, clock=clock, connected=line)


@pytest.mark.usefixtures("store")
def test_a_frozen_master_costs_one_deadline_per_rest(
    mooncake: MooncakeServer, line: MooncakeLine, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting = config(mooncake.address, NEVER)
    began = clock.monotonic()
    with closing(over(line, resting, clock)) as client:
        assert_one_deadline(
            line,
            "mooncake",
            lambda namespace: open_over(MooncakeTier, client, resting, namespace, clock=clock),
            monkeypatch,
            connected=True,
        )
    assert clock.monotonic() - began == LONG


@pytest.mark.usefixtures("store")
def test_a_late_answer_changes_no_memory_and_gives_its_thread_back(
    mooncake: MooncakeServer, line: MooncakeLine, clock: SimulatedClock
) -> None:
    simulated = config(mooncake.address)
    with (
        closing(over(line, simulated, clock)) as client,
        open_over(MooncakeTier, client, simulated, clock=clock) as store,
    ):
        line.freeze()
        memories = [Memory(block, EVEN) for block in KEYS]
        failed = store.load([memory.transfer() for memory in memories]).wait().failed
        assert {error.cause for error in failed.values()} == {"timeout"}
        line.thaw()
        clock.advance(LONG)
        assert not any(any(memory.data) for memory in memories)
        assert store.lookup(KEYS) == [True] * len(KEYS), "the probe"
        assert fetch(store, KEYS, EVEN)[0] == ALL


def test_a_master_that_thaws_is_used_again(hurried: KVStore, mooncake: MooncakeServer) -> None:
    mooncake.freeze()
    assert "timeout" in causes(hurried)
    mooncake.thaw()
    recover(hurried)


def test_a_master_that_is_frozen_before_anybody_has_connected(
    mooncake: MooncakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens, asks and closes waits for the deadlines, not for the 30 seconds of Mooncake's client."""
    monkeypatch.setattr("ucm.store.remote.mooncake_client._clients", {})
    mooncake.freeze()
    begin = time.monotonic()
    with open_store(config(mooncake.address, 0.1, **HURRIED), NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert causes(store) <= {"timeout"}
    assert time.monotonic() - begin < 25
    mooncake.thaw()


def test_a_process_whose_master_is_frozen_ends(mooncake: MooncakeServer) -> None:
    code = f"""
import sys
from tests.ucm.store.test_mooncake import *
store = open_store(config("{mooncake.address}", **HURRIED), NAMESPACE, EVEN)
recover(store)
print("there", flush=True)
sys.stdin.readline()
print(causes(store), flush=True)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert "there\n" in iter(process.stdout.readline, "")
        mooncake.freeze()
        out, _ = process.communicate("\n", timeout=25)
        mooncake.thaw()
    assert ("timeout" in out, process.returncode) == (True, 0)


def test_a_master_that_is_killed_and_comes_back(hurried: KVStore, mooncake: MooncakeServer) -> None:
    mooncake.kill_master()
    assert causes(hurried) <= {"unavailable", "timeout"}
    assert hurried.lookup(KEYS) == [False] * len(KEYS)
    Server.start(mooncake)
    recover(hurried)


def test_a_master_that_restarts_knows_no_value(store: KVStore, mooncake: MooncakeServer) -> None:
    mooncake.restart()
    loaded, failed = fetch(store, KEYS, EVEN)
    assert loaded == {}
    assert {error.cause for error in failed.values()} <= {"missing", "unavailable"}
    recover(store)


def test_a_master_that_is_not_there() -> None:
    MOONCAKE.require()
    with open_store(config(f"127.0.0.1:{free_port()}"), NAMESPACE, EVEN) as store:
        assert set(save(store, KEYS, EVEN).failed) == set(KEYS)
        (error, *_) = fetch(store, KEYS, EVEN)[1].values()
        assert (error.cause, "refused" in error.what) == ("unavailable", True), error


def test_a_server_of_another_kind() -> None:
    """Mooncake's client would try it for 30 seconds, in which no thread of the process runs."""
    MOONCAKE.require()
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_store(config(f"127.0.0.1:{server.server_port}"), NAMESPACE, EVEN) as store:
            (error, *_) = fetch(store, KEYS, EVEN)[1].values()
        server.shutdown()
    assert (error.cause, "no master" in error.what) == ("unavailable", True), error


def test_a_port_that_says_nothing() -> None:
    MOONCAKE.require()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with open_store(config(address, **HURRIED), NAMESPACE, EVEN) as store:
            assert store.lookup(KEYS) == [False] * len(KEYS)
            assert causes(store) == {"timeout"}


# A node that fails.


def test_a_frozen_node_is_given_up_in_time(hurried: KVStore, mooncake: MooncakeServer) -> None:
    """The master still says that the values exist; memory that was waited for in vain is never written."""
    mooncake.freeze_node()
    memories = [Memory(block, EVEN) for block in KEYS]
    failed = hurried.load([memory.transfer() for memory in memories]).wait().failed
    assert {error.cause for error in failed.values()} == {"timeout"}
    mooncake.thaw_node()
    recover(hurried)
    assert not any(any(memory.data) for memory in memories)


def test_a_node_that_is_killed_and_replaced(hurried: KVStore, mooncake: MooncakeServer) -> None:
    mooncake.kill_node()
    failed = fetch(hurried, KEYS, EVEN)[1]
    assert set(failed) == set(KEYS)
    assert {error.cause for error in failed.values()} <= {"unavailable", "timeout", "missing"}
    mooncake.lend()
    recover(hurried)


# Options and tools.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": "localhost"}, "host:port"),
        ({"address": "http://user:hunter2@localhost:50051"}, "host:port"),
        ({"protocol": "smoke"}, "protocol"),
        ({"replicas": 0}, "replicas"),
        ({"password": "hunter2"}, "password"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(StoreConfig(pipeline="Mooncake", tiers={"Mooncake": options}), NAMESPACE, EVEN)
    found = f"{caught.value} {caught.value.where}"
    assert says in found
    assert "hunter2" not in found


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ucm.store.remote.mooncake_client", raising=False)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="client of Mooncake") as caught:
        open_store(config("127.0.0.1:1"), NAMESPACE, EVEN)
    assert "-m pip install '<ucm_runtime wheel>[mooncake]'" in caught.value.fix


def test_the_doctor_connects(mooncake: MooncakeServer, tmp_path: Path) -> None:
    def ask(port: int) -> Finding:
        file = tmp_path / "ucm_config.yaml"
        tier = f"Mooncake: {{address: '127.0.0.1:{port}', timeout: 60.0, transfer_timeout: 60.0}}"
        file.write_text(f"store:\n  pipeline: Posix|Mooncake\n  directories: {tmp_path}/kv\n  tiers:\n    {tier}\n")
        (found,) = [one for one in check_config(file) if one.check == "tier Mooncake"]
        return found

    well = ask(mooncake.port)
    assert (well.status, well.what[:8]) == (Status.OK, "answers,"), well
    nobody = ask(free_port())
    assert (nobody.status, "refused" in nobody.what) == (Status.ERROR, True), nobody
