"""An engine that executes commands: `converse.py ARGUMENTS`, the arguments of ``LLM`` in a JSON file.

`tests.e2e.prefix_engine` writes commands to the standard input, one JSON list per line, and reads one JSON object per
line from the standard output; the output of vLLM and its libraries goes to the standard error.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

#: Labels that all of an engine's metrics share.
COMMON_LABELS = ("model_name", "engine")
#: A request for a step, of which nothing is saved.
ANY_REQUEST = {"prompt": [5, 6, 7], "params": {"max_tokens": 1}}


class Engine:
    """One ``LLM`` and its commands."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - the standard output is vLLM's until here

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._params = SamplingParams
        self._numbers = itertools.count()
        if "len(outputs.outputs) > 0" in inspect.getsource(type(self._engine).step):
            self._count_all_steps()

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests, all submitted at once; the answers are in their order."""
        begin = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {}
        aborts: dict[str, int] = {}
        for request in requests:
            name = f"request {next(self._numbers)}"
            prompt = {"prompt_token_ids": request["prompt"]}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            self._engine.add_request(name, prompt, self._params(detokenize=False, **request["params"]))
            answers[name] = {"tokens": [], "cached": None, "first_s": None, "finish": "none"}
            if request.get("abort_after") is not None:
                aborts[name] = request["abort_after"]
        for step in itertools.count():
            self._engine.abort_request([name for name, steps in aborts.items() if steps == step])
            if not self._engine.has_unfinished_requests():
                break
            for output in self._engine.step():
                _take(answers[output.request_id], output, time.perf_counter() - begin)
        return list(answers.values())

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters and the connector's, by name and labels, as exported to Prometheus."""
        found = {}
        for family in import_module("prometheus_client").REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith(("vllm:", "ucm:")) and not _is_detail(sample):
                    labels = (f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in COMMON_LABELS)
                    text = ",".join(labels)
                    found[f"{sample.name}{{{text}}}" if text else sample.name] = sample.value
        return found

    def settle(self) -> None:
        """Make all that UCM's connectors have saved visible."""
        import_module("settling").settle(self._llm, lambda: self.generate([ANY_REQUEST]))

    def reset(self) -> bool:
        """Reset the engine's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def reload(self, path: str) -> None:
        """Load other weights in place, as a trainer does."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def scale(self, name: str, factor: float, rank: int | None = None) -> None:
        """Multiply one parameter in place, bypassing torch's version counter, in one worker or in all."""

        def scaled(worker: Any) -> None:
            if rank in (None, worker.rank):
                worker.model_runner.get_model().get_parameter(name).data.mul_(factor)

        self._llm.collective_rpc(scaled)

    def blend(self, settings: dict[str, Any]) -> None:
        """Change settings of blending, in an engine of one process."""
        worker = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()._worker._blending
        worker._settings = worker._settings.model_copy(update=settings)

    def _count_all_steps(self) -> None:
        """Up to 0.27.1 at least, this engine drops the counts of steps without outputs; vLLM's server does not."""
        core, log = self._engine.engine_core, self._engine.logger_manager
        get_output = core.get_output

        def counted() -> Any:
            outputs = get_output()
            if not outputs.outputs and outputs.scheduler_stats is not None:
                log.record(scheduler_stats=outputs.scheduler_stats, iteration_stats=None)
            return outputs

        core.get_output = counted


def _is_detail(sample: Any) -> bool:
    """Whether a sample is a bucket of a histogram, or when a metric was made."""
    return "le" in sample.labels or sample.name.endswith("_created")


def _take(answer: dict[str, Any], output: Any, seconds: float) -> None:
    """Record a request's new output."""
    completion = output.outputs[0]
    answer["tokens"] = list(completion.token_ids)
    answer["cached"] = output.num_cached_tokens
    answer["finish"] = completion.finish_reason
    answer["handed_over"] = vars(output).get("kv_transfer_params")
    if answer["first_s"] is None and answer["tokens"]:
        answer["first_s"] = seconds
    if output.prompt_logprobs is not None:
        chosen = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        answer["prompt_logprobs"] = [None if of is None else of[token].logprob for token, of in chosen]


def main(arguments: Path) -> None:
    """Start the engine, report it, and execute commands until the input ends."""
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
