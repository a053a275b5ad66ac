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
        outputs = [output for batch in batches for output in _generate(llm, batch)]
        seconds = time.perf_counter() - begin
        result["phases"][name] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": seconds,
            "counters": {key: value - before.get(key, 0) for key, value in _counters(llm).items()},
        }
    if spec.get("reports"):
        _collect(Path(spec["reports"]))
    config = llm.llm_engine.vllm_config
    result["chunked_prefill"] = config.scheduler_config.enable_chunked_prefill
    result["tokens_per_step"] = config.scheduler_config.max_num_batched_tokens
    result["block_size"] = config.cache_config.block_size
    result_file.write_text(json.dumps(result), encoding="utf-8")


def _generate(llm: Any, batch: list[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams  # noqa: PLC0415

    prompts = [{"prompt_token_ids": request["prompt"]} for request in batch]
    params = [SamplingParams(detokenize=False, **request["params"]) for request in batch]
    outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    return outputs


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


def _collect(reports: Path, patience: float = 20.0) -> None:
    """Ask the plugin in each process for its report and wait for them."""
    processes = 1 if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else 3
    (reports / "now").touch()
    deadline = time.monotonic() + patience
    while len(list(reports.glob("*.json"))) < processes and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
