"""Where the sparse method is configured, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ucm.errors import ConfigError
from ucm.integration.vllm.config import sparse_method_config


@dataclass
class Transfer:
    kv_connector_extra_config: object


@dataclass
class VllmConfig:
    kv_transfer_config: Transfer | None = None
    additional_config: object = None


def connector(value: object) -> Transfer:
    return Transfer({"ucm_sparse_config": value, "storage_backends": "/mnt"})


def additional(value: object) -> dict[str, object]:
    return {"ucm_sparse_config": value, "other": 1}


@pytest.mark.parametrize(
    "config",
    [
        object(),
        VllmConfig(),
        VllmConfig(Transfer({}), {}),
        VllmConfig(Transfer(None)),
        VllmConfig(connector({}), additional(None)),
        VllmConfig(None, "an object with a hash of its own"),
    ],
)
def test_nothing_configured(config: object) -> None:
    assert sparse_method_config(config) is None


@pytest.mark.parametrize(
    "config",
    [
        VllmConfig(connector({"GSA": {"ratio": 0.3}})),
        VllmConfig(None, additional({"GSA": {"ratio": 0.3}})),
        VllmConfig(Transfer({}), additional({"GSA": {"ratio": 0.3}})),
    ],
    ids=["connector", "additional", "connector-without"],
)
def test_a_method_in_either_place(config: VllmConfig) -> None:
    assert sparse_method_config(config) == ("GSA", {"ratio": 0.3})


def test_the_connector_comes_first() -> None:
    config = VllmConfig(connector({"first": {}}), additional({"second": {}}))
    assert sparse_method_config(config) == ("first", {})


def test_options_are_handed_on_as_they_are() -> None:
    options: dict[str, Any] = {}
    found = sparse_method_config(VllmConfig(None, additional({"GSA": options})))
    assert found is not None
    assert found[1] is options


@pytest.mark.parametrize("value", ["GSA", ["GSA"], {"GSA": {}, "ESA": {}}])
def test_not_one_method(value: object) -> None:
    with pytest.raises(ConfigError, match="one name with its options") as caught:
        sparse_method_config(VllmConfig(connector(value)))
    assert caught.value.where == f"kv_connector_extra_config.ucm_sparse_config: {value!r}"
    assert caught.value.fix == 'write {"ucm_sparse_config": {"<method>": {…options…}}}'


@pytest.mark.parametrize("options", [None, 3, ["ratio"]])
def test_options_that_are_no_mapping(options: object) -> None:
    with pytest.raises(ConfigError, match="the options of 'GSA' are not a mapping") as caught:
        sparse_method_config(VllmConfig(None, additional({"GSA": options})))
    assert caught.value.where == f"additional_config.ucm_sparse_config.GSA: {options!r}"
    assert caught.value.fix == "write {} for none"
