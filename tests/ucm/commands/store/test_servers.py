"""``ucm store stat`` and ``verify`` with tiers on servers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import obstore
import pytest

from tests.ucm.store.servers import RedisServer
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec, namespace_digest
from ucm.testing.blocks import EVEN, key, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.commands.store.conftest import Answer, Remote

ONE, OTHER = "llama-3f9a/g0", "tiny-9bce/g0"
FILE = HeaderCodec(ONE, EVEN).file_nbytes


class Held:
    """A tier with five blocks of one namespace and two of another."""

    def __init__(self, remote: Remote, directory: Path) -> None:
        self.name, self.server, self.options = remote.name, remote.server, remote.options
        self.file = directory / "ucm_config.yaml"
        self.configure(self.name)
        tiers = StoreConfig(pipeline=self.name, tiers={self.name: self.options}, save_nice=0)
        for namespace, count in ((ONE, 5), (OTHER, 2)):
            with open_store(tiers, namespace, EVEN) as store:
                assert save(store, [key(number) for number in range(count)], EVEN).failed == {}

    def configure(self, pipeline: str, **others: Any) -> None:
        text = {"pipeline": pipeline, "tiers": {self.name: {**self.options, **others}}}
        if "Posix" in pipeline:
            text["directories"] = str(self.file.parent / "kv")
        self.file.write_text(json.dumps({"store": text}), encoding="utf-8")

    def flip(self, namespace: str, number: int) -> str:
        """Change a byte of a block, and return its name."""
        parts = ("ucm1", namespace_digest(namespace).hex(), key(number).hex())
        if isinstance(self.server, RedisServer):
            name = ":".join(parts)
            with self.server.client() as client:
                value = bytearray(client.get(name))
                value[-5] ^= 1
                client.set(name, bytes(value))
            return name
        name, bucket = "/".join(parts), self.server.store()
        value = bytearray(obstore.get(bucket, name).bytes())
        value[-5] ^= 1
        obstore.put(bucket, name, bytes(value), use_multipart=False)
        return name


LISTED = pytest.mark.parametrize("remote", ["Redis", "S3"], indirect=True)


@pytest.fixture
def held(remote: Remote, tmp_path: Path) -> Held:
    return Held(remote, tmp_path)


@LISTED
def test_stat_counts_what_a_server_holds(ask: Callable[..., Answer], held: Held) -> None:
    data = ask("stat", "--json", "--config", held.file).data
    (server,) = data["servers"]
    assert (data["directories"], server["tier"], server["answers"]) == ([], held.name, True)
    digests = {name: namespace_digest(name).hex() for name in (ONE, OTHER)}
    expected = [
        {"digest": digests[name], "namespace": None, "blocks": count, "bytes": count * FILE}
        for name, count in sorted(((ONE, 5), (OTHER, 2)), key=lambda it: digests[it[0]])
    ]
    assert server["namespaces"] == expected
    answer = ask("stat", "--config", held.file, "--namespace", ONE)
    assert answer.code == 0
    assert [line.split()[:2] for line in answer.out.splitlines()[1:]] == [["namespace", "blocks"], [ONE, "5"]]


@LISTED
def test_verify_reads_every_value(ask: Callable[..., Answer], held: Held) -> None:
    answer = ask("verify", "--json", "--config", held.file)
    assert (answer.code, answer.data["blocks"], answer.data["bytes"]) == (0, 7, 7 * FILE)
    name = held.flip(OTHER, 1)
    assert ask("verify", "--config", held.file, "--namespace", ONE).code == 0
    answer = ask("verify", "--json", "--config", held.file, "--quarantine")
    (problem,) = answer.data["problems"]
    assert (answer.code, problem["cause"], problem["quarantined"]) == (1, "corrupt", True)
    assert (problem["tier"], problem["key"], problem["path"]) == (held.name.lower(), key(1).hex(), name)
    answer = ask("verify", "--config", held.file)
    assert (answer.code, answer.out.startswith("6 blocks, ")) == (0, True), "a damaged value was deleted"


@LISTED
def test_beside_directories(ask: Callable[..., Answer], held: Held) -> None:
    held.configure(f"Posix|{held.name}")
    (held.file.parent / "kv").mkdir()
    both = StoreConfig(directories=(str(held.file.parent / "kv"),))
    with open_store(both, ONE, EVEN) as store:
        save(store, [key(7)], EVEN)
    (server,) = ask("stat", "--json", "--config", held.file).data["servers"]
    assert {one["namespace"] for one in server["namespaces"]} == {ONE, None}, "a directory tells the name"
    assert ask("verify", "--json", "--config", held.file).data["blocks"] == 8
    assert ask("verify", "--json", "--config", held.file, "--namespace", "llama*").data["blocks"] == 6
    assert ask("verify", "--json", "--config", held.file, "--tier", "posix").data["blocks"] == 1
    assert ask("verify", "--json", "--config", held.file, "--tier", held.name.lower()).data["blocks"] == 7


@LISTED
def test_a_server_that_does_not_answer_is_a_problem(ask: Callable[..., Answer], held: Held, remote: Remote) -> None:
    held.configure(held.name, **remote.unanswered)
    answer = ask("verify", "--config", held.file)
    assert (answer.code, f"{held.name} ({held.name.lower()}) cannot be read: " in answer.out) == (1, True)
    (server,) = ask("stat", "--json", "--config", held.file).data["servers"]
    assert (server["answers"], server["namespaces"]) == (False, [])


@pytest.mark.parametrize("remote", ["Mooncake"], indirect=True)
def test_what_cannot_be_listed_is_no_problem(ask: Callable[..., Answer], held: Held) -> None:
    held.configure(f"Posix|{held.name}")
    (held.file.parent / "kv").mkdir()
    with open_store(StoreConfig(directories=(str(held.file.parent / "kv"),)), ONE, EVEN) as store:
        save(store, [key(7)], EVEN)
    assert ask("verify", "--json", "--config", held.file).data["blocks"] == 1
    answer = ask("stat", "--json", "--config", held.file)
    (server,) = answer.data["servers"]
    assert (answer.code, server["answers"], server["namespaces"]) == (0, True, [])


@pytest.mark.parametrize("remote", ["Mooncake"], indirect=True)
def test_a_store_of_which_nothing_can_be_listed(ask: Callable[..., Answer], held: Held) -> None:
    """Whether its server answers is told all the same, also where it is the chosen one of several tiers."""
    answer = ask("verify", "--config", held.file)
    assert (answer.code, "what is in Mooncake cannot be listed" in answer.err) == (2, True)
    for chosen in ((), ("--tier", "mooncake")):
        answer = ask("stat", "--json", "--config", held.file, *chosen)
        assert answer.code == 0, answer.err
        assert [(server["tier"], server["answers"]) for server in answer.data["servers"]] == [("Mooncake", True)]
        held.configure(f"Posix|{held.name}")
        (held.file.parent / "kv").mkdir(exist_ok=True)


def test_other_commands_are_about_directories(ask: Callable[..., Answer], held: Held) -> None:
    for command in ("ls", "gc"):
        answer = ask(command, "--config", held.file)
        assert (answer.code, "has no directories that this command can read" in answer.err) == (2, True)


@LISTED
@pytest.mark.parametrize("above", ["", "Posix|"])
def test_bench_measures_a_server_and_leaves_nothing(ask: Callable[..., Answer], held: Held, above: str) -> None:
    held.configure(above + held.name)
    (held.file.parent / "kv").mkdir()
    answer = ask("bench", "--json", "--config", held.file, "--blocks", 2, "--block", "64KiB", "--rounds", 2)
    assert answer.code == 0, answer.err
    assert {"save", "load hot", "write", "read hot"} <= answer.data["seconds"].keys()
    assert answer.data["shares"].keys() == {"save", "load hot"}
    assert ask("verify", "--json", "--config", held.file).data["blocks"] == 7
