"""Time ``Scheduler.schedule()`` without and with the overlay: `schedule.py MODEL REQUESTS STEPS` prints seconds.

Both schedulers live in one process and take turns, so that whatever else the machine does slows both alike. All
requests are running and each step adds one token to each: the steady state of decoding.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SCHEDULER = "vllm.v1.core.sched.scheduler"
#: The modules of a scheduler that the overlay shadows.
SHADOWED = ("vllm.v1.core.sched.output", "vllm.v1.core.kv_cache_manager", SCHEDULER)
BLOCK = 32
BLOCKS = 20_000
PROMPT = 64
WARM_UP = 50


def scheduler_classes() -> dict[str, Any]:
    """The scheduler of the overlay and, with the kill switch set, vLLM's own."""
    classes = {"with": importlib.import_module(SCHEDULER).Scheduler}
    os.environ["UCM_DISABLE_PATCHES"] = "1"
    for name in SHADOWED:
        del sys.modules[name]
    classes["without"] = importlib.import_module(SCHEDULER).Scheduler
    for name, scheduler in classes.items():
        rewritten = "ucm_vllm_overlay" in scheduler.schedule.__code__.co_filename
        if rewritten != (name == "with"):
            raise SystemExit(f"the scheduler {name} the overlay is not: {scheduler.schedule.__code__.co_filename}")
    return classes


def make_scheduler(scheduler: Any, model: str, requests: int) -> Any:
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
    return scheduler(config, blocks, StructuredOutputManager(config), BLOCK)


def fill(scheduler: Any, requests: int, steps: int) -> None:
    """Bring a scheduler to its steady state."""
    source = random.Random(0)  # noqa: S311 - prompts, no secrets
    params = SamplingParams(max_tokens=steps + WARM_UP + PROMPT, ignore_eos=True, temperature=0)
    for number in range(requests):
        prompt = [source.randrange(3, 500) for _ in range(PROMPT)]
        scheduler.add_request(Request(str(number), prompt, params, None))
    while len(scheduler.running) < requests:
        step(scheduler)
    for _ in range(WARM_UP):
        step(scheduler)


def step(scheduler: Any) -> float:
    """One step with a token for each request; the seconds that `schedule` took of it."""
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


def main(model: str, requests: int, steps: int) -> dict[str, list[float]]:
    """The seconds of each call in the steady state, for both sides."""
    schedulers = {name: make_scheduler(found, model, requests) for name, found in scheduler_classes().items()}
    for scheduler in schedulers.values():
        fill(scheduler, requests, steps)
    gc.collect()
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in schedulers}
    for number in range(steps):
        for name in sorted(schedulers, reverse=bool(number % 2)):
            seconds[name].append(step(schedulers[name]))
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
