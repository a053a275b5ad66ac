"""`ucm store stat`."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from tests.ucm.commands.store.conftest import BIG, DAY, FILE, SMALL
from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig, read_files, write_model
from tests.ucm.store.keys import key_file, secret
from tests.ucm.store.workers import of_salt
from ucm.commands.store import stat
from ucm.config import load_connector_config
from ucm.config.settings import format_size
from ucm.integration.vllm.connector.identity import engine_identity
from ucm.salts import tag_name, tag_of_salt
from ucm.store.authentication import Authenticator
from ucm.store.posix.layout import Layout, owner_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer, Kept


def test_what_is_there(kept: Kept, ask: Callable[..., Answer]) -> None:
    answer = ask("stat", "--directory", kept.root)
    assert (answer.code, answer.err) == (0, "")
    first, head, big, small = answer.out.splitlines()
    assert first.startswith(f"{kept.root} (posix): 2 namespaces, 14 blocks, 1.8 MiB; ")
    assert head.split()[:3] == ["namespace", "blocks", "bytes"]
    assert big.split()[:4] == [BIG, "10", "1.29", "MiB"]
    assert "9 d ago" in big
    assert small.split()[:2] == [SMALL, "4"]


def test_compressed_blocks(kept: Kept, ask: Callable[..., Answer]) -> None:
    name = "compressed/tp0of1"
    kept.fill(name, 5, "lossless")
    stored = sum(kept.path(name, number).stat().st_size for number in range(5))
    line = next(line for line in ask("stat", "--directory", kept.root).out.splitlines() if name in line)
    assert f", {5 * FILE / stored:.2f} times compressed  " in line
    (directory,) = ask("stat", "--json", "--directory", kept.root).data["directories"]
    sizes = {one["namespace"]: (one["bytes"], one["uncompressed_bytes"]) for one in directory["namespaces"]}
    assert sizes == {name: (stored, 5 * FILE), BIG: (10 * FILE, 10 * FILE), SMALL: (4 * FILE, 4 * FILE)}
    assert ask("verify", "--directory", kept.root).code == 0


def test_for_a_program(kept: Kept, ask: Callable[..., Answer]) -> None:
    kept.side(BIG, "identity.json").write_text(json.dumps({"name": "llama", "digest": "3f9a"}), encoding="utf-8")
    data = ask("stat", "--json", "--directory", kept.root).data
    (directory,) = data["directories"]
    assert (directory["directory"], directory["tier"], directory["problem"]) == (str(kept.root), "posix", None)
    assert (directory["blocks"], directory["bytes"], directory["side_bytes"]) == (14, 14 * FILE, 0)
    assert (directory["bare"], directory["unmarked"]) == (False, [])
    assert 0 < directory["free_bytes"] < directory["total_bytes"]
    big, small = directory["namespaces"]
    assert (big["namespace"], big["blocks"], big["bytes"]) == (BIG, 10, 10 * FILE)
    assert big["identity"] == {"name": "llama", "digest": "3f9a"}
    assert small["identity"] is None
    assert big["oldest_use"] < small["oldest_use"] < small["newest_use"]
    assert data["tiers"] == [{"tier": "posix", "bytes": 14 * FILE, "capacity_bytes": None}]


def test_what_lies_beside_the_blocks(kept: Kept, ask: Callable[..., Answer]) -> None:
    mine = owner_name()
    dead = mine.replace(f"-{os.getpid()}-", "-999999999-")
    for name in (mine, dead):
        kept.side(BIG, f"tmp/{name}").write_bytes(b"x" * 100)
        kept.side(BIG, f"aside/{name}").write_bytes(b"x")
    kept.side(BIG, "aside/1-ab-corrupt").write_bytes(b"x" * 50)
    (directory,) = ask("stat", "--json", "--directory", kept.root, "--namespace", "llama*").data["directories"]
    (big,) = directory["namespaces"]
    found = {name: big[name] for name in ("temporaries", "left_behind", "quarantined", "side_bytes")}
    assert found == {"temporaries": 2, "left_behind": 2, "quarantined": 1, "side_bytes": 250}


def test_whose_blocks_they_are(kept: Kept, ask: Callable[..., Answer]) -> None:
    identity = {"name": "Llama-3", "digest": "3f9a" * 16, "vllm": "0.32.0", "cache": {"cache_dtype": "fp8_e4m3"}}
    for namespace in (BIG, SMALL):
        kept.side(namespace, "identity.json").write_text(json.dumps(identity), encoding="utf-8")
    lines = ask("stat", "--directory", kept.root).out.splitlines()
    told = f"  {BIG.partition('/')[0]}: model Llama-3, vLLM 0.32.0, KV cache fp8_e4m3, identity 3f9a3f9a3f9a3f9a"
    assert lines[-1] == told, "an identity that several namespaces share is told once"


def test_the_authentication_key_of_a_namespace_is_named(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    """As the connector writes the identity of its blocks."""
    extra = {
        "store": {"directories": str(kept.root), "authentication_key_file": key_file(tmp_path / "key", secret("k"))}
    }
    engine: Any = VllmConfig(ModelConfig(str(write_model(tmp_path / "llama"))))
    engine.kv_transfer_config = SimpleNamespace(kv_connector="UCMConnector", kv_connector_extra_config=extra)
    identity = engine_identity(engine, load_connector_config(extra))
    written = identity.with_contents(read_files(identity.unread.values())).to_json()
    kept.side(BIG, "identity.json").write_text(written, encoding="utf-8")
    assert (
        f", authentication key {Authenticator(secret('k')).fingerprint.hex()}\n"
        in ask("stat", "--directory", kept.root).out
    )


@pytest.mark.parametrize("written", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_an_identity_that_cannot_be_read_is_none(kept: Kept, ask: Callable[..., Answer], written: bytes) -> None:
    kept.side(BIG, "identity.json").write_bytes(written)
    (directory,) = ask("stat", "--json", "--directory", kept.root).data["directories"]
    assert directory["namespaces"][0]["identity"] is None


def test_strange_identities_are_shown(kept: Kept, ask: Callable[..., Answer]) -> None:
    kept.side(BIG, "identity.json").write_text('{"cache": 1, "name": null}', encoding="utf-8")
    assert ask("stat", "--directory", kept.root).code == 0


def test_times_that_no_calendar_has(kept: Kept, ask: Callable[..., Answer]) -> None:
    os.utime(kept.path(BIG, 0), (0, 0))
    os.utime(kept.path(BIG, 1), (time.time() + DAY,) * 2)
    (directory,) = ask("stat", "--json", "--directory", kept.root).data["directories"]
    assert directory["namespaces"][0]["oldest_use"].startswith("1970-01-01")
    assert " kept 24 h " in ask("stat", "--directory", kept.root).out


def test_what_is_in_use_was_used_just_now(kept: Kept, ask: Callable[..., Answer]) -> None:
    """Though its time is the end of the current span of ``touch_seconds``."""
    for place in range(2):
        os.utime(kept.path(BIG, place), (time.time() + 70,) * 2)
    answer = ask("ls", "--directory", kept.root, "--limit", 2).out
    assert answer.count("  just now\n") == 2
    assert "kept" not in answer


def test_an_empty_directory_is_no_problem(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    answer = ask("stat", "--directory", tmp_path)
    assert answer.code == 0
    assert "0 namespaces, 0 blocks" in answer.out
    assert "\n  There is no store here: none was written yet, " in answer.out
    assert ask("stat", "--json", "--directory", tmp_path).data["directories"][0]["bare"] is True
    assert list(tmp_path.iterdir()) == []


def test_a_namespace_without_its_marker_is_a_problem(kept: Kept, ask: Callable[..., Answer]) -> None:
    kept.side(BIG, "NAMESPACE").unlink()
    (kept.root / "stranger").mkdir()
    answer = ask("stat", "--directory", kept.root)
    assert answer.code == 1
    assert f"{kept.side(BIG, '.')} looks like a namespace but lacks its marker" in answer.out
    assert str(kept.root / "stranger") not in answer.out
    assert ask("stat", "--json", "--directory", kept.root).data["directories"][0]["unmarked"] == [
        str(kept.side(BIG, "."))
    ]


def test_a_configuration_with_both_tiers(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(
        f"store: {{pipeline: Cache|Posix, directories: [{kept.root.name}], posix_capacity: 10MiB, dram_directory: d}}",
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        answer = ask("stat", "--config", file)
        data = ask("stat", "--json", "--config", file).data
    assert answer.code == 0
    assert f"{tmp_path}/d (dram) cannot be read: No such file or directory: engines make it" in answer.out
    assert "The posix tier uses 1.8 MiB of the 10 MiB that it may use." in answer.out
    assert not (tmp_path / "d").exists()
    tiers = {tier["tier"]: tier for tier in data["tiers"]}
    assert tiers["posix"] == {"tier": "posix", "bytes": 14 * FILE, "capacity_bytes": 10 << 20}
    assert tiers["dram"]["bytes"] == 0


def test_a_configured_directory_that_is_gone_is_a_problem(
    kept: Kept, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(f"store: {{directories: ['{kept.root}', '{tmp_path}/gone']}}\n", encoding="utf-8")
    for command in ("stat", "ls", "verify", "gc"):
        answer = ask(command, "--config", file)
        assert answer.code == 1
        assert f"{tmp_path}/gone (posix) cannot be read: No such file or directory: engines make it " in answer.out
        assert "; if they have started, is its file system mounted?\n" in answer.out
    assert not (tmp_path / "gone").exists()
    shutil.rmtree(kept.root)
    kept.root.write_text("", encoding="utf-8")
    out = ask("stat", "--config", file).out
    assert f"{kept.root} (posix) cannot be read: Not a directory\n" in out


def test_a_tier_on_a_server_that_does_not_answer_is_a_problem(
    kept: Kept, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    file = tmp_path / "ucm_config.yaml"
    redis = f"tiers: {{Redis: {{address: '127.0.0.1:{free_port()}'}}}}"
    file.write_text(f"store: {{pipeline: Posix|Redis, directories: '{kept.root}', {redis}}}", encoding="utf-8")
    answer = ask("stat", "--config", file)
    assert answer.code == 1
    assert "Redis: Redis: Error 111" in answer.out
    (server,) = ask("stat", "--json", "--config", file).data["servers"]
    assert (server["tier"], server["answers"]) == ("Redis", False)
    assert ask("stat", "--tier", "posix", "--config", file).code == 0


def test_salts(kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no-salt" not in ask("stat", "--directory", kept.root).out
    shutil.rmtree(kept.root)
    kept.root.mkdir(mode=0o700)
    kept.fill("a/g0", 8)
    names = []
    for salt in ("", "one\n", "two"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(salt))
        answer = ask("tag")
        if not salt:
            assert (answer.code, "no salt on standard input" in answer.err) == (2, True)
        names.append(answer.out.strip())
    assert names[1:] == [tag_name(tag_of_salt(salt).hex()) for salt in ("one", "two")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    assert ask("tag", "--json").data == {"tag": names[1]}
    for number, salt in enumerate(["", "one", "one", "two", "", "one", "", ""]):
        old = kept.path("a/g0", number)
        (new := Path(Layout(str(kept.root), "a/g0").block(of_salt(salt, number)))).parent.mkdir(exist_ok=True)
        old.rename(new)
    (directory,) = ask("stat", "--json", "--directory", kept.root).data["directories"]
    assert directory["salts"] == [
        {"salt": "no-salt", "blocks": 4, "bytes": 4 * FILE, "pinned_bytes": 0},
        {"salt": names[1], "blocks": 3, "bytes": 3 * FILE, "pinned_bytes": 0},
        {"salt": names[2], "blocks": 1, "bytes": FILE, "pinned_bytes": 0},
    ]
    monkeypatch.setattr(stat, "_MOST_SALTS", 1)
    last = ask("stat", "--directory", kept.root).out.splitlines()[-3:]
    assert [line.split() for line in last] == [
        ["salt", "blocks", "bytes", "pinned"],
        ["no-salt", "4", *format_size(4 * FILE).split(), *format_size(0).split()],
        ["2", "other", "salts", "4", *format_size(4 * FILE).split(), *format_size(0).split()],
    ]
