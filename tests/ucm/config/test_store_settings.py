"""The store's section beside the store's own options: the same names, defaults and bounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.config import StoreSettings
from ucm.config.load import load_connector_config
from ucm.config.store_settings import ONLY_WITH, PIPELINES
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from pathlib import Path

#: Each setting with another value than its default.
OTHER: dict[str, Any] = {
    "pipeline": "acme.tape:Store",
    "directories": ["/a", "/b"],
    "posix_capacity": "2GiB",
    "dram_directory": "/dev/shm/another",  # noqa: S108 - only a name here
    "dram_capacity": 12345,
    "dram_capacity_fraction": 0.5,
    "fsync": True,
    "direct_io": True,
    "load_threads": 7,
    "dump_threads": 8,
    "dump_nice": 9,
    "dump_queue": "10MiB",
    "lookup_cache_keys": 11,
    "lookup_cache_seconds": 12.5,
    "failures_until_rest": 13,
    "rest_seconds": 14,
    "aside_keep": 15,
    "touch_seconds": 16.5,
    "stale_seconds": 17,
    "options": {"reels": 18},
}
UNITS = {
    "posix_capacity": "posix_capacity_bytes",
    "dram_capacity": "dram_capacity_bytes",
    "dump_queue": "dump_queue_bytes",
}


def test_every_option_of_a_store_can_be_set() -> None:
    ours = {UNITS.get(name, name) for name in StoreSettings.model_fields}
    assert ours == set(StoreConfig.field_names()) == {UNITS.get(name, name) for name in OTHER}


def test_the_defaults_are_the_stores() -> None:
    assert StoreSettings(pipeline="Empty").as_store_config() == StoreConfig(pipeline="Empty")


def test_what_is_set_arrives() -> None:
    made = StoreSettings.model_validate(OTHER).as_store_config()
    expected = {UNITS.get(name, name): value for name, value in OTHER.items()}
    expected |= {"directories": ("/a", "/b"), "posix_capacity_bytes": 2 << 30, "dump_queue_bytes": 10 << 20}
    assert dataclasses.asdict(made) == expected
    assert all(value != getattr(StoreConfig(), name) for name, value in dataclasses.asdict(made).items())


@given(
    st.sampled_from([n for n, v in OTHER.items() if isinstance(v, int | float) and not isinstance(v, bool)]),
    st.one_of(st.integers(-3, 300), st.floats(-2, 2)),
)
def test_what_the_store_refuses_is_refused_here(name: str, value: float) -> None:
    """The checks are made where the operator's file can be named; the store's own never say more."""
    try:
        ours = StoreSettings.model_validate({"pipeline": "acme.tape:Store", name: value})
    except ValueError:
        return
    assert ours.as_store_config().pipeline == "acme.tape:Store"


@dataclass
class EntryPoint:
    name: str


@pytest.mark.parametrize("pipeline", ["acme.tape:Store", "tape", "a:B"])
def test_a_store_of_ones_own(pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("tape")]
    monkeypatch.setattr(
        "ucm.config.store_settings.entry_points",
        lambda *, group, name: [e for e in found if (group, name) == ("ucm.stores", e.name)],
    )
    store = load_connector_config({"store": {"pipeline": pipeline, "options": {"reels": 3}}}).store
    assert store.as_store_config().pipeline == pipeline


@pytest.mark.parametrize("pipeline", ["posix", "Posix|Dram", "tape", "acme.tape", "acme.tape:", ":Store", "", "a b:C"])
def test_no_such_store(pipeline: str) -> None:
    with pytest.raises(ConfigError, match="there is no such store") as caught:
        load_connector_config({"store": {"pipeline": pipeline}})
    assert caught.value.where == f"kv_connector_extra_config: store.pipeline = {pipeline!r}"
    assert "Cache|Posix" in caught.value.fix


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PIPELINES), st.sampled_from(sorted(ONLY_WITH)))
def test_a_setting_that_means_nothing_to_the_store_is_an_error(tmp_path: Path, pipeline: str, name: str) -> None:
    sensible: dict[str, Any] = {**OTHER, "directories": [str(tmp_path)], "dram_directory": str(tmp_path)}
    store = {"pipeline": pipeline, name: sensible[name]}
    if "directories" in ONLY_WITH and pipeline in ONLY_WITH["directories"]:
        store["directories"] = [str(tmp_path)]
    if pipeline in ONLY_WITH[name]:
        load_connector_config({"store": store})
        return
    with pytest.raises(ConfigError, match=f"{name} means nothing to the store") as caught:
        load_connector_config({"store": store})
    assert caught.value.fix == f"remove {name}"
