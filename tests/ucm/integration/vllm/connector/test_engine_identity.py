"""Settings that shape an engine's blocks are part of their identity."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.ucm.hashing.stand_ins import CacheConfig, ModelConfig, VllmConfig, read_files, write_model
from tests.ucm.store.keys import key_file, secret
from ucm import compat
from ucm.config.load import load_connector_config
from ucm.errors import ConfigError
from ucm.hashing.model_identity import namespace
from ucm.integration.vllm.connector import identity
from ucm.integration.vllm.connector.identity import engine_identity
from ucm.integration.vllm.connector.kv_cache import CacheGroups, cache_groups
from ucm.sparse.esa.method import ESA
from ucm.sparse.sink_window import SinkWindow, SinkWindowOptions

if TYPE_CHECKING:
    from types import ModuleType


def named(model: Path, store: Path | dict[str, str], additional: dict[str, Any] | None = None, **settings: Any) -> str:
    """Return the namespace of an engine with these settings."""
    extra: dict[str, Any] = {"store": store if isinstance(store, dict) else {"directories": str(store)}, **settings}
    engine: Any = VllmConfig(ModelConfig(str(model)))
    engine.kv_transfer_config = SimpleNamespace(kv_connector="UCMConnector", kv_connector_extra_config=extra)
    engine.additional_config = additional or {}
    identity = engine_identity(engine, load_connector_config(extra))
    return namespace(identity.with_contents(read_files(identity.unread.values())))


def test_the_operators_name_for_the_weights_is_believed(tmp_path: Path) -> None:
    one, other = (write_model(tmp_path / name / "llama", name.encode() * 100_000) for name in ("a", "b"))
    assert named(one, tmp_path) != named(other, tmp_path)
    assert named(one, tmp_path, weights_id="mine") == named(other, tmp_path, weights_id="mine")
    assert named(one, tmp_path, weights_id="mine") != named(one, tmp_path, weights_id="mine 2")


def test_an_empty_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty\n.*weights_id = ''"):
        named(tmp_path, tmp_path, weights_id="")


def test_engines_with_other_keys_or_none_share_nothing(tmp_path: Path) -> None:
    """A key's fingerprint, never the key, is part of the identity, and so are its blocks' checks."""
    model = write_model(tmp_path / "llama")
    keys = [
        key_file(tmp_path / name, text)
        for name, text in (("a", secret("a")), ("b", secret("b")), ("same", secret("a")))
    ]
    none = named(model, tmp_path)
    one, other, same = (named(model, {"directories": str(tmp_path), "authentication_key_file": path}) for path in keys)
    assert len({none, one, other}) == 3
    assert one == same


def test_a_key_that_cannot_be_used_is_refused_where_it_stands(tmp_path: Path) -> None:
    path = Path(key_file(tmp_path / "key"))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read or change it") as caught:
        named(tmp_path, {"directories": str(tmp_path), "authentication_key_file": str(path)})
    assert f"store.authentication_key_file = '{path}'" in str(caught.value)


def test_the_options_of_a_sparse_method_are_part_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama")
    options = [{"window_tokens": n} for n in (256, 512)]
    names = [named(model, tmp_path, ucm_sparse_config={"SinkWindow": of}) for of in options]
    assert len({named(model, tmp_path), *names}) == 3


def test_it_is_the_same_wherever_the_method_is_configured(tmp_path: Path) -> None:
    """Our hooks copy the setting to the other place, in some processes before the namespace is computed."""
    model = write_model(tmp_path / "llama")
    method: dict[str, Any] = {"ucm_sparse_config": {"SinkWindow": {}}}
    names = {named(model, tmp_path, method), named(model, tmp_path, **method), named(model, tmp_path, method, **method)}
    assert len(names) == 1
    assert named(model, tmp_path, {**method, "of others": 1}) not in names


def test_what_shapes_distances_is_part_of_it(tmp_path: Path) -> None:
    """With each of these the KV differs from the second layer on; with equal ones it is the same."""
    model = write_model(tmp_path / "llama")
    methods: list[dict[str, Any]] = [
        {"ReRoPE": {"window": 128}},
        {"ReRoPE": {"window": 256}},
        {"ReRoPE": {"window": 128, "training_length": 512}},
        {"LeakyReRoPE": {"window": 128, "leak": 4.0}},
        {"LeakyReRoPE": {"window": 128, "leak": 8.0}},
    ]
    names = {named(model, tmp_path), *(named(model, tmp_path, ucm_sparse_config=method) for method in methods)}
    assert len(names) == 6
    again = {"ucm_sparse_config": {"ReRoPE": {"training_length": None, "window": 128}}}
    assert named(model, tmp_path, **again) == named(model, tmp_path, ucm_sparse_config=methods[0])


def test_where_a_method_keeps_the_middle_of_contexts_is_not_part_of_it(tmp_path: Path) -> None:
    stores = [{"pipeline": "Posix", "directories": [str(tmp_path / name)]} for name in ("a", "b")]
    assert ESA.identity({"store": stores[0]}) == ESA.identity({"store": stores[1]})
    assert ESA.identity({"token_budget": 16}) != ESA.identity({})


def test_a_methods_name_and_its_defaults_make_no_difference(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama")
    methods: list[dict[str, Any]] = [{"SinkWindow": {}}, {"StreamingLLM": {"prefill": "window"}}]
    assert len({named(model, tmp_path, ucm_sparse_config=method) for method in methods}) == 1


def test_a_changed_default_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "llama")
    before = named(model, tmp_path, ucm_sparse_config={"SinkWindow": {}})

    class Options(SinkWindowOptions):
        window_tokens: int = 2048

    monkeypatch.setattr(SinkWindow, "options_type", Options)
    assert named(model, tmp_path, ucm_sparse_config={"SinkWindow": {}}) != before
    monkeypatch.undo()
    monkeypatch.setattr(SinkWindow, "tile", 64)
    assert named(model, tmp_path, ucm_sparse_config={"SinkWindow": {}}) != before


@pytest.mark.parametrize(
    "method",
    [{"BlockTopK": {}}, {"GSAOnDevice": {"token_budget": 256}}, {"SinkWindow": {"prefill": "dense"}}, {"ESA": {}}],
)
def test_dense_prompts_are_shared_with_engines_without_a_method(tmp_path: Path, method: dict[str, Any]) -> None:
    model = write_model(tmp_path / "llama")
    assert named(model, tmp_path, ucm_sparse_config=method) == named(model, tmp_path)


def test_they_are_not_where_vllm_finds_generated_blocks_as_anybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.10.0, unless vLLM's prefix cache is off, in which case nothing is found."""

    class Request:
        def __init__(self, request_id: str, prompt_token_ids: list[int]) -> None: ...

    monkeypatch.setitem(sys.modules, compat.REQUESTS, cast("ModuleType", SimpleNamespace(Request=Request)))
    model = write_model(tmp_path / "llama")
    method: dict[str, Any] = {"BlockTopK": {}}
    assert named(model, tmp_path, ucm_sparse_config=method) != named(model, tmp_path)
    monkeypatch.setattr(CacheConfig, "__init__", partialmethod(CacheConfig.__init__, enable_prefix_caching=False))
    assert named(model, tmp_path, ucm_sparse_config=method) == named(model, tmp_path)


@pytest.mark.parametrize(
    ("method", "lasting"),
    [
        ({}, sys.maxsize),
        ({"BlockTopK": {}}, 100),
        ({"SinkWindow": {}}, sys.maxsize),
        ({"SinkWindow": {"prefill": "dense"}}, 100),
        ({"ESA": {}}, 100),
    ],
)
def test_which_tokens_have_a_name_at_all(method: dict[str, Any], lasting: int) -> None:
    engine = SimpleNamespace(kv_transfer_config=None, additional_config={"ucm_sparse_config": method})
    assert identity.lasting_tokens(engine)(100) == lasting


def test_a_method_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sparse method 'Unheard'"):
        named(write_model(tmp_path / "llama"), tmp_path, ucm_sparse_config={"Unheard": {}})


@dataclass
class FullAttentionSpec:
    """The part of vLLM's class that is read."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: str = "torch.bfloat16"
    sliding_window: int | None = None
    page_size_bytes: int = 8192


class SlidingWindowSpec(FullAttentionSpec):
    """vLLM's."""


def geometry(*groups: tuple[Any, list[str]], layout: str | None = None) -> CacheGroups:
    """Return the groups of a ``KVCacheConfig``: specifications with their layers."""
    made = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    return cache_groups(None, SimpleNamespace(kv_cache_groups=made, kv_cache_layout=layout))


def test_engines_whose_layers_are_grouped_or_laid_out_otherwise_share_nothing(tmp_path: Path) -> None:
    """For instance with and without ``--disable-hybrid-kv-cache-manager``: only the first group is the same."""
    full, window = FullAttentionSpec(), SlidingWindowSpec(sliding_window=96)
    kinds = [
        geometry((full, ["0", "3"]), (window, ["1", "4"]), (window, ["2", "5"])),
        geometry((full, ["0", "3", "1", "4", "2", "5"])),
        geometry((full, ["0", "1"]), (window, ["3", "4"]), (window, ["2", "5"])),
        geometry((full, ["0", "3"]), (SlidingWindowSpec(sliding_window=64), ["1", "4"]), (window, ["2", "5"])),
        geometry((full, ["0"])),
        geometry((full, ["0"]), layout="HND"),
        geometry((FullAttentionSpec(block_size=32), ["0"])),
        geometry((FullAttentionSpec(num_kv_heads=1), ["0"])),
        geometry((FullAttentionSpec(head_size=32), ["0"])),
        geometry((FullAttentionSpec(dtype="torch.uint8"), ["0"])),
        geometry((FullAttentionSpec(page_size_bytes=4096), ["0"])),
    ]
    model = write_model(tmp_path / "llama")
    engine: Any = VllmConfig(ModelConfig(str(model)))
    extra = {"store": {"directories": str(tmp_path)}}
    engine.kv_transfer_config = SimpleNamespace(kv_connector="UCMConnector", kv_connector_extra_config=extra)
    seeds = [engine_identity(engine, load_connector_config(extra), kind.facts).seed for kind in kinds]
    assert len(set(seeds)) == len(kinds)
    assert engine_identity(engine, load_connector_config(extra), kinds[0].facts).seed == seeds[0]
