"""The store of a proof: like the user's, but apart from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ucm.commands.store import places
from ucm.errors import ConfigError
from ucm.prove.store import ProofStore, proof_store
from ucm.store.base import StoreUnavailableError
from ucm.store.format import namespace_digest
from ucm.store.remote.tiers import StoredValue

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "ucm-prove-1"
    found.mkdir()
    return found


def store_of(directory: Path, settings: dict[str, Any]) -> ProofStore:
    file = directory.parent / "ucm_config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return proof_store(file, directory)


def test_without_settings_blocks_are_files_in_the_temporary_directory(directory: Path) -> None:
    found = proof_store(None, directory)
    place = str(directory / "store-ucm-prove-1")
    assert found.extra == {"store": {"pipeline": "Posix", "directories": [place]}, "metrics": True}
    assert found.notes == ()


def test_the_tiers_are_on_the_users_media_in_directories_of_their_own(directory: Path) -> None:
    existing, missing, memory = (directory.parent / name for name in ("existing", "missing", "memory"))
    existing.mkdir(mode=0o700)
    own = {"load_threads": 3, "dram_capacity": "1MiB", "posix_capacity": "1GiB"}
    store = {"pipeline": "Dram|Posix", "directories": [str(existing), str(missing)], "dram_directory": str(memory)}
    found = store_of(directory, {"connector": "layerwise", "store": {**store, **own}})
    section = found.extra["store"]
    assert section["directories"] == [str(existing / "ucm-prove-1"), f"{missing}-ucm-prove-1"]
    assert section["dram_directory"] == f"{memory}-ucm-prove-1"
    assert (found.extra["connector"], section["load_threads"]) == ("layerwise", 3)
    assert "weights_id" not in found.extra


def test_a_refused_store_leaves_nothing(directory: Path) -> None:
    inside = directory / "file"
    inside.touch()
    wanted = [str(directory.parent / "new" / "blocks"), str(inside / "blocks")]
    with pytest.raises(ConfigError):
        store_of(directory, {"store": {"directories": wanted}})
    assert sorted(path.name for path in directory.parent.iterdir()) == ["ucm-prove-1", "ucm_config.yaml"]


def test_what_changes_answers_by_design_is_left_out_and_said(directory: Path) -> None:
    store = {"directories": str(directory.parent / "store")}
    found = store_of(directory, {"store": store, "ucm_sparse_config": {"BlockTopK": {}}, "blend": {}})
    assert set(found.extra) == {"store", "metrics"}
    assert [note.split(",")[0] for note in found.notes[-2:]] == [
        "blending changes answers by design",
        "a budget changes answers by design; --sparse NAME tries the method with a full budget",
    ]


def test_only_the_proofs_own_directories_are_deleted(directory: Path) -> None:
    existing = directory.parent / "existing"
    existing.mkdir(mode=0o700)
    (existing / "block").touch()
    found = store_of(directory, {"store": {"directories": str(existing)}})
    for place in found.places:
        (place / "namespace").mkdir(parents=True)
    assert found.remove(["tp0of1"]) == []
    assert [path.name for path in existing.iterdir()] == ["block"]


class Server:
    """A tier on a server with some blocks."""

    timeout = 1.0

    def __init__(self, values: list[StoredValue], *, down: bool = False) -> None:
        self.values, self.down = values, down

    def stored(self) -> list[StoredValue]:
        if self.down:
            raise StoreUnavailableError("the server does not answer")
        return self.values

    def discard(self, value: StoredValue) -> None:
        self.values = [one for one in self.values if one != value]

    def close(self) -> None:
        pass


def of_servers(directory: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> ProofStore:
    monkeypatch.setattr(places, "RemoteTier", Server)
    monkeypatch.setattr(places, "open_tier", lambda *_, **__: server)
    found = store_of(directory, {"store": {"pipeline": "Redis", "tiers": {"Redis": {"address": "127.0.0.1:1"}}}})
    found.namespaces.add("model-1")
    return found


def test_on_servers_blocks_have_a_namespace_of_their_own_and_are_deleted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (namespace_digest(name).hex() for name in ("model-1/tp0of1-g0", "model-2/tp0of1-g0"))
    values: list[Any] = [StoredValue(digest, bytes(32), 10) for digest in (ours, theirs)]  # type: ignore[arg-type]
    server = Server(values)
    found = of_servers(directory, monkeypatch, server)
    assert found.extra["weights_id"] == "ucm-prove-1"
    assert found.servers == ["Redis"]
    assert found.remove(["tp0of1-g0", "tp0of1-g1"]) == []
    assert [value.digest for value in server.values] == [theirs]


def test_without_a_namespace_nothing_is_deleted_on_servers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_servers(directory, monkeypatch, Server([], down=True))
    assert found.remove([]) == ["blocks of this run may be left on Redis: no engine said under which namespace"]


def test_a_server_that_does_not_answer_keeps_blocks_and_that_is_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_servers(directory, monkeypatch, Server([], down=True))
    assert found.remove(["tp0of1-g0"]) == ["blocks of this run may be left on Redis: the server does not answer"]
