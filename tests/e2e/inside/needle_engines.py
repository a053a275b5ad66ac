"""Ask one engine after another the same kind of questions: `needle_engines.py SPEC RESULT`.

The specification has the arguments of ``LLM`` and a list of runs, each with its prompts and the setting of its sparse
method. The engines live in this one process, so that a start costs seconds; a run that fails says why, and the next one
goes on. The result has one JSON object per line, written as soon as its run has ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Before vLLM is imported: scheduler and worker in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def answer(arguments: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The tokens that an engine of its own generates for a run's prompts, and what it cost."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment is set

    begin = time.perf_counter()
    llm = LLM(**arguments, additional_config={"ucm_sparse_config": run["method"]} if run["method"] else {})
    started = time.perf_counter()
    params = SamplingParams(max_tokens=run["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in run["prompts"]], params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "start_s": started - begin,
        "seconds": time.perf_counter() - started,
    }


def main(spec_file: Path, result_file: Path) -> None:
    """Do all runs."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    with result_file.open("w", encoding="utf-8", buffering=1) as results:
        for run in spec["runs"]:
            try:
                told = answer(spec["engine"], run)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this run's result
                traceback.print_exc()
                told = {"error": f"{type(error).__name__}: {error}"}
            results.write(json.dumps(told) + "\n")
            _clean_up()


def _clean_up() -> None:
    """Let go of what an engine leaves in its process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: PLC0415

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
