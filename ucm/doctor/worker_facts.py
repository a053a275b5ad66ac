"""Report the facts of a worker: its model runner, attention layers and model classes.

vLLM mixes `WorkerFacts` into its worker class (``worker_extension_cls``), and calls it by name in each worker. The
facts determine which hooks could fire; the probe counts which did.
"""

from __future__ import annotations

import os
from typing import Any


class WorkerFacts:
    """A mix-in for vLLM's worker."""

    def ucm_facts(self) -> dict[str, Any]:
        """Return the facts as plain data.

        Returns:
            ``pid``; ``runner`` and ``model``, the modules that define the runner's and the model's classes, including
            bases; ``attention``, for each kind of attention layer whether it is MLA (``mla``), its ``backend``, and
            whether a separate operator writes keys and values (``separate_kv_write``).
        """
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return {
            "pid": os.getpid(),
            "runner": _modules_of([worker.model_runner]),
            "model": _modules_of(worker.get_model().modules()),
            "attention": _distinct([_attention(layer) for layer in layers if _backend(layer) is not None]),
        }

    def ucm_method(self) -> dict[str, Any]:
        """What the sparse method of this worker has counted: its ``figures``, and its own ``summary`` of them."""
        from ucm.integration.vllm.hooks import worker_method  # noqa: PLC0415 - workers of a run import it anyway

        worker: Any = self
        method: Any = worker_method(worker.vllm_config)
        summary = getattr(method, "summary", None)
        return {"figures": dict(method.figures()) if method else {}, "summary": summary() if summary else ""}


def _modules_of(things: Any) -> list[str]:
    return sorted({base.__module__ for thing in things for base in type(thing).__mro__})


def _attention(layer: Any) -> dict[str, Any]:
    backend = _backend(layer)
    return {
        "mla": type(layer).__name__ == "MLAAttention" or bool(getattr(layer, "use_mla", False)),
        "backend": backend.__name__ if isinstance(backend, type) else str(backend),
        "separate_kv_write": not getattr(backend, "forward_includes_kv_cache_update", True),
    }


def _backend(layer: Any) -> Any:
    """Return the backend's class; up to 0.9.x a layer only has its name."""
    return getattr(layer, "attn_backend", None) or getattr(layer, "backend", None)


def _distinct(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
