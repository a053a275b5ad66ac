"""The settings of the connectors: sizes, and the ``store`` section."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from annotated_types import Ge, Gt, Le
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.config import StoreSettings
from ucm.config.load import load_connector_config
from ucm.config.settings import ONLY_WITH, format_size, parse_size, setting_name
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig, option_types

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal
    from pathlib import Path

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}

#: Each setting with another value than its default.
OTHER: dict[str, Any] = {
    "pipeline": "acme.tape:Store",
    "tiers": {"acme.tape:Store": {"speed": 1}},
    "directories": ["/a", "/b"],
    "posix_capacity": "2GiB",
    "dram_directory": "/dev/shm/another",  # noqa: S108 - only a name here
    "dram_capacity": 12345678,
    "dram_capacity_fraction": 0.5,
    "trusted_group": 0,
    "authentication_key_file": "/etc/ucm/key",
    "fsync": True,
    "load_threads": 7,
    "save_threads": 8,
    "save_nice": 9,
    "save_queue": "10MiB",
    "write_behind": "11MiB",
    "stuck_seconds": 10.5,
    "failures_until_rest": 13,
    "rest_seconds": 14,
    "quarantine_keep": 15,
    "touch_seconds": 16.5,
    "lease_seconds": 900.0,
    "share_seconds": 3600.0,
    "share_weights": {"salt-1a2b3c4d": 3.0, "no-salt": 0.5, "others": 2.0},
    "stale_seconds": 17,
    "options": {"reels": 18},
}
BY_UNIT = {
    "posix_capacity": "posix_capacity_bytes",
    "dram_capacity": "dram_capacity_bytes",
    "save_queue": "save_queue_bytes",
    "write_behind": "write_behind_bytes",
}


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_a_whole_number_and_a_unit(number: int, unit: str, space: str, upper: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse_size(text.upper() if upper else text) == number * UNITS[unit]


@given(st.decimals("0.001", "9999", places=3), st.sampled_from(["GiB", "TB"]))
def test_a_fraction_is_exact(number: Decimal, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == int(number * UNITS[unit])


@pytest.mark.parametrize("value", [1 << 20, 10**18])
def test_a_number_is_bytes(value: int) -> None:
    assert parse_size(value) == parse_size(str(value)) == value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0, "at least one byte"),
        (-1, "at least one byte"),
        ("0GiB", "at least one byte"),
        ("0.0001 B", "at least one byte"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("-1GiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("1e3", "not a size"),
        ("٣GiB", "not a size"),
        ("5G", "'G' is not a unit of size"),
        ("5 Gib s", "not a size"),
        (20, "20 without a unit is read as 20 bytes"),
        ("20", "20 without a unit is read as 20 bytes"),
        ((1 << 20) - 1, "without a unit"),
        ("010", "not a size"),
        ("010GiB", "not a size"),
        ("1:30", "not a size"),
        ("0x10", "not a size"),
        ("5 blocks", "'blocks' is not a unit of size"),
    ],
)
def test_what_is_no_size(value: object, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_size(value)


@given(st.integers(1, 2**60))
def test_what_is_shown_is_near_what_it_is(size: int) -> None:
    shown = format_size(size)
    assert re.fullmatch(r"(\d{1,4}|\d{1,2}\.\d{1,2}|\d+\.\d) ([KMGTP]i)?B", shown), shown
    assert abs(parse_size(shown) - size) <= size * 0.01


def test_every_option_of_a_store_can_be_set() -> None:
    ours = {BY_UNIT.get(name, name) for name in StoreSettings.model_fields}
    assert ours == set(StoreConfig.field_names()) == {BY_UNIT.get(name, name) for name in OTHER}


def test_the_defaults_are_the_stores() -> None:
    assert StoreSettings(pipeline="Empty").as_store_config() == StoreConfig(pipeline="Empty")


def test_what_is_set_arrives() -> None:
    made = StoreSettings.model_validate(OTHER).as_store_config()
    expected = {BY_UNIT.get(name, name): value for name, value in OTHER.items()}
    expected |= {"directories": ("/a", "/b"), "posix_capacity_bytes": 2 << 30, "save_queue_bytes": 10 << 20}
    expected["write_behind_bytes"] = 11 << 20
    assert dataclasses.asdict(made) == expected
    assert all(value != getattr(StoreConfig(), name) for name, value in dataclasses.asdict(made).items())


@given(
    st.sampled_from([n for n, v in OTHER.items() if isinstance(v, int | float) and not isinstance(v, bool)]),
    st.one_of(st.integers(-3, 300), st.floats(-2, 2)),
)
def test_what_the_store_refuses_is_refused_here(name: str, value: float) -> None:
    """These checks can name the operator's file, so they cover everything that the store's own checks refuse."""
    try:
        ours = StoreSettings.model_validate({"pipeline": "acme.tape:Store", name: value})
    except ValueError:
        return
    assert ours.as_store_config().pipeline == "acme.tape:Store"


BOUNDS = [
    (name, bound)
    for name, hint in option_types().items()
    for info in getattr(hint, "__metadata__", ())
    for bound in info.metadata
]


@pytest.mark.parametrize(("name", "bound"), BOUNDS)
def test_an_option_and_its_setting_have_the_same_bounds(name: str, bound: Ge | Gt | Le) -> None:
    setting, value = setting_name(name), next(iter(dataclasses.asdict(bound).values()))
    outside, accepted = {Ge: value - 1, Gt: value, Le: value + 1}[type(bound)], {name: value}
    refused: dict[str, Any] = {name: outside}
    with pytest.raises(ConfigError, match=f"{name} is {outside}; it must be"):
        StoreConfig(**refused)
    with pytest.raises(ValueError, match=setting):
        StoreSettings.model_validate({"pipeline": "acme.tape:Store", setting: outside})
    if not isinstance(bound, Gt):
        assert getattr(StoreConfig(**accepted), name) == value


@dataclass
class EntryPoint:
    name: str


@pytest.mark.parametrize("pipeline", ["acme.tape:Store", "tape", "a:B"])
def test_a_store_of_ones_own(pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("tape")]
    monkeypatch.setattr(
        "ucm.config.settings.entry_points",
        lambda **of: [e for e in found if of == {"group": "ucm.stores", "name": e.name}],
    )
    store = load_connector_config({"store": {"pipeline": pipeline, "options": {"reels": 3}}}).store
    assert store.as_store_config().pipeline == pipeline


@pytest.mark.parametrize(
    "pipeline", ["posix", "Posix|dram", "tape", "acme.tape", "acme.tape:", ":Store", "", "Posix|", "a b:C"]
)
def test_no_such_store(pipeline: str) -> None:
    with pytest.raises(ConfigError, match="there is no such store") as caught:
        load_connector_config({"store": {"pipeline": pipeline}})
    assert caught.value.where == f"kv_connector_extra_config: store.pipeline = {pipeline!r}"
    assert "Cache|Posix" in caught.value.fix


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(["Posix", "Dram", "Cache|Posix", "Empty"]), st.sampled_from(sorted({*ONLY_WITH, "options"})))
def test_a_setting_that_means_nothing_to_the_store_is_an_error(tmp_path: Path, pipeline: str, name: str) -> None:
    sensible: dict[str, Any] = {**OTHER, "directories": [str(tmp_path)], "dram_directory": str(tmp_path / "memory")}
    store = {"pipeline": pipeline, name: sensible[name]}
    parts = set(pipeline.split("|"))
    if parts & ONLY_WITH["directories"]:
        store["directories"] = [str(tmp_path / "disk")]
    if parts & ONLY_WITH.get(name, frozenset()):
        load_connector_config({"store": store})
        return
    with pytest.raises(ConfigError, match=f"{name} does not apply to the store") as caught:
        load_connector_config({"store": store})
    assert caught.value.fix == f"remove {name}"


HERE = "tests.ucm.store.test_factory:ShelfTier"


@pytest.mark.parametrize("pipeline", ["Posix|Posix", "Cache|Dram", "Posix|Empty", "Empty|Posix"])
def test_what_cannot_stand_together(pipeline: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"twice|cannot be combined"):
        load_connector_config({"store": {"pipeline": pipeline, "directories": str(tmp_path)}})


def test_a_tier_of_others_in_a_pipeline_with_its_options(tmp_path: Path) -> None:
    written = {"pipeline": f"Posix|{HERE}", "directories": str(tmp_path), "tiers": {HERE: {"shelf": "a"}}}
    assert load_connector_config({"store": written}).store.as_store_config().tiers == {HERE: {"shelf": "a"}}


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ({HERE: {"shlef": "hunter2", "shelf": "a"}}, f"store.tiers.{HERE}.shlef: did you mean 'shelf'"),
        ({HERE: {"shelf": "a", "password": "hunter2"}}, "write the secret into a file"),
        ({HERE: "hunter2"}, "not a mapping"),
        ({"Posix": {"password": "hunter2"}}, "'password' is not a setting"),
        ({"Redis": {"password": "hunter2"}}, "which is not part of"),
    ],
)
def test_a_wrong_option_of_a_tier_is_told_without_its_value(tmp_path: Path, tiers: dict[str, Any], says: str) -> None:
    written = {"pipeline": f"Posix|{HERE}", "directories": str(tmp_path), "tiers": tiers}
    with pytest.raises(ConfigError) as caught:
        load_connector_config({"store": written})
    found = f"{caught.value.where}: {caught.value}"
    assert "hunter2" not in found
    assert all(part in found for part in says.split(": "))


# Values that are taken for something else.

NO_PATHS = {
    "": "the path is empty",
    "  ": "the path is empty",
    "/a\0b": "null character",
    " /a": "white space",
    "/a:/b": "several paths",
    "s3://bucket": "a URL",
}
PATHS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "directories": ("Posix", lambda path: {"directories": path}),
    "directories[1]": ("Posix", lambda path: {"directories": ["kv", path]}),
    "dram_directory": ("Dram", lambda path: {"dram_directory": path}),
    "authentication_key_file": ("Dram", lambda path: {"authentication_key_file": path}),
}


@pytest.mark.parametrize("path", NO_PATHS)
@pytest.mark.parametrize("place", PATHS)
def test_what_is_no_path_is_refused_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline, write = PATHS[place]
    with pytest.raises(ConfigError, match=NO_PATHS[path]) as caught:
        load_connector_config({"store": {"pipeline": pipeline, **write(path)}})
    assert f"store.{place}" in caught.value.where.replace("directories[0]", "directories")
    assert caught.value.fix


@pytest.mark.parametrize("written", ["$EMPTY", "${EMPTY}", "$EMPTY/kv", "/kv/${EMPTY}"])
@pytest.mark.parametrize("place", PATHS)
def test_an_empty_variable_names_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, written: str
) -> None:
    """It would be the working directory, or the root of the file system."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMPTY", "")
    pipeline, write = PATHS[place]
    with pytest.raises(ConfigError, match="the environment variable EMPTY is empty") as caught:
        load_connector_config({"store": {"pipeline": pipeline, **write(written)}})
    assert "EMPTY in the environment of vLLM" in caught.value.fix


def test_without_a_home_there_is_no_path_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match="no such home directory"):
        load_connector_config({"store": {"directories": "~/kv"}})


@pytest.mark.parametrize("name", ["posix_capacity", "save_queue", "write_behind"])
@pytest.mark.parametrize("written", [20, "20", "010GiB"])
def test_a_size_without_a_unit_is_refused(tmp_path: Path, name: str, written: object) -> None:
    with pytest.raises(ConfigError, match=r"without a unit|not a size") as caught:
        load_connector_config({"store": {"directories": str(tmp_path), name: written}})
    assert caught.value.where == f"kv_connector_extra_config: store.{name} = {written!r}"
    assert "200GiB" in caught.value.fix


@pytest.mark.parametrize("name", [name for name in StoreSettings.model_fields if name.endswith("_seconds")])
def test_a_time_that_no_clock_can_wait_for_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="more than"):
        load_connector_config({"store": {"directories": str(tmp_path), name: 1e300}})


@pytest.mark.parametrize("option", ["password_file", "password_env", "tls_ca", "username", "master"])
def test_an_empty_option_of_a_tier_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="it is empty") as caught:
        load_connector_config({"store": {"pipeline": "Redis", "tiers": {"Redis": {option: ""}}}})
    assert caught.value.where == f"kv_connector_extra_config: store.tiers.Redis.{option}"
