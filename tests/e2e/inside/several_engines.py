"""Several engines in this process, one after the other and step by step in turns: `several_engines.py SPEC RESULT`.

A plan is a list of turns. A turn names engines, which start when they are first named and serve the same requests side
by side, a step of each at a time; or, as ``-name``, an engine that ends. Told is what each generated in each turn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def serve(engines: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    """Return each engine's answers to the requests, all of which arrive at once."""
    from vllm import SamplingParams  # noqa: PLC0415 - vLLM is imported when the first engine starts

    found: dict[str, list[list[int]]] = {}
    for name, engine in engines.items():
        found[name] = [[] for _ in requests]
        for number, request in enumerate(requests):
            params = SamplingParams(detokenize=False, **request["params"])
            engine.llm_engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, params)
    while any(engine.llm_engine.has_unfinished_requests() for engine in engines.values()):
        for name, engine in engines.items():
            for output in engine.llm_engine.step():
                found[name][int(output.request_id)] = list(output.outputs[0].token_ids)
    return found


def main(spec_file: Path, result_file: Path) -> None:
    """Follow the plan."""
    from vllm import LLM  # noqa: PLC0415 - takes its time

    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    running: dict[str, Any] = {}
    turns = []
    for names in spec["plan"]:
        for name in names:
            if name.startswith("-"):
                running.pop(name[1:])
        gc.collect()
        serving = [name for name in names if not name.startswith("-")]
        for name in serving:
            if name not in running:
                running[name] = LLM(**spec["engines"][name])
        turns.append(serve({name: running[name] for name in serving}, spec["requests"]))
    result_file.write_text(json.dumps(turns), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
