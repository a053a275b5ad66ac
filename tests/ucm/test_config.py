"""The places where a sparse method is configured, and invalid configurations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ucm.config import ConnectorConfig, document
from ucm.errors import ConfigError
from ucm.integration.vllm.sparse import config
from ucm.integration.vllm.sparse.config import sparse_method_config

if TYPE_CHECKING:
    from pathlib import Path


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
    "vllm_config",
    [
        object(),
        VllmConfig(),
        VllmConfig(Transfer({}), {}),
        VllmConfig(Transfer(None)),
        VllmConfig(connector({}), additional(None)),
        VllmConfig(None, "an object with a hash of its own"),
    ],
)
def test_nothing_configured(vllm_config: object) -> None:
    assert sparse_method_config(vllm_config) is None


@pytest.mark.parametrize(
    "vllm_config",
    [
        VllmConfig(connector({"GSA": {"ratio": 0.3}})),
        VllmConfig(None, additional({"GSA": {"ratio": 0.3}})),
        VllmConfig(Transfer({}), additional({"GSA": {"ratio": 0.3}})),
    ],
    ids=["connector", "additional", "connector-without"],
)
def test_a_method_in_either_place(vllm_config: VllmConfig) -> None:
    assert sparse_method_config(vllm_config) == ("GSA", {"ratio": 0.3})


def test_another_method_in_each_place_is_refused() -> None:
    both = VllmConfig(connector({"first": {}}), additional({"second": {}}))
    with pytest.raises(ConfigError, match="two sparse methods are configured, but only one can run") as caught:
        sparse_method_config(both)
    assert "kv_connector_extra_config.ucm_sparse_config: {'first': {}}" in str(caught.value.where)
    assert "additional_config.ucm_sparse_config: {'second': {}}" in str(caught.value.where)


def test_the_same_in_both_places_is_one() -> None:
    """Our own hook copies it to the other place."""
    both = VllmConfig(connector({"GSA": {"ratio": 1}}), additional({"GSA": {"ratio": 1}}))
    assert sparse_method_config(both) == ("GSA", {"ratio": 1})


def within(*extras: dict[str, Any]) -> Transfer:
    """Return settings of vLLM's ``MultiConnector``."""
    return Transfer({"connectors": [{"kv_connector": "A", "kv_connector_extra_config": extra} for extra in extras]})


def test_a_connector_within_another_may_have_the_method() -> None:
    one = VllmConfig(within({"other": 1}, {"ucm_sparse_config": {"ESA": {"token_budget": 64}}}))
    assert sparse_method_config(one) == ("ESA", {"token_budget": 64})
    assert sparse_method_config(VllmConfig(within({}, {"other": 1}))) is None
    assert sparse_method_config(VllmConfig(Transfer({"connectors": "none"}))) is None


def test_connectors_within_another_with_different_methods_are_refused() -> None:
    two = VllmConfig(within({"ucm_sparse_config": {"ESA": {}}}, {"ucm_sparse_config": {"BlockTopK": {}}}))
    with pytest.raises(ConfigError, match="two sparse methods are configured") as caught:
        sparse_method_config(two)
    place = "kv_connector_extra_config.connectors[1].kv_connector_extra_config.ucm_sparse_config"
    assert f"{place}: {{'BlockTopK': {{}}}}" in str(caught.value.where)


@pytest.mark.parametrize(
    "settings",
    [
        {"ucm_sparse_confg": {"ESA": {}}},
        {"ESA": {}},
        {"UCM_CONFIG_FILE": "ucm.yaml"},
        {"ucm-sparse-config": {"ESA": {}}},
    ],
)
def test_what_would_be_overlooked_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not a setting that UCM reads here") as caught:
        sparse_method_config(VllmConfig(None, settings))
    assert 'write {"ucm_sparse_config": {"<method>"' in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"sparse_config": {}, "expert_map": "x"}, {"ESA": "a word"}])
def test_what_may_be_anothers_is_left_alone(settings: dict[str, Any]) -> None:
    assert sparse_method_config(VllmConfig(None, settings)) is None


def test_options_are_handed_on_as_they_are() -> None:
    options: dict[str, Any] = {}
    found = sparse_method_config(VllmConfig(None, additional({"GSA": options})))
    assert found is not None
    assert found[1] is options


def test_ucms_blending_is_no_sparse_method(tmp_path: Path) -> None:
    """`BlendConnector` reads it; together with a method it is refused, like two methods."""
    blend = {"Blend": {"chunk_end_token_id": 3}}
    assert sparse_method_config(VllmConfig(connector(blend))) is None
    file = settings_file(tmp_path, "ucm_sparse_config: {Blend: {chunk_end_token_id: 3}}\n")
    assert sparse_method_config(VllmConfig(Transfer(file))) is None
    with pytest.raises(ConfigError, match="2 sparse methods"):
        sparse_method_config(VllmConfig(connector({**blend, "GSA": {}})))


def test_several_methods() -> None:
    with pytest.raises(ConfigError, match="2 sparse methods are named, but only one can run") as caught:
        sparse_method_config(VllmConfig(connector({"GSA": {}, "ESA": {}})))
    assert caught.value.where == "kv_connector_extra_config.ucm_sparse_config: GSA, ESA"


@pytest.mark.parametrize("value", ["GSA", ["GSA"]])
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


def settings_file(directory: Path, text: str) -> dict[str, object]:
    path = directory / "ucm.yaml"
    path.write_text(text, encoding="utf-8")
    return {"UCM_CONFIG_FILE": str(path)}


def test_a_method_in_the_connectors_file(tmp_path: Path) -> None:
    extra = settings_file(tmp_path, "ucm_sparse_config: {GSA: {ratio: 0.3}}\nstore: {pipeline: Empty}\n")
    assert sparse_method_config(VllmConfig(Transfer(extra))) == ("GSA", {"ratio": 0.3})


def test_what_stands_inline_wins_over_the_file(tmp_path: Path) -> None:
    extra = settings_file(tmp_path, "ucm_sparse_config: {GSA: {}}\n")
    assert sparse_method_config(VllmConfig(Transfer({**extra, "ucm_sparse_config": {"ESA": {}}}))) == ("ESA", {})
    assert sparse_method_config(VllmConfig(Transfer({**extra, "ucm_sparse_config": {}}))) is None


def test_a_file_without_a_method(tmp_path: Path) -> None:
    extra = settings_file(tmp_path, "store: {pipeline: Empty}\n")
    assert sparse_method_config(VllmConfig(Transfer(extra))) is None
    assert sparse_method_config(VllmConfig(Transfer(extra), additional({"GSA": {}}))) == ("GSA", {})


def test_what_is_wrong_in_the_file_is_told_with_its_name(tmp_path: Path) -> None:
    extra = settings_file(tmp_path, "ucm_sparse_config: [GSA]\n")
    with pytest.raises(ConfigError, match="one name with its options") as caught:
        sparse_method_config(VllmConfig(Transfer(extra)))
    assert caught.value.where == f"{tmp_path}/ucm.yaml: ucm_sparse_config: ['GSA']"


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        sparse_method_config(VllmConfig(Transfer({"UCM_CONFIG_FILE": "/nowhere/ucm.yaml"})))


def test_the_keys_are_those_of_the_connectors_configuration() -> None:
    assert config.FILE_KEY == document.FILE_KEY
    assert config.KEY in ConnectorConfig.model_fields


def test_without_a_file_nothing_is_imported_for_it() -> None:
    script = (
        "import sys; from ucm.integration.vllm.sparse.config import sparse_method_config\n"
        "class Transfer: kv_connector_extra_config = {'ucm_sparse_config': {'GSA': {}}}\n"
        "class Config: kv_transfer_config = Transfer; additional_config = None\n"
        "assert sparse_method_config(Config) == ('GSA', {})\n"
        "Transfer.kv_connector_extra_config = {}\n"
        "assert sparse_method_config(Config) is None\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('yaml', 'pydantic') or n == 'ucm.config'))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
