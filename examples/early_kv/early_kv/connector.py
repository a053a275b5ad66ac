"""A small connector that uses both hooks: KV of prompts in files, fetched by the worker, one file per block.

It supports one rank, full attention, and a prompt's first chunk. The worker decides: it computes blocks whose files are
missing or damaged, and does not report them to the scheduler.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Prompt:
    """What a worker needs to know about a request in its first step.

    Attributes:
        keys: The names of its prompt's whole blocks.
        found: How many of them the lookup found.
    """

    keys: list[str]
    found: int


@dataclass
class Prompts(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The requests for which a step is the first, by id."""

    of: dict[str, Prompt] = field(default_factory=dict)


@dataclass(frozen=True)
class Blocks:
    """The blocks to write after the step: their names and indices."""

    keys: list[str]
    places: list[int]


class EarlyKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See above.

    Raises:
        RuntimeError: If there are several ranks or several kinds of layers; in a worker, if its hook was not called.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise RuntimeError("EarlyKVConnector: ranks would have to agree on what each of them fetched; use one")
        self._size = int(vllm_config.cache_config.block_size)
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._directory = Path(vllm_config.kv_transfer_config.get_from_extra_config("directory", ""))
        self._directory.mkdir(parents=True, exist_ok=True)
        # Scheduler side.
        self._lookups: dict[str, tuple[list[str], Future[int]]] = {}
        self._threads = ThreadPoolExecutor(1) if role is KVConnectorRole.SCHEDULER else None
        # Worker side.
        self._caches: dict[str, torch.Tensor] = {}
        self._asked = False
        self._to_save: list[Blocks] = []

    # Scheduler side

    def request_admitted(self, request: Any) -> None:
        """Hook: start the lookup of a new request."""
        if not _is_plain(request) or self._threads is None:
            return
        keys = list(_keys(request.prompt_token_ids, self._size))
        self._lookups[request.request_id] = (keys, self._threads.submit(self._count, keys))

    def _count(self, keys: list[str]) -> int:
        """Return how many blocks, from the first, have files."""
        return next((n for n, key in enumerate(keys) if not self._file(key).exists()), len(keys))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Make a request wait for its lookup, and report no hit: a worker computes what it cannot fetch."""
        del num_computed_tokens
        _, lookup = self._lookups.get(request.request_id, ([], None))
        return (None if lookup is not None and not lookup.done() else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: no hit was reported."""

    def build_connector_meta(self, scheduler_output: Any) -> Prompts:
        """Return what the lookups found for requests in their first step."""
        prompts = Prompts()
        for request in scheduler_output.scheduled_new_reqs:
            keys, lookup = self._lookups.pop(request.req_id, ([], None))
            if lookup is not None:
                prompts.of[request.req_id] = Prompt(keys, lookup.result())
        return prompts

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that ended before its first step."""
        del block_ids
        self._lookups.pop(request.request_id, None)
        return False, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the cache of each layer."""
        self._caches = kv_caches

    def before_update_states(self, scheduler_output: Any) -> Any:
        """Hook: fetch the blocks that lookups found, and remove their tokens from the step."""
        self._asked = True
        new, counts = list(scheduler_output.scheduled_new_reqs), dict(scheduler_output.num_scheduled_tokens)
        for place, request in enumerate(new):
            prompt = scheduler_output.kv_connector_metadata.of.get(request.req_id)
            if prompt is None:
                continue
            if len(request.block_ids) != 1:
                raise RuntimeError("EarlyKVConnector: the model has layers of several kinds")
            first, count = request.num_computed_tokens, counts[request.req_id]
            fetched = self._fetch(prompt, request.block_ids[0], first, first + count)
            new[place] = replace(request, num_computed_tokens=first + fetched)
            counts[request.req_id] = count - fetched
            until = (first + count) // self._size
            begin = (first + fetched) // self._size
            self._to_save.append(Blocks(prompt.keys[begin:until], request.block_ids[0][begin:until]))
            logger.info("early KV: fetched %d of the %d tokens of a step", fetched, count)
        return replace(
            scheduler_output,
            scheduled_new_reqs=new,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )

    def _fetch(self, prompt: Prompt, block_ids: list[int], begin: int, end: int) -> int:
        """Read the blocks from ``begin`` on into the cache, and leave at least one token to compute.

        Returns:
            The number of fetched tokens.
        """
        first = begin // self._size
        last = min(prompt.found, (end - 1) // self._size)
        if begin % self._size:
            return 0
        for number in range(first, last):
            try:
                block = torch.load(self._file(prompt.keys[number]))
            except (OSError, RuntimeError, EOFError):
                last = number
                break
            for name, cache in self._caches.items():
                self._slice(cache, block_ids[number]).copy_(block[name])
        return max(0, last - first) * self._size

    def _slice(self, cache: torch.Tensor, block: int) -> torch.Tensor:
        """Return a layer's slice of a block, along the dimension whose length is the number of blocks."""
        (dimension,) = (d for d, size in enumerate(cache.shape) if size == self._num_blocks)
        return cache.select(dimension, block)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Check that the hook was called, which requires the overlay."""
        del forward_context, kwargs
        if not self._asked:
            raise RuntimeError(
                "EarlyKVConnector: before_update_states was not called; install early-kv-vllm-overlay for this vLLM, "
                "and use the V1 model runner"
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: there are no asynchronous loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are written after the step."""

    def wait_for_save(self) -> None:
        """Write the blocks that the step has filled; each file appears only when it is complete."""
        for blocks in self._to_save:
            for key, place in zip(blocks.keys, blocks.places, strict=True):
                layers = {name: self._slice(cache, place).clone() for name, cache in self._caches.items()}
                partial = self._file(f"{key}.{os.getpid()}")
                torch.save(layers, partial)
                partial.replace(self._file(key))
        self._to_save.clear()

    def _file(self, key: str) -> Path:
        return self._directory / key


def _is_plain(request: Any) -> bool:
    """Return whether the KV of a request's prompt depends only on its tokens, and may be skipped."""
    extra = (request.lora_request, request.mm_features, request.cache_salt, request.prompt_token_ids is None)
    sampling = request.sampling_params
    return not any(extra) and sampling is not None and sampling.prompt_logprobs is None


def _keys(tokens: Any, size: int) -> Iterator[str]:
    """Yield the name of each full block, a hash of its tokens and those before it."""
    name = b""
    for begin in range(0, len(tokens) - size + 1, size):
        name = hashlib.sha256(name + array("q", tokens[begin : begin + size]).tobytes()).digest()
        yield name.hex()
