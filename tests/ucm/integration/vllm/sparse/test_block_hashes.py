"""vLLM's own hasher with a sparse method's settings, in an environment with vLLM, for every hash algorithm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from ucm.integration.vllm import hooks

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside_newest.py runs these beside it")

from vllm import SamplingParams
from vllm.config.cache import PrefixCachingHashAlgo
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

SIZE = 16
TOKENS = list(range(100, 100 + 5 * SIZE + 3))


def hashes(algorithm: str, window: int | None) -> list[bytes]:
    """Return the hashes of a request's blocks, as EngineCore has them made."""
    config: Any = SimpleNamespace(
        additional_config={"ucm_sparse_config": {"ReRoPE": {"window": window}}} if window else {},
        kv_transfer_config=None,
        cache_config=SimpleNamespace(block_size=SIZE, enable_prefix_caching=True),
    )
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    hasher = kv_cache_utils.get_request_block_hasher(SIZE, hooks.block_hash_function(config, function))
    parameters = {"request_id": "r", "prompt_token_ids": TOKENS, "sampling_params": SamplingParams(max_tokens=1)}
    return list(Request(**parameters, pooling_params=None, block_hasher=hasher).block_hashes)


@pytest.mark.parametrize("algorithm", get_args(PrefixCachingHashAlgo))
def test_each_setting_has_its_own_hashes(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproducible ones where vLLM's are, of the same length, and vLLM's own without a method."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    found = {window: hashes(algorithm, window) for window in (None, 64, 128)}
    assert len({one for of in found.values() for one in of}) == 3 * (len(TOKENS) // SIZE)
    assert found == {window: hashes(algorithm, window) for window in found}
    assert {len(one) for one in found[64]} == {len(one) for one in found[None]}
    function = get_hash_fn_by_name(algorithm)
    first = function((kv_cache_utils.NONE_HASH, tuple(TOKENS[:SIZE]), None))
    assert found[None][0] == first != found[64][0]


def test_the_seed_is_vllms_while_the_function_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks whether its function resists collisions, and then fixes or draws the seed; it must see its own."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hashes("sha256", 64) == hashes("sha256", 64)
    assert hashes("xxhash", 64) != hashes("xxhash", 64)
