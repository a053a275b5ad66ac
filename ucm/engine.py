"""A short vLLM engine, as the commands run it that examine a user's installation, and what its workers report.

vLLM mixes `WorkerFacts` into its worker class (``worker_extension_cls``), and calls it by name in each worker.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.compat import graph_mode, optional
from ucm.hashing.rank_geometry import part_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

PREEMPTIONS = "vllm:num_preemptions"
PREFIX_HITS = "vllm:prefix_cache_hits"


class Engine:
    """One vLLM engine that answers greedily."""

    def __init__(self, model: str, **arguments: Any) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - ucm imports without vLLM

        self.llm: Any = LLM(model=model, worker_extension_cls=f"{__name__}.{WorkerFacts.__name__}", **arguments)
        self._params = SamplingParams

    def params(self, count: int, **extra: Any) -> Any:
        """Return vLLM's ``SamplingParams`` for an answer of so many tokens."""
        return self._params(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, **extra)

    def generate(self, prompts: Sequence[list[int]], counts: Sequence[int], **extra: Any) -> list[Any]:
        """Answer prompts, each with so many tokens; return vLLM's outputs."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found: list[Any] = self.llm.generate(asked, [self.params(n, **extra) for n in counts], use_tqdm=False)
        return found

    def workers(self, question: str) -> list[dict[str, Any]]:
        """Return what each worker answers to one of the methods of `WorkerFacts`."""
        found: list[dict[str, Any]] = self.llm.collective_rpc(question)
        return found

    def vllm_counters(self) -> dict[str, int]:
        """Return the engine's own counters by name; empty in releases that do not expose them."""
        metrics = optional(self.llm, "get_metrics", list)()
        return {metric.name: metric.value for metric in metrics if isinstance(optional(metric, "value"), int)}


class WorkerFacts:
    """A mix-in for vLLM's worker."""

    def ucm_facts(self) -> dict[str, Any]:
        """Return the facts as plain data.

        Returns:
            ``pid``; ``runner`` and ``model``, the modules that define the runner's and the model's classes, including
            bases; ``attention``, for each kind of attention layer whether it is MLA (``mla``), its ``backend``, and
            whether a separate operator writes keys and values (``separate_kv_write``); ``groups``, for each KV-cache
            group the ``tokens`` of a block and the store's ``tag`` for this rank;
            ``graphs``, what of a step is replayed as a graph; ``device``, its name.
        """
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        kinds = [_attention(layer) for layer in layers if _backend(layer) is not None]
        return {
            "pid": os.getpid(),
            "runner": _modules_of([worker.model_runner]),
            "model": _modules_of(worker.get_model().modules()),
            "attention": list({str(kind): kind for kind in kinds}.values()),
            "groups": _groups(worker),
            "graphs": _graphs(worker.vllm_config),
            "device": _device_name(),
        }

    def ucm_method(self) -> dict[str, Any]:
        """Return what the sparse method of this worker has counted, its ``figures``.

        ``method`` is the name of its class; empty if none runs, as without an overlay.
        """
        from ucm.integration.vllm.hooks import worker_method  # noqa: PLC0415 - workers of a run import it anyway

        worker: Any = self
        method: Any = worker_method(worker.vllm_config)
        if not method:
            return {"method": "", "figures": {}}
        return {"method": type(method).__name__, "figures": dict(method.figures())}


def _modules_of(things: Any) -> list[str]:
    return sorted({base.__module__ for thing in things for base in type(thing).__mro__})


def _attention(layer: Any) -> dict[str, Any]:
    backend = _backend(layer)
    return {
        "mla": type(layer).__name__ == "MLAAttention" or bool(optional(layer, "use_mla", False)),
        "backend": backend.__name__ if isinstance(backend, type) else str(backend),
        "separate_kv_write": not optional(backend, "forward_includes_kv_cache_update", True),
    }


def _backend(layer: Any) -> Any:
    """Return the backend's class; up to 0.9.x a layer only has its name."""
    return optional(layer, "attn_backend") or optional(layer, "backend")


def _groups(worker: Any) -> list[dict[str, Any]]:
    specs = [group.kv_cache_spec for group in optional(worker.model_runner, "kv_cache_config.kv_cache_groups", ())]
    return [
        {"tokens": int(spec.block_size), "tag": part_tags(worker.vllm_config, index, spec=spec)[0]}
        for index, spec in enumerate(specs)
    ]


def _graphs(config: Any) -> str:
    """Return the name of the graph mode; the name of a step that is launched kernel by kernel is ``NONE``."""
    mode = graph_mode(config.compilation_config)
    eager = bool(optional(config, "model_config.enforce_eager", False))
    return "NONE" if eager else str(optional(mode, "name", mode))


def _device_name() -> str:
    """Return the device's name, and the processor's for the CPU, which vLLM calls ``cpu``."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - in a worker

    name = str(current_platform.get_device_name())
    if name != "cpu":
        return name
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith(("model name", "Model name"))).partition(":")[2].strip()
        return f"CPU, {os.cpu_count()} threads of {model}"
    return f"CPU, {os.cpu_count()} threads"
