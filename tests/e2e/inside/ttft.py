"""An engine that answers one request at a time and says how long each took: `ttft.py ARGUMENTS`, those of ``LLM``.

`tests.e2e.bench.ttft_engine` writes commands to the standard input, one JSON list per line, and reads one JSON object
per line from the standard output; whatever vLLM and its libraries print goes where the standard error goes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

#: How often a reset is tried while something still holds blocks, and the pause between.
RESETS, PAUSE = 200, 0.05


class Engine:
    """One ``LLM`` and what it can be asked."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - the standard output is vLLM's from here on

        self._llm = LLM(**arguments)
        #: ``LLM.generate`` changes the ones that it gets, so that nothing but the last output is ever returned.
        self._params = partial(SamplingParams, temperature=0.0, detokenize=False)
        self._crowds = 0

    def generate(self, *prompts: list[int]) -> list[dict[str, Any]]:
        """The first token of each prompt, one request after another without a pause.

        Each answer has the tokens, here one, how many of the prompt's tokens were cached, and the seconds.
        """
        answers = []
        for prompt in prompts:
            begin = time.perf_counter()
            (output,) = self._llm.generate({"prompt_token_ids": prompt}, self._params(max_tokens=1), use_tqdm=False)
            seconds = time.perf_counter() - begin
            cached = output.num_cached_tokens
            answers.append({"tokens": list(output.outputs[0].token_ids), "cached": cached, "seconds": seconds})
        return answers

    def crowd(self, clients: int, answer: int, prompts: list[list[int]]) -> dict[str, Any]:
        """Let clients send prompts, each its next one when its last answer is complete.

        Args:
            clients: How many send at the same time.
            answer: Tokens to generate for each.
            prompts: The prompts, in the order in which they are sent.

        Returns:
            The seconds of all together; and for each prompt the seconds to its first token, how many of its tokens
            were cached, and its tokens.

        Raises:
            RuntimeError: The first output of a request has more than its first token, so the times are not those of it.
        """
        engine = self._llm.llm_engine
        params = self._params(max_tokens=answer, ignore_eos=True)
        # A connector may still save for a request of the last crowd: no name is used twice.
        self._crowds += 1
        names = [f"{self._crowds}-{number}" for number in range(len(prompts))]
        begin = time.perf_counter()
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        answers: dict[str, dict[str, Any]] = {}
        while len(answers) < len(prompts):
            while len(sent) < len(prompts) and len(sent) - len(answers) < clients:
                name, prompt = names[len(sent)], prompts[len(sent)]
                sent[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if output.request_id not in first and len(tokens) > 1:
                    raise RuntimeError(f"the first output of a request has {len(tokens)} tokens")
                first.setdefault(output.request_id, time.perf_counter())
                if output.finished:
                    seconds = first[output.request_id] - sent[output.request_id]
                    answers[output.request_id] = {
                        "seconds": seconds,
                        "cached": output.num_cached_tokens,
                        "tokens": tokens,
                    }
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "answers": [answers[name] for name in names]}

    def reset(self) -> bool:
        """Empty the engine's own prefix cache, as soon as no connector holds its blocks any more."""
        for _ in range(RESETS):
            if self._llm.reset_prefix_cache():
                return True
            time.sleep(PAUSE)
        return False


def main(arguments: Path) -> None:
    """Start the engine, say so, obey until the input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        begin = time.perf_counter()
        engine = Engine(json.loads(arguments.read_text(encoding="utf-8")))
        answers.write(json.dumps({"answer": time.perf_counter() - begin}) + "\n")
        for line in sys.stdin:
            name, *parameters = json.loads(line)
            answers.write(json.dumps({"answer": getattr(engine, name)(*parameters)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
