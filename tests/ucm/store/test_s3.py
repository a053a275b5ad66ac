"""The S3 tier beside a real server: what it keeps there, and what becomes of a store when the server fails or lies."""

from __future__ import annotations

import http.server
import socket
import ssl
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest

from tests.ports import free_port
from tests.ucm.store.line import S3Line
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
from tests.ucm.store.servers import Proxy, S3Server, certificates
from ucm.doctor.config_checks import check_config
from ucm.doctor.findings import Status
from ucm.errors import ConfigError
from ucm.store.base import StoreTimeoutError, StoreUnavailableError
from ucm.store.config import StoreConfig
from ucm.store.factory import ask_tier, open_store
from ucm.store.format import namespace_digest
from ucm.store.remote import s3_client
from ucm.store.remote.s3_client import S3Client
from ucm.store.remote.tiers import S3Options, S3Tier
from ucm.testing.blocks import EVEN, Memory, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from email.message import Message

    from tests.clock import SimulatedClock
    from ucm.doctor.findings import Finding
    from ucm.store.base import KVStore

PREFIX = f"ucm1/{namespace_digest(NAMESPACE).hex()}/"
#: The length of a rest in seconds.
REST = 0.5
HURRIED = {"timeout": SHORT, "transfer_timeout": 2 * SHORT}


@pytest.fixture
def configure(s3_server: S3Server, tmp_path: Path) -> Callable[..., StoreConfig]:
    """Makes configurations of the tier, with other options than those that reach the bucket."""

    def found(rest: float = REST, **others: Any) -> StoreConfig:
        options = s3_server.options(tmp_path / "secret", **{"timeout": LONG, "transfer_timeout": LONG, **others})
        return StoreConfig(pipeline="S3", tiers={"S3": options}, rest_seconds=rest, load_threads=1)

    return found


@pytest.fixture
def store(configure: Callable[..., StoreConfig]) -> Iterator[KVStore]:
    with open_store(configure(), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    found = Proxy(s3_server.port)
    yield found
    found.close()


@pytest.fixture
def proxied(configure: Callable[..., StoreConfig], proxy: Proxy) -> Iterator[KVStore]:
    """A store with all blocks, which reaches its server through the proxy."""
    with open_store(configure(endpoint=f"http://{proxy.address}"), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


@pytest.fixture
def hurried(configure: Callable[..., StoreConfig], proxy: Proxy) -> Iterator[KVStore]:
    """A store with all blocks and short deadlines, which reaches its server through the proxy."""
    with open_store(configure(endpoint=f"http://{proxy.address}", **HURRIED), NAMESPACE, EVEN) as opened:
        recover(opened)
        yield opened


def over(line: S3Line, config: StoreConfig, clock: SimulatedClock) -> S3Client:
    """Return a client in simulated time whose answers come through a line."""
    options = S3Options.model_validate(config.tiers["S3"])
    limits = config.failures_until_rest, config.rest_seconds
    return S3Client(options, S3Server.SECRET, *limits, clock=clock, loop=line.loop, requests=line)


def objects(server: S3Server) -> dict[str, int]:
    return {one["path"]: one["size"] for page in obstore.list(server.store()) for one in page}


# What is there.


def test_a_block_is_one_object_under_its_format_namespace_and_key(
    configure: Callable[..., StoreConfig], s3_server: S3Server
) -> None:
    with open_store(configure(prefix="fleet/a"), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        assert objects(s3_server).keys() == {f"fleet/a/{PREFIX}{block.hex()}" for block in KEYS}
        value = bytes(obstore.get(s3_server.store(), f"fleet/a/{PREFIX}{KEYS[0].hex()}").bytes())
        assert value.endswith(ALL[KEYS[0]])
        assert store.stats()["s3"].saved_blocks == len(KEYS)
    with open_store(configure(prefix="fleet/b"), NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS), "another prefix is another store"


def test_below_memory_and_disk(
    configure: Callable[..., StoreConfig], s3_server: S3Server, tmp_path: Path, memory: str
) -> None:
    """What one machine saves, another one with empty tiers of its own loads."""
    tiers = configure().tiers

    def on(machine: str) -> StoreConfig:
        (tmp_path / machine).mkdir()
        return StoreConfig(
            pipeline="Cache|Posix|S3",
            dram_directory=f"{memory}-{machine}",
            dram_capacity_bytes=64 << 20,
            directories=(str(tmp_path / machine),),
            tiers=tiers,
        )

    with open_store(on("a"), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        assert store.flush(LONG)
    assert len(objects(s3_server)) == len(KEYS)
    with open_store(on("b"), NAMESPACE, EVEN) as store:
        assert store.lookup_on_prefix([*KEYS, key(99)]) == len(KEYS)
        assert fetch(store, KEYS, EVEN)[0] == ALL
        assert store.stats()["s3"].loaded_blocks == len(KEYS)


def test_a_prefix_is_looked_up_in_growing_parts(store: KVStore) -> None:
    others = [key(number) for number in range(100, 1100)]
    before = store.stats()["s3"]
    assert store.lookup_on_prefix([*KEYS, *others]) == len(KEYS)
    assert store.lookup_on_prefix(others) == 0
    assert store.lookup([*KEYS, *others[:100]]) == [True] * len(KEYS) + [False] * 100
    assert store.stats()["s3"].lookup_calls - before.lookup_calls == 4
    assert store.stats()["s3"].failures == {}


def test_after_a_gap_few_blocks_are_asked_for(configure: Callable[..., StoreConfig], tmp_path: Path) -> None:
    """What lies behind the gap of a prompt costs no request, and a prefix may change between the tiers often."""
    (tmp_path / "kv").mkdir()
    bucket = configure()
    directory = StoreConfig(directories=(str(tmp_path / "kv"),))
    both = replace(bucket, pipeline="Posix|S3", directories=directory.directories)
    pieces = [KEYS[:3], KEYS[3:5], KEYS[5:6], KEYS[6:9], KEYS[9:]]
    for number, piece in enumerate(pieces):
        with open_store(bucket if number % 2 else directory, NAMESPACE, EVEN) as store:
            assert save(store, piece, EVEN).failed == {}
    others = [key(number) for number in range(100, 2100)]
    for known in (KEYS, KEYS[:3], KEYS[:5]):
        with open_store(both, NAMESPACE, EVEN) as store:
            assert store.lookup_on_prefix([*known, *others]) == len(known)
            assert store.stats()["s3"].lookups < 4 * len(KEYS)
            assert store.stats()["s3"].failures == {}
    everything = [*KEYS, *others[:40]]
    with open_store(both, NAMESPACE, EVEN) as store:
        assert save(store, others[:40], EVEN).failed == {}
        assert store.flush(LONG)
        assert store.lookup_on_prefix([*everything, *others[500:]]) == len(everything)
        assert store.stats()["posix"].lookup_calls < 2 * len(pieces)


def test_parts_of_blocks(store: KVStore) -> None:
    memories = [Memory(block, EVEN) for block in [*KEYS, key(99)]]
    result = store.load([memory.transfer(2, 3) for memory in memories]).wait()
    assert {block: error.cause for block, error in result.failed.items()} == {key(99): "missing"}
    begin, end = sum(EVEN.slice_sizes[:2]), sum(EVEN.slice_sizes[:5])
    for memory in memories[:-1]:
        assert memory.data[begin:end] == ALL[memory.key][begin:end]


# Objects that are not what they should be.


@pytest.mark.parametrize("damage", ["flip", "flip-header", "short", "empty", "long", "huge", "other", "version"])
def test_a_damaged_object_is_a_miss_and_is_removed(store: KVStore, s3_server: S3Server, damage: str) -> None:
    client, name = s3_server.store(), PREFIX + KEYS[0].hex()
    value = bytearray(obstore.get(client, name).bytes())
    changed = {
        "flip": value[:-5] + bytes([value[-5] ^ 1]) + value[-4:],
        "flip-header": value[:200] + bytes([value[200] ^ 1]) + value[201:],
        "short": value[:-1],
        "empty": b"",
        "long": value + b"?",
        "huge": bytes(1 << 22),
        "other": bytes(obstore.get(client, PREFIX + KEYS[1].hex()).bytes()),
        "version": value[:8] + bytes([value[8] ^ 8]) + value[9:],
    }[damage]
    obstore.put(client, name, bytes(changed), use_multipart=False)
    loaded, failed = fetch(store, KEYS, EVEN)
    assert {block: error.cause in {"corrupt", "foreign"} for block, error in failed.items()} == {KEYS[0]: True}
    assert loaded == {block: ALL[block] for block in KEYS[1:]}
    assert name not in objects(s3_server)
    assert store.stats()["s3"].quarantined_blocks == 1


@pytest.mark.parametrize("nbytes", [0, 10, 5000])
def test_parts_of_an_object_that_is_too_short(store: KVStore, s3_server: S3Server, nbytes: int) -> None:
    client, name = s3_server.store(), PREFIX + KEYS[0].hex()
    obstore.put(client, name, bytes(obstore.get(client, name).bytes())[:nbytes], use_multipart=False)
    result = store.load([Memory(block, EVEN).transfer(2, 3) for block in KEYS]).wait()
    assert {block: error.cause for block, error in result.failed.items()} == {KEYS[0]: "corrupt"}
    assert name not in objects(s3_server)
    assert store.stats()["s3"].resting == 0


def test_objects_of_other_formats_are_neither_found_nor_touched(store: KVStore, s3_server: S3Server) -> None:
    """A rolling upgrade: engines of two releases share a bucket."""
    s3_server.clear()
    others = {f"ucm{version}/{PREFIX.partition('/')[2]}{block.hex()}" for version in ("0", "2", "10") for block in KEYS}
    for name in others:
        obstore.put(s3_server.store(), name, b"of another release", use_multipart=False)
    assert store.lookup(KEYS) == [False] * len(KEYS)
    assert causes(store) == {"missing"}
    recover(store)
    assert objects(s3_server).keys() == others | {PREFIX + block.hex() for block in KEYS}
    assert store.stats()["s3"].quarantined_blocks == 0


def test_an_object_deleted_between_lookup_and_load_is_a_miss(store: KVStore, s3_server: S3Server) -> None:
    assert store.lookup(KEYS) == [True] * len(KEYS)
    s3_server.clear()
    assert causes(store) == {"missing"}
    assert store.stats()["s3"].quarantined_blocks == 0
    recover(store)


# Servers that fail.


@pytest.mark.usefixtures("store")
def test_a_frozen_server_costs_one_deadline_per_rest(
    configure: Callable[..., StoreConfig], clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, resting = S3Line(clock), configure(rest=NEVER)
    began = clock.monotonic()
    with closing(over(line, resting, clock)) as client:
        assert_one_deadline(
            line, "s3", lambda namespace: open_over(S3Tier, client, resting, namespace, clock=clock), monkeypatch
        )
    assert clock.monotonic() - began == LONG


def test_a_server_that_thaws_is_used_again(hurried: KVStore, s3_server: S3Server) -> None:
    s3_server.freeze()
    assert "timeout" in causes(hurried)
    s3_server.thaw()
    recover(hurried)


def test_a_server_that_is_killed_and_comes_back(store: KVStore, s3_server: S3Server) -> None:
    s3_server.kill()
    assert causes(store) == {"unavailable"}
    assert store.lookup(KEYS) == [False] * len(KEYS)
    s3_server.start()
    recover(store)


def test_nobody_there(configure: Callable[..., StoreConfig]) -> None:
    with open_store(configure(endpoint=f"http://127.0.0.1:{free_port()}"), NAMESPACE, EVEN) as store:
        assert set(save(store, KEYS, EVEN).failed) == set(KEYS)
        (error, *_) = fetch(store, KEYS, EVEN)[1].values()
        assert (error.cause, "Connection refused" in error.what) == ("unavailable", True), error


def test_a_port_that_says_nothing(configure: Callable[..., StoreConfig]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with open_store(configure(endpoint=endpoint, **HURRIED), NAMESPACE, EVEN) as store:
            assert store.lookup(KEYS) == [False] * len(KEYS)
            assert causes(store) == {"timeout"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"access_key": "somebody"}, "403 Forbidden"),  # the answer to a HEAD does not say more
        ({"secret_env": "UCM_TEST_SECRET", "secret_file": None}, "403 Forbidden"),
        ({"bucket": "not-there"}, "NoSuchBucket"),
    ],
)
def test_a_bucket_that_refuses(
    configure: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("UCM_TEST_SECRET", "hunter2")
    with open_store(configure(**options), NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS)
        for errors in (save(store, KEYS, EVEN).failed, fetch(store, KEYS, EVEN)[1]):
            assert {error.cause for error in errors.values()} <= {"unavailable", "incomplete"}
            assert set(errors) == set(KEYS)
            assert says in str(errors[KEYS[0]])
            assert "hunter2" not in str(errors)
            assert S3Server.SECRET not in str(errors)


@pytest.mark.parametrize(
    ("days", "trusted", "says"), [(2, False, "UnknownIssuer"), (-1, True, "Expired"), (0, True, "InvalidContentType")]
)
def test_tls_that_fails_says_why(tmp_path: Path, days: int, *, trusted: bool, says: str) -> None:
    files = certificates(tmp_path, days=days or 2)
    with wrong_server(files if days else None) as (port, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCM_TEST_SECRET", "hunter2")
        options = {"endpoint": f"https://127.0.0.1:{port}", "bucket": "ucm-blocks", "timeout": LONG}
        options |= {"access_key": "ucm", "secret_env": "UCM_TEST_SECRET"}
        options |= {"tls_ca": files["ca.crt"]} if trusted else {}
        with pytest.raises(StoreUnavailableError, match=says):
            ask_tier(StoreConfig(pipeline="S3", tiers={"S3": options}), "S3")


def test_a_server_that_is_no_bucket(configure: Callable[..., StoreConfig]) -> None:
    """A proxy's page for people, with which it answers everything."""
    with wrong_server(None) as (port, _):
        config = configure(endpoint=f"http://127.0.0.1:{port}")
        with pytest.raises(StoreUnavailableError, match="nobody stored"):
            ask_tier(config, "S3")
        with open_store(config, NAMESPACE, EVEN) as store:
            assert set(fetch(store, KEYS, EVEN)[1]) == set(KEYS)


@contextmanager
def wrong_server(files: dict[str, str] | None) -> Iterator[tuple[int, list[Message]]]:
    """A web server that answers everything with a page, with a certificate or without TLS.

    Yields its port and the headers that it receives.
    """
    seen: list[Message] = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers)
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.send_header("Last-Modified", "Mon, 23 Nov 2026 05:00:00 GMT")
            self.end_headers()
            self.wfile.write(b"page" if self.command == "GET" else b"")

        do_HEAD = do_DELETE = do_GET  # noqa: N815 - the base class wants these names

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["server.crt"], files["server.key"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_account_that_only_reads(store: KVStore, configure: Callable[..., StoreConfig]) -> None:
    with open_store(configure(access_key=S3Server.READER), NAMESPACE, EVEN) as reader:
        assert fetch(reader, KEYS, EVEN)[0] == ALL
        failed = save(reader, [key(99)], EVEN).failed
        assert "AccessDenied" in str(failed[key(99)])
        assert fetch(reader, KEYS, EVEN)[0] == ALL


@pytest.mark.parametrize("bit", [0, 4])
def test_flipped_bytes_are_noticed(hurried: KVStore, proxy: Proxy, bit: int) -> None:
    def flip(data: bytes, passed: int) -> bytes:
        changed = bytearray(data)
        changed[(passed * 7 + 13) % len(changed)] ^= 1 << bit
        return bytes(changed)

    proxy.spoil = flip
    for _ in range(4):
        loaded, failed = fetch(hurried, KEYS, EVEN)
        assert all(ALL[block] == data for block, data in loaded.items())
        assert failed
        hurried.lookup(KEYS)
    proxy.spoil = lambda data, _: data
    recover(hurried)


def test_an_idle_connection_is_closed_before_a_balancer_forgets_it(
    s3_server: S3Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of no time stands for that of many seconds: every connection has been idle for too long."""
    monkeypatch.setattr(s3_client, "_MOST_IDLE", 0.0)
    options = s3_server.options(tmp_path / "secret", endpoint=f"http://{proxy.address}", timeout=LONG)
    with closing(S3Client(S3Options.model_validate(options), S3Server.SECRET, 1, NEVER)) as client:
        client.put("idle", [bytearray(b"abcd")], time.monotonic() + LONG)
        proxy.forget()
        assert client.exists(["idle"], time.monotonic() + LONG) == [True]


@pytest.mark.parametrize("after", [0, 3, 5000])
def test_a_connection_that_is_cut(proxied: KVStore, proxy: Proxy, s3_server: S3Server, after: int) -> None:
    proxy.spoil = lambda data, passed: data if passed + len(data) < after else None
    for _ in range(3):
        loaded, failed = fetch(proxied, KEYS, EVEN)
        assert all(ALL[block] == data for block, data in loaded.items())
        assert {error.cause for error in failed.values()} <= {"unavailable", "timeout"}
        proxied.lookup(KEYS)
    assert len(objects(s3_server)) == len(KEYS), "an answer that is cut costs no block"
    proxy.spoil = lambda data, _: data
    recover(proxied)


@pytest.mark.parametrize(("on_time", "resting"), [(2, 0), (8, 1)])
@pytest.mark.usefixtures("store")
def test_some_answers_that_are_late_do_not_rest_the_bucket(
    configure: Callable[..., StoreConfig], clock: SimulatedClock, on_time: int, resting: int
) -> None:
    """Only if all of a call are late, as in a later part of a prefix, does it rest; what is known is returned."""
    line, config = S3Line(clock), configure(rest=NEVER)
    with (
        closing(over(line, config, clock)) as client,
        open_over(S3Tier, client, config, clock=clock) as store,
    ):
        line.answers_left = on_time
        if on_time < len(KEYS) // 2:
            assert store.lookup([key(97), key(98), key(99)]) == [False] * 3
        else:
            assert store.lookup_on_prefix(KEYS) == on_time
        stats = store.stats()["s3"]
        assert (stats.failures, stats.resting) == ({"lookup.timeout": 1}, resting)
        line.thaw()


@pytest.mark.usefixtures("store")
def test_an_answer_that_trickles_is_given_up_in_time(
    configure: Callable[..., StoreConfig], clock: SimulatedClock
) -> None:
    line, config = S3Line(clock), configure()
    with (
        closing(over(line, config, clock)) as client,
        open_over(S3Tier, client, config, clock=clock) as store,
    ):
        line.delay = 0.6 * LONG
        began = clock.monotonic()
        assert causes(store) == {"timeout"}
        assert clock.monotonic() - began == LONG
        line.thaw()
        clock.advance(REST)
        assert store.lookup(KEYS) == [True] * len(KEYS), "the probe"
        assert fetch(store, KEYS, EVEN)[0] == ALL


def test_the_deadline_holds_where_the_thread_of_the_requests_does_not_run(clock: SimulatedClock) -> None:
    options = S3Options(bucket="ucm-blocks", endpoint="http://127.0.0.1:1", anonymous=True)
    line = S3Line(clock)
    client = S3Client(options, "", 3, NEVER, clock=clock, loop=line.loop, requests=line)
    end, began = clock.event(), clock.monotonic()
    line.loop.call_soon_threadsafe(end.wait)
    answers = client.exists(["one", "two"], began + LONG)
    assert [type(answer) for answer in answers] == [StoreTimeoutError] * 2
    assert LONG <= clock.monotonic() - began <= LONG + 2
    end.set()
    client.close()
    assert clock.alive == []


# Options.


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
        {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_SKIP_SIGNATURE": "true"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "/not/there", "AWS_ROLE_ARN": "arn:aws:iam::1:role/x", "AWS_REGION": "moon"},
    ],
)
def test_the_environment_changes_nothing_that_is_configured(
    configure: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open_store(configure(), NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        assert fetch(store, KEYS, EVEN)[0] == ALL


def test_a_session_of_the_environment_is_not_mixed_with_an_account(
    configure: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody")
    with wrong_server(None) as (port, seen):
        config = configure(endpoint=f"http://127.0.0.1:{port}")
        with open_store(config, NAMESPACE, EVEN) as store:
            store.lookup(KEYS[:1])
    (headers,) = seen
    assert f"Credential={S3Server.KEY}/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket": "A b"}, "bucket"),
        ({"endpoint": "cache:8333"}, "https://host:port"),
        ({"endpoint": "https://user:hunter2@cache"}, "an option of its own"),
        ({"access_key": None}, "need access_key"),
        ({"secret_file": None}, "needs secret_file"),
        ({"secret_env": "UCM_NOT_SET"}, "not in both"),
        ({"secret_file": None, "secret_env": "UCM_NOT_SET"}, "UCM_NOT_SET is not set"),
        ({"secret_file": "/not/there"}, "cannot be read"),
        ({"password": "hunter2"}, "password"),
        ({"anonymous": True}, "no access_key"),
        ({"tls_ca": "/not/there"}, "cannot be read"),
        ({"tls_ca": str(Path(__file__))}, "No certificates found"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_options_that_cannot_be(configure: Callable[..., StoreConfig], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(configure(**options), NAMESPACE, EVEN)
    found = f"{caught.value} {caught.value.where}"
    assert says in found
    assert "hunter2" not in found


def test_a_missing_obstore_is_named_with_its_extra(
    configure: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ucm.store.remote.s3_client", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="obstore") as caught:
        open_store(configure(), NAMESPACE, EVEN)
    assert "-m pip install '<ucm_runtime wheel>[s3]'" in caught.value.fix


def test_the_doctor_connects(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_TEST_SECRET", "hunter2")

    def ask(**others: Any) -> Finding:
        every = s3_server.options(tmp_path / "secret", timeout=LONG, **others)
        options = {name: value for name, value in every.items() if value is not None}
        file = tmp_path / "ucm_config.yaml"
        file.write_text(f"store: {{pipeline: Posix|S3, directories: {tmp_path}/kv, tiers: {{S3: {options}}}}}\n")
        (found,) = [one for one in check_config(file) if one.check == "tier S3"]
        assert S3Server.SECRET not in repr(found)
        return found

    well = ask()
    assert (well.status, well.what[:8]) == (Status.OK, "answers,"), well
    for others, says in (
        ({"bucket": "not-there"}, "NoSuchBucket"),
        ({"access_key": "somebody"}, "InvalidAccessKeyId"),
        ({"secret_file": None, "secret_env": "UCM_TEST_SECRET"}, "SignatureDoesNotMatch"),
        ({"endpoint": f"http://127.0.0.1:{free_port()}"}, "Connection refused"),
    ):
        found = ask(**others)
        assert (found.status, says in found.what) == (Status.ERROR, True), found
