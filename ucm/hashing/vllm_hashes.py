"""Use vLLM's own block hashes as keys if they are the same in every process and of a cryptographic hash function.

Releases differ (``vllm/v1/core/kv_cache_utils.py``):

- up to 0.10.0 a request has no ``block_hashes``; in 0.10.1 they are tuples that start from a 64-bit number;
- from 0.10.2 they are bytes, chained from ``NONE_HASH``: random in each process unless ``PYTHONHASHSEED`` is set;
- from 0.29.0 ``NONE_HASH`` comes from a fixed seed if the algorithm is SHA-256.

The release's number decides none of this: vLLM is asked for the seed, and before the first key is used, the first hash
of a request is computed again from the planned ``NONE_HASH`` and the tokens alone.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: Algorithms of vLLM without known collisions. The xxHash and the 64-bit ones are good enough for one engine's memory,
#: but not for a store with many writers.
_SOUND = ("sha256", "sha256_cbor")
_SEED_VARIABLE = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class HashPlan:
    """The choice of the hashes that are the keys of plain requests' blocks.

    Args:
        algorithm: vLLM's algorithm if its hashes are used; empty if ours are.
        none_hash: The start of vLLM's chains if its hashes are used.
        reason: The reason of the choice, for the log.
    """

    algorithm: str
    none_hash: bytes
    reason: str

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM's hashes are used."""
        return bool(self.algorithm)

    @property
    def kind(self) -> str:
        """The plan as a part of the namespace, so that engines with different seeds share nothing."""
        return f"vllm:{self.algorithm}:{self.none_hash.hex()}" if self.uses_vllm else "ucm"


def plan_hashes(vllm_config: Any) -> HashPlan:
    """Decide from vLLM itself and its configuration; every process of an engine decides the same.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """
    algorithm = getattr(getattr(vllm_config, "cache_config", None), "prefix_caching_hash_algo", None)
    if algorithm not in _SOUND:
        return _ours(f"vLLM hashes blocks with {algorithm!r}, which is not a cryptographic hash")
    utils, function = _utils(), _hash_function(algorithm)
    if utils is None or function is None:
        return _ours("this vLLM release has no block hashes of requests")
    seed = _seed(utils, function)
    if seed is None:
        return _ours(f"this vLLM release starts its hashes from a random number ({_SEED_VARIABLE} would fix it)")
    return HashPlan(algorithm, bytes(function(seed)), "they are the same in every process")


def verified_block_size(request: Any, plan: HashPlan, largest: int) -> int | None:
    """Return how many tokens each of a request's hashes covers, found by computing its first hash again.

    Args:
        request: A vLLM ``Request`` with nothing but tokens and a salt, and at least one hash.
        plan: The result of ``plan_hashes``.
        largest: The block size for which keys are wanted; a multiple of the size that the hashes cover.

    Returns:
        The tokens per hash; None if the hash covers anything but the planned ``NONE_HASH``, the tokens and the salt, so
        that it must not be the key of a stored block.
    """
    function = _hash_function(plan.algorithm)
    if function is None:
        return None
    salt = getattr(request, "cache_salt", None)
    keys = (None,) if not salt else ((salt,), (("cache_salt", salt),))  # tagged from 0.31.0
    wanted = request.block_hashes[0]
    tokens = tuple(request.all_token_ids[:largest])
    for size in range(len(tokens), 0, -1):
        if largest % size == 0 and any(function((plan.none_hash, tokens[:size], key)) == wanted for key in keys):
            return size
    return None


def has_hashes(request: Any) -> bool:
    """Return whether vLLM hashes the blocks of this request to bytes, and the request has at least one hash."""
    hashes = getattr(request, "block_hashes", None)
    return isinstance(hashes, list) and bool(hashes) and isinstance(hashes[0], bytes)


def finds_adapters_by_name() -> bool:
    """Return whether vLLM's own prefix cache identifies LoRA adapters by name, as it does up to 0.27.1 at least."""
    utils = _module("vllm.v1.core.kv_cache_utils")
    if utils is None:
        return False

    def keys(path: str) -> Any:
        adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path)
        return utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter))  # noqa: SLF001

    try:
        return bool(keys("one") == keys("other"))
    except Exception:  # noqa: BLE001 - another release has this elsewhere; then a name is not trusted
        return True


def _ours(reason: str) -> HashPlan:
    return HashPlan("", b"", reason)


def _utils() -> ModuleType | None:
    utils = _module("vllm.v1.core.kv_cache_utils")
    return utils if hasattr(utils, "get_request_block_hasher") else None


def _hash_function(algorithm: str) -> Callable[[Any], Any] | None:
    for name in ("vllm.utils.hashing", "vllm.utils"):
        find = getattr(_module(name), "get_hash_fn_by_name", None)
        if find is not None:
            try:
                function: Callable[[Any], Any] = find(algorithm)
                return function if isinstance(function(""), bytes) else None  # a number up to 0.10.1
            except Exception:  # noqa: BLE001 - a package of the algorithm is missing; the engine reports that itself
                return None
    return None


def _seed(utils: ModuleType, function: Callable[[Any], Any]) -> str | None:
    """Return the seed of ``NONE_HASH``, or None if it is random."""
    resolve = getattr(utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return os.environ.get(_SEED_VARIABLE)
    seed = resolve(function)
    return seed if isinstance(seed, str) and seed == resolve(function) else None  # two equal results: not random


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
