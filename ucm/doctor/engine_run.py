"""The child process of ``ucm doctor --run``: a short run of a real vLLM engine.

``python -m ucm.doctor.engine_run PLAN RESULT`` reads the plan that `ucm.doctor.run` wrote, and writes the result. The
requests of a run cause every kind of step: a prompt longer than a step's token budget, the same prompt again, and more
tokens than the tiny KV cache can hold.

The workers' facts determine which hooks could fire; the probe counts which did.
"""

from __future__ import annotations

import time
from typing import Any

from ucm.engine import PREEMPTIONS, PREFIX_HITS, Engine
from ucm.engine_process import run_plan

#: Ten usable blocks: one request of full length fits even if a backend insists on blocks of 16 tokens, and the requests
#: of the last round do not all fit even with blocks of 32.
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,  # the engine's own count of preemptions is the probe's cross-check
    "max_model_len": 160,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 11,
    "gpu_memory_utilization": 0.1,
    "seed": 0,
}
#: For each round, the requests as (length of the prompt, tokens to generate).
ROUNDS = (((150, 4),), ((150, 4),), ((20, 90), (20, 90), (20, 90), (20, 90), (5, 30)))


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, serve the rounds, ask the workers.

    Args:
        plan: A mapping with ``model``, ``load_format`` and ``report_dir``.
    """
    began = time.perf_counter()
    method = {"Probe": {"report_dir": plan["report_dir"]}}
    engine = Engine(
        plan["model"], load_format=plan["load_format"], additional_config={"ucm_sparse_config": method}, **SETTINGS
    )
    started = time.perf_counter()
    for requests in ROUNDS:
        prompts = [prompt(place, length) for place, (length, _) in enumerate(requests)]
        engine.generate(prompts, [count for _, count in requests])
    counters = engine.vllm_counters()
    return {
        "requests": sum(map(len, ROUNDS)),
        "preemptions": counters.get(PREEMPTIONS),
        "prefix_hit_tokens": counters.get(PREFIX_HITS),
        "workers": engine.workers("ucm_facts"),
        "seconds": {"start": round(started - began, 1), "generate": round(time.perf_counter() - started, 1)},
    }


def prompt(place: int, length: int) -> list[int]:
    """Return a prompt that shares all blocks with others of the same ``place``, and none with the rest."""
    return [3 + (place * 97 + token * 7) % 500 for token in range(length)]


if __name__ == "__main__":
    run_plan(lambda plan, tell: tell(run(plan)))
