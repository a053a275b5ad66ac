"""Run the same requests alone and among others, on an engine in this process: `company.py SPEC RESULT`, JSON files.

Each phase is a list of requests, each with the step before which it arrives. A request may continue another one's
answer, or end after some tokens, as one whose client is gone. The result has each request's generated tokens, their
logarithms of probability if it asks for these, hit tokens, and number of steps that generated some; and each phase's
preemptions of requests that had started to generate, and drafts that were to be verified.
"""

from __future__ import annotations

import itertools
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Labels of the series beside vLLM's own.
LABELS = {"kernel", "outcome"}


class Engine:
    """One ``LLM`` and its answers."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the arguments are read

        if find_spec("ucm") is not None:  # else this is plain vLLM, a reference
            from ucm.integration.vllm import metrics  # noqa: PLC0415 - only where it is installed

            metrics.TIER_SECONDS = 0.0  # counts are exported with the next step
        self._engine = LLM(**arguments).llm_engine
        self._params = SamplingParams
        self._told: dict[str, list[dict[str, Any]]] = {}
        core = getattr(self._engine.engine_core, "engine_core", None)
        #: None if the scheduler is in another process.
        self._scheduler = getattr(core, "scheduler", None)

    def phase(self, name: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serve some requests to their end."""
        waiting = dict(enumerate(requests))
        found: list[dict[str, Any]] = [{} for _ in requests]
        self._told[name] = found
        answering: dict[str, int] = {}
        drafted = 0
        for step in itertools.count():
            for number in [number for number, request in waiting.items() if request.get("arrives", 0) <= step]:
                request = waiting.pop(number)
                prompt = {"prompt_token_ids": self._begun(request) + request["prompt"], "cache_salt": request["salt"]}
                params = self._params(detokenize=False, **request["params"])
                found[number] = {"prompt": prompt["prompt_token_ids"], "tokens": [], "cached": 0, "steps": 0}
                self._engine.add_request(f"{name} {number}", prompt, params)
            if not waiting and not self._engine.has_unfinished_requests():
                break
            drafted += sum(len(of.spec_token_ids) for of in getattr(self._scheduler, "requests", {}).values())
            for output in self._engine.step():
                of = found[number_of(output)]
                of["tokens"], of["cached"] = list(output.outputs[0].token_ids), output.num_cached_tokens
                of["steps"] += 1
                of["logprobs"] = [
                    logprobs[token].logprob
                    for token, logprobs in zip(of["tokens"], output.outputs[0].logprobs or (), strict=False)
                ]
                if len(of["tokens"]) >= requests[number_of(output)].get("ends", sys.maxsize):
                    self._engine.abort_request([output.request_id])
            for own, running in getattr(self._scheduler, "requests", {}).items():
                if running.num_preemptions and running.num_output_tokens:
                    answering[own] = running.num_preemptions
        return [*found, {"preempted": sum(answering.values()), "drafted": drafted}]

    def close(self) -> None:
        """End it like a server, which first completes saves; up to 0.27.1 at least, an in-process engine does not."""
        self._engine.engine_core.shutdown()

    def _begun(self, request: dict[str, Any]) -> list[int]:
        """Return the prompt and answer that a request continues."""
        if "continues" not in request:
            return []
        phase, number = request["continues"]
        before = self._told[phase][number]
        tokens: list[int] = before["prompt"] + before["tokens"]
        return tokens


def number_of(output: Any) -> int:
    """Return the place of an output's request in its phase."""
    return int(output.request_id.rpartition(" ")[2])


def exported() -> dict[str, float]:
    """Return this process's exported series of a sparse method, by name and labels except vLLM's own."""
    return {
        ".".join([sample.name, *(value for label, value in sample.labels.items() if label in LABELS)]): sample.value
        for family in import_module("prometheus_client").REGISTRY.collect()  # vLLM brings it
        for sample in family.samples
        if sample.name.startswith("ucm:sparse_") and sample.name.endswith("_total")
    }


def main(spec_file: Path, result_file: Path) -> None:
    """Start the engine, run the phases, write the results."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    engine = Engine(spec["engine"])
    result = {name: engine.phase(name, requests) for name, requests in spec["phases"].items()}
    result["exported"] = [exported()]
    engine.close()
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
