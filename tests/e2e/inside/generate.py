"""Run one engine: `generate.py SPEC RESULT`, JSON files of which `tests.e2e.engine` writes one and reads the other."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(spec_file: Path, result_file: Path) -> None:
    """Start the engine, run the phases, write the results."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    begin = time.perf_counter()
    from vllm import LLM  # noqa: PLC0415 - part of the start that is timed

    llm = LLM(**spec["engine"])
    result: dict[str, Any] = {"start_s": time.perf_counter() - begin, "phases": {}}
    for name, batches in spec["phases"].items():
        before, begin = _counters(llm), time.perf_counter()
        refused: list[str] = []
        outputs = [output for batch in batches for output in _generate(llm, batch, refused)]
        seconds = time.perf_counter() - begin
        result["phases"][name] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "refused": refused,
            "seconds": seconds,
            "counters": {key: value - before.get(key, 0) for key, value in _counters(llm).items()},
        }
    if spec.get("reports"):
        _collect(Path(spec["reports"]), spec["engine"])
    config = llm.llm_engine.vllm_config
    result["chunked_prefill"] = config.scheduler_config.enable_chunked_prefill
    result["tokens_per_step"] = config.scheduler_config.max_num_batched_tokens
    result["block_size"] = config.cache_config.block_size
    result_file.write_text(json.dumps(result), encoding="utf-8")


def _generate(llm: Any, batch: list[dict[str, Any]], refused: list[str]) -> list[Any]:
    """Return the outputs of a batch; if vLLM may refuse it and does, none, and note the reason."""
    from vllm import SamplingParams  # noqa: PLC0415

    prompts = [{"prompt_token_ids": request["prompt"]} for request in batch]
    params = [SamplingParams(detokenize=False, **_settings(request["params"])) for request in batch]
    try:
        outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    except ValueError as error:
        if not any(request.get("may_be_refused") for request in batch):
            raise
        refused.append(str(error))
        return []
    return outputs


def _settings(params: dict[str, Any]) -> dict[str, Any]:
    """Return a request's parameters, those of structured outputs as vLLM's object."""
    wanted = params.get("structured_outputs")
    if wanted is None:
        return params
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415 - older releases have none

    return {**params, "structured_outputs": StructuredOutputsParams(**wanted)}


def _counters(llm: Any) -> dict[str, float]:
    """vLLM's own counters, and the sums and counts of its histograms."""
    if not llm.llm_engine.log_stats:
        return {}
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        for field in ("value", "sum", "count"):
            number = getattr(metric, field, None)
            if number is not None:
                key = metric.name if field == "value" else f"{metric.name}:{field}"
                found[key] = found.get(key, 0) + number
    return found


def _collect(reports: Path, engine: dict[str, Any], patience: float = 20.0) -> None:
    """Ask the plugin in each process for its report and wait for them."""
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    processes = 1 if in_process else 2 + engine.get("pipeline_parallel_size", 1)
    (reports / "now").touch()
    deadline = time.monotonic() + patience
    while len(list(reports.glob("*.json"))) < processes and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
