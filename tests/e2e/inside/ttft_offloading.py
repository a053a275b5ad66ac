"""Out-of-tree specs that let vLLM's OffloadingConnector run on the CPU, which its own worker refuses.

All but the copying is vLLM's: its managers, its tiers, its shared memory. The worker copies one page at a time with a
plain memmove: loads at once, as there is nothing that they could overlap with, stores in a thread of their own, as the
copy engine of an accelerator would.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class MemmoveWorker(OffloadingWorker):  # type: ignore[misc] # vLLM is untyped here
    """Copies whole pages between the KV cache and a shared region of memory.

    Args:
        kv_caches: vLLM's ``CanonicalKVCaches``.
        region: The memory; one page per tensor and chunk.
    """

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._pages = [
            (one.tensor, region.create_next_worker_view(one.page_size_bytes), one.page_size_bytes)
            for one in kv_caches.tensors
        ]
        self._storing = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[None]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._storing.submit(self._copy, src_spec.block_ids, dst_spec.block_ids, _to_second)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(dst_spec.block_ids, src_spec.block_ids, _to_first)
        self._jobs[job_id] = Future()
        self._jobs[job_id].set_result(None)
        return True

    def _copy(self, blocks: Any, chunks: Any, move: Callable[[int, int, int], object]) -> None:
        for blocks_of, chunks_of, size in self._pages:
            for block, chunk in zip(blocks.tolist(), chunks.tolist(), strict=True):
                move(_address(blocks_of, block), _address(chunks_of, chunk), size)

    def get_finished(self) -> list[Any]:
        done = [job for job, future in self._jobs.items() if future.done()]
        return [TransferResult(job_id=job, success=self._jobs.pop(job).exception() is None) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

    def shutdown(self) -> None:
        self._storing.shutdown()
        self._pages.clear()
        self._region.cleanup()


def _address(pages: torch.Tensor, index: int) -> int:
    return int(pages.data_ptr() + index * pages.stride(0))


def _to_first(first: int, second: int, size: int) -> None:
    ctypes.memmove(first, second, size)


def _to_second(first: int, second: int, size: int) -> None:
    ctypes.memmove(second, first, size)


class _OnCpu:
    """Makes the worker above instead of vLLM's, on the shared region that vLLM's spec has worked out."""

    def get_worker(self: Any, kv_caches: Any) -> MemmoveWorker:
        if self.blocks_per_chunk != 1 or self.config.parallel.world_size != 1:
            raise ValueError("this worker copies single blocks of a single rank")
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemmoveWorker(kv_caches, region)


class CpuDramSpec(_OnCpu, CPUOffloadingSpec):  # type: ignore[misc] # vLLM is untyped here
    """Blocks in memory alone."""


class CpuTieringSpec(_OnCpu, TieringOffloadingSpec):  # type: ignore[misc] # vLLM is untyped here
    """Blocks in memory, and in the tiers below it that the configuration names."""
