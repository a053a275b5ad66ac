"""Decode given answers in a real engine: `forced.py SPEC RESULT`, JSON files.

Each token of an answer is forced, whatever the model would have said (teacher forcing). The result has its loss and
whether the model would have said it, as `real_judge.py` tells, and the seconds of each step after the first.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Callable


class Forced(AdapterLogitsProcessor):  # type: ignore[misc] # vLLM is not installed where types are checked
    """Allows the next token of ``extra_args["forced"]`` alone."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all."""

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes what greedy sampling says."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Return a request's processor."""
        answer = params.extra_args["forced"]

        def force(said: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[answer[len(said)]] = 0.0
            return forced

        return force


def main(spec_file: Path, result_file: Path) -> None:
    """Decode all answers, one after the other."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    vllm = import_module("vllm")
    engine = vllm.LLM(**spec["engine"], logits_processors=[Forced]).llm_engine
    found = []
    for number, (prompt, answer, extra) in enumerate(spec["items"]):
        params = vllm.SamplingParams(
            max_tokens=len(answer),
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            extra_args={"forced": answer, **extra},
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        last: Any = None
        steps: list[float] = []
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            (last,) = engine.step() or (last,)
            steps.append(time.perf_counter() - begin)
        (output,) = last.outputs
        assert list(output.token_ids) == answer
        tokens = [[-of[token].logprob, of[token].rank == 1] for token, of in zip(answer, output.logprobs, strict=True)]
        found.append({"tokens": tokens, "steps": steps[-len(answer) + 1 :]})
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
