"""Loading as a whole: directories are created, capacities compared with the medium, all problems reported at once."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.store.frozen import FrozenDirectory
from ucm.config import ConnectorConfig, load_connector_config
from ucm.config.document import FILE_KEY, read_document
from ucm.config.load import check_connector_config
from ucm.config.upstream import TOP, translate
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.directory import check_apart
from ucm.testing.blocks import EVEN

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from tests.clock import SimulatedClock

EMPTY = {"store": {"pipeline": "Empty"}}
TOO_MUCH = 1 << 60


def test_the_least_that_has_to_be_said(tmp_path: Path) -> None:
    config = load_connector_config({"store": {"directories": str(tmp_path / "kv")}})
    assert config.connector == "direct"
    assert config.store.directories == (str(tmp_path / "kv"),)
    assert config.save_decode_blocks
    assert config.hit_ratio == 1
    assert config.min_hit_tokens == 0
    assert config.load_failure == "recompute"
    assert config.metrics


def test_directories_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "kv"
    load_connector_config({"store": {"directories": [str(directory)]}})
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DISK", str(tmp_path / "disk"))
    store = load_connector_config({"store": {"directories": ["kv", "~/kv", "${DISK}/kv"]}}).store
    assert store.directories == tuple(str(tmp_path / name / "kv") for name in (".", "home", "disk"))


@pytest.mark.parametrize("inline", [{"load_failure": "fail"}, {"connector": "mock", "hit_ratio": 0}])
def test_what_is_said_arrives(inline: dict[str, Any]) -> None:
    config = load_connector_config(EMPTY | inline)
    assert {name: getattr(config, name) for name in inline} == inline


def test_the_file_and_what_wins_over_it_are_said_once(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text("store: {pipeline: Empty}\nmetrics: false\nenable_event_sync: true\n", "utf-8")
    for _ in range(2):
        assert load_connector_config({"UCM_CONFIG_FILE": str(path), "metrics": True}).metrics
    reason = TOP["enable_event_sync"]
    assert said == [
        f"[UCM.Connector] settings come from {path} (UCM_CONFIG_FILE)",
        f"[UCM.Connector] metrics: kv_connector_extra_config wins over {path}",
        f"[UCM.Connector] {path}: enable_event_sync has no effect here: {reason}",
    ]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(
        "store:\n"
        f"  directories: [{tmp_path}/kv, {path}]\n"
        f"  posix_capacity: {TOO_MUCH}\n"
        "  save_threads: none\n"
        "conector: layerwise\n"
        "min_hit_tokens: -1\n"
        "load_failure: retry\n",
        "utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_connector_config({"UCM_CONFIG_FILE": str(path), "use_lite": True})
    text = str(caught.value)
    assert text.startswith("5 settings cannot be used\n")
    for line in (
        "'conector' is not a setting",
        f"where: {path}: conector = 'layerwise'",
        "to do: did you mean 'connector'?",
        f"where: {path}: min_hit_tokens = -1",
        f"where: {path}: store.save_threads = 'none'",
        f"where: {path}: load_failure = 'retry'",
        "to do: write 'recompute' or 'fail'",
        "where: kv_connector_extra_config: use_lite = True",
    ):
        assert line in text
    assert "is not a directory" not in text  # media are looked at when the store's settings are valid
    path.write_text(path.read_text("utf-8").replace("  save_threads: none\n", ""), "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_connector_config({"UCM_CONFIG_FILE": str(path), "use_lite": True})
    text = str(caught.value)
    assert text.startswith("5 settings cannot be used\n")
    assert f"{path} is not a directory" in text
    assert f"where: {path}: store.directories[1] = '{path}'" in text
    assert "posix_capacity" not in text  # nothing to hold it against while a directory is wrong


@pytest.mark.parametrize(
    ("settings", "what", "where"),
    [
        ({}, "no store is configured", ""),
        ({"store": None}, "not a mapping", "store = None"),
        ({"store": {"directories": []}}, "the store 'Posix' needs a directory", "store = {'directories': []}"),
        ({"store": {"pipeline": "Empty", "fsnc": 1}}, "'fsnc' is not a setting", "store.fsnc = 1"),
        ({"store": {"pipeline": "Empty", 5: 1}}, "a name is expected, not a number", "store[5] = 5"),
        (EMPTY | {"hit_ratio": 1.5}, "more than 1", "hit_ratio = 1.5"),
        (EMPTY | {"hit_ratio": float("nan")}, "not a finite number", "hit_ratio = nan"),
        (EMPTY | {"connector": "mock"}, "the mock connector needs hit_ratio", ""),
        (EMPTY | {"save_decode_blocks": "no"}, "neither true nor false", "save_decode_blocks = 'no'"),
        (EMPTY | {"ucm_sparse_config": []}, "not a mapping", "ucm_sparse_config = []"),
        (EMPTY | {"zzz": 1}, "'zzz' is not a setting", "zzz = 1"),
    ],
)
def test_what_is_wrong(settings: dict[str, Any], what: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector_config(settings)
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"kv_connector_extra_config: {where}".removesuffix(": ")
    assert caught.value.fix


def test_where_there_are_no_settings_a_file_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector_config({})
    assert caught.value.where == "kv_connector_extra_config"
    written = re.search(r"file with the settings, (.*), or write (.*)", caught.value.fix)
    assert written is not None
    assert list(json.loads(written[1])) == [FILE_KEY]
    assert translate(read_document(json.loads(written[2])), ConnectorConfig.model_fields).problems == []
    empty = tmp_path / "ucm.yaml"
    empty.touch()
    with pytest.raises(ConfigError) as caught:
        load_connector_config({FILE_KEY: str(empty)})
    assert (caught.value.where, FILE_KEY in caught.value.fix) == (str(empty), False)


def test_the_name_of_the_file_misspelt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector_config({"UCM_CONFIG_FIL": "ucm_config.yaml"})
    assert caught.value.what == "'UCM_CONFIG_FIL' is not a setting"
    assert caught.value.where == "kv_connector_extra_config: UCM_CONFIG_FIL = 'ucm_config.yaml'"
    assert caught.value.fix == "did you mean 'UCM_CONFIG_FILE'?"
    path = tmp_path / "ucm.yaml"
    path.write_text("UCM_CONFIG_FIL: other.yaml\nstore: {pipeline: Empty}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_connector_config({FILE_KEY: str(path)})
    assert FILE_KEY not in caught.value.fix, "a file cannot name another"


def test_a_key_that_is_like_no_other_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector_config(EMPTY | {"zzz": 1})
    assert "save_decode_blocks" in caught.value.fix
    assert "ucm_connectors" in caught.value.fix


@pytest.mark.parametrize(
    ("store", "name"),
    [
        ({"pipeline": "Posix", "posix_capacity": TOO_MUCH}, "posix_capacity"),
        ({"dram_capacity": "900PiB"}, "dram_capacity"),
    ],
)
def test_a_capacity_beyond_the_medium(store: dict[str, Any], name: str, tmp_path: Path) -> None:
    settings = {"pipeline": "Cache|Posix", "directories": [str(tmp_path)], **store}
    with pytest.raises(ConfigError, match=r"are more than the file system of /.* has: .* in all") as caught:
        load_connector_config({"store": settings})
    assert caught.value.where == f"kv_connector_extra_config: store.{name} = {store[name]!r}"


def test_directories_on_one_file_system_share_it(tmp_path: Path) -> None:
    two = [str(tmp_path / "a"), str(tmp_path / "b")]
    total = shutil.disk_usage(tmp_path).total
    load_connector_config({"store": {"directories": two, "posix_capacity": total - total % 2}})
    with pytest.raises(ConfigError, match=", in equal shares, are more than the file system"):
        load_connector_config({"store": {"directories": two, "posix_capacity": total + 2}})


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system at hand")  # noqa: S108
def test_the_smallest_file_system_counts(tmp_path: Path) -> None:
    """Each directory gets an equal share, however much space the others have."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        small, large = sorted((shutil.disk_usage(one).total, str(one)) for one in (memory, tmp_path))
        if small[0] * 2 >= small[0] + large[0]:
            pytest.skip("both file systems are of one size")
        settings = {"directories": [small[1], large[1]], "posix_capacity": small[0] + large[0]}
        with pytest.raises(ConfigError, match=f"the file system of {small[1]} has"):
            load_connector_config({"store": settings})


def test_a_directory_below_one_that_is_not_there_yet_has_its_file_systems_size(tmp_path: Path) -> None:
    dram = {"pipeline": "Dram", "dram_directory": str(tmp_path / "a" / "b")}
    total = shutil.disk_usage(tmp_path).total
    assert load_connector_config({"store": {**dram, "dram_capacity": total}}).store.dram_capacity == total
    assert (tmp_path / "a" / "b").is_dir()


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock) -> FrozenDirectory:
    """A directory whose server is gone."""
    return FrozenDirectory(monkeypatch, str(tmp_path / "frozen"), clock=clock)


def outcome(call: Callable[[], ConnectorConfig]) -> ConnectorConfig | Exception:
    """Return a call's result or error."""
    try:
        return call()
    except ConfigError as error:
        return error


@pytest.mark.parametrize("make", [True, False])
def test_a_directory_that_does_not_answer_is_named_and_keeps_nobody(
    tmp_path: Path, frozen: FrozenDirectory, said: list[str], clock: SimulatedClock, *, make: bool
) -> None:
    """An engine starts, and opens its store once the directory answers; the doctor reports an error."""
    two = [str(tmp_path / "well"), str(tmp_path / "frozen")]
    written = {"store": {"directories": two, "posix_capacity": "900PiB", "stuck_seconds": 2.0}}
    began = clock.monotonic()
    found = outcome(lambda: check_connector_config(written, make=make, clock=clock)[0])
    assert clock.monotonic() - began <= 10
    assert frozen.held.is_set()
    named = f"{two[1]} has not answered for 2.0 s"
    if make:
        assert isinstance(found, ConnectorConfig)
        assert found.store.directories == tuple(two)
        assert Path(two[0]).is_dir(), "the others are made all the same"
        assert [named in line and "store.directories[1]" in line for line in said] == [True]
    else:
        assert isinstance(found, ConfigError)
        assert (found.what, said) == (named, [])
        assert found.where == f"kv_connector_extra_config: store.directories[1] = {two[1]!r}"


@pytest.mark.parametrize("make", [True, False])
def test_a_key_that_does_not_answer_is_an_error(
    tmp_path: Path, frozen: FrozenDirectory, clock: SimulatedClock, *, make: bool
) -> None:
    """The names of all blocks depend on it, so that an engine cannot start without."""
    written = {
        "store": {
            "directories": str(tmp_path / "well"),
            "authentication_key_file": str(tmp_path / "frozen" / "key"),
            "stuck_seconds": 1.0,
        }
    }
    began = clock.monotonic()
    found = outcome(lambda: check_connector_config(written, make=make, clock=clock)[0])
    assert clock.monotonic() - began <= 10
    assert frozen.held.is_set()
    assert isinstance(found, ConfigError)
    assert found.what == "the key's file has not answered for 1.0 s"


def test_a_directory_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, frozen: FrozenDirectory, clock: SimulatedClock
) -> None:
    """This holds for any number of connectors that read the configuration in one process."""
    written = {"store": {"directories": str(tmp_path / "frozen"), "stuck_seconds": 2.0}}
    load_connector_config(written, clock=clock)
    calls, began = frozen.calls, clock.monotonic()
    load_connector_config({"store": {**written["store"], "stuck_seconds": 3600.0}}, clock=clock)
    assert (frozen.calls, clock.monotonic()) == (calls, began)
    frozen.thawed.set()
    clock.run_until_idle()
    assert clock.alive == []


def test_a_file_system_that_stops_answering_is_asked_for_no_size(
    tmp_path: Path, frozen: FrozenDirectory, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    frozen.thawed.set()
    usage = shutil.disk_usage

    def freeze(path: Path) -> Any:
        frozen.thawed.clear()
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", freeze)
    store = {"directories": str(tmp_path / "frozen"), "posix_capacity": "900PiB", "stuck_seconds": 2.0}
    found = load_connector_config({"store": store}, clock=clock)
    assert isinstance(found, ConnectorConfig)


def test_a_directory_that_may_not_be_written() -> None:
    """Checked as another user, because root may write anywhere."""
    script = (
        "import os, sys; from ucm.config import load_connector_config\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: load_connector_config({'store': {'directories': sys.argv[1:]}})\n"
        "except Exception as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as closed:
        Path(closed).chmod(0o555)
        command = [sys.executable, "-c", script, closed, f"{closed}/below"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"no file can be created in {closed}: Permission denied" in told
    assert f"{closed}/below does not exist and cannot be created: Permission denied" in told
    assert f"store.directories[1] = '{closed}/below'" in told


# Directories that are the same.

NAMED_TWICE = {
    "twice": ("kv", "kv"),
    "with a slash": ("kv", "kv/"),
    "with dots": ("kv", "./other/../kv/."),
    "from the root": ("kv", "{here}/kv"),
    "from the home": ("kv", "~/kv"),
    "by a variable": ("kv", "$HERE/kv"),
    "by a link": ("kv", "link"),
    "by a link to a parent": ("kv", "up/kv"),
    "not yet there": ("new/kv", "new/./kv"),
    "not yet there, by a link": ("new/kv", "up/new/kv"),
}
INSIDE = {
    "inside": ("kv", "kv/inner"),
    "around": ("kv/inner/most", "kv"),
    "inside a link": ("kv", "link/inner"),
    "not yet there": ("new", "new/a/b"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HERE", str(tmp_path))
    for name in ("kv", "other"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("kv")
    (tmp_path / "up").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize("case", NAMED_TWICE)
def test_a_directory_named_twice_is_refused_naming_both(here: Path, case: str, make: bool) -> None:
    two = [path.format(here=here) for path in NAMED_TWICE[case]]
    with pytest.raises(ConfigError, match="is the same as") as caught:
        check_connector_config({"store": {"directories": ["other", *two]}}, make=make)
    assert caught.value.where == "kv_connector_extra_config: store.directories"
    named = [path.replace("~", str(here)).replace("$HERE", str(here)) for path in two]
    assert all(str(here / path) in caught.value.what for path in named)


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize("case", INSIDE)
def test_a_directory_inside_another_is_refused(here: Path, case: str, make: bool) -> None:
    two = list(INSIDE[case])
    with pytest.raises(ConfigError, match="is inside") as caught:
        check_connector_config({"store": {"directories": two}}, make=make)
    assert all(str(here / path) in caught.value.what for path in two)


def test_every_directory_is_inside_the_root_of_the_file_system(here: Path) -> None:
    """Only root may write there, so that for others the settings end with another problem."""
    with pytest.raises(ConfigError, match=f"{here / 'kv'} is inside the Posix tier's directory /\n"):
        check_apart(["/", str(here / "kv")], None)


@pytest.mark.parametrize("memory", ["kv", "link", "kv/inner", "up"])
def test_tiers_need_directories_of_their_own(here: Path, memory: str) -> None:
    store = {"pipeline": "Dram|Posix", "directories": ["other", "kv"], "dram_directory": memory}
    with pytest.raises(ConfigError, match="the Dram tier's directory") as caught:
        load_connector_config({"store": store})
    assert caught.value.where == "kv_connector_extra_config: store.dram_directory"
    assert str(here / memory) in caught.value.what


def test_directories_that_only_look_alike_are_accepted(here: Path) -> None:
    (here / "kv-2").mkdir()
    assert len(load_connector_config({"store": {"directories": ["kv", "kv-2", "other/kv"]}}).store.directories) == 3


def test_a_directory_that_is_mounted_in_two_places_is_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names lead to the same device and number, without any link."""
    real = Path.stat

    def stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return real(here / "kv" if self == here / "other" else self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigError, match=f"{here}/other is the same as the Posix tier's directory {here}/kv"):
        load_connector_config({"store": {"directories": ["kv", "other"]}})


def test_a_store_that_is_opened_by_a_program_is_checked_as_well(here: Path) -> None:
    config = StoreConfig(directories=(str(here / "kv"), str(here / "link")))
    with pytest.raises(ConfigError, match="is the same as"):
        open_store(config, "model", EVEN)
