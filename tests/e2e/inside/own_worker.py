"""Workers other than vLLM's own, for ``worker_cls``."""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.worker import cpu_worker


class OwnWorker(cpu_worker.CPUWorker):  # type: ignore[misc]
    """A worker like other platforms': it sets up its ranks itself instead of with vLLM's function."""

    def init_device(self) -> None:
        """Set up the ranks with its own function; the rest is vLLM's."""
        with mock.patch.object(cpu_worker, "init_worker_distributed_environment", _set_up):
            super().init_device()


class Forgetful(cpu_worker.CPUWorker):  # type: ignore[misc]
    """Replaces its model runner by one without a method, as if hooks had never fired."""

    def load_model(self, *arguments: Any, **keywords: Any) -> None:
        """Load the model, then drop the method."""
        super().load_model(*arguments, **keywords)
        del self.model_runner._ucm_sparse_method


def _set_up(vllm_config: Any, rank: int, init_method: str, local_rank: int, backend: str = "gloo") -> None:
    parallel = vllm_config.parallel_config
    init_distributed_environment(parallel.world_size, rank, init_method, local_rank, backend)
    ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
