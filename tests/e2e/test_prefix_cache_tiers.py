"""Stores in memory, in files, in both and above a server; restarts; two concurrent engines on one store."""

from __future__ import annotations

import shutil
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest

from tests.e2e.prefix_workload import computed_blocks
from tests.e2e.workload import BLOCK
from tests.ucm.store.keys import key_file
from tests.ucm.store.servers import MooncakeServer, RedisServer, S3Server
from ucm.store.format import UNIT, checksum, decode, header_nbytes
from ucm.store.memory.segment import delete_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.e2e.prefix_engine import PrefixEngine
    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.prefix_workload import Played
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: The phases with the reference's answers; each prompt once.
PHASES = ("boundary", "chunked", "document", "base")
#: Seconds within which a healthy server answers on a busy machine.
LONG = 60.0
#: Seconds for which a failed server is not asked.
REST = 2.0


@pytest.fixture(scope="module")
def known(prefix_runs: PrefixRuns) -> list[Played]:
    return [prefix_runs["reference"].phases[name] for name in PHASES]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="ucm-e2e-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def start(runs: PrefixRuns, directory: Path, store: dict[str, Any], path: str = "", **settings: Any) -> PrefixEngine:
    from tests.e2e.prefix_engine import PrefixEngine, connector  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    arguments = connector(store, **settings)
    return PrefixEngine(runs.environments[False], directory, arguments, {**IN_PROCESS, "PYTHONPATH": path})


def wait_for_all(store: Path, known: list[Played]) -> None:
    """Wait until a directory has exactly all blocks."""
    from tests.e2e.prefix_runs import block_files, blocks_in_memory, wait_for_blocks  # noqa: PLC0415 - as above

    number = len(computed_blocks(known))
    wait_for_blocks(store, number)
    assert len(block_files(store)) + len(blocks_in_memory(store)) == number


def requests_of(known: list[Played]) -> list[Request]:
    return [request for phase in known for request in phase.requests]


def check(engine: PrefixEngine, known: list[Played], *, loaded: bool, rows: Sequence[int] | None = None) -> None:
    """Check that an engine answers like the reference, loading either all possible KV or none."""
    requests, tokens = requests_of(known), [tokens for phase in known for tokens in phase.tokens]
    chosen = range(len(requests)) if rows is None else rows
    answers = engine.generate([requests[row] for row in chosen])
    assert [answer.tokens for answer in answers] == [tokens[row] for row in chosen]
    if loaded:
        whole = [(len(requests[row]["prompt"]) - 1) // BLOCK * BLOCK for row in chosen]
        assert [answer.cached for answer in answers] == whole
    else:
        assert not any(answer.cached for answer in answers)
    failures = {name: n for name, n in engine.counters().items() if name.startswith("ucm:failures_total") and n}
    assert not failures


def loaded_from(engine: PrefixEngine, tier: str) -> float:
    """Return the number of tokens whose KV an engine has loaded from a tier."""
    return engine.counters()[f"ucm:hit_tokens_total{{tier={tier}}}"]


def test_two_engines_at_once_on_one_store(prefix_runs: PrefixRuns, known: list[Played], tmp_path: Path) -> None:
    from tests.e2e.prefix_engine import posix  # noqa: PLC0415 - needs the build's packages

    store = posix(tmp_path / "store")
    count = len(requests_of(known))
    # Each computes two thirds, so that both save some blocks at the same time.
    parts = [range(2 * count // 3), range(count // 3, count)]
    with start(prefix_runs, tmp_path / "one", store) as one, start(prefix_runs, tmp_path / "other", store) as other:
        one.wait_until_started()
        other.wait_until_started()
        with ThreadPoolExecutor(2) as pool:
            done = [
                pool.submit(engine.generate, [requests_of(known)[row] for row in rows])
                for engine, rows in zip((one, other), parts, strict=True)
            ]
        tokens = [tokens for phase in known for tokens in phase.tokens]
        for future, rows in zip(done, parts, strict=True):
            assert [answer.tokens for answer in future.result()] == [tokens[row] for row in rows]
        wait_for_all(tmp_path / "store", known)
        for engine, rows in zip((one, other), reversed(parts), strict=True):
            assert engine.reset()
            check(engine, known, loaded=True, rows=rows)
            assert loaded_from(engine, "posix") > 0


@pytest.mark.parametrize("kind", ["UCMDirectConnector", "UCMLayerWiseConnector"])
def test_chunks_of_blocks(prefix_runs: PrefixRuns, known: list[Played], tmp_path: Path, kind: str) -> None:
    """Also where vLLM's own prefix cache ends within a chunk: what it has is not loaded over."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files, wait_for_blocks  # noqa: PLC0415 - likewise
    from tests.e2e.prefix_workload import blocks_of  # noqa: PLC0415 - likewise
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - likewise

    root, size = tmp_path / "store", 3 * BLOCK
    arguments = connector(posix(root), kind, chunk_tokens=size - 1)
    requests, tokens = requests_of(known), [tokens for phase in known for tokens in phase.tokens]
    with PrefixEngine(prefix_runs.environments[False], tmp_path / "cold", arguments, IN_PROCESS) as engine:
        check(engine, known, loaded=False)
        answers = [answer for phase in known for answer in phase.answers]
        pairs = zip(requests, answers, strict=True)
        number = len({chunk for one, answer in pairs for chunk in blocks_of(one, answer, size)})
        wait_for_blocks(root, number)
        assert len(block_files(root)) == number
    with PrefixEngine(prefix_runs.environments[False], tmp_path / "warm", arguments, IN_PROCESS) as engine:
        answers = engine.generate(requests)
        assert [answer.tokens for answer in answers] == tokens
        assert [answer.cached for answer in answers] == [(len(one["prompt"]) - 1) // size * size for one in requests]
        assert engine.reset()
        longest = max(range(len(requests)), key=lambda row: len(requests[row]["prompt"]))
        prompt = requests[longest]["prompt"]
        assert len(prompt) > 2 * size
        first = {**requests[longest], "prompt": prompt[: size + BLOCK + 1]}
        for one in (first, requests[longest]):
            (answer,) = engine.generate([one])
        assert answer.tokens == tokens[longest]
        assert answer.cached == (len(prompt) - 1) // size * size
        assert not any(n for name, n in engine.counters().items() if name.startswith("ucm:failures_total"))


def test_authenticated_blocks(prefix_runs: PrefixRuns, known: list[Played], tmp_path: Path) -> None:
    """All is loaded with the key, forged blocks are computed again, and nothing is found with another key."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - likewise

    root, (mine, other) = tmp_path / "store", (key_file(tmp_path / name) for name in ("mine.key", "other.key"))
    store = {**posix(root), "authentication_key_file": mine}
    with start(prefix_runs, tmp_path / "cold", store) as engine:
        check(engine, known, loaded=False)
        wait_for_all(root, known)
    files = block_files(root)
    # The scheduler and the worker in processes of their own.
    with PrefixEngine(prefix_runs.environments[False], tmp_path / "warm", connector(store)) as engine:
        check(engine, known, loaded=True)
    for path in files.values():
        forge(path)
    with start(prefix_runs, tmp_path / "forged", store) as engine:
        answers = engine.generate(requests_of(known))
        assert [answer.tokens for answer in answers] == [tokens for phase in known for tokens in phase.tokens]
        assert not any(answer.cached for answer in answers)
        failures = {name: n for name, n in engine.counters().items() if name.startswith("ucm:failures_total") and n}
        assert list(failures) == ["ucm:failures_total{cause=corrupt,operation=load}"]
    with start(prefix_runs, tmp_path / "other", {**store, "authentication_key_file": other}) as engine:
        check(engine, known, loaded=False)
        # Only the names of namespaces differ.
        assert len(list(root.glob("*/NAMESPACE"))) == 2


def forge(path: Path) -> None:
    """Change the last byte of a stored block, and both checksums that cover it, as somebody without the key can."""
    value = bytearray(path.read_bytes())
    header = decode(bytes(value[: header_nbytes(bytes(value[:UNIT]))]))
    value[-1] ^= 1
    count, last = len(header.slice_sizes), header.slice_sizes[-1]
    at = 128 + 8 * (2 * count - 1)  # the last layer slice's checksum
    value[at : at + 8] = checksum(bytes(value[-last:])).to_bytes(8, "little")
    end = header.nbytes - 8
    value[end : header.nbytes] = checksum(bytes(value[:end])).to_bytes(8, "little")
    assert decode(bytes(value[: header.nbytes])).key == header.key
    path.write_bytes(value)


def test_memory_alone(prefix_runs: PrefixRuns, known: list[Played], tmp_path: Path, memory: Path) -> None:
    store = {"pipeline": "Dram", "dram_directory": str(memory / "store")}
    with start(prefix_runs, tmp_path / "cold", store) as engine:
        check(engine, known, loaded=False)
        wait_for_all(memory / "store", known)
        assert engine.reset()
        check(engine, known, loaded=True)
        assert loaded_from(engine, "dram") > 0
    with start(prefix_runs, tmp_path / "warm", store) as engine:
        check(engine, known, loaded=True)
        assert loaded_from(engine, "dram") > 0


def test_memory_above_two_directories(
    prefix_runs: PrefixRuns, known: list[Played], tmp_path: Path, memory: Path
) -> None:
    from tests.e2e.prefix_engine import posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files, blocks_in_memory, wait_for_blocks  # noqa: PLC0415

    disk = tmp_path / "disk"
    files = posix(disk / "one", disk / "two")
    store = {**files, "pipeline": "Cache|Posix", "dram_directory": str(memory / "store")}
    with start(prefix_runs, tmp_path / "cold", store) as engine:
        check(engine, known, loaded=False)
        wait_for_all(memory / "store", known)
        wait_for_all(disk, known)
        assert all(len(block_files(disk / name)) > 10 for name in ("one", "two"))
    with start(prefix_runs, tmp_path / "warm", store) as engine:
        check(engine, known, loaded=True)
        assert loaded_from(engine, "dram") > 0
        assert loaded_from(engine, "posix") == 0
    for block in blocks_in_memory(memory / "store"):
        delete_blocks(block.layout, [block.key])
    # A new engine each time, which has staged nothing yet.
    with start(prefix_runs, tmp_path / "below", store) as engine:
        check(engine, known, loaded=True)
        assert loaded_from(engine, "posix") > 0
        # Blocks loaded from the lower tier are promoted.
        wait_for_blocks(memory / "store", 20)
    with start(prefix_runs, tmp_path / "above", store) as engine:
        check(engine, known, loaded=True)
        assert loaded_from(engine, "dram") > 0


def redis_values(directory: Path) -> tuple[RedisServer, dict[str, Any], Callable[[], int]]:
    server = RedisServer(directory / "redis")
    return server, {"address": server.address}, lambda: int(server.client().dbsize())


def bucket(directory: Path) -> tuple[S3Server, dict[str, Any], Callable[[], int]]:
    server = S3Server(directory / "s3")
    return server, server.options(directory / "secret"), lambda: sum(map(len, obstore.list(server.store())))


def lent_memory(directory: Path) -> tuple[MooncakeServer, dict[str, Any], Callable[[], int]]:
    del directory
    server = MooncakeServer()

    def count() -> int:
        with urllib.request.urlopen(f"http://{server.metrics_address}/get_all_keys") as answer:
            return len(answer.read().split())

    return server, {"address": server.address}, count


def clients(directory: Path, client: str) -> str:
    """Return a path of a client of servers, which the environment lacks; that of the tests fits its interpreter."""
    directory.mkdir()
    origin = Path(import_module(client).__path__[0])
    for found in (origin, *origin.parent.glob(f"{client}_*.libs")):
        (directory / found.name).symlink_to(found)
    return str(directory)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a server."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("name", "client", "serve"),
    [("Redis", "redis", redis_values), ("S3", "obstore", bucket), ("Mooncake", "mooncake", lent_memory)],
)
def test_a_server_below_memory_and_disk(
    prefix_runs: PrefixRuns,
    known: list[Played],
    tmp_path: Path,
    memory: Path,
    name: str,
    client: str,
    serve: Callable[[Path], tuple[RedisServer | S3Server | MooncakeServer, dict[str, Any], Callable[[], int]]],
) -> None:
    """An engine on another machine loads from the server what the first one saved; if it is frozen, it computes."""
    server, options, count = serve(tmp_path)
    path = clients(tmp_path / "clients", client)

    def on(machine: str, **limits: float) -> PrefixEngine:
        store = {
            "pipeline": f"Cache|Posix|{name}",
            "dram_directory": str(memory / machine),
            "directories": [str(tmp_path / machine / "kv")],
            "tiers": {name: {**options, "timeout": LONG, "transfer_timeout": LONG, **limits}},
        }
        (tmp_path / machine / "kv").mkdir(parents=True)
        return start(prefix_runs, tmp_path / machine / "engine", store, path, staging_deadline=LONG)

    try:
        with on("one") as engine:
            check(engine, known, loaded=False)
            until(lambda: count() >= len(computed_blocks(known)))
        with on("another") as engine:
            check(engine, known, loaded=True)
            assert loaded_from(engine, name.lower()) > 0
            assert engine.reset()
            check(engine, known, loaded=True)
        server.freeze()
        with on("third", timeout=0.5, transfer_timeout=0.5) as engine:
            answers = engine.generate(requests_of(known))
            assert [answer.tokens for answer in answers] == [tokens for phase in known for tokens in phase.tokens]
            assert not any(answer.cached for answer in answers)
    finally:
        server.kill()


@pytest.mark.parametrize(("name", "client", "serve"), [("Redis", "redis", redis_values), ("S3", "obstore", bucket)])
def test_a_server_is_killed_beside_requests_and_comes_back(
    prefix_runs: PrefixRuns,
    known: list[Played],
    tmp_path: Path,
    name: str,
    client: str,
    serve: Callable[[Path], tuple[RedisServer | S3Server, dict[str, Any], Callable[[], int]]],
) -> None:
    """Answers stay the same throughout; after a rest, the same engine saves and loads again."""
    server, options, count = serve(tmp_path)
    store = {
        "pipeline": name,
        "tiers": {name: {**options, "timeout": LONG, "transfer_timeout": LONG}},
        "rest_seconds": REST,
    }
    requests, tokens = requests_of(known), [tokens for phase in known for tokens in phase.tokens]
    whole = [(len(request["prompt"]) - 1) // BLOCK * BLOCK for request in requests]
    path, read = clients(tmp_path / "clients", client), f"ucm:load_blocks_total{{tier={name.lower()}}}"  # at every step
    try:
        with start(prefix_runs, tmp_path / "engine", store, path, staging_deadline=LONG) as engine:
            check(engine, known, loaded=False, rows=range(len(requests) // 2))
            until(lambda: count() > 0)
            assert engine.reset()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(engine.generate, requests)
                server.kill()
                assert [answer.tokens for answer in asked.result()] == tokens
            assert engine.reset()
            assert [answer.tokens for answer in engine.generate(requests)] == tokens
            server.start()
            before = engine.counters().get(read, 0)

            def all_is_loaded() -> bool:
                assert engine.reset()
                answers = engine.generate(requests)
                assert [answer.tokens for answer in answers] == tokens
                return [answer.cached for answer in answers] == whole

            until(all_is_loaded)
            assert engine.counters()[read] > before
            assert count() >= len(computed_blocks(known))
    finally:
        server.kill()
