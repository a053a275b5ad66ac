"""What an operator says of an engine's blocks reaches their identity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig, write_model
from ucm.config.load import load_connector_config
from ucm.errors import ConfigError
from ucm.hashing.model_identity import namespace
from ucm.integration.vllm.connector.scheduler_side import engine_identity

if TYPE_CHECKING:
    from pathlib import Path


def named(model: Path, store: Path, additional: dict[str, Any] | None = None, **settings: Any) -> str:
    """The namespace of an engine with these settings."""
    extra = {"store": {"directories": str(store)}, **settings}
    engine: Any = VllmConfig(ModelConfig(str(model)))
    engine.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
    engine.additional_config = additional or {}
    return namespace(engine_identity(engine, load_connector_config(extra)))


def test_the_operators_name_for_the_weights_is_believed(tmp_path: Path) -> None:
    one, other = (write_model(tmp_path / name / "llama", name.encode() * 100_000) for name in ("a", "b"))
    assert named(one, tmp_path) != named(other, tmp_path)
    assert named(one, tmp_path, weights_id="mine") == named(other, tmp_path, weights_id="mine")
    assert named(one, tmp_path, weights_id="mine") != named(one, tmp_path, weights_id="mine 2")


def test_an_empty_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty\n.*weights_id = ''"):
        named(tmp_path, tmp_path, weights_id="")


def test_the_options_of_a_sparse_method_are_part_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama")
    names = [named(model, tmp_path, ucm_sparse_config={"ESA": {"token_budget": n}}) for n in (256, 512)]
    assert len({named(model, tmp_path), *names}) == 3


def test_it_is_the_same_wherever_the_method_is_configured(tmp_path: Path) -> None:
    """Our hooks copy the setting into the other place, in some processes before the namespace is made."""
    model, method = write_model(tmp_path / "llama"), {"ucm_sparse_config": {"BlockTopK": {"token_budget": 256}}}
    names = {named(model, tmp_path, method), named(model, tmp_path, **method), named(model, tmp_path, method, **method)}
    assert len(names) == 1
    assert named(model, tmp_path, {**method, "of others": 1}) not in names


def test_where_a_method_keeps_the_middle_of_contexts_is_not_part_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama")
    stores = [{"pipeline": "Posix", "directories": [str(tmp_path / name)]} for name in ("a", "b")]
    methods = [{"ESA": {"token_budget": 256, "store": store}} for store in stores]
    assert len({named(model, tmp_path, ucm_sparse_config=method) for method in methods}) == 1


def test_a_method_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sparse method 'Unheard'"):
        named(write_model(tmp_path / "llama"), tmp_path, ucm_sparse_config={"Unheard": {}})
