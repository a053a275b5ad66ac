"""The origins of settings: inline, a file, or both; and invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucm.config.document import read_document
from ucm.config.load import check_connector_config
from ucm.errors import ConfigError


def file_with(directory: Path, text: str) -> Path:
    path = directory / "ucm.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_inline() -> None:
    document = read_document({"store": {"pipeline": "Empty"}})
    assert document.settings == {"store": {"pipeline": "Empty"}}
    assert document.file is None
    assert str(document.place("store")) == "kv_connector_extra_config: store"


def test_settings_in_a_file(tmp_path: Path) -> None:
    path = file_with(tmp_path, "metrics: false\nstore: {pipeline: Empty}\n")
    document = read_document({"UCM_CONFIG_FILE": str(path)})
    assert document.settings == {"metrics": False, "store": {"pipeline": "Empty"}}
    assert document.file == path
    assert str(document.place("metrics")) == f"{path}: metrics"


def test_what_stands_inline_wins(tmp_path: Path) -> None:
    path = file_with(tmp_path, "metrics: false\nmin_hit_tokens: 3\n")
    document = read_document({"UCM_CONFIG_FILE": str(path), "metrics": True, "hit_ratio": 0.5})
    assert document.settings == {"metrics": True, "min_hit_tokens": 3, "hit_ratio": 0.5}
    assert document.overridden == {"metrics"}
    assert str(document.place("metrics")) == "kv_connector_extra_config: metrics"
    assert str(document.place("min_hit_tokens")) == f"{path}: min_hit_tokens"


def test_the_path_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path, "metrics: false")
    monkeypatch.chdir(tmp_path)
    assert read_document({"UCM_CONFIG_FILE": "./ucm.yaml"}).file == tmp_path / "ucm.yaml"


@pytest.mark.parametrize("written", ["~/ucm.yaml", "$WHERE/ucm.yaml", "${WHERE}/ucm.yaml"])
def test_the_path_may_name_variables(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", str(tmp_path))
    path = file_with(tmp_path, "metrics: false")
    assert read_document({"UCM_CONFIG_FILE": written}).file == path


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_has_no_settings(text: str, tmp_path: Path) -> None:
    assert read_document({"UCM_CONFIG_FILE": file_with(tmp_path, text)}).settings == {}


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("store: {pipeline: Empty\n", "not YAML: ", ":2:1"),
        ("metrics: true\nmetrics: false\n", "not YAML: the key 'metrics' is given twice", ":2:1"),
        ("store:\n  fsync: true\n  fsync: true\n", "not YAML: the key 'fsync' is given twice", ":3:3"),
        ("store: !!python/object/apply:os.getcwd []\n", "not YAML: could not determine a constructor", ":1:8"),
        ("a: b: c", "not YAML: mapping values are not allowed here", ":1:5"),
        ("\x00", "not YAML: ", ""),
        ("- store\n", "the file holds list, where 'name: value' lines are expected", ""),
        ("text", "the file holds str, where 'name: value' lines are expected", ""),
        ("1: 2\n", "the file holds keys that are not names, where", ""),
        ("UCM_CONFIG_FILE: other.yaml\n", "a configuration file cannot name another", ": UCM_CONFIG_FILE"),
    ],
)
def test_what_is_no_configuration_file(text: str, what: str, where: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_document({"UCM_CONFIG_FILE": str(path)})
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"{path}{where}"
    assert caught.value.fix


@pytest.mark.parametrize(
    "written",
    [
        *("010", "007", "00", "007.5", "08.5e2", "1:30", "-1:30:00", "0x10", "0b11", "0o10", "1_000"),
        *("yes", "No", "on", "OFF", "2026-11-26", "="),
    ],
)
def test_what_versions_of_yaml_do_not_agree_on_is_a_text(written: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, f"store:\n  sizes: [2, {written}]\n")
    assert read_document({"UCM_CONFIG_FILE": str(path)}).settings == {"store": {"sizes": [2, written]}}


def test_a_text_or_nothing_in_the_place_of_a_number_is_refused(tmp_path: Path) -> None:
    written = "load_threads: 010, rest_seconds: 1:30, fsync: yes, posix_capacity: , tiers: {Redis: {username: 0123456}}"
    path = file_with(tmp_path, f"staging:\nstore: {{pipeline: Posix|Redis, directories: /x, {written}}}\n")
    with pytest.raises(ConfigError) as caught:
        check_connector_config({"UCM_CONFIG_FILE": str(path)}, make=False)
    told = str(caught.value)
    for place in ("staging = ''", "store.load_threads = '010'", "store.rest_seconds = '1:30'", "store.fsync = 'yes'"):
        assert f"{path}: {place}" in told
    assert f"{path}: store.posix_capacity = ''" in told
    assert "0123456" not in told, "it may be a password"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(
            ("10", 10),
            ("-3", -3),
            ("0", 0),
            ("0.5", 0.5),
            (".5", 0.5),
            ("1.5e+3", 1500.0),
            ("1e3", 1000.0),
            ("true", True),
            ("~", None),
        ),
        *(
            ("null", None),
            ("'010'", "010"),
            ("!!str 010", "010"),
            ("'yes'", "yes"),
            ("127.0.0.1:6379", "127.0.0.1:6379"),
        ),
        *(("200GiB", "200GiB"), ("0.32.0", "0.32.0"), ("v1", "v1"), ("12:61", "12:61"), ("1/2", "1/2")),
    ],
)
def test_what_is_read_as_it_looks(written: str, value: object, tmp_path: Path) -> None:
    path = file_with(tmp_path, f"anything: {written}\n")
    assert read_document({"UCM_CONFIG_FILE": str(path)}).settings == {"anything": value}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"a: " + b"[" * 20_000, "nested too deeply"),
        (b"a: !!bool x", "not YAML: 'x'"),
        (b"a: !!timestamp x", "not YAML: "),
        (b"a: " + b"9" * 5000, "not YAML: Exceeds the limit"),
        (b"a:\n\tb: 1", "not YAML: found character"),
        ("metrics: true".encode("utf-16"), "not UTF-8"),
        (b"#" * (1 << 20) + b"\na: 1", "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_an_attack_or_an_accident(content: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=what) as caught:
        read_document({"UCM_CONFIG_FILE": str(path)})
    assert str(path) in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize("text", ["\ufeffmetrics: true\n", "metrics: true\r\n", "x: &x {a: 1}\ny: {<<: *x, b: 2}\n"])
def test_what_other_editors_write_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_bytes(text.encode())
    assert read_document({"UCM_CONFIG_FILE": str(path)}).settings in (
        {"metrics": True},
        {"x": {"a": 1}, "y": {"a": 1, "b": 2}},
    )


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_bytes("metrics: yes # für".encode("latin-1"))
    with pytest.raises(ConfigError, match="the configuration file is not UTF-8"):
        read_document({"UCM_CONFIG_FILE": str(path)})


@pytest.mark.parametrize(
    ("written", "reason"), [("none.yaml", "does not exist"), (".", "cannot be read: Is a directory")]
)
def test_a_file_that_cannot_be_read(written: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"the configuration file {reason}") as caught:
        read_document({"UCM_CONFIG_FILE": written})
    assert caught.value.where == str(tmp_path / written)


@pytest.mark.parametrize("value", ["", None, 3, ["ucm.yaml"]])
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(ConfigError, match="not the path of a file") as caught:
        read_document({"UCM_CONFIG_FILE": value})
    assert caught.value.where == f"kv_connector_extra_config: UCM_CONFIG_FILE = {value!r}"


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("$NOT_SET_HERE/ucm.yaml", "the environment variable NOT_SET_HERE is not set"),
        ("${NOT_SET_HERE}.yaml", "the environment variable NOT_SET_HERE is not set"),
        ("~nobody-of-that-name/ucm.yaml", "there is no such home directory"),
    ],
)
def test_a_path_that_cannot_be_put_together(written: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError, match=what) as caught:
        read_document({"UCM_CONFIG_FILE": Path(written)})
    assert "UCM_CONFIG_FILE" in caught.value.where
