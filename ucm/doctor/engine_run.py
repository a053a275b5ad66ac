"""The child process of ``ucm doctor --run``: a short run of a real vLLM engine, and what its workers report.

``python -m ucm.doctor.engine_run PLAN RESULT`` reads the plan that `ucm.doctor.run` wrote, and writes the result. The
requests of a run cause every kind of step: a prompt longer than a step's token budget, the same prompt again, and more
tokens than the tiny KV cache can hold. Those of a trial are long.

vLLM mixes `WorkerFacts` into its worker class (``worker_extension_cls``), and calls it by name in each worker. The
facts determine which hooks could fire; the probe counts which did.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ucm.compat import graph_mode, layer_specs, optional, page_bytes
from ucm.engine_process import WORKER_FACTS
from ucm.hashing.rank_geometry import rank_tag

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
#: A trial's: two requests of the longest context that the tiny model has, in steps of a server's size.
LONGEST = 2048
ROOM = {"max_model_len": LONGEST, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 2 * LONGEST // 32 + 2}
#: Generated tokens; tokens before the first chunk, which are fewer than a block; and how often chunks are asked for.
ANSWER, BEFORE, ATTEMPTS = 32, 9, 20
#: For each round, the requests as (length of the prompt, tokens to generate).
ROUNDS = (((150, 4),), ((150, 4),), ((20, 90), (20, 90), (20, 90), (20, 90), (5, 30)))
PREEMPTIONS = "vllm:num_preemptions"
PREFIX_HITS = "vllm:prefix_cache_hits"


class WorkerFacts:
    """A mix-in for vLLM's worker."""

    def ucm_facts(self) -> dict[str, Any]:
        """Return the facts as plain data.

        Returns:
            ``pid``; ``runner`` and ``model``, the modules that define the runner's and the model's classes, including
            bases; ``attention``, for each kind of attention layer whether it is MLA (``mla``), its ``backend``, and
            whether a separate operator writes keys and values (``separate_kv_write``); ``groups``, for each KV-cache
            group the ``tokens`` and ``bytes`` of a block, the ``layers`` and the store's ``tag`` for this rank;
            ``graphs``, what of a step is replayed as a graph; ``device``, its name.
        """
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return {
            "pid": os.getpid(),
            "runner": _modules_of([worker.model_runner]),
            "model": _modules_of(worker.get_model().modules()),
            "attention": _distinct([_attention(layer) for layer in layers if _backend(layer) is not None]),
            "groups": _groups(worker),
            "graphs": _graphs(worker.vllm_config),
            "device": _device_name(),
        }

    def ucm_method(self) -> dict[str, Any]:
        """What the sparse method of this worker has counted: its ``figures``, and its own ``summary`` of them.

        ``method`` is the name of its class; empty if none runs, as without an overlay. ``report`` is what a method that
        measures has found; None of others.
        """
        from ucm.integration.vllm.hooks import worker_method  # noqa: PLC0415 - workers of a run import it anyway

        worker: Any = self
        method: Any = worker_method(worker.vllm_config)
        summary, report = optional(method, "summary"), optional(method, "report")
        return {
            "method": type(method).__name__ if method else "",
            "figures": dict(method.figures()) if method else {},
            "summary": summary() if summary else "",
            "report": report() if report else None,
        }


def _modules_of(things: Any) -> list[str]:
    return sorted({base.__module__ for thing in things for base in type(thing).__mro__})


def _attention(layer: Any) -> dict[str, Any]:
    backend = _backend(layer)
    return {
        "mla": type(layer).__name__ == "MLAAttention" or bool(optional(layer, "use_mla", False)),
        "backend": backend.__name__ if isinstance(backend, type) else str(backend),
        "separate_kv_write": not optional(backend, "forward_includes_kv_cache_update", True),
    }


def _backend(layer: Any) -> Any:
    """Return the backend's class; up to 0.9.x a layer only has its name."""
    return optional(layer, "attn_backend") or optional(layer, "backend")


def _groups(worker: Any) -> list[dict[str, Any]]:
    found = []
    for index, group in enumerate(optional(worker.model_runner, "kv_cache_config.kv_cache_groups", ())):
        specs = layer_specs(group.kv_cache_spec, group.layer_names)
        found.append(
            {
                "tokens": int(group.kv_cache_spec.block_size),
                "bytes": sum(page_bytes(spec) or 0 for spec in specs.values()),
                "layers": len(specs),
                "tag": rank_tag(worker.vllm_config, index, spec=group.kv_cache_spec),
            }
        )
    return found


def _graphs(config: Any) -> str:
    """Return the name of the graph mode; the name of a step that is launched kernel by kernel is ``NONE``."""
    mode = graph_mode(config.compilation_config)
    eager = bool(optional(config, "model_config.enforce_eager", False))
    return "NONE" if eager else str(optional(mode, "name", mode))


def _device_name() -> str:
    """Return the device's name, and the processor's for the CPU, which vLLM calls ``cpu``."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - in a worker

    name = str(current_platform.get_device_name())
    if name != "cpu":
        return name
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith(("model name", "Model name"))).partition(":")[2].strip()
        return f"CPU, {os.cpu_count()} threads of {model}"
    return f"CPU, {os.cpu_count()} threads"


def _distinct(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]


def main() -> None:
    """Run the engine as planned."""
    plan, result = (Path(argument) for argument in sys.argv[1:3])
    told = json.loads(plan.read_text())
    result.write_text(json.dumps(attempt(told) if "engine" in told else run(told)), encoding="utf-8")


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, serve the rounds, ask the workers.

    Args:
        plan: A mapping with ``model``, ``load_format`` and ``report_dir``.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - the only module of the runtime's that starts an engine

    began = time.perf_counter()
    engine = LLM(
        model=plan["model"],
        load_format=plan["load_format"],
        additional_config={"ucm_sparse_config": {"Probe": {"report_dir": plan["report_dir"]}}},
        worker_extension_cls=WORKER_FACTS,
        **SETTINGS,
    )
    started = time.perf_counter()
    for requests in ROUNDS:
        prompts = [{"prompt_token_ids": prompt(place, length)} for place, (length, _) in enumerate(requests)]
        sampling = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False) for _, n in requests]
        engine.generate(prompts, sampling, use_tqdm=False)
    counters = counters_of(engine)
    return {
        "requests": sum(map(len, ROUNDS)),
        "preemptions": counters.get(PREEMPTIONS),
        "prefix_hit_tokens": counters.get(PREFIX_HITS),
        "workers": engine.collective_rpc("ucm_facts"),
        "seconds": {"start": round(started - began, 1), "generate": round(time.perf_counter() - started, 1)},
    }


def attempt(plan: dict[str, Any]) -> dict[str, Any]:
    """Start an engine with some settings, and give it what they are for.

    Args:
        plan: ``model``, ``load_format``, ``engine``, further arguments of ``LLM``, and for blending ``min_tokens``.

    Returns:
        Of blending, how many ``chunks`` were stored, how many tokens of a prompt of so many ``tokens`` were ``taken``
        from them; else ``workers``, what each one's method says.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - as in `run`

    given = {**SETTINGS, **ROOM, "disable_log_stats": True, **plan["engine"]}
    engine = LLM(model=plan["model"], load_format=plan["load_format"], worker_extension_cls=WORKER_FACTS, **given)

    def ask(tokens: list[int], count: int, **extra: Any) -> int:
        """The tokens of a prompt that a connector or vLLM's own cache had."""
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        (answer,) = engine.generate([{"prompt_token_ids": tokens}], [sampling], use_tqdm=False)
        return int(answer.num_cached_tokens or 0)

    if "min_tokens" not in plan:
        ask(prompt(0, LONGEST - ANSWER), ANSWER)
        ask(prompt(1, LONGEST - ANSWER), ANSWER, ucm_sparse=False)
        return {"workers": engine.collective_rpc("ucm_method")}
    texts = [prompt(place, plan["min_tokens"] + rest) for place, rest in ((0, 70), (1, 90))]
    marks = [[BEFORE, BEFORE + len(texts[1])], [BEFORE + len(texts[1]), BEFORE + len(texts[0]) + len(texts[1])]]
    whole = [*texts[1], *texts[0], *prompt(2, BEFORE)]
    if BEFORE + len(whole) > LONGEST:
        return {"chunks": 0, "taken": 0, "tokens": 0}
    for attempts in range(ATTEMPTS):
        for text in texts:
            ask(text, 1, kv_transfer_params={"ucm_chunks": [[0, len(text)]]})
        # Nothing else begins like this: what is found is found by its chunks.
        taken = ask([*prompt(3 + attempts, BEFORE), *whole], 1, kv_transfer_params={"ucm_chunks": marks})
        if taken > marks[-1][0]:
            break
        time.sleep(0.5)  # until what was saved is visible
    return {"chunks": len(texts), "taken": taken, "tokens": BEFORE + len(whole)}


def prompt(place: int, length: int) -> list[int]:
    """Return a prompt that shares all blocks with others of the same ``place``, and none with the rest."""
    return [3 + (place * 97 + token * 7) % 500 for token in range(length)]


def counters_of(engine: Any) -> dict[str, int]:
    """Return the engine's own counters by name; empty in releases that do not expose them."""
    metrics = optional(engine, "get_metrics", list)()
    return {metric.name: metric.value for metric in metrics if isinstance(optional(metric, "value"), int)}


if __name__ == "__main__":
    main()
