"""An engine in this process whose scheduler is looked at after every step: `windowed.py SPEC RESULT`, JSON files.

Each phase is a list of requests that arrive at once. Of each is told what it generated and, for every step, how many
tokens were computed and how many blocks were held; of each phase, how many requests ran at once at most, and how often
one was preempted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Observed:
    """One ``LLM`` with its scheduler in reach."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the arguments are read

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        (self._manager,) = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self._params = SamplingParams

    def phase(self, name: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve some requests to their end."""
        found: dict[str, dict[str, Any]] = {}
        internal: dict[str, str] = {}
        for number, request in enumerate(requests):
            external = f"{name} {number}"
            prompt = {"prompt_token_ids": request["prompt"]}
            before = set(self._scheduler.requests)
            self._engine.add_request(external, prompt, self._params(detokenize=False, **request["params"]))
            (own,) = set(self._scheduler.requests) - before  # newer releases give requests another name inside
            internal[own] = external
            found[external] = {"tokens": [], "cached": 0, "held": []}
        most = preemptions = 0
        known = dict(self._scheduler.requests)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[output.request_id]["tokens"] = list(output.outputs[0].token_ids)
                found[output.request_id]["cached"] = output.num_cached_tokens
            most = max(most, len(self._scheduler.running))
            for own, request in self._scheduler.requests.items():
                held = sum(not block.is_null for block in self._manager.req_to_blocks.get(own, ()))
                found[internal[own]]["held"].append([request.num_computed_tokens, held])
        preemptions = sum(request.num_preemptions for request in known.values())
        usage = self._scheduler.kv_cache_manager.usage
        return {"requests": list(found.values()), "most": most, "preemptions": preemptions, "left": usage}


def main(spec_file: Path, result_file: Path) -> None:
    """Start the engine, run the phases, write the results."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    engine = Observed(spec["engine"])
    result = {name: engine.phase(name, requests) for name, requests in spec["phases"].items()}
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
