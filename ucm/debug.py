"""The prefix cache without an engine: look up prompts and move test blocks with the settings of a real deployment.

::

    from ucm.debug import open_connector

    with open_connector("ucm_config.yaml", model="/models/llama") as connector:
        connector.namespace               # the engine's namespace
        connector.lookup(token_ids)       # tokens that an engine would load
        connector.roundtrip()             # save, load and compare test blocks

No engine is started and no weights are loaded, but vLLM has to be installed: its model classes determine the layout of
the model's KV. ``ucm try`` does the same in a terminal.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.config.document import FILE_KEY
from ucm.config.load import load_connector_config
from ucm.errors import UcmError
from ucm.hashing.request_content import RequestContent
from ucm.integration.vllm.connector.kv_cache import longest_hit
from ucm.integration.vllm.weightless import EngineFacts, describe_engine
from ucm.store.base import BlockKey, BlockTransfer
from ucm.store.factory import open_store, remove_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.request_hasher import RequestHasher
    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.store.base import BlockGeometry, KVStore, TierStats

#: The time limit for a test block to reach every tier, in seconds.
FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class Found:
    """The part of a prompt that the store has.

    Args:
        tokens: The number of tokens in the prompt.
        found_tokens: How many of the first tokens an engine would load.
        missing_key: The key of the first missing block, in hexadecimal digits, of the first KV-cache group that needs
            all blocks, if there is one; empty if all full blocks are there.
        seconds: The time to hash the blocks and look them up.
    """

    tokens: int
    found_tokens: int
    missing_key: str
    seconds: float

    @property
    def hit_rate(self) -> float:
        """The share of the prompt's tokens that were found, 0 to 1."""
        return self.found_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class RoundTrip:
    """The result of saving and loading test blocks of one KV-cache group.

    Args:
        group: The group's index.
        blocks: The number of blocks.
        block_bytes: The size of one block.
        save_seconds: The time from the first byte written until the blocks are visible.
        load_seconds: The time of each load of all blocks.
        tiers: The tiers that served the last load.
        problems: Descriptions of failures; empty if every byte was loaded unchanged.
    """

    group: int
    blocks: int
    block_bytes: int
    save_seconds: float
    load_seconds: tuple[float, ...]
    tiers: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return self.blocks * self.block_bytes


def open_connector(
    config: str | Path | Mapping[str, Any],
    model: str | Path,
    *,
    engine_args: Mapping[str, Any] | None = None,
) -> DebugConnector:
    """Open the stores of an engine without the engine.

    Args:
        config: A file with the connector's settings, or vLLM's ``kv_connector_extra_config``.
        model: The model's directory.
        engine_args: The engine's other arguments, as vLLM's ``EngineArgs`` names them. Pass the same as for the engine:
            ``dtype``, ``block_size``, ``kv_cache_dtype`` and others are part of the namespace.

    Raises:
        ConfigError: A setting is wrong.
        UcmError: There is no such model, or vLLM is not installed or refuses it.
    """
    settings, facts = describe(config, model, engine_args)
    if any(len(stored.ranks) > 1 or stored.group.slices for stored in facts.stored):
        raise UcmError(
            "it has several ranks, or stores slices of KV heads, and only whole blocks of one rank can be tried",
            where="tensor_parallel_size, or kv_head_shards",
            fix="leave them out: the store of each rank, or slice, works alike",
        )
    return DebugConnector(settings, facts)


def describe(
    config: str | Path | Mapping[str, Any], model: str | Path, engine_args: Mapping[str, Any] | None = None
) -> tuple[ConnectorConfig, EngineFacts]:
    """Return the settings of an engine, of any number of ranks, and what it would name and store."""
    extra = {FILE_KEY: str(Path(config).absolute())} if isinstance(config, str | Path) else dict(config)
    return load_connector_config(extra), describe_engine(Path(model), extra, engine_args)


def hit_length(
    settings: ConnectorConfig, groups: Sequence[CacheGroup], present: Sequence[Sequence[bool]], count: int
) -> int:
    """Return how many of the first tokens an engine with an empty KV cache of its own would load.

    Args:
        settings: The engine's settings.
        groups: The KV-cache groups.
        present: For each group, whether each block of the prompt is stored.
        count: The tokens of the prompt.
    """
    limit = min(count - 1, int(settings.hit_ratio * count))
    step = int(np.lcm.reduce([group.chunk_tokens for group in groups]))
    tokens = longest_hit(groups, present, limit, step) if count else 0
    return tokens if tokens >= settings.min_hit_tokens else 0


def block_keys(facts: EngineFacts, token_ids: Sequence[int], block_size: int, salt: str = "") -> list[BlockKey]:
    """Return the keys of a prompt's whole blocks of so many tokens, in requests with a ``cache_salt`` if there is one.

    Raises:
        UcmError: The engine would not cache this prompt.
    """
    content = RequestContent(salt=salt) if salt else None
    try:
        return [BlockKey(key) for key in facts.hasher.generate_block_hashes(list(token_ids), block_size, content)]
    except ValueError as error:
        raise UcmError(f"an engine would not cache this prompt: {error}") from error


class DebugConnector(AbstractContextManager["DebugConnector"]):
    """The stores of an engine, opened by ``open_connector``.

    Args:
        settings: The connector's settings.
        facts: The namespace and geometry that the engine would use.
    """

    def __init__(self, settings: ConnectorConfig, facts: EngineFacts) -> None:
        self.settings = settings
        self.facts = facts
        self._config = settings.store.as_store_config()
        with ExitStack() as stack:
            self.stores: tuple[KVStore, ...] = tuple(
                stack.enter_context(open_store(self._config, one.namespace, one.geometry)) for one in facts.stored
            )
            self._stack = stack.pop_all()

    @property
    def namespace(self) -> str:
        """The engine's namespace, below which each rank and KV-cache group has its own."""
        return self.facts.namespace

    @property
    def store(self) -> KVStore:
        """The store of the first KV-cache group, which is the only one if the model has one kind of attention."""
        return self.stores[0]

    @property
    def request_hasher(self) -> RequestHasher:
        """The hasher that names a prompt's blocks as the engine does."""
        return self.facts.hasher

    @property
    def tiers(self) -> dict[str, TierStats]:
        """The tiers, fastest first, with their counters."""
        return dict(self.store.stats())

    def lookup(self, token_ids: Sequence[int]) -> Found:
        """Find the stored prefix of a prompt without loading it.

        The result is that of an engine whose own KV cache is empty: at least one token is left to compute, and
        ``hit_ratio`` and ``min_hit_tokens`` apply.

        Args:
            token_ids: The prompt.

        Raises:
            UcmError: The engine would not cache this prompt.
        """
        began = time.perf_counter()
        groups = [stored.group for stored in self.facts.stored]
        keys = [block_keys(self.facts, token_ids, group.chunk_tokens) for group in groups]
        present = [store.lookup(of_group) for store, of_group in zip(self.stores, keys, strict=True)]
        tokens = hit_length(self.settings, groups, present, len(token_ids))
        seconds = time.perf_counter() - began
        leading = next((place for place, group in enumerate(groups) if group.needs_all), 0)
        missing = [key.hex() for key, there in zip(keys[leading], present[leading], strict=True) if not there]
        return Found(len(token_ids), tokens, next(iter(missing), ""), seconds)

    def roundtrip(self, blocks: int = 8, loads: int = 1) -> list[RoundTrip]:
        """Save test blocks, load them into other memory, and compare every byte.

        The blocks have the geometry of the model's blocks and a separate namespace. They are deleted afterwards, unless
        a third-party tier or store cannot delete.

        Args:
            blocks: The number of blocks per KV-cache group.
            loads: How often to load them.

        Returns:
            The result of each KV-cache group.
        """
        if blocks < 1 or loads < 1:
            raise ValueError("a round trip needs at least one block and one load")
        return [self._trip(index, stored.geometry, blocks, loads) for index, stored in enumerate(self.facts.stored)]

    def close(self) -> None:
        """Close the stores."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trip(self, index: int, geometry: BlockGeometry, blocks: int, loads: int) -> RoundTrip:
        namespace = f"ucm-try-{os.getpid()}-{os.urandom(4).hex()}/g{index}"
        keys = [BlockKey(os.urandom(32)) for _ in range(blocks)]
        content = np.random.default_rng().bytes(blocks * geometry.nbytes)
        loaded = bytearray(len(content))
        saving, loading = (_transfers(keys, geometry, memoryview(memory)) for memory in (content, loaded))
        problems, times, tiers = [], [], tuple[str, ...]()
        try:
            with open_store(self._config, namespace, geometry) as store:
                began = time.perf_counter()
                failed = store.save(saving).wait().failed
                saved = time.perf_counter() - began
                problems += [f"save: {reason}" for reason in dict.fromkeys(map(str, failed.values()))]
                if not store.flush(FLUSH_SECONDS):
                    problems.append(f"save: not in every tier after {FLUSH_SECONDS:.0f} s")
                for _ in range(0 if failed else loads):
                    loaded[:] = bytes(len(loaded))
                    began = time.perf_counter()
                    result = store.load(loading).wait()
                    times.append(time.perf_counter() - began)
                    tiers = tuple(dict.fromkeys(result.done.values()))
                    problems += [f"load: {error}" for error in result.failed.values()]
                    if not result.failed and loaded != content:
                        problems.append("load: the bytes are not those that were saved, and no checksum failed")
        finally:
            remove_blocks(self._config, namespace, keys)
        return RoundTrip(index, blocks, geometry.nbytes, saved, tuple(times), tiers, tuple(problems))


def _transfers(keys: Sequence[BlockKey], geometry: BlockGeometry, memory: memoryview) -> list[BlockTransfer]:
    """Return transfers of blocks that lie back to back in memory."""
    ends = list(accumulate(geometry.slice_sizes * len(keys), initial=0))
    slices, count = [memory[a:b] for a, b in pairwise(ends)], len(geometry.slice_sizes)
    return [BlockTransfer(key, slices[count * n : count * (n + 1)]) for n, key in enumerate(keys)]
