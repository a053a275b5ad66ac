"""An engine whose decode steps run when they are asked for, and are timed from within: `sparse_decode.py SETTINGS`.

Commands come and answers go as in ``ttft.py``. Scheduler and worker live in this process: a step is one call, nothing
runs between two commands, and what the sparse method does is timed where it is called. An engine without a method is
timed as a whole only.

The engine runs in a child process, as vLLM's default has it: only there does UCM compile kernels
(`ucm.sparse.compiled`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# Before vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

REQUEST = "measured-"
ATTENTION, METHOD = "attention", "method"
#: The calls of a method within a step, on either side.
CALLS = (
    "limit_new_tokens",
    "before_allocation",
    "build_metadata",
    "update_states",
    "blocks_updated",
    "execute_begin",
    "kv_write_begin",
    "kv_write_finished",
    "attention_begin",
    "attention_finished",
    "execute_finished",
)


class Stopwatch:
    """The seconds of a step that a method's calls take, and those between its two calls around an attention.

    Args:
        *methods: The instances of both sides; their bound methods are wrapped.
    """

    def __init__(self, *methods: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began = 0.0
        for method in methods:
            for name in CALLS:
                setattr(method, name, self._timed(name, getattr(method, name)))

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            if name == "attention_finished":
                self.seconds[ATTENTION] += begin - self._began
            result = call(*arguments)
            now = time.perf_counter()
            self.seconds[METHOD] += now - begin
            if name == "attention_begin":
                self._began = now
            return result

        return timed


class Engine:
    """One ``LLM`` and what it can be asked."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - the standard output is vLLM's from here on

        self._engine = LLM(**settings["engine"]).llm_engine
        token = settings.get("token")
        self._params = SamplingParams(
            max_tokens=10**6,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logit_bias=None if token is None else {token: 100.0},
        )
        self._requests: list[str] = []
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._watch: Stopwatch | None = None
        self._figures: Any = dict
        if settings["timed"]:
            runner = core.model_executor.driver_worker.worker.model_runner
            self._figures = runner._ucm_sparse_method.figures
            self._watch = Stopwatch(runner._ucm_sparse_method, self._scheduler._ucm_sparse_method)

    def prefill(self, prompts: list[list[int]], asked: object = None) -> dict[str, Any]:
        """Compute prompts, and go on until each request has a token.

        Args:
            prompts: Tokens of each request.
            asked: What they ask of the method, as ``ucm_sparse``; None for nothing.

        Returns:
            The seconds, the most blocks that the requests held after a step, and those after the last one.
        """
        begin = time.perf_counter()
        params = self._params.clone()
        params.extra_args = None if asked is None else {"ucm_sparse": asked}
        self._requests = [f"{REQUEST}{number}" for number in range(len(prompts))]
        for name, prompt in zip(self._requests, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        most, waiting = 0, set(self._requests)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
            most = max(most, self._held())
        return {"seconds": time.perf_counter() - begin, "most": most, "held": self._held()}

    def decode(self, steps: int) -> dict[str, Any]:
        """So many decode steps.

        Returns:
            For each step its seconds, those in attention and those in the method (0 without one); the tokens; the
            blocks that the requests hold; of the tokens between sinks and window that they read, the share whose block
            was fetched for it (0 for a method that fetches none).
        """
        before = self._figures()
        told: dict[str, list[Any]] = {"step": [], ATTENTION: [], METHOD: [], "tokens": []}
        for _ in range(steps):
            if self._watch:
                self._watch.seconds.clear()
            begin = time.perf_counter()
            outputs = self._engine.step()
            told["step"].append(time.perf_counter() - begin)
            for output in outputs:
                told["tokens"] += list(output.outputs[0].token_ids)[-1:]
            for name in (ATTENTION, METHOD):
                told[name].append(self._watch.seconds[name] if self._watch else 0.0)
        after = {name: value - before[name] for name, value in self._figures().items()}
        size = self._engine.vllm_config.cache_config.block_size
        fetched = size * after.get("fetched_blocks", 0) / max(1, after.get("read_tokens", 0))
        return {**told, "held": self._held(), "fetched": fetched}

    def finish(self) -> bool:
        """End the requests; whether all blocks are free again but the null block."""
        self._engine.abort_request(self._requests)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._held() == 0

    def _held(self) -> int:
        """The blocks that the requests hold, those included that a method has taken for them; no others run."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def bandwidth(mebibytes: int = 512, repeats: int = 5) -> float:
    """Bytes per second at which all threads together read a buffer: the best of a few sums."""
    import torch  # noqa: PLC0415 - after vLLM has set its threads

    buffer = torch.ones(mebibytes << 18, dtype=torch.float32)
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        buffer.sum()
        found.append((mebibytes << 20) / (time.perf_counter() - begin))
    return max(found)


def main(settings: Path, commands: int, answering: int) -> None:
    """Start the engine, say so, obey until the input ends.

    Args:
        settings: The file with the engine's arguments.
        commands: The descriptor from which commands come.
        answering: The descriptor to which answers go.
    """
    with os.fdopen(answering, "w", encoding="utf-8", buffering=1) as answers, os.fdopen(commands) as lines:
        begin = time.perf_counter()
        engine = Engine(json.loads(settings.read_text(encoding="utf-8")))
        answers.write(json.dumps({"answer": time.perf_counter() - begin}) + "\n")
        for line in lines:
            name, *parameters = json.loads(line)
            call = bandwidth if name == "bandwidth" else getattr(engine, name)
            answers.write(json.dumps({"answer": call(*parameters)}) + "\n")


if __name__ == "__main__":
    descriptors = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    # A fork, before anything has loaded torch: the child keeps the pipes.
    child = multiprocessing.get_context("fork").Process(target=main, args=(Path(sys.argv[1]), *descriptors))
    child.start()
    for descriptor in descriptors:
        os.close(descriptor)
    child.join()
    sys.exit(child.exitcode)
