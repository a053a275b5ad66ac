"""Time ``Scheduler.schedule()`` of the installed vLLM: `schedule.py MODEL REQUESTS STEPS` prints seconds per call.

All requests are running and each step adds one token to each: the steady state of decoding.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
BLOCKS = 20_000
PROMPT = 64
WARM_UP = 50


def make_scheduler(model: str, requests: int) -> Any:
    """A scheduler as EngineCore makes it, with room for all requests."""
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    blocks = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, blocks, StructuredOutputManager(config), BLOCK)


def measure(scheduler: Any, requests: int, steps: int) -> list[float]:
    """Seconds of each of so many calls in the steady state."""
    source = random.Random(0)  # noqa: S311 - prompts, no secrets
    params = SamplingParams(max_tokens=steps + WARM_UP + PROMPT, ignore_eos=True, temperature=0)
    for number in range(requests):
        prompt = [source.randrange(3, 500) for _ in range(PROMPT)]
        scheduler.add_request(Request(str(number), prompt, params, None))
    while len(scheduler.running) < requests:
        _step(scheduler)
    for _ in range(WARM_UP):
        _step(scheduler)
    gc.collect()
    gc.disable()
    return [_step(scheduler) for _ in range(steps)]


def _step(scheduler: Any) -> float:
    begin = time.perf_counter()
    output = scheduler.schedule()
    seconds = time.perf_counter() - begin
    ids = list(output.num_scheduled_tokens)
    sampled = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: index for index, request in enumerate(ids)},
        sampled_token_ids=[[7] for _ in ids],
    )
    scheduler.update_from_output(output, sampled)
    return seconds


if __name__ == "__main__":
    count, calls = int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(measure(make_scheduler(sys.argv[1], count), count, calls)))
