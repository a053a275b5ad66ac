"""vLLM's engine core without weights, to find out what an engine would hash and store, without serving requests.

``describe_engine`` starts vLLM's own ``EngineCore`` in this process. The model is on torch's ``meta`` device, so its
layers determine their KV, but no weights are read or allocated. The KV cache has a few blocks. vLLM creates UCM's
connector in both roles, as in a serving engine, and the connector reports its namespace and block geometry.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.compat import divided_context, optional, vllm_module
from ucm.engine_process import connector, model_config
from ucm.errors import UcmError
from ucm.hashing.request_hasher import RequestHasher
from ucm.integration.vllm.connector.kv_cache import divided

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.store.base import BlockGeometry

#: Our name among vLLM's ``--load-format`` values.
LOAD_FORMAT = "ucm_weightless"
#: Blocks of the KV cache; nothing runs in it.
NUM_BLOCKS = 16
#: More bytes than these take.
PLENTY = 1 << 50
#: Engine arguments that are about several ranks.
_OF_RANKS = frozenset(
    {"tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "enable_expert_parallel"}
)
#: Engine arguments that do not influence the blocks; the user's own arguments take precedence.
SMALL: dict[str, Any] = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.01,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "skip_tokenizer_init": True,
}


@dataclass(frozen=True)
class StoredGroup:
    """The stored blocks of one rank and KV-cache group.

    Args:
        group: The group.
        namespace: The namespace of its blocks.
        geometry: The geometry of a block in an engine of one rank, or of one of its slices of KV heads.
        ranks: The namespaces of all ranks' blocks of the group, or of all slices of them.
    """

    group: CacheGroup
    namespace: str
    geometry: BlockGeometry
    ranks: tuple[str, ...]

    @property
    def geometry_of_all(self) -> BlockGeometry | None:
        """The geometry of a block in each of these; None if several ranks store another one, which is not known."""
        return self.geometry if self.group.slices or len(self.ranks) == 1 else None


@dataclass(frozen=True)
class EngineFacts:
    """What an engine would hash and store.

    Args:
        namespace: The engine's namespace.
        device: The type of the device of its KV cache, for instance ``cpu`` or ``cuda``.
        stored: The stored blocks of each KV-cache group.
        hasher: Hashes prompts as the engine's scheduler side does.
    """

    namespace: str
    device: str
    stored: tuple[StoredGroup, ...]
    hasher: RequestHasher


def describe_engine(
    model: Path, extra_config: Mapping[str, Any], engine_args: Mapping[str, Any] | None = None
) -> EngineFacts:
    """Start vLLM's engine core without weights, ask the connector, and shut it down.

    An engine of several ranks is described by one of a single rank, whose KV-cache groups are then divided as vLLM's
    layers divide their heads.

    Raises:
        UcmError: vLLM is not installed, or refuses the model or the arguments; or the engine would store nothing.
    """
    model_config(model)
    config = _engine_config(model, extra_config, engine_args or {})
    one = config
    if config.parallel_config.world_size > 1:
        one = _of_one_rank(config, model, extra_config, engine_args or {})
    core = _started(one)
    try:
        return _facts(core, config)
    finally:
        core.shutdown()
        _forget_worker_connector()


def _of_one_rank(config: Any, model: Path, extra_config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> Any:
    """Return the ``VllmConfig`` of an engine with one rank whose blocks have the same tokens.

    Raises:
        UcmError: There is none, because the tokens of a block depend on the number of ranks.
    """
    kept = {name: value for name, value in engine_args.items() if name not in _OF_RANKS}
    one = _engine_config(model, extra_config, kept)
    divided_tokens = config.parallel_config.pipeline_parallel_size > 1 or divided_context(config.parallel_config)
    if divided_tokens or one.cache_config.block_size != config.cache_config.block_size:
        raise UcmError(
            "what a rank of this engine stores is not known without it: it has pipeline or context parallelism, or "
            "recurrent layers",
            where="engine arguments",
            fix="none is known; engines with tensor parallelism alone are served",
        )
    return one


def _engine_config(model: Path, extra_config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> Any:
    """Return vLLM's ``VllmConfig``."""
    try:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - ucm imports without vLLM
    except ImportError as error:
        raise UcmError(
            f"vLLM cannot be imported: {error}", fix="run this in the environment that serves the model"
        ) from error
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    unknown = sorted(set(engine_args) - known)
    if unknown:
        raise UcmError(
            f"vLLM has no engine argument {unknown[0]!r}",
            where="engine arguments",
            fix="write vLLM's options with underscores and without dashes in front, for instance max_model_len",
        )
    transfer = connector(extra_config)
    arguments = {name: value for name, value in SMALL.items() if name in known}
    try:
        made = EngineArgs(**{**arguments, **engine_args, "model": str(model), "kv_transfer_config": transfer})
        return made.create_engine_config()
    except Exception as error:
        raise _refused(error, model) from error


def _started(config: Any) -> Any:
    """Start vLLM's ``EngineCore`` without weights."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - ucm imports without vLLM

    try:
        return EngineCore(config, _executor_class(), log_stats=False)
    except UcmError:
        raise
    except Exception as error:
        raise _refused(error, config.model_config.model) from error


def _refused(error: Exception, model: object) -> UcmError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__
    return UcmError(
        f"vLLM would not start with this model: {said}",
        where=f"model: {model}",
        fix="start vLLM with this model and no connector; its log says more",
    )


def _executor_class() -> Any:
    """Return an in-process executor that loads no weights, profiles no memory and skips the warm-up."""
    import torch  # noqa: PLC0415 - ucm imports without torch
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 - and without vLLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415 - likewise
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415 - likewise
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415 - likewise

    class WeightlessLoader(BaseModelLoader):  # type: ignore[misc] # vLLM is untyped here
        """Creates the model's layers without memory for their weights."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load nothing."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            """Return the model on the ``meta`` device."""
            before = torch.get_default_dtype()
            torch.set_default_dtype(model_config.dtype)
            try:
                with torch.device("meta"):
                    made = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            finally:
                torch.set_default_dtype(before)
            return made.eval()

    register_model_loader(LOAD_FORMAT)(WeightlessLoader)

    class WeightlessExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM is untyped here
        """vLLM's executor of one process."""

        def _init_executor(self) -> None:
            load_config = self.vllm_config.load_config
            before = load_config.load_format
            load_config.load_format = LOAD_FORMAT
            try:
                super()._init_executor()
            finally:
                load_config.load_format = before  # it is part of the identity

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            """Answer the worker calls that would need weights, and report memory for a minimal KV cache."""
            model_config = self.vllm_config.model_config
            if method == "determine_available_memory":
                self._longest, block_size = model_config.max_model_len, self.vllm_config.cache_config.block_size
                model_config.max_model_len = min(self._longest, block_size)
                return [PLENTY]
            if method == "initialize_from_config":
                model_config.max_model_len = self._longest
            if method == "compile_or_warm_up_model":
                return []
            return super().collective_rpc(method, *args, **kwargs)

    return WeightlessExecutor


def _facts(core: Any, config: Any) -> EngineFacts:
    """Return the facts of an engine, by the connectors of one of a single rank."""
    # The two sides are private to the connector, because vLLM's API has no call for this.
    connector = core.scheduler.connector
    memories = vllm_module("distributed.kv_transfer").get_kv_transfer_group()._worker._memories  # noqa: SLF001
    if config.parallel_config.world_size > 1:
        # First, so that the weights' files are read once: the other connector finds their digests.
        _namespace_of(connector._scheduler)  # noqa: SLF001
        connector = _connector_of_ranks(core, config)
    try:
        side = connector._scheduler  # noqa: SLF001
        namespace = _namespace_of(side)
        stored = []
        for memory in memories:
            if not memory.group.place:
                ranks = tuple(f"{namespace}/{tag}" for tag in side._tags[memory.group.index])  # noqa: SLF001
                stored.append(StoredGroup(memory.group, ranks[0], memory.geometry, ranks))
        kind, hasher = str(config.device_config.device_type), RequestHasher(side._block_keys.seed)  # noqa: SLF001
        return EngineFacts(namespace, kind, tuple(stored), hasher)
    finally:
        if connector is not core.scheduler.connector:
            connector.shutdown()


def _connector_of_ranks(core: Any, config: Any) -> Any:
    """Return the scheduler's connector of an engine of several ranks, which is not started."""
    tp, of_one = config.parallel_config.tensor_parallel_size, core.scheduler.kv_cache_config
    groups = [
        dataclasses.replace(group, kv_cache_spec=divided(group.kv_cache_spec, tp)) for group in of_one.kv_cache_groups
    ]
    of_ranks = dataclasses.replace(of_one, kv_cache_groups=groups)
    role = vllm_module("distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole.SCHEDULER
    return type(core.scheduler.connector)(config, role, of_ranks)


def _namespace_of(scheduler_side: Any) -> str:
    """Return the namespace, after the weights' files have been read."""
    while not scheduler_side.namespace:
        reading = any(thread.name == "ucm-identity" for thread in threading.enumerate())
        scheduler_side.poll()
        if scheduler_side.namespace:
            break
        if not reading:
            raise UcmError(
                "an engine would store nothing, because it cannot tell which weights it serves",
                fix="see the warnings of [UCM.Hasher] above",
            )
        time.sleep(0.05)
    return str(scheduler_side.namespace)


def _forget_worker_connector() -> None:
    """Reset the worker's connector, if the worker has not, so that the next engine in this process creates its own."""
    shut_down = optional(vllm_module("distributed.kv_transfer"), "ensure_kv_transfer_shutdown")
    if shut_down is not None:
        shut_down()
