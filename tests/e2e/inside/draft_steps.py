"""What sparse drafts cost, and how many are accepted: `draft_steps.py SPEC RESULT`, JSON files.

vLLM's scheduler and worker run in this process, without an engine around them, so that each step can be timed with what
it verifies and with the time in which drafts are made. They run in a child, because only there does UCM compile kernels
(`ucm.sparse.compiled`).
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Steps:
    """A scheduler and a worker.

    Args:
        arguments: Those of vLLM's engine.
        skips_prompts: Whether prompts are computed without their attention: with random weights, what a cache holds
            makes no difference to the time of the steps that read it.
    """

    def __init__(self, arguments: dict[str, Any], *, skips_prompts: bool) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - after the specification is read
        from vllm.plugins import load_general_plugins  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
        from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415

        from ucm.integration.vllm import hooks  # noqa: PLC0415

        load_general_plugins()
        config = EngineArgs(**arguments).create_engine_config()
        self._executor = UniProcExecutor(config)
        core = SimpleNamespace(vllm_config=config, model_executor=self._executor)
        core.collective_rpc, core.available_gpu_memory_for_kv_cache = self._executor.collective_rpc, -1
        caches = EngineCore._initialize_kv_caches(core, config)
        block, hashed = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = core.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
        )
        hooks.engine_core_started(core)
        method: Any = hooks.worker_method(config)
        self._method, self._payoff, self._told = method, method._payoff, method.made
        self.making = 0.0  #: the seconds in which the drafts after the last step were made
        method.made = self._made
        self._hasher = self._block_hasher(config, hashed)
        if skips_prompts:
            self._skip_prompts()

    def draft(self, most: int, *, measured: bool) -> None:
        """Let the next request be drafted: as many tokens as pay, or as many as are allowed."""
        always = type(self._payoff)(most, time.monotonic, always=True)
        self._method._most, self._method._payoff = most, self._payoff if measured else always

    def add(self, name: str, prompt: list[int], count: int, asked: object) -> None:
        """Add a request."""
        from vllm import SamplingParams  # noqa: PLC0415 - as above
        from vllm.v1.request import Request  # noqa: PLC0415

        extra = {"ucm_sparse": asked}
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, extra_args=extra, detokenize=False)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self._hasher))

    def step(self) -> tuple[Any, int]:
        """Run a step; return what was scheduled, and how many tokens it has generated."""
        self.making = 0.0
        scheduled = self.scheduler.schedule()
        output = self._executor.execute_model(scheduled)
        if output is None:
            output = self._executor.sample_tokens(None)
        told = self.scheduler.update_from_output(scheduled, output)
        drafts = self._executor.take_draft_token_ids()
        if drafts is not None:
            self.scheduler.update_draft_token_ids(drafts)
        return scheduled, sum(len(one.new_token_ids) for each in told.values() for one in each.outputs)

    def _made(self, drafts: int, seconds: float) -> None:
        self.making = seconds
        self._told(drafts, seconds)

    @staticmethod
    def _block_hasher(config: Any, tokens: int) -> Any:
        from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415 - as above
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: PLC0415

        function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        return get_request_block_hasher(tokens, function)

    @staticmethod
    def _skip_prompts() -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # noqa: PLC0415 - as above

        attend = CPUAttentionBackendImpl.forward

        def forward(
            impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **more: Any
        ) -> Any:
            if metadata is not None and metadata.max_query_len > 32:
                return output.zero_()
            return attend(impl, layer, query, key, value, cache, metadata, output, **more)

        CPUAttentionBackendImpl.forward = forward


def measured(steps: Steps, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serve requests one after the other; return for each the seconds of its steps, and what they verified.

    The step that ends the prompt is left out. The drafts made after it are as many as those after the last token.

    Args:
        steps: The engine's parts.
        requests: Each has a ``prompt``, a ``count`` of tokens, what is ``asked`` of the method, the most ``drafts`` of
            a step, and whether only those are made that pay (``measured``).
    """
    found = []
    for number, request in enumerate(requests):
        name, told = str(number), []
        steps.draft(request["drafts"], measured=request["measured"])
        steps.add(name, request["prompt"], request["count"], request["asked"])
        while steps.scheduler.has_requests():
            began, busy = time.perf_counter(), time.process_time()
            scheduled, tokens = steps.step()
            took, busy = time.perf_counter() - began, time.process_time() - busy
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            if tokens:
                parts = {"step": took - steps.making, "making": steps.making, "busy": busy}
                told.append({"drafts": drafts, "tokens": tokens, **parts})
        found.append({**request, "prompt": len(request["prompt"]), "steps": told[1:]})
    return found


def main(spec_file: Path, result_file: Path) -> None:
    """Start, serve, write the results."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    steps = Steps(spec["engine"], skips_prompts=spec["skips_prompts"])
    result_file.write_text(json.dumps(measured(steps, spec["requests"])), encoding="utf-8")


if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=main, args=(Path(sys.argv[1]), Path(sys.argv[2])))
    child.start()
    child.join()
    sys.exit(child.exitcode)
