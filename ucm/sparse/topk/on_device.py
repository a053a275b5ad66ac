"""Choose the blocks of a step with Triton kernels: per layer two launches, whatever the number of requests.

`StepOnDevice` is what `RestrictedTables` is for torch. It serves steps in which each request is one row, the decode
steps of all requests with the chunks of prompts beside them. Steps that compute several generated tokens of a request
again, after a preemption, use `RestrictedTables` on every device, as do steps with a top-p, block sizes that are not a
power of two, and devices other than NVIDIA's and AMD's. On a CPU, `RestrictedTables` is faster; there the kernels run
only in Triton's interpreter. The kernels have been compiled for GPUs, but not run on one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.logger import get_logger
from ucm.sparse.topk.selection import RestrictedTables, blocks_between

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ucm.sparse.topk.representatives import Representatives
    from ucm.sparse.topk.selection import SelectionPlan

#: Triton's variable that interprets kernels, on any device.
INTERPRET = "TRITON_INTERPRET"


class DeviceBuffers:
    """The tensors that the kernels write; all layers and steps share them, and they only ever grow.

    Args:
        device: Where they are.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Return a contiguous tensor; what a new one holds is 0.

        Args:
            name: The buffer.
            shape: The tensor's shape.
            dtype: Its dtype, always the same for a buffer.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        size = int(np.prod(shape))
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            room = 1 << max(size - 1, 0).bit_length()
            kept = self._kept[name] = torch.zeros(room, dtype=dtype, device=self._device)
        return kept[:size].view(shape)


def buffers_for(device: Any) -> DeviceBuffers | None:
    """Return buffers if the kernels run on a device, else None: they need more shared memory than NVIDIA's 7.x have."""
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    if os.environ.get(INTERPRET) == "1":
        return DeviceBuffers(device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or not _has_triton():
        return None
    return DeviceBuffers(device)


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed; log once if it is not."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        get_logger(__name__).warning(
            "[UCM.Sparse] blocks are selected with about 15 launches per layer instead of two, without Triton"
        )
    return found


class StepOnDevice:
    """The block tables of a plan, written by kernels.

    Args:
        plan: The plan; each of its pieces is a whole row.
        block_table: See `RestrictedTables`.
        buffers: The worker's buffers. They must not be used for another step before this one's kernels are launched.
    """

    def __init__(self, plan: SelectionPlan, block_table: Tensor, buffers: DeviceBuffers) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        rows = len(plan.seq_lens)
        self._budget, self._source, self._buffers, self._rows = plan.budget, block_table, buffers, rows
        counts = plan.blocks - plan.budget.sinks - plan.budget.recent
        self._most, self._candidates = int(counts.max()), int(counts.sum())
        packed = np.zeros((5, rows), np.int32)
        size = plan.budget.block_size
        packed[0] = packed[1] = -(-plan.seq_lens // size)
        packed[0, plan.rows], packed[1, plan.rows], packed[2, plan.rows] = plan.blocks, plan.totals, plan.tokens
        packed[3, plan.rows] = counts.cumsum() - counts
        packed[4] = plan.seq_lens
        host = torch.from_numpy(packed)
        if block_table.device.type == "cuda":
            host = host.pin_memory()  # torch does not reuse its memory before the copy has ended
        plan_and_lens = buffers.take("plan", packed.shape, torch.int32)
        plan_and_lens.copy_(host, non_blocking=True)
        self._plan, self.seq_lens = plan_and_lens, plan_and_lens[4]
        self.max_seq_len = int(plan.seq_lens.max())
        self.missing = blocks_between(block_table, plan.rows, plan.missing)
        self.fresh: list[Any] = []  # every piece is a whole row
        self.split = None
        self.table = buffers.take("table", (rows, block_table.shape[1]), torch.int32)[:, : int(packed[1].max())]

    @property
    def any_block(self) -> Tensor:
        """``[1]``, int64: a block that is in use."""
        return self._source[0, :1].long()

    def select(
        self, made: Representatives, query: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return what a layer reads; the next layer overwrites it.

        Args:
            made: The layer's representatives.
            query: ``[num_tokens, num_heads, head_size]``: the queries of the step.
            sum_over_ranks: See `AttentionView.sum_over_ranks`.

        Returns:
            The block table, ``[rows, blocks]``, int32, and `seq_lens`; see `RestrictedTables.choose`.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        from ucm.sparse.topk import kernels  # noqa: PLC0415 - loads Triton

        num_heads, head_size = query.shape[1:]
        if query.stride()[1:] != (head_size, 1):
            query = query.contiguous()
        kernel = made.kernel(num_heads)
        budget, rows, take = self._budget, self._rows, self._buffers.take
        shares = take("shares", (self._candidates,), torch.int64)
        scores = take("scores", (num_heads, self._candidates), torch.float32)
        done = take("done", (rows, kernel.num_kv_heads), torch.int32)
        ends = budget.sinks, budget.recent
        kernel.function[rows, kernel.num_kv_heads, -(-self._most // kernels.CHUNK.value)](
            *(query, *kernel.tensors, self._source, self._plan, scores, shares, done),
            *(rows, *ends, made.num_blocks, self._candidates),
            *(query.stride(0), self._source.stride(0), head_size**-0.5),
            **kernel.constants,
        )
        summed = sum_over_ranks(shares)
        if summed is not shares:
            shares.copy_(summed)
        kernels.choose[rows,](
            *(self._source, self._plan, shares, self.table, rows, *ends, self._source.stride(0), self.table.stride(0))
        )
        return self.table, self.seq_lens


def step_tables(
    plan: SelectionPlan, block_table: Tensor, buffers: DeviceBuffers | None
) -> RestrictedTables | StepOnDevice:
    """Return the tables of a step, from kernels where these serve it.

    Args:
        plan: The plan.
        block_table: See `RestrictedTables`.
        buffers: From `buffers_for`.
    """
    size = plan.budget.block_size
    if buffers is None or plan.top_p is not None or not plan.pieces.whole or size & (size - 1):
        return RestrictedTables(plan, block_table)
    return StepOnDevice(plan, block_table, buffers)
