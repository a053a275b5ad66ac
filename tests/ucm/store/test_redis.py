"""The Redis tier with real servers: its data, and the store's behaviour when servers fail or return wrong data."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import tracemalloc
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from tests.ports import free_port
from tests.ucm.store.line import Line
from tests.ucm.store.remote_blocks import (
    ALL,
    KEYS,
    LONG,
    NAMESPACE,
    NEVER,
    SHORT,
    assert_one_deadline,
    causes,
    eventually,
    open_over,
    recover,
)
from tests.ucm.store.servers import (
    Proxy,
    RedisServer,
    certificates,
    take_over,
    tls_before,
)
from ucm.doctor.config_checks import check_config
from ucm.doctor.findings import Status
from ucm.errors import ConfigError
from ucm.store.base import BlockCorruptError, BlockGeometry
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store, open_tier
from ucm.store.format import namespace_digest
from ucm.store.remote import redis_client
from ucm.store.remote.redis_client import _MOST_IDLE, Servers, pack_set, packets
from ucm.store.remote.tiers import RedisOptions, RedisTier
from ucm.testing.blocks import EVEN, Memory, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.doctor.findings import Finding
    from ucm.store.base import BlockKey, KVStore, StoreError

PREFIX = f"ucm1:{namespace_digest(NAMESPACE).hex()}:"
#: The permissions that the tier's account needs.
ALLOWED = ["+get", "+set", "+exists", "+del"]
#: The length of a rest in seconds.
REST = 0.5
#: Options with which an answer does not arrive in time.
HURRIED = {"timeout": SHORT, "transfer_timeout": 4 * SHORT}


def config(address: str | list[str], **options: Any) -> StoreConfig:
    tiers = {"Redis": {"address": address, "timeout": LONG, "transfer_timeout": LONG, **options}}
    return StoreConfig(pipeline="Redis", tiers=tiers, rest_seconds=REST)


def name(block: BlockKey) -> str:
    return PREFIX + block.hex()


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[KVStore]:
    with open_store(config(redis_server.address), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    found = Proxy(redis_server.port)
    yield found
    found.close()


@pytest.fixture
def through(proxy: Proxy) -> Iterator[KVStore]:
    """A store with all blocks that connects to its server through the proxy."""
    with open_store(config(proxy.address), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def hurried(proxy: Proxy) -> Iterator[KVStore]:
    """Like ``through``, with short deadlines."""
    with open_store(config(proxy.address, **HURRIED), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def line(clock: SimulatedClock) -> Line:
    """Between a store in simulated time and the server."""
    return Line(clock)


@pytest.fixture
def behind(redis_server: RedisServer, line: Line, clock: SimulatedClock) -> Iterator[KVStore]:
    """A store with all blocks, in simulated time behind the line."""
    simulated = config(redis_server.address, transfer_timeout=4 * LONG)
    with (
        closing(over(line, simulated)) as client,
        open_over(RedisTier, client, simulated, clock=clock) as opened,
    ):
        assert save(opened, KEYS, EVEN).failed == {}
        yield opened


def over(line: Line, config: StoreConfig) -> Servers:
    """Return a client that connects through a line."""
    options = RedisOptions.model_validate(config.tiers["Redis"])
    limits = config.failures_until_rest, config.rest_seconds
    return Servers(options, "", *limits, clock=line.clock, connections=line.redis_connections())


# Stored values.


def test_a_block_is_one_value_under_its_format_namespace_and_key(store: KVStore, redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        assert {found.decode() for found in client.keys("*")} == {name(block) for block in KEYS}
        stored = client.get(name(KEYS[0]))
        assert isinstance(stored, bytes)
        assert stored.endswith(ALL[KEYS[0]])
        assert client.ttl(name(KEYS[0])) == -1
    assert store.stats()["redis"].saved_blocks == len(KEYS)


def test_a_block_may_expire(redis_server: RedisServer) -> None:
    with open_store(config(redis_server.address, ttl_seconds=100), NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
    with redis_server.client() as client:
        assert 0 < client.ttl(name(KEYS[0])) <= 100


@pytest.mark.parametrize("count", [1, 1000])
def test_keys_are_looked_up_in_one_round_trip(store: KVStore, redis_server: RedisServer, count: int) -> None:
    with redis_server.client() as client:
        before = client.info("stats")["total_reads_processed"]
        assert sum(store.lookup([*KEYS[:1], *(key(number) for number in range(100, 99 + count))])) == 1
        assert store.lookup_on_prefix([*KEYS, *(key(number) for number in range(100, 100 + count))]) == len(KEYS)
        reads = client.info("stats")["total_reads_processed"] - before
    # A request of 1,000 keys has some 90 kB, which a server reads in parts of 16 kB.
    assert reads <= 3 if count == 1 else reads < 100


def test_values_are_received_in_place(redis_server: RedisServer) -> None:
    """Nothing as large as a value is allocated on the way."""
    big = BlockGeometry((1 << 20,) * 8, b"a block of 8 MiB")
    with open_store(config(redis_server.address), NAMESPACE, big) as store:
        save(store, KEYS[:1], big)
        memory = Memory(KEYS[0], big)
        tracemalloc.start()
        try:
            assert store.load([memory.transfer()]).wait().failed == {}
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert bytes(memory.data) == content(KEYS[0], big)
        assert peak < 1 << 20


def test_small_slices_move_together(redis_server: RedisServer) -> None:
    """A system call for each would take longer than its bytes."""
    small = BlockGeometry((*[100] * 3000, *[50_000] * 30, (5 << 20) // 2, *[70] * 20), b"chunk of a block")
    with open_store(config(redis_server.address), NAMESPACE, small) as store:
        save(store, KEYS, small)
        assert fetch(store, KEYS, small) == ({block: content(block, small) for block in KEYS}, {})
    slices = Memory(KEYS[0], small, content(KEYS[0], small)).slices
    sent = list(packets(slices))
    assert b"".join(sent) == content(KEYS[0], small)
    assert max(map(len, sent)) <= 1 << 20
    assert len(sent) < 40, "one for small slices, one for each of the others, and one for each MiB of the largest"
    assert len(list(packets(pack_set(b"key", [*slices[:3000], *slices[3031:]], None)))) == 1


def test_parts_of_blocks(store: KVStore) -> None:
    memories = [Memory(block, EVEN) for block in KEYS]
    result = store.load([memory.transfer(2, 3) for memory in memories]).wait()
    assert result.failed == {}
    begin, end = sum(EVEN.slice_sizes[:2]), sum(EVEN.slice_sizes[:5])
    for memory in memories:
        assert memory.data[begin:end] == ALL[memory.key][begin:end]


def test_parts_of_blocks_are_asked_for_as_many_bytes_at_once_as_whole_ones(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server sends the whole value, and each request has one deadline for all of its values."""
    asked, whole = list[int](), Servers.fetch

    def noted(
        self: Servers, names: Sequence[str], nbytes: int | None, deadline: float
    ) -> list[memoryview | StoreError]:
        asked.append(len(names))
        return whole(self, names, nbytes, deadline)

    monkeypatch.setattr(Servers, "fetch", noted)
    monkeypatch.setattr(RedisTier, "batch_nbytes", EVEN.nbytes + 4096)
    result = store.load([Memory(block, EVEN).transfer(2, 1) for block in KEYS]).wait()
    assert result.failed == {}
    assert asked == [1] * len(KEYS)


# Wrong values.


@pytest.mark.parametrize(
    "damage", ["flip", "flip-header", "short", "empty", "long", "huge", "other", "version", "kind"]
)
def test_a_damaged_value_is_a_miss_and_is_removed(store: KVStore, redis_server: RedisServer, damage: str) -> None:
    with redis_server.client() as client:
        value = bytearray(client.get(name(KEYS[0])))
        changed: Any = value
        if damage == "flip":
            value[-5] ^= 1
        elif damage == "flip-header":
            value[200] ^= 1
        elif damage == "version":
            value[8] ^= 8
        elif damage == "other":
            changed = client.get(name(KEYS[1]))
        else:
            changed = {
                "short": value[:-1],
                "empty": b"",
                "long": value + b"?",
                "huge": bytes(1 << 22),
                "kind": b"",
            }[damage]
        client.set(name(KEYS[0]), bytes(changed))
        if damage == "kind":
            client.delete(name(KEYS[0]))
            client.rpush(name(KEYS[0]), "a", "b")
        loaded, failed = fetch(store, KEYS, EVEN)
        assert set(failed) == {KEYS[0]}
        assert failed[KEYS[0]].cause in {"corrupt", "foreign"}
        assert loaded == {block: ALL[block] for block in KEYS[1:]}, "the others, which came behind it, are loaded"
        assert not client.exists(name(KEYS[0]))
    assert store.stats()["redis"].quarantined_blocks == 1
    part = Memory(KEYS[1], EVEN)
    assert store.load([part.transfer(1, 2)]).wait().failed == {}


@pytest.mark.parametrize("version", ["0", "2", "10", ""])
def test_values_of_other_formats_are_neither_found_nor_touched(
    store: KVStore, redis_server: RedisServer, version: str
) -> None:
    """A rolling upgrade: engines of two releases share a server."""
    other, sentinel = [f"ucm{version}:" + name(block).partition(":")[2] for block in KEYS], b"of another release"
    with redis_server.client() as client:
        client.delete(*map(name, KEYS))
        client.mset(dict.fromkeys(other, sentinel))
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert causes(store) == {"missing"}
        recover(store)
        assert client.mget(other) == [sentinel] * len(other)
    assert store.stats()["redis"].quarantined_blocks == 0


def test_a_value_evicted_between_lookup_and_load_is_a_miss(store: KVStore, redis_server: RedisServer) -> None:
    assert store.lookup(KEYS) == [True] * len(KEYS)
    with redis_server.client() as client:
        client.flushall()
    assert causes(store) == {"missing"}
    assert store.stats()["redis"].quarantined_blocks == 0
    recover(store)


# Servers that fail.


@pytest.mark.usefixtures("store")
def test_a_frozen_server_costs_one_deadline_per_rest(
    redis_server: RedisServer, line: Line, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = config(redis_server.address).tiers
    resting = StoreConfig(pipeline="Redis", tiers=tiers, rest_seconds=NEVER, load_threads=1)
    began = clock.monotonic()
    with closing(over(line, resting)) as client:
        assert_one_deadline(
            line,
            "redis",
            lambda namespace: open_over(RedisTier, client, resting, namespace, clock=clock),
            monkeypatch,
        )
    assert clock.monotonic() - began == LONG


def test_a_server_that_is_stopped_and_goes_on_is_used_again(hurried: KVStore, redis_server: RedisServer) -> None:
    """A real process that stands still, and real sockets that time out."""
    redis_server.freeze()
    assert "timeout" in causes(hurried)
    redis_server.thaw()
    recover(hurried)


def test_a_server_that_thaws_is_used_again_after_a_rest(behind: KVStore, line: Line, clock: SimulatedClock) -> None:
    line.freeze()
    assert causes(behind) == {"timeout"}
    line.thaw()
    assert causes(behind) == {"timeout"}, "it rests"
    clock.advance(REST)
    assert behind.lookup(KEYS) == [True] * len(KEYS), "the probe; calls beside it are refused"
    assert fetch(behind, KEYS, EVEN)[0] == ALL


def test_a_server_that_is_killed_and_comes_back(store: KVStore, redis_server: RedisServer) -> None:
    redis_server.kill()
    assert causes(store) == {"unavailable"}
    assert store.lookup(KEYS) == [False] * len(KEYS)
    redis_server.start()
    recover(store)


def test_a_server_that_is_not_there() -> None:
    with open_store(config(f"127.0.0.1:{free_port()}"), NAMESPACE, EVEN) as store:
        assert set(save(store, KEYS, EVEN).failed) == set(KEYS)
        assert causes(store) == {"unavailable"}


def test_a_port_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with open_store(config(address, **HURRIED), NAMESPACE, EVEN) as store:
            assert store.lookup(KEYS) == [False] * len(KEYS)
            assert causes(store) == {"timeout"}


def test_a_server_that_is_full_is_read_all_the_same(store: KVStore, redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        failed = save(store, [key(99)], EVEN).failed
        assert {error.cause for error in failed.values()} == {"full"}
        for number in range(100, 106):
            save(store, [key(number)], EVEN)
        assert store.stats()["redis"].failures.get("save.full", 0) >= 3
        assert fetch(store, KEYS, EVEN)[0] == ALL
        client.config_set("maxmemory", "128mb")
    recover(store)


def test_a_master_that_became_a_replica_is_read_all_the_same(
    through: KVStore, proxy: Proxy, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        try:
            made = proxy.connections
            assert {error.cause for error in save(through, [key(99)], EVEN).failed.values()} == {"unavailable"}
            assert fetch(through, KEYS, EVEN)[0] == ALL
            assert proxy.connections > made, "a new connection asks the sentinels who is the master by now"
        finally:
            client.replicaof("NO", "ONE")
    recover(through)


@pytest.mark.parametrize("bit", [0, 4])
def test_flipped_bytes_are_noticed(hurried: KVStore, proxy: Proxy, bit: int) -> None:
    """A flipped length makes the client wait for a longer answer, which only a deadline ends."""

    def flip(data: bytes, passed: int) -> bytes:
        changed = bytearray(data)
        changed[(passed * 7) % len(changed)] ^= 1 << bit
        return bytes(changed)

    proxy.spoil = flip
    for _ in range(5):
        loaded, failed = fetch(hurried, KEYS, EVEN)
        assert all(ALL[block] == data for block, data in loaded.items())
        assert failed
        hurried.lookup(KEYS)
    proxy.spoil = lambda data, _: data
    recover(hurried)


def test_an_answer_that_cannot_be_read_costs_no_block(
    through: KVStore, proxy: Proxy, redis_server: RedisServer
) -> None:
    proxy.spoil = lambda data, _: b"!" + data[1:]
    assert causes(through) == {"unavailable"}
    proxy.spoil = lambda data, _: data
    with redis_server.client() as client:
        assert client.exists(*map(name, KEYS)) == len(KEYS)
    recover(through)


@pytest.mark.parametrize("after", [0, 3, 5000, 300_000])
def test_a_connection_that_is_cut(through: KVStore, proxy: Proxy, after: int) -> None:
    proxy.spoil = lambda data, passed: data if passed + len(data) < after else None
    for _ in range(4):
        loaded, _ = fetch(through, KEYS, EVEN)
        assert all(ALL[block] == data for block, data in loaded.items())
        through.lookup(KEYS)
    proxy.spoil = lambda data, _: data
    recover(through)


def test_an_answer_that_trickles_is_given_up_in_time(behind: KVStore, line: Line, clock: SimulatedClock) -> None:
    """Otherwise every block would arrive eventually, because no piece is later than a socket's limit."""
    began = clock.monotonic()
    line.delay = 0.9 * LONG
    assert "timeout" in causes(behind)
    assert clock.monotonic() - began <= 5 * LONG
    line.thaw()
    clock.advance(REST)
    assert behind.lookup(KEYS) == [True] * len(KEYS), "the probe; calls beside it are refused"
    assert fetch(behind, KEYS, EVEN)[0] == ALL


@pytest.mark.parametrize("pieces", [1, 5, 20])
def test_memory_is_not_written_after_a_load_failed(
    behind: KVStore, line: Line, clock: SimulatedClock, pieces: int
) -> None:
    line.pieces_left = pieces
    memories = [Memory(block, EVEN) for block in KEYS]
    result = behind.load([memory.transfer() for memory in memories]).wait()
    assert result.failed
    for memory in memories:
        memory.data[:] = bytes(len(memory.data))
    line.thaw()
    clock.advance(NEVER)
    assert not any(any(memory.data) for memory in memories)


# Balancers that forget connections.


def together(client: Servers, count: int) -> None:
    """Use a number of connections at the same time, so that the pool has as many."""
    (node,) = client.nodes
    pool = node._pool
    held = [pool.get_connection() for _ in range(count)]
    for connection in held:
        pool.release(connection)
        assert node.plain(b"PING") == b"PONG"  # by the connection that was released last
        assert pool.get_connection() is connection
    for connection in held:
        pool.release(connection)


def test_when_a_connection_was_forgotten_those_beside_it_are_closed(proxy: Proxy) -> None:
    """A real black hole, and real sockets that time out: half of the time for the answer that never comes."""
    patience = 8 * SHORT
    options = RedisOptions(address=(proxy.address,), timeout=patience, transfer_timeout=LONG)
    with closing(Servers(options, "", 1, NEVER)) as client:
        client.put("ucm-here", [bytearray(b"abcd")], time.monotonic() + LONG)
        together(client, 4)
        assert proxy.connections == 4
        proxy.forget()
        assert client.exists(["ucm-here", "ucm-none"], time.monotonic() + patience) == [True, False]
        assert client.resting == 0
        assert proxy.connections == 5
        together(client, 4)
        assert proxy.connections == 8, "the other three were closed, not tried one by one"


def test_a_store_behind_a_forgotten_connection_finds_and_loads_all(
    behind: KVStore, line: Line, clock: SimulatedClock
) -> None:
    line.forget()
    began = clock.monotonic()
    assert behind.lookup(KEYS) == [True] * len(KEYS)
    assert clock.monotonic() - began == LONG, "one time limit"
    assert fetch(behind, KEYS, EVEN)[0] == ALL
    assert clock.monotonic() - began == LONG
    assert behind.stats()["redis"].failures == {}


def test_a_client_that_never_comes_up_stops_no_other(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()

    class Stuck(Servers):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            began.set()
            goes_on.wait()
            super().__init__(*arguments, **more)

    usual = config(redis_server.address)
    there = open_tier(usual, "Redis", NAMESPACE)
    opened: list[Any] = []
    thread = threading.Thread(
        target=lambda: opened.append(open_tier(replace(usual, rest_seconds=7.0), "Redis", NAMESPACE))
    )
    with monkeypatch.context() as patched:
        patched.setattr(redis_client, "CLIENT", Stuck)
        thread.start()
        began.wait()
    open_tier(replace(usual, rest_seconds=8.0), "Redis", NAMESPACE).close()
    there.close()
    goes_on.set()
    thread.join()
    opened[0].close()


def test_a_value_that_is_too_long_is_none_of_ours(redis_server: RedisServer) -> None:
    with closing(Servers(RedisOptions(address=(redis_server.address,)), "", 3, REST)) as client:
        end = time.monotonic() + LONG
        for name, nbytes in (("long", 150), ("longer", 1 << 20), ("right", 100)):
            client.put(name, [bytearray(nbytes)], end)
        long, longer, right = client.fetch(["long", "longer", "right"], 100, end)
        assert isinstance(long, BlockCorruptError)
        assert isinstance(longer, BlockCorruptError)
        assert isinstance(right, memoryview)
        assert right == bytes(100)


CALLS: dict[str, tuple[Callable[[Servers, float], Any], Any]] = {
    "read": (lambda client, end: client.read(["ucm-here"], [[memoryview(bytearray(4))]], 4, end), [None]),
    "fetch": (lambda client, end: client.fetch(["ucm-here"], 4, end), [b"abcd"]),
    "put": (lambda client, end: client.put("ucm-here", [bytearray(3 << 20)], end), None),
    "remove": (lambda client, end: client.remove("ucm-here", end), None),
    "names": (lambda client, _: sorted(client.names("ucm-here")), [("ucm-here", 4)]),
}


@pytest.mark.parametrize("asked", CALLS)
def test_every_call_survives_a_forgotten_connection(
    redis_server: RedisServer, line: Line, clock: SimulatedClock, asked: str
) -> None:
    call, answer = CALLS[asked]
    with closing(over(line, config(redis_server.address, transfer_timeout=4 * LONG))) as client:
        client.put("ucm-here", [bytearray(b"abcd")], clock.monotonic() + LONG)
        line.forget()
        assert call(client, clock.monotonic() + 4 * LONG) == answer
        assert client.resting == 0
        assert line.connections == 2


def test_a_connection_that_is_idle_is_replaced_before_it_is_asked(
    behind: KVStore, line: Line, clock: SimulatedClock
) -> None:
    made = line.connections
    assert behind.lookup(KEYS) == [True] * len(KEYS)
    assert line.connections == made
    line.forget()
    clock.advance(_MOST_IDLE)
    began = clock.monotonic()
    assert behind.lookup(KEYS) == [True] * len(KEYS)
    assert line.connections == made + 1
    assert clock.monotonic() == began, "no time-out was needed to notice"


def test_a_server_that_freezes_between_two_calls_is_asked_twice_and_rests(
    behind: KVStore, line: Line, clock: SimulatedClock
) -> None:
    assert behind.lookup(KEYS) == [True] * len(KEYS)
    line.freeze()
    began = clock.monotonic()
    assert behind.lookup(KEYS) == [False] * len(KEYS)
    assert clock.monotonic() - began <= 2 * LONG
    assert behind.stats()["redis"].resting == 1
    line.thaw()


def test_idle_connections_are_kept_alive(proxy: Proxy) -> None:
    made = []

    class Seen(redis.Connection):
        def _connect(self) -> socket.socket:
            found: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
            made.append(found)
            return found

    options = RedisOptions(address=(proxy.address,), timeout=LONG)
    with closing(Servers(options, "", 1, NEVER, connections=Seen)) as client:
        assert client.exists(["ucm-none"], time.monotonic() + LONG) == [False]
        (found,) = made
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < _MOST_IDLE


# Permissions.


def test_an_account_of_ones_own(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password = tmp_path / "password"
    password.write_text("right\n")
    password.chmod(0o600)
    monkeypatch.setenv("UCM_TEST_PASSWORD", "right")
    with redis_server.client() as client:
        client.acl_setuser("ucm", enabled=True, passwords=["+right"], keys=["ucm1:*"], commands=ALLOWED)
        try:
            for secret in ({"password_file": str(password)}, {"password_env": "UCM_TEST_PASSWORD"}):
                allowed = config(redis_server.address, username="ucm", **secret)
                assert "right" not in repr(allowed)
                with open_store(allowed, NAMESPACE, EVEN) as store:
                    recover(store)
            client.execute_command(*["ACL", "SETUSER", "ucm", "resetpass", ">another"])
            client.client_kill_filter(_type="normal", skipme=True)
            with open_store(allowed, NAMESPACE, EVEN) as store:
                assert store.lookup(KEYS) == [False] * len(KEYS)
                errors = fetch(store, KEYS, EVEN)[1].values()
                assert {error.cause for error in errors} == {"unavailable"}
                assert all("right" not in str(error) for error in errors)
        finally:
            client.acl_deluser("ucm")


@pytest.mark.parametrize("days", [2, -1])
def test_tls_with_an_authority_of_ones_own(tmp_path: Path, redis_server: RedisServer, days: int) -> None:
    files = certificates(tmp_path, days=days)
    with tls_before(redis_server.port, files) as port:
        secure = config(f"127.0.0.1:{port}", tls=True, tls_ca=files["ca.crt"])
        with open_store(secure, NAMESPACE, EVEN) as store:
            if days > 0:
                recover(store)
                return
            (error, *_) = fetch(store, KEYS, EVEN)[1].values()
            assert error.cause == "unavailable"
            assert "certificate has expired" in str(error)
        with open_store(config(f"127.0.0.1:{port}", tls=True), NAMESPACE, EVEN) as store:
            assert causes(store) == {"unavailable"}, "an authority that nobody named is not trusted"


# Clusters.


@dataclass
class Load:
    """What threads that save, look up and load all blocks have met: wrong bytes, exceptions, and causes of failures."""

    rounds: int = 0
    wrong: list[BlockKey] = field(default_factory=list)
    raised: list[Exception] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


@contextmanager
def under_load(store: KVStore) -> Iterator[Load]:
    """Use a store in two threads all the time."""
    found, ends = Load(), threading.Event()

    def use() -> None:
        try:
            while not ends.is_set():
                loaded, failed = fetch(store, KEYS, EVEN)
                found.wrong.extend(block for block, data in loaded.items() if ALL[block] != data)
                failed |= save(store, [KEYS[0], key(int(time.monotonic() * 1000))], EVEN).failed
                found.causes.extend(error.cause for error in failed.values())
                found.causes.extend("not found" for is_there in store.lookup(KEYS) if not is_there)
                found.rounds += 1
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            found.raised.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_a_cluster_whose_master_dies_under_load(redis_cluster: list[RedisServer]) -> None:
    with open_store(config([redis_cluster[0].address], mode="cluster"), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        assert fetch(store, KEYS, EVEN)[0] == ALL
        try:
            with under_load(store) as load:
                redis_cluster[1].kill()
                loaded, failed = fetch(store, KEYS, EVEN)
                assert loaded, "what the others have"
                assert failed, "no replica takes over yet"
                assert all(ALL[block] == data for block, data in loaded.items())
                take_over(redis_cluster, redis_cluster[1])
                recover(store)
                rounds = load.rounds
                eventually(lambda: load.rounds > rounds + 2)
        finally:
            redis_cluster[1].start()
    assert (load.wrong, load.raised) == ([], [])


def test_what_a_cluster_holds_is_listed(redis_cluster: list[RedisServer]) -> None:
    clustered = config([redis_cluster[0].address], mode="cluster")
    with open_store(clustered, NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
    tier = open_tier(clustered, "Redis")
    assert isinstance(tier, RedisTier)
    with closing(tier):
        assert {value.key for value in tier.stored()} == set(KEYS)
        assert [tier.check(value) for value in tier.stored()] == [None] * len(KEYS)


def test_slots_that_move_under_load(redis_cluster: list[RedisServer]) -> None:
    """Threads save, look up and load, while the slots of all blocks go through all masters, one by one, and back."""
    masters = [node.client() for node in redis_cluster if node.process and node.client().role()[0] == b"master"]
    with open_store(config([redis_cluster[0].address], mode="cluster"), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        with under_load(store) as load:
            for _ in masters:
                for number in {slot_of(block) for block in KEYS}:
                    owner = next(one for one in masters if one.execute_command("CLUSTER COUNTKEYSINSLOT", number))
                    begin_to_move(number, owner, masters[masters.index(owner) - 1])
                    time.sleep(0.02)
                    end_to_move(number, masters, masters[masters.index(owner) - 1])
        assert load.rounds
        assert (load.wrong, load.raised, load.causes) == ([], [], [])
        assert store.stats()["redis"].failures == {}


def test_slots_that_are_half_moved(redis_cluster: list[RedisServer]) -> None:
    masters = [node.client() for node in redis_cluster if node.process and node.client().role()[0] == b"master"]
    with open_store(config([redis_cluster[0].address], mode="cluster"), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        source, target = masters[:2]
        moving = {slot_of(block) for block in KEYS}
        moving = {number for number in moving if source.execute_command("CLUSTER COUNTKEYSINSLOT", number)}
        assert moving
        for number in moving:
            begin_to_move(number, source, target)
        assert store.lookup(KEYS) == [True] * len(KEYS), "the server asks to ask another one"
        assert fetch(store, KEYS, EVEN)[0] == ALL
        for number in moving:
            end_to_move(number, masters, target)
        assert fetch(store, KEYS, EVEN)[0] == ALL, "the slot has moved"
        assert store.stats()["redis"].failures == {}
    for number in moving:  # other tests rely on a master's blocks
        begin_to_move(number, target, source)
        end_to_move(number, masters, source)


def begin_to_move(number: int, source: Any, target: Any) -> None:
    """Move the values of a slot; the source goes on owning it, and asks clients to ask the target."""
    ids = [str(one.execute_command("CLUSTER MYID").decode()) for one in (source, target)]
    target.execute_command("CLUSTER SETSLOT", number, "IMPORTING", ids[0])
    source.execute_command("CLUSTER SETSLOT", number, "MIGRATING", ids[1])
    port = target.connection_pool.connection_kwargs["port"]
    for moved in source.execute_command("CLUSTER GETKEYSINSLOT", number, 1000):
        source.execute_command("MIGRATE", "127.0.0.1", port, moved, 0, 60_000)


def end_to_move(number: int, masters: list[Any], target: Any) -> None:
    owner = str(target.execute_command("CLUSTER MYID").decode())
    for one in (target, *masters):
        one.execute_command("CLUSTER SETSLOT", number, "NODE", owner)


def slot_of(block: BlockKey) -> int:
    return key_slot(name(block).encode())


def test_the_master_that_sentinels_name(tmp_path: Path, redis_server: RedisServer) -> None:
    sentinel = RedisServer(tmp_path, sentinel=f"kv 127.0.0.1 {redis_server.port}")
    try:
        found = config(sentinel.address, mode="sentinel", master="kv")
        with open_store(found, NAMESPACE, EVEN) as store:
            recover(store)
        with redis_server.client() as client:
            assert client.exists(name(KEYS[0]))
    finally:
        sentinel.kill()


def test_a_replica_that_sentinels_promote(tmp_path: Path) -> None:
    master = RedisServer(tmp_path / "master")
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(master.port))
    sentinel = None
    try:
        eventually(lambda: replica.client().info("replication")["master_link_status"] == "up")
        sentinel = RedisServer(tmp_path / "sentinel", sentinel=f"kv 127.0.0.1 {master.port}")
        eventually(lambda: sentinel.client().sentinel_slaves("kv"))
        found = config(sentinel.address, mode="sentinel", master="kv")
        with open_store(found, NAMESPACE, EVEN) as store:
            recover(store)
            eventually(lambda: replica.client().exists(*map(name, KEYS)) == len(KEYS))
            master.kill()
            assert causes(store) <= {"unavailable", "timeout"}
            eventually(lambda: fetch(store, KEYS, EVEN)[0] == ALL)
            recover(store)
        assert replica.client().role()[0] == b"master"
    finally:
        for server in (sentinel, replica, master):
            if server is not None:
                server.kill()


# Options.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": "localhost"}, "host:port"),
        ({"address": "redis://user:hunter2@localhost:6379"}, "options of their own"),
        ({"address": []}, "no address"),
        ({"address": ["a:1", "b:2"]}, "one address"),
        ({"address": "a:1", "mode": "sentinel"}, "master"),
        ({"address": "a:1", "mode": "cluster", "database": 1}, "database"),
        ({"address": "a:1", "tls_ca": "/ca"}, "tls: true"),
        ({"address": "a:1", "password": "hunter2"}, "password"),
        ({"address": "a:1", "password_file": "/a", "password_env": "B"}, "not in both"),
        ({"address": "a:1", "password_env": "UCM_NOT_SET"}, "UCM_NOT_SET is not set"),
        ({"address": "a:1", "password_file": "/not/there"}, "cannot be read"),
        ({"address": "a:1", "timeout": 0}, "timeout"),
        ({"address": "a:1", "ttl_seconds": 0}, "ttl_seconds"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(StoreConfig(pipeline="Redis", tiers={"Redis": options}), NAMESPACE, EVEN)
    found = f"{caught.value} {caught.value.where}"
    assert says in found
    assert "hunter2" not in found


def test_a_password_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="contains a secret, but other users") as caught:
        open_store(config("127.0.0.1:1", password_file=str(file)), NAMESPACE, EVEN)
    assert "hunter2" not in str(caught.value)


def test_a_missing_redis_py_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ucm.store.remote.redis_client", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match="redis-py") as caught:
        open_store(config("127.0.0.1:1"), NAMESPACE, EVEN)
    assert "-m pip install '<ucm_runtime wheel>[redis]'" in caught.value.fix


def test_a_block_that_no_server_takes(redis_server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="a server takes"):
        open_store(config(redis_server.address), NAMESPACE, BlockGeometry((600 << 20,), bytes(16)))


def test_stores_of_one_process_share_their_connections(redis_server: RedisServer) -> None:
    one = open_store(config(redis_server.address), "n/1", EVEN)
    two = open_store(config(redis_server.address), "n/2", EVEN)
    recover(one)
    recover(two)
    with redis_server.client() as client:
        shared = len(client.client_list())
    one.close()
    assert fetch(two, KEYS, EVEN)[0] == ALL
    two.close()
    deadline = time.monotonic() + LONG
    with redis_server.client() as client:
        while len(client.client_list()) >= shared:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_doctor_connects(redis_server: RedisServer, tmp_path: Path) -> None:
    def ask(port: int) -> Finding:
        file = tmp_path / "ucm_config.yaml"
        tier = f"Redis: {{address: '127.0.0.1:{port}', password_env: UCM_TEST_PASSWORD, timeout: 60.0}}"
        file.write_text(f"store:\n  pipeline: Posix|Redis\n  directories: {tmp_path}/kv\n  tiers:\n    {tier}\n")
        (found,) = [one for one in check_config(file) if one.check == "tier Redis"]
        return found

    assert ask(redis_server.port).status is Status.ERROR, "the password's variable is not set"
    word = "hunter2"
    os.environ["UCM_TEST_PASSWORD"] = word
    try:
        refused = ask(redis_server.port)
        assert refused.status is Status.ERROR
        assert "AUTH" in refused.what, refused
        assert word not in repr(refused)
        nobody = ask(free_port())
        assert nobody.status is Status.ERROR
        assert "refused" in nobody.what
        with redis_server.client() as client:
            client.config_set("requirepass", word)
        try:
            assert (ask(redis_server.port).status, ask(redis_server.port).what[:8]) == (Status.OK, "answers,")
        finally:
            with redis_server.client(password=word) as client:
                client.config_set("requirepass", "")
    finally:
        del os.environ["UCM_TEST_PASSWORD"]
