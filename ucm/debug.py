"""The prefix cache without an engine: look up prompts and move test blocks with the settings of a real deployment.

::

    from ucm.debug import open_connector

    with open_connector("ucm_config.yaml", model="/models/llama") as connector:
        connector.namespace               # the engine's namespace
        connector.lookup(token_ids)       # tokens that an engine would load
        connector.roundtrip()             # save, load and compare test blocks
        connector.timings                 # seconds of each operation so far

No engine is started and no weights are loaded, but vLLM has to be installed: its model classes determine the layout of
the model's KV. ``ucm try`` does the same in a terminal.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.config.document import FILE_KEY
from ucm.config.load import load_connector_config
from ucm.errors import UcmError
from ucm.hashing.request_content import RequestContent
from ucm.integration.vllm.connector.kv_cache import longest_hit
from ucm.integration.vllm.weightless import EngineFacts, StoredGroup, describe_engine
from ucm.store.base import BlockKey, BlockTransfer
from ucm.store.factory import open_store, remove_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.request_hasher import RequestHasher
    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.store.base import BlockGeometry, KVStore, TaskResult, TierStats

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
class FoundBlocks:
    """Where the blocks of a prompt are stored, of one KV-cache group.

    Args:
        stored: The group.
        keys: The whole blocks of the prompt, in order.
        tiers: For each tier of the pipeline whether it has each block, of all ranks.
        present: Whether each block is stored, of all ranks, in any tier.
        silent: The tiers that did not answer, with the causes; they have nothing.
    """

    stored: StoredGroup
    keys: tuple[BlockKey, ...]
    tiers: Mapping[str, Sequence[bool]]
    present: Sequence[bool]
    silent: Mapping[str, str]


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


@dataclass
class Timings:
    """The seconds of every operation so far, by name: ``open``, ``lookup``, ``save`` and ``load``."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, operation: str, seconds: float) -> None:
        """Record one operation."""
        self.seconds.setdefault(operation, []).append(seconds)

    def median(self, operation: str) -> float:
        """Return the median of an operation.

        Raises:
            KeyError: The operation was never run.
        """
        return median(self.seconds[operation])


def open_connector(
    config: str | Path | Mapping[str, Any],
    model: str | Path,
    *,
    engine_args: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> DebugConnector:
    """Open the stores of an engine without the engine.

    Args:
        config: A file with the connector's settings, or vLLM's ``kv_connector_extra_config``.
        model: The model's directory.
        engine_args: The engine's other arguments, as vLLM's ``EngineArgs`` names them. Pass the same as for the engine:
            ``dtype``, ``block_size``, ``kv_cache_dtype`` and others are part of the namespace.
        device: The expected type of device, for instance ``cuda``; None for whatever vLLM finds.

    Raises:
        ConfigError: A setting is wrong.
        UcmError: There is no such model, or vLLM is not installed or refuses it.
    """
    began = time.perf_counter()
    opened = DebugConnector(*describe(config, model, engine_args, device))
    opened.timings.add("open", time.perf_counter() - began)
    return opened


def describe(
    config: str | Path | Mapping[str, Any],
    model: str | Path,
    engine_args: Mapping[str, Any] | None = None,
    device: str | None = None,
    *,
    of_all_ranks: bool = False,
) -> tuple[ConnectorConfig, EngineFacts]:
    """Return the settings of an engine, and what it would name and store; see ``open_connector``.

    With ``of_all_ranks``, the engine may have several ranks.
    """
    extra = {FILE_KEY: str(Path(config).absolute())} if isinstance(config, str | Path) else dict(config)
    settings = load_connector_config(extra)
    if settings.kv_head_shards and not of_all_ranks:
        raise UcmError(
            "this engine stores blocks in slices of KV heads, and only whole blocks can be tried",
            where=f"kv_head_shards = {settings.kv_head_shards}",
            fix="leave it out: each slice's store works alike",
        )
    return settings, describe_engine(Path(model), extra, engine_args, device, of_all_ranks=of_all_ranks)


def find_blocks(
    settings: ConnectorConfig, facts: EngineFacts, token_ids: Sequence[int], salt: str = ""
) -> list[FoundBlocks]:
    """Look up every block of a prompt in every tier; nothing is loaded.

    Args:
        settings: The engine's settings.
        facts: The namespace and geometry that the engine would use.
        token_ids: The prompt.
        salt: The ``cache_salt`` of its requests; empty for none.

    Returns:
        One entry for each KV-cache group.

    Raises:
        ConfigError: A tier cannot be opened.
        UcmError: The engine would not cache this prompt.
    """
    config, found = settings.store.as_store_config(), []
    for stored in facts.stored:
        keys = block_keys(facts, token_ids, stored.group.chunk_tokens, salt)
        there: Any = np.zeros((len(config.parts), len(stored.ranks), len(keys)), np.bool_)
        silent = {}
        for tier, name in enumerate(config.parts):
            options = {name: config.tiers[name]} if name in config.tiers else {}
            for rank, namespace in enumerate(stored.ranks):
                with open_store(replace(config, pipeline=name, tiers=options), namespace, None) as store:
                    there[tier, rank] = store.lookup(keys)
                    failures = [cause for stats in store.stats().values() for cause in stats.failures]
                if failures:
                    silent[name] = ", ".join(failures)
        tiers = dict(zip(config.parts, there.all(axis=1).tolist(), strict=True))
        found.append(FoundBlocks(stored, tuple(keys), tiers, there.any(axis=0).all(axis=0).tolist(), silent))
    return found


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
    return [BlockKey(key) for key in facts.hasher.generate_block_hashes(list(token_ids), block_size, content)]


class DebugConnector:
    """The stores of an engine, opened by ``open_connector``.

    Args:
        settings: The connector's settings.
        facts: The namespace and geometry that the engine would use.
    """

    def __init__(self, settings: ConnectorConfig, facts: EngineFacts) -> None:
        self.settings = settings
        self.facts = facts
        self.timings = Timings()
        self._config = settings.store.as_store_config()
        self._profiling = False
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
        with self._span("ucm.lookup"):
            began = time.perf_counter()
            groups = [stored.group for stored in self.facts.stored]
            keys = [block_keys(self.facts, token_ids, group.chunk_tokens) for group in groups]
            present = [store.lookup(of_group) for store, of_group in zip(self.stores, keys, strict=True)]
            tokens = hit_length(self.settings, groups, present, len(token_ids))
            seconds = time.perf_counter() - began
        self.timings.add("lookup", seconds)
        leading = next((place for place, group in enumerate(groups) if group.needs_all), 0)
        missing = [key.hex() for key, there in zip(keys[leading], present[leading], strict=True) if not there]
        return Found(len(token_ids), tokens, next(iter(missing), ""), seconds)

    def roundtrip(self, blocks: int = 8, loads: int = 1) -> list[RoundTrip]:
        """Save test blocks, load them into other memory, and compare every byte.

        The blocks have the geometry of the model's blocks and a separate namespace. They are deleted afterwards, unless
        a third-party tier or store cannot delete. On an accelerator they start on the device and pass through pinned
        host memory both ways.

        Args:
            blocks: The number of blocks per KV-cache group.
            loads: How often to load them.

        Returns:
            The result of each KV-cache group.
        """
        if blocks < 1 or loads < 1:
            raise ValueError("a round trip needs at least one block and one load")
        return [self._trip(index, stored.geometry, blocks, loads) for index, stored in enumerate(self.facts.stored)]

    @contextmanager
    def profile(self, file: str | Path) -> Iterator[None]:
        """Record the body of the ``with`` statement with torch's profiler.

        Args:
            file: The trace to write, for Perfetto or ``chrome://tracing``.

        Raises:
            UcmError: torch is not installed.
        """
        try:
            from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - ucm imports without torch
        except ImportError as error:
            raise UcmError(f"torch cannot be imported: {error}", fix="leave out --profile") from error
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.facts.device == "cuda" else [])]
        with profile(activities=activities) as profiler:
            self._profiling = True
            try:
                yield
            finally:
                self._profiling = False
        profiler.export_chrome_trace(str(file))

    def close(self) -> None:
        """Close the stores."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _span(self, name: str) -> Any:
        """Return a context manager that names its body in the trace."""
        if not self._profiling:
            return nullcontext()
        from torch.profiler import record_function  # noqa: PLC0415 - the profiler has imported it

        return record_function(name)

    def _trip(self, index: int, geometry: BlockGeometry, blocks: int, loads: int) -> RoundTrip:
        namespace = f"ucm-try-{os.getpid()}-{os.urandom(4).hex()}/g{index}"
        keys = [BlockKey(os.urandom(32)) for _ in range(blocks)]
        memory = _Memory(self.facts.device, geometry, blocks)
        saving, loading = partial(memory.transfers, keys, "out"), partial(memory.transfers, keys, "back")
        problems: list[str] = []
        result: TaskResult | None = None
        times = []
        try:
            with open_store(self._config, namespace, geometry) as store:
                began = time.perf_counter()
                with self._span("ucm.save"):
                    memory.leave_device()
                    failed = store.save(saving()).wait().failed
                saved = time.perf_counter() - began
                problems += [f"save: {reason}" for reason in dict.fromkeys(str(error) for error in failed.values())]
                if not store.flush(FLUSH_SECONDS):
                    problems.append(f"save: not in every tier after {FLUSH_SECONDS:.0f} s")
                for _ in range(0 if failed else loads):
                    memory.clear()
                    began = time.perf_counter()
                    with self._span("ucm.load"):
                        result = store.load(loading()).wait()
                        memory.enter_device()
                    times.append(time.perf_counter() - began)
                    problems += [f"load: {error}" for error in result.failed.values()]
                    if not result.failed and not memory.is_intact():
                        problems.append("load: the bytes are not those that were saved, and no checksum failed")
        finally:
            remove_blocks(self._config, namespace, keys)
        self.timings.add("save", saved)
        for seconds in times:
            self.timings.add("load", seconds)
        tiers = tuple(dict.fromkeys(result.done.values())) if result is not None else ()
        return RoundTrip(index, blocks, geometry.nbytes, saved, tuple(times), tiers, tuple(problems))


class _Memory:
    """Test blocks in host memory; on an accelerator also on the device, and the host memory is pinned."""

    def __init__(self, device: str, geometry: BlockGeometry, blocks: int) -> None:
        self._geometry = geometry
        nbytes = blocks * geometry.nbytes
        content = np.frombuffer(np.random.default_rng().bytes(nbytes), dtype=np.uint8)
        self._on_device: dict[str, Any] | None = None
        if device == "cpu":
            self._host = {"out": content, "back": np.zeros(nbytes, dtype=np.uint8)}
            return
        import torch  # noqa: PLC0415 - ucm imports without torch

        self._pinned = {name: torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for name in ("out", "back")}
        self._host = {name: tensor.numpy() for name, tensor in self._pinned.items()}
        self._on_device = {
            "out": torch.from_numpy(content.copy()).to(device),
            "back": torch.zeros(nbytes, dtype=torch.uint8, device=device),
        }

    def leave_device(self) -> None:
        """Copy the blocks to host memory, and wait for the copy."""
        if self._on_device is not None:
            self._pinned["out"].copy_(self._on_device["out"])

    def enter_device(self) -> None:
        """Copy the loaded blocks to the device, and wait for the copy."""
        if self._on_device is not None:
            self._on_device["back"].copy_(self._pinned["back"])

    def clear(self) -> None:
        """Overwrite the previously loaded blocks."""
        self._host["back"].fill(0)
        if self._on_device is not None:
            self._on_device["back"].zero_()

    def is_intact(self) -> bool:
        """Return whether the loaded bytes equal the saved ones."""
        if self._on_device is None:
            return bool(np.array_equal(self._host["out"], self._host["back"]))
        return bool((self._on_device["out"] == self._on_device["back"]).all().item())

    def transfers(self, keys: Sequence[BlockKey], name: str) -> list[BlockTransfer]:
        """Return the memory of all blocks, as transfers for the store."""
        whole, found, start = self._host[name].data, [], 0
        for key in keys:
            slices = []
            for size in self._geometry.slice_sizes:
                slices.append(whole[start : start + size])
                start += size
            found.append(BlockTransfer(key, slices))
        return found
