"""An engine in this process with ESA, looked at after every step: `retrieving.py SPEC RESULT`, JSON files.

Each phase has requests that arrive at once; in one, a directory is deleted after some steps. Told are what each request
generated and why it ended, for every step the most tokens that a request had computed and the blocks that were in use,
and what the worker has counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

#: How many seconds the store may take.
PATIENCE = 120


class Observed:
    """One ``LLM`` with both of its sides in reach."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the arguments are read

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._method = core.model_executor.driver_worker.worker.model_runner._ucm_sparse_method
        self._params = SamplingParams

    def phase(self, name: str, requests: list[dict[str, Any]], removal: list[Any] | None) -> dict[str, Any]:
        """Serve some requests to their end."""
        found: dict[str, dict[str, Any]] = {}
        for number, request in enumerate(requests):
            prompt = {"prompt_token_ids": request["prompt"]}
            own = f"{name} {number}"
            self._engine.add_request(own, prompt, self._params(detokenize=False, **request["params"]))
            found[own] = {"tokens": [], "finish": None}
        known, steps, held = dict(self._scheduler.requests), 0, []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "finish": output.outputs[0].finish_reason,
                }
            steps += 1
            if removal is not None and steps == removal[0]:
                self._await_blocks()
                Path(removal[1]).rename(f"{removal[1]}-gone")  # at once: it is being written into
            if self._scheduler.requests:
                used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
                held.append([max(one.num_computed_tokens for one in self._scheduler.requests.values()), used])
        store = self._method._store
        return {
            "requests": list(found.values()),
            "held": held,
            "preemptions": sum(request.num_preemptions for request in known.values()),
            "left": self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks(),
            "worker": dict(self._method.counts),
            "store": dict(store.counts) if store else {},
        }

    def _await_blocks(self) -> None:
        """Wait until the store has most blocks: its threads give way to everything else on a busy machine."""
        store = self._method._store
        deadline = time.monotonic() + PATIENCE
        while any(2 * len(kept.copies) > len(kept.keys) for kept in store._kept.values()):
            assert time.monotonic() < deadline, "the store takes nothing"
            store.settle()
            time.sleep(0.01)


def main(spec_file: Path, result_file: Path) -> None:
    """Start the engine, run the phases, write the results."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    engine = Observed(spec["engine"])
    phases = spec["phases"].items()
    result = {name: engine.phase(name, phase["requests"], phase.get("removal")) for name, phase in phases}
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
