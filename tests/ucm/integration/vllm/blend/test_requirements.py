"""Configurations that blending refuses, with errors that name the cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ucm.errors import ConfigError
from ucm.integration.vllm.blend import sides
from ucm.integration.vllm.blend.sides import require_engine
from ucm.integration.vllm.connector.kv_cache import CacheGroup

GROUP = CacheGroup(0, 16, None, {}, ())


def config(**changes: Any) -> Any:
    """Return a supported configuration with some changes: ``part__name`` is a field of a part."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "m",
            "runner_type": "generate",
            "use_mla": False,
            "is_encoder_decoder": False,
            "uses_mrope": False,
            "is_hybrid": False,
            "enforce_eager": False,
            "hf_text_config": SimpleNamespace(),
        },
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
    }
    top: dict[str, Any] = {"speculative_config": None, "kv_transfer_config": None, "additional_config": {}}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            top[name] = value
    return SimpleNamespace(**{part: SimpleNamespace(**fields) for part, fields in parts.items()}, **top)


def test_an_ordinary_engine_is_served() -> None:
    require_engine(config(), [GROUP])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_config__runner_type": "pooling"}, "generate no text"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__is_multimodal_model": True}, "multimodal"),
        ({"lora_config": object()}, "maps adapters"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config__uses_mrope": True}, "mrope"),
        ({"model_config__uses_xdrope_dim": 3}, "mrope"),
        ({"model_config__is_hybrid": True}, "mix attention"),
        ({"model_config__attention_chunk_size": 8192}, "within chunks"),
        (
            {"model_config__hf_text_config": SimpleNamespace(no_rope_layers=[1, 1, 0])},
            "some layers do not rotate their keys",
        ),
        ({"parallel_config__pipeline_parallel_size": 2}, "only on the ranks of one tensor-parallel group"),
        ({"parallel_config__data_parallel_size": 2}, "only on the ranks of one tensor-parallel group"),
        ({"parallel_config__enable_dbo": True}, "micro-batches"),
        ({"cache_config__cache_dtype": "fp8"}, "cannot be rotated"),
        ({"speculative_config": object()}, "not that of a draft"),
        ({"additional_config": {"ucm_sparse_config": {"BlockTopK": {}}}}, "sparse method"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_engine(config(**changes), [GROUP])
    assert what in caught.value.what
    assert caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize("groups", [[GROUP, GROUP], [CacheGroup(0, 16, 128, {}, ())]])
def test_windows_and_several_groups_are_refused(groups: list[CacheGroup]) -> None:
    with pytest.raises(ConfigError, match="sliding windows"):
        require_engine(config(), groups)


def test_names_that_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.10.2, vLLM's own cache would give blended blocks to other requests."""
    monkeypatch.setattr(sides, "hashes_are_bytes", lambda: False)
    with pytest.raises(ConfigError, match="cannot change the hashes"):
        require_engine(config(), [GROUP])
    require_engine(config(cache_config__enable_prefix_caching=False), [GROUP])
