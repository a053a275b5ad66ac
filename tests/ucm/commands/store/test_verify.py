"""`ucm store verify`."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.campaign.damage import DAMAGES, damage_store
from tests.system import require_root
from tests.ucm.commands.store.conftest import BIG, FILE, SMALL
from tests.ucm.store.keys import key_file
from ucm.commands.store import verify as module
from ucm.config import load_connector_config
from ucm.doctor.config_checks import check_config
from ucm.doctor.findings import Status
from ucm.errors import ConfigError
from ucm.store.authentication import Authenticator, read_authenticator
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec, checksum
from ucm.store.inspection import check_block
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import EVEN, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer, Kept
    from ucm.store.base import StoreError
    from ucm.store.inspection import StoredBlock

ONLY_ROOT = "only root can give files away"


def test_a_sound_store(kept: Kept, ask: Callable[..., Answer]) -> None:
    answer = ask("verify", "--directory", kept.root)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("14 blocks, 1.8 MiB read in ")
    assert answer.out.endswith("/s\nEvery block is as it was written.\n")
    data = ask("verify", "--json", "--directory", kept.root).data
    assert (data["blocks"], data["bytes"], data["vanished"], data["problems"]) == (14, 14 * FILE, 0, [])
    assert data["bytes_per_second"] == pytest.approx(data["bytes"] / data["seconds"])


@pytest.mark.parametrize("how", sorted(set(DAMAGES) - {"delete"}))
@pytest.mark.parametrize("threads", [1, 4])
def test_every_damage_is_found(kept: Kept, ask: Callable[..., Answer], how: str, threads: int) -> None:
    harmed = damage_store(kept.root, how, random.Random(1), limit=3)  # noqa: S311 - it decides what is tested
    answer = ask("verify", "--json", "--directory", kept.root, "--threads", threads)
    assert answer.code == 1
    assert {problem["path"] for problem in answer.data["problems"]} == {str(block.path) for block in harmed}
    assert sum(answer.data["damaged"].values()) == 3
    assert all(block.path.exists() for block in harmed)


def test_the_reasons(kept: Kept, ask: Callable[..., Answer]) -> None:
    whole = kept.path(BIG, 0).read_bytes()
    kept.path(BIG, 0).write_bytes(whole[:-1])
    kept.path(BIG, 1).write_bytes(whole)
    kept.path(BIG, 2).write_bytes(kept.path(BIG, 2).read_bytes() + bytes(100))  # not all of it is read
    kept.path(SMALL, 0).write_bytes(whole)
    answer = ask("verify", "--directory", kept.root)
    assert answer.code == 1
    assert f"corrupt: the file has {FILE - 1} bytes, not {FILE}\n  {kept.path(BIG, 0)}\n" in answer.out
    assert f"corrupt: the file has more bytes than {FILE}\n  {kept.path(BIG, 2)}\n" in answer.out
    assert f"foreign: the block's key is {kept.keys[BIG][0].hex()}\n  {kept.path(BIG, 1)}\n" in answer.out
    assert f"foreign: the block belongs to another namespace\n  {kept.path(SMALL, 0)}\n" in answer.out
    assert answer.out.endswith("Not as they should be: 2 corrupt, 2 foreign.\n")


def test_damage_is_quarantined_on_demand(kept: Kept, ask: Callable[..., Answer]) -> None:
    kept.path(BIG, 3).write_bytes(b"rubbish")
    answer = ask("verify", "--quarantine", "--directory", kept.root)
    assert answer.code == 1
    assert "within its header; quarantined" in answer.out
    assert kept.blocks(BIG) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    (moved,) = kept.side(BIG, "aside").iterdir()
    assert moved.name.endswith(f"{kept.keys[BIG][3].hex()}-corrupt")
    assert ask("verify", "--directory", kept.root).code == 0


def test_what_cannot_be_read_goes_out_of_the_way(kept: Kept, ask: Callable[..., Answer]) -> None:
    path = kept.path(BIG, 0)
    path.unlink()
    path.mkdir()
    for options, done in ((), False), (("--quarantine",), True):
        answer = ask("verify", *options, "--json", "--directory", kept.root)
        assert answer.code == 1
        (problem,) = answer.data["problems"]
        assert (problem["cause"], problem["quarantined"]) == ("unreadable", done)
    assert not path.exists()
    assert ask("verify", "--directory", kept.root).code == 0


def test_engines_may_be_at_work(kept: Kept, ask: Callable[..., Answer]) -> None:
    """Blocks are saved, deleted and used while all are verified again and again."""
    ended = threading.Event()

    def work() -> None:
        number = 100
        with open_store(StoreConfig(directories=(str(kept.root),)), BIG, EVEN) as store:
            while not ended.is_set():
                fresh = [key(number), key(number + 1)]
                save(store, fresh, EVEN)
                fetch(store, fresh, EVEN)
                for path in kept.root.glob(f"*/??/{fresh[0].hex()[2:]}"):
                    path.unlink()
                number += 1

    engine = threading.Thread(target=work)
    engine.start()
    try:
        answers = [ask("verify", "--json", "--directory", kept.root) for _ in range(20)]
    finally:
        ended.set()
        engine.join()
    assert [answer.data["problems"] for answer in answers] == [[]] * 20
    assert all(answer.code == 0 for answer in answers)


def test_a_block_that_vanishes_is_counted_as_such(
    kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(
        block: StoredBlock, authenticator: Authenticator | None = None, authentic: Callable[[], object] = int
    ) -> StoreError | None:
        kept.path(BIG, 0).unlink(missing_ok=True)
        return check_block(block, authenticator, authentic)

    monkeypatch.setattr(module, "check_block", slowly)
    answer = ask("verify", "--directory", kept.root, "--namespace", BIG, "--threads", 1)
    assert answer.code == 0
    assert "; 1 was deleted meanwhile\n" in answer.out or answer.out.startswith("9 blocks")


def test_a_failure_of_a_thread_ends_all(
    kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(
        block: StoredBlock, authenticator: Authenticator | None = None, authentic: Callable[[], object] = int
    ) -> None:
        raise OSError(5, "Input/output error", "somewhere")

    monkeypatch.setattr(module, "check_block", fail)
    answer = ask("verify", "--directory", kept.root)
    assert answer.code == 2
    assert "the store cannot be read: Input/output error" in answer.err


def test_nobody_to_read(kept: Kept, ask: Callable[..., Answer]) -> None:
    assert ask("verify", "--directory", kept.root, "--threads", 0).code == 2


def test_where_no_store_is_nothing_was_verified(kept: Kept, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    """A wrong directory, or one whose disk is not mounted, must not count as verified."""
    other = tmp_path / "other"
    (other / "lost+found").mkdir(parents=True)
    answer = ask("verify", "--directory", other)
    assert answer.code == 1
    assert answer.out.startswith(f"{other} (posix): no store here: ")
    assert answer.out.endswith("\nNothing was verified: there are no blocks.\n")
    answer = ask("verify", "--directory", kept.root, "--directory", other)
    assert answer.code == 1
    assert answer.out.endswith("\nEvery block that was read is as it was written; not all could be, see above.\n")
    data = ask("verify", "--json", "--directory", kept.root, "--directory", other).data
    assert (data["blocks"], data["bare"], data["unmarked"], data["unreadable"]) == (14, [str(other)], [], [])


def test_a_namespace_without_its_marker_is_not_read_and_a_problem(kept: Kept, ask: Callable[..., Answer]) -> None:
    kept.side(BIG, "NAMESPACE").unlink()
    answer = ask("verify", "--directory", kept.root)
    assert answer.code == 1
    assert answer.out.startswith(f"{kept.side(BIG, '.')} looks like a namespace but lacks its marker")
    assert answer.out.endswith("not all could be, see above.\n")
    kept.side(SMALL, "NAMESPACE").unlink()
    answer = ask("verify", "--directory", kept.root)
    assert answer.code == 1
    assert "no store here" not in answer.out
    assert answer.out.endswith("Nothing was verified: there are no blocks.\n")
    data = ask("verify", "--json", "--directory", kept.root).data
    assert data["unmarked"] == [str(kept.side(BIG, ".")), str(kept.side(SMALL, "."))]


def test_a_store_without_blocks_is_in_order(kept: Kept, ask: Callable[..., Answer]) -> None:
    for namespace in (BIG, SMALL):
        for number in kept.blocks(namespace):
            kept.path(namespace, number).unlink()
    answer = ask("verify", "--directory", kept.root)
    assert answer.code == 0
    assert answer.out.endswith("Nothing was verified: there are no blocks.\n")


def test_a_tier_in_memory_may_be_empty(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    (tmp_path / "memory").mkdir()
    file.write_text(
        f"store: {{pipeline: Cache|Posix, directories: ['{kept.root}'], dram_directory: '{tmp_path}/memory'}}",
        encoding="utf-8",
    )
    answer = ask("verify", "--config", file)
    assert answer.code == 0
    assert answer.out.endswith("Every block is as it was written.\n")


def test_a_directory_that_is_gone_is_never_sound(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(f"store: {{directories: ['{kept.root}', '{tmp_path}/gone']}}", encoding="utf-8")
    answer = ask("verify", "--config", file)
    assert answer.code == 1
    assert "Every block is as it was written." not in answer.out
    assert ask("verify", "--json", "--config", file).data["unreadable"] == [
        {"directory": f"{tmp_path}/gone", "tier": "posix", "reason": "No such file or directory"}
    ]


def test_forged_blocks_are_found_with_the_key_of_the_configuration(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    root, file = tmp_path / "kv", tmp_path / "ucm_config.yaml"
    root.mkdir(mode=0o700)
    store = {"directories": str(root), "authentication_key_file": key_file(tmp_path / "key")}
    file.write_text(json.dumps({"store": store}), encoding="utf-8")
    signed = StoreConfig(directories=(str(root),), authentication_key_file=store["authentication_key_file"])
    keys = [key(number) for number in range(4)]
    for config, namespace in ((signed, BIG), (replace(signed, authentication_key_file=None), SMALL)):
        with open_store(config, namespace, EVEN) as opened:
            assert save(opened, keys, EVEN).failed == {}
    answer = ask("verify", "--config", file)
    assert answer.code == 0
    assert "\n4 blocks are of another authentication key, or of none: only accidental changes" in answer.out
    path = Path(Layout(str(root), BIG).block(keys[0]))
    forged = HeaderCodec(BIG, EVEN, Authenticator("not the key"))
    (memory,) = filled(keys[:1], EVEN, version=1)
    path.write_bytes(forged.encode(keys[0], forged.seal(memory.slices)) + memory.data)
    data = ask("verify", "--json", "--config", file).data
    assert (data["blocks"], data["authentic"], data["damaged"]) == (8, 3, {})
    value = bytearray(path.read_bytes())
    at = forged.nbytes - 32
    value[at : at + 8] = Authenticator(Path(store["authentication_key_file"]).read_text("utf-8").strip()).fingerprint
    value[forged.nbytes - 8 : forged.nbytes] = checksum(bytes(value[: forged.nbytes - 8])).to_bytes(8, "little")
    path.write_bytes(value)
    answer = ask("verify", "--json", "--config", file)
    assert (answer.code, answer.data["authentic"], answer.data["damaged"]) == (1, 3, {"corrupt": 1})
    assert "authentication tag is wrong" in answer.data["problems"][0]["reason"]
    without = ask("verify", "--json", "--directory", root)
    assert (without.code, without.data["authentic"]) == (0, None)


@pytest.fixture
def signed(tmp_path: Path) -> StoreConfig:
    """An authenticated store with four blocks, and its configuration in ``ucm_config.yaml``."""
    (tmp_path / "kv").mkdir(mode=0o700)
    config = StoreConfig(
        directories=(str(tmp_path / "kv"),), authentication_key_file=key_file(tmp_path / "key"), save_nice=0
    )
    store = {"directories": config.directories[0], "authentication_key_file": config.authentication_key_file}
    (tmp_path / "ucm_config.yaml").write_text(json.dumps({"store": store}), encoding="utf-8")
    with open_store(config, BIG, EVEN) as opened:
        assert save(opened, [key(number) for number in range(4)], EVEN).failed == {}
    return config


@pytest.mark.parametrize("why", ["gone", "another user's"])
def test_without_a_usable_key_tools_count_and_find_accidental_damage(
    signed: StoreConfig, tmp_path: Path, ask: Callable[..., Answer], why: str
) -> None:
    file, path = tmp_path / "ucm_config.yaml", tmp_path / "key"
    read_authenticator.cache_clear()
    if why == "gone":
        path.unlink()
    else:
        require_root(ONLY_ROOT)
        os.chown(path, 12345, 12345)
    assert ask("stat", "--json", "--config", file).data["directories"][0]["blocks"] == 4
    assert ask("ls", "--config", file).code == 0
    assert ask("gc", "--yes", "--older-than", "1h", "--config", file).code == 0
    answer = ask("verify", "--config", file)
    assert (answer.code, answer.out.startswith("No tags are compared, because the key cannot be used")) == (1, True)
    assert "No block that was read was changed by accident" in answer.out
    block = Path(Layout(signed.directories[0], BIG).block(key(1)))
    value = bytearray(block.read_bytes())
    value[-1] ^= 1
    block.write_bytes(value)
    data = ask("verify", "--json", "--config", file).data
    assert (data["damaged"], data["authentic"], str(path) in data["keyless"]) == ({"corrupt": 1}, None, True)


def test_root_may_use_the_key_of_the_stores_owner(
    signed: StoreConfig, tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    require_root(ONLY_ROOT)
    file, root = tmp_path / "ucm_config.yaml", Path(signed.directories[0])
    read_authenticator.cache_clear()
    os.chown(tmp_path / "key", 12345, 12345)
    os.chown(root, 12345, os.getgid())
    root.chmod(0o770)
    store = json.loads(file.read_text("utf-8"))["store"]
    file.write_text(json.dumps({"store": {**store, "trusted_group": os.getgid()}}), encoding="utf-8")
    assert ask("verify", "--json", "--config", file).data["authentic"] == 4
    (found,) = check_config(file)
    assert found.status is Status.OK, found
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        load_connector_config({"UCM_CONFIG_FILE": str(file)})
