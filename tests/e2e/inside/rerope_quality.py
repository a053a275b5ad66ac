"""What engines think of answers that they are given: `rerope_quality.py SPEC RESULT`, JSON files.

Each engine runs in a fork of a process that has imported vLLM. Of each token of an answer is told its loss, in nats,
and whether it was the likeliest.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def measured(arguments: dict[str, Any], texts: list[list[int]], answer: int) -> list[list[tuple[float, bool]]]:
    """For each text of its last tokens, which are the answer."""
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(**arguments)
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = []
    for output in llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False):
        told = zip(output.prompt_token_ids[-answer:], output.prompt_logprobs[-answer:], strict=True)
        found.append([(-of[token].logprob, of[token].rank == 1) for token, of in told])
    return found


def main(spec_file: Path, result_file: Path) -> None:
    """Run each engine to its end."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    for name in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        import_module(name)
    found = {}
    for number, (name, arguments) in enumerate(spec["engines"].items()):
        own = result_file.with_suffix(f".{number}")
        child = os.fork()
        if not child:
            told = measured({**spec["common"], **arguments}, spec["texts"], spec["answer"])
            own.write_text(json.dumps(told), encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
        found[name] = json.loads(own.read_text(encoding="utf-8"))
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
