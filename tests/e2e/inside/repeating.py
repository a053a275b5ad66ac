"""Time the steps of answers: `repeating.py SPEC RESULT`, JSON files.

Each prompt is computed first, so that all of its answers begin with what is in vLLM's prefix cache. Of an answer are
told its tokens, the seconds of its steps after the first, and how many tokens were drafted and accepted meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

COUNTERS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def counted(llm: Any) -> dict[str, int]:
    """Return how many tokens were drafted, and accepted, so far."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    return {name: values.get(series, 0) for name, series in COUNTERS.items()}


def main(spec_file: Path, result_file: Path) -> None:
    """Answer each prompt in each way, as often as there are rounds."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(**spec["engine"], disable_log_stats=False)
    engine = llm.llm_engine

    def answer(number: int, name: str, prompt: list[int], extra: dict[str, Any], count: int) -> dict[str, Any]:
        params = vllm.SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        before = counted(llm)
        engine.add_request(f"{number} {name}", {"prompt_token_ids": prompt}, params)
        steps: list[float] = []
        last: Any = None
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            (last,) = engine.step() or (last,)
            steps.append(time.perf_counter() - begin)
        counts = {of: after - before[of] for of, after in counted(llm).items()}
        return {"name": name, "tokens": list(last.outputs[0].token_ids), "steps": steps[1:], **counts}

    found = []
    for number, prompt in enumerate(spec["prompts"]):
        answer(number, "warm", prompt, {}, 4)
        for at in range(spec["rounds"]):
            found += [
                {"prompt": number, **answer(number, name, prompt, extra, spec["count"])}
                for name, extra in list(spec["ways"].items())[:: 1 if at % 2 else -1]
            ]
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
