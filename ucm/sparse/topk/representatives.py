"""Summaries of KV blocks (representatives), which estimate how much a query attends to a block without reading it.

`Representatives` is the interface, and `ucm.sparse.topk.codes` has the kind that the methods use. The bounds of each
channel of a block's keys (Tang et al., "Quest", ICML 2024, arXiv:2406.10774) were another kind: with a trained model
they found fewer passkeys than the mean key of a block does (docs/measurements_sparse_answers.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

#: The key elements to read at once to compute representatives: as many as fit into a processor's cache (measured on a
#: CPU).
AT_ONCE = 1 << 19
#: The same on other devices: each reading takes 5 to 23 launches there, and up to 20 bytes per element (reasoned).
AT_ONCE_ON_DEVICE = 1 << 23
#: The elements to score at once, but at least one row. A request that is computed again after a preemption has a row
#: for each of its generated tokens, and what all these rows need at once would not fit into any device.
SCORED_AT_ONCE = 1 << 27
#: Shares are integers in units of ``1 / WHOLE``, so their sums are the same in any order and over any ranks.
WHOLE = 1 << 33
#: The number of blocks of a request that `ranked` can distinguish; with `WHOLE` it leaves room for 512 heads.
PLACES = 1 << 20


@dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel that makes or reads representatives.

    Attributes:
        function: The kernel.
        num_kv_heads: The number of KV heads.
        tensors: The representatives, among its arguments.
        constants: Its compile-time constants, and Triton's options.
        parts: The programs that make the representatives of a block and KV head.
    """

    function: Any
    num_kv_heads: int
    tensors: tuple[Tensor, ...]
    constants: Mapping[str, int]
    parts: int = 1


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


class Representatives(ABC):
    """The summaries of one layer's blocks, by physical block.

    Args:
        num_blocks: The number of blocks of the layer's KV cache.
        keys: The keys of a block, ``[1, block_size, num_kv_heads, head_size]``, for their shape, dtype and device.

    Attributes:
        num_blocks: The number of blocks for which there is room.
        at_once: The number of blocks whose keys are best read at once.
    """

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        self.num_blocks = num_blocks
        at_once = AT_ONCE if keys.device.type == "cpu" else AT_ONCE_ON_DEVICE
        self.at_once = max(1, at_once // keys.numel())

    def update(self, block_ids: Tensor, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Compute the representatives of some blocks from their keys.

        Args:
            block_ids: ``[n]``, int64; complete blocks.
            read_keys: Returns the keys of some of them, ``[n, block_size, num_kv_heads, head_size]``.
        """
        for some in block_ids.split(self.at_once):
            self.put(some, read_keys(some))

    def update_in_place(self, block_ids: Tensor, keys: Tensor) -> None:
        """Compute the representatives of some blocks from the cache itself, in one launch on the device.

        Args:
            block_ids: ``[n]``, int64; complete blocks.
            keys: ``[num_blocks, block_size, num_kv_heads, head_size]``: all keys of the cache, in any memory order.
        """
        kernel = self.making_kernel()
        kernel.function[len(block_ids), kernel.num_kv_heads, kernel.parts](
            *(keys, block_ids, *kernel.tensors, self.num_blocks, *keys.stride()), **kernel.constants
        )

    def shares(self, query: Tensor, block_ids: Tensor, hidden: Tensor | None) -> Tensor:
        """Estimate the share of their attention that the heads of each row give to each of its blocks.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: the blocks of each row.
            hidden: ``[rows, blocks]``: entries that are padding; None if there are none.

        Returns:
            ``[rows, blocks]``, int64; see `shares`.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        at_once = max(1, SCORED_AT_ONCE // self._elements(query.shape[1], block_ids.shape[1]))
        parts = [slice(begin, begin + at_once) for begin in range(0, len(query), at_once)]
        found = [
            shares(self.scores(query[rows], block_ids[rows]), None if hidden is None else hidden[rows])
            for rows in parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def nbytes(self) -> int:
        """The bytes of the representatives of all blocks."""
        return sum(int(of.nbytes) for of in self._stored())

    @abstractmethod
    def _stored(self) -> tuple[Tensor, ...]:
        """Return the tensors with an entry for each block."""

    @abstractmethod
    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Compute the representatives of blocks from these keys, ``[n, block_size, num_kv_heads, head_size]``."""

    @abstractmethod
    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """Estimate how strongly each query head attends to each block.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: the blocks of each row.

        Returns:
            ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32, with the attention's scale applied, so that a
            softmax over blocks gives their relative attention.
        """

    def scoring_kernel(self, num_heads: int) -> TritonKernel:
        """Return the Triton kernel that scores these representatives; see `ucm.sparse.topk.kernels`.

        Args:
            num_heads: The number of query heads.

        Raises:
            NotImplementedError: If they are only ever scored with torch.
        """
        raise NotImplementedError

    def making_kernel(self) -> TritonKernel:
        """Return the Triton kernel that makes these representatives; see `ucm.sparse.topk.kernels`.

        Raises:
            NotImplementedError: If they are only ever made with torch.
        """
        raise NotImplementedError

    @abstractmethod
    def _elements(self, num_heads: int, blocks: int) -> int:
        """Return the number of elements in memory while a row of this many heads and blocks is scored."""


def shares(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the estimated share of attention that all heads of a row together give to each block.

    It is the sum over heads of a softmax per head, so a head that attends to one block counts as much as a head that
    attends to all. A sum of the scores themselves would lose the former: with 32 heads, one of which attends to one
    block of 128, the ten best blocks contained that block in 57 % of trials with the softmax and in 23 % without, and
    no mixture of heads was worse with it (synthetic keys and queries).

    Args:
        scores: ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32, with the attention's scale applied.
        hidden: ``[rows, blocks]``: entries that are padding; None if there are none.

    Returns:
        ``[rows, blocks]``, int64, in units of ``1 / WHOLE``; the shares of heads on other ranks can be added.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    if hidden is not None:
        scores = scores.masked_fill(hidden[None, :, None], float("-inf"))
    found = scores.softmax(-1) * WHOLE
    return found.where(found >= 0, 0).to(torch.int64).sum((0, 2))  # NaN chooses nothing


def ranked(shares: Tensor) -> Tensor:
    """Make the shares of a row distinct: of equal shares, that of the later block becomes larger.

    So the selection does not depend on other rows or on the device.

    Args:
        shares: ``[rows, blocks]``, int64, from `shares`, in the order of the blocks' positions.

    Returns:
        ``[rows, blocks]``, int64.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return shares * PLACES + torch.arange(shares.shape[-1], device=shares.device)
