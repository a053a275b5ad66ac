"""Objects of the installed vLLM as its engine creates them; imported only where vLLM is installed."""

from __future__ import annotations

import os
import pkgutil
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.ucm.stepping.setting import EngineSetting


def engine_config(
    model: Path, setting: EngineSetting, block_size: int, max_model_len: int, ranks: int = 1, **parts: Any
) -> Any:
    """Return vLLM's ``VllmConfig`` for its V1 runner, with the caller's parts besides the usual ones."""
    # `Rows` is the state of the V1 runner. Where Triton is installed, vLLM 0.32.0 chooses the V2 runner, to which its
    # scheduler sends a resumed request as a new one.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setting.running,
            max_num_batched_tokens=setting.budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            long_prefill_token_threshold=setting.chunk,
            policy=setting.policy,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=setting.caching),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks),
        **parts,
    )
    config.scheduler_config.async_scheduling = setting.asynchronous  # on the CPU vLLM turns it off
    config.cache_config.num_gpu_blocks = setting.blocks
    return config


#: A variable that names another scheduler's class, ``module:Class``, which derives from vLLM's.
ANOTHER = "UCM_TEST_SCHEDULER"


def make_scheduler(config: Any, kv_cache_config: Any, hash_tokens: int = 0) -> Any:
    """Return the scheduler that vLLM chooses for a configuration, or the one that `ANOTHER` names.

    Args:
        config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        hash_tokens: The tokens that vLLM hashes as one; 0: those of a block.
    """
    size = config.cache_config.block_size
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    if named := os.environ.get(ANOTHER):
        kind = pkgutil.resolve_name(named)
    return kind(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=hash_tokens or size,
        log_stats=False,
    )


class Requests:
    """Makes requests, numbered, with vLLM's hashes of their blocks.

    Args:
        block_size: Tokens per block.
        stop: Tokens that end an answer.
    """

    def __init__(self, block_size: int, stop: Sequence[int] = ()) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._stop = list(stop)
        self._number = 0

    def make(self, prompt: Sequence[int], max_tokens: int, priority: int = 0, asked: object = None) -> Any:
        """Return vLLM's ``Request``; ``asked`` is its request to a sparse method, or None."""
        self._number += 1
        extra = None if asked is None else {"ucm_sparse": asked}
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=self._stop,
            detokenize=False,
            extra_args=extra,
        )
        params.update_from_generation_config({}, 1)
        return Request(f"{self._number}", list(prompt), params, None, block_hasher=self._hasher, priority=priority)


def runner_output(output: Any, sampled: Mapping[str, list[int]], **more: Any) -> Any:
    """Return vLLM's model runner output for a step, with the sampled tokens by request."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[sampled.get(request_id, []) for request_id in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        **more,
    )
