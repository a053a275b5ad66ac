"""Any input gives either valid settings or one ConfigError that names the place and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.config import ConnectorConfig, StoreSettings, load, upstream
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
SENSIBLE = st.sampled_from([True, False, 0, 1, 5, 0.5, "1GiB", "/a", "/a:/b", ["/a"], "direct", "mock", "fail", {}])
STORES = st.sampled_from(
    ["Posix", "Dram", "Cache|Posix", "Empty", "a.b:C", "Fake", "Cache|Ds3fs", *upstream.STORE_NAMES]
)


def mappings(names: Mapping[str, Any], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw some of these settings, and occasionally an unknown one."""
    known = dict.fromkeys(names, SENSIBLE | YAML) | more
    return st.builds(
        lambda chosen, strange: {**strange, **chosen},
        st.fixed_dictionaries({}, optional=known),
        st.dictionaries(st.text(max_size=8), YAML, max_size=1),
    )


UPSTREAM_STORE = mappings(
    {**upstream.STORE, **dict.fromkeys(["stream_number", "node_runner_count"])},
    store_pipeline=STORES | YAML,
    store_health=mappings(dict.fromkeys(["enabled", "failure_threshold", "health_check_interval_s"])),
)
UPSTREAM = st.fixed_dictionaries(
    {},
    optional={
        "ucm_connector_name": STORES | st.just("UcmPipelineStore") | YAML,
        "ucm_connector_config": UPSTREAM_STORE | YAML,
        "ucm_connector_module_path": st.just("acme.kv") | YAML,
    },
)
SETTINGS = mappings(
    {
        **ConnectorConfig.model_fields,
        **{name.strip("()"): None for name in upstream.TOP},
    },
    store=mappings(StoreSettings.model_fields, pipeline=STORES | YAML) | YAML,
    ucm_connectors=st.lists(UPSTREAM, max_size=2),
)


@pytest.fixture(autouse=True)
def _no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not create directories, whose names would be arbitrary."""
    monkeypatch.setattr(load, "directory_problem", lambda *_, **__: None)
    monkeypatch.setattr(load, "capacity_problem", lambda *_, **__: None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.builds(lambda one, other: {**one, **other}, SETTINGS, UPSTREAM) | SETTINGS | UPSTREAM)
def test_it_is_valid_or_said_why_not(written: dict[str, Any]) -> None:
    try:
        config = load.load_connector_config(written)
    except ConfigError as error:
        told = str(error)
        assert "where: kv_connector_extra_config" in told
        assert told.count("where: ") == told.count("to do: ")
        return
    assert isinstance(config.store.as_store_config(), StoreConfig)
