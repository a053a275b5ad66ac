"""What is kept of each KV block to guess, without reading it, how much a query attends to it.

`Representatives` is what a selector needs of it, `KeyBounds` one kind; `ucm.sparse.topk.codes` has another.

Source of the bounds: Tang, Zhao, Zhu, Xiao, Kasikci, Han, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference" (ICML 2024, arXiv:2406.10774): the greatest and the least value of each channel of a block's keys bound the
product of any query with any of these keys from above.

Kept by physical block: ``2 / block_size`` of the bytes of the keys, which is ``1 / block_size`` of the KV cache's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: Key elements that are read at once while representatives are made: as many as stay in a processor's cache (measured
#: on a CPU).
AT_ONCE = 1 << 19
#: Elements that are scored at once, but for those of one row: a request that is computed anew after a preemption has a
#: row for each of its generated tokens, and the bounds of all of these rows' blocks would not fit into any device.
SCORED_AT_ONCE = 1 << 27
#: A cache of fewer blocks than so many times a row's is scored as a whole: gathering a row's bounds costs more.
FEW = 4
#: Shares are counted in parts of so many: sums of whole numbers are the same in any order, and over any ranks.
WHOLE = 1 << 33
#: How many blocks of a request `ranked` tells apart; with `WHOLE` it leaves room for 512 heads.
PLACES = 1 << 20


class Representatives(ABC):
    """What is kept of one layer's blocks, by physical block.

    Args:
        num_blocks: Of the layer's KV cache.
        keys: Those of a block, ``[1, block_size, num_kv_heads, head_size]``, for their shape, dtype and device.
    """

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        self.num_blocks = num_blocks
        self._at_once = max(1, AT_ONCE // keys.numel())

    def update(self, block_ids: Tensor, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Make the representatives of some blocks from their keys.

        Args:
            block_ids: ``[n]``, int64; whole blocks.
            read_keys: Gives ``[n, block_size, num_kv_heads, head_size]`` for some of them.
        """
        for some in block_ids.split(self._at_once):
            self.put(some, read_keys(some))

    def shares(self, query: Tensor, block_ids: Tensor, hidden: Tensor | None) -> Tensor:
        """How much of their attention the heads of each row might give to each of its blocks.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: those of each row.
            hidden: ``[rows, blocks]``: what stands for no block; None if nothing does.

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

    @abstractmethod
    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Make the representatives of blocks from these keys, ``[n, block_size, num_kv_heads, head_size]``."""

    @abstractmethod
    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """How strongly each query head may attend to each block.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: those of each row.

        Returns:
            ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32, scaled as attention scales products: of two
            blocks the softmax says how much more attention one gets.
        """

    @abstractmethod
    def _elements(self, num_heads: int, blocks: int) -> int:
        """How many numbers are held at once to score a row of so many heads and blocks."""


class KeyBounds(Representatives):
    """The greatest and the least value of each channel of the keys of each block: upper bounds of products."""

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        super().__init__(num_blocks, keys)
        _, _, num_kv_heads, head_size = keys.shape
        #: ``[num_kv_heads, num_blocks, 2 * head_size]``: the greatest values, and behind them the least.
        self._bounds = keys.new_zeros((num_kv_heads, num_blocks, 2 * head_size))

    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Take the bounds of some blocks from these keys."""
        self._bounds[:, block_ids] = bounds_of(keys)

    def _elements(self, num_heads: int, blocks: int) -> int:
        heads, _, both = self._bounds.shape
        return int(max(heads * both, num_heads * FEW)) * blocks

    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """An upper bound of each query head's product with any key of each block; see `bounded_products`."""
        heads, num_blocks, both = self._bounds.shape
        rows, blocks = block_ids.shape
        wanted = signed(query.to(self._bounds.dtype), heads)
        if num_blocks <= FEW * blocks:
            found = bounded_products(wanted.flatten(1, 2), self._bounds).view(heads, rows, -1, num_blocks)
            return found.gather(-1, block_ids[None, :, None].expand(*found.shape[:3], blocks))
        # index_select rather than an index: measured to be five times as fast on a CPU.
        gathered = self._bounds.index_select(1, block_ids.reshape(-1)).view(heads * rows, blocks, both)
        return bounded_products(wanted.flatten(0, 1), gathered).view(heads, rows, -1, blocks)


def bounds_of(keys: Tensor) -> Tensor:
    """The greatest and the least value of each channel of each block's keys.

    Args:
        keys: ``[blocks, block_size, num_kv_heads, head_size]``.

    Returns:
        ``[num_kv_heads, blocks, 2 * head_size]``: the greatest values, and behind them the least.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return torch.cat((keys.amax(1), keys.amin(1)), -1).transpose(0, 1)


def signed(query: Tensor, num_kv_heads: int) -> Tensor:
    """Queries as `bounded_products` wants them: their positive parts, and behind them their negative parts.

    A channel's product is greatest with the greatest value where the query is positive, else with the least.

    Args:
        query: ``[tokens, num_heads, head_size]``.
        num_kv_heads: Of the keys.

    Returns:
        ``[num_kv_heads, tokens, heads of a KV head, 2 * head_size]``.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    grouped = query.view(len(query), num_kv_heads, -1, query.shape[-1]).transpose(0, 1)
    return torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), -1)


def bounded_products(queries: Tensor, bounds: Tensor) -> Tensor:
    """The greatest products that queries can have with the keys of blocks.

    Args:
        queries: ``[batch, n, 2 * head_size]``, as of `signed`.
        bounds: ``[batch, blocks, 2 * head_size]``, as of `bounds_of`, in the same dtype.

    Returns:
        ``[batch, n, blocks]``, float32, scaled by ``head_size ** -0.5`` as attention scales them.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    # This way round it is up to three times as fast on a CPU.
    products = torch.bmm(queries * (bounds.shape[-1] // 2) ** -0.5, bounds.transpose(1, 2))
    if products.dtype == torch.float16:  # a softmax over infinite ones is undefined
        finite = torch.finfo(torch.float16)
        products = products.clamp(finite.min, finite.max)
    return products.float()


def shares(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """How much of their attention all heads of a row together might give to each block.

    A softmax per head, and then the sum: a head that looks for one block in particular counts as much as one that looks
    everywhere. Sums of the bounds themselves drown it: with 32 heads of which one seeks one block of 128, ten blocks
    had it in 57 % of trials instead of 23 %, and no mixture of heads was served worse (synthetic keys and queries).

    Args:
        scores: ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32, scaled as attention scales them.
        hidden: ``[rows, blocks]``: what stands for no block; None if nothing does.

    Returns:
        ``[rows, blocks]``, int64, in parts of `WHOLE`: those of more heads, on other ranks, may be added.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    if hidden is not None:
        scores = scores.masked_fill(hidden[None, :, None], float("-inf"))
    return (scores.softmax(-1) * WHOLE).to(torch.int64).sum((0, 2))


def ranked(shares: Tensor) -> Tensor:
    """Shares such that no two blocks of a row have the same: of equal ones, the later block comes first.

    So what is chosen is the same whatever stands beside it, and wherever it is chosen.

    Args:
        shares: ``[rows, blocks]``, int64, as of `shares`, in the order of the blocks' positions.

    Returns:
        ``[rows, blocks]``, int64.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return shares * PLACES + torch.arange(shares.shape[-1], device=shares.device)
