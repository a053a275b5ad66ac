"""How much of its attention a token really gives to each block: what all guesses are judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def block_masses(query: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """The share of their attention that the heads of each row give to each of its blocks, the mean over heads.

    Args:
        query: ``[rows, num_heads, head_size]``.
        keys: ``[rows, blocks, block_size, num_kv_heads, head_size]``.
        tokens: How many of a row's tokens are read; the others are behind its end.

    Returns:
        ``[rows, blocks]``, float32; the sum of each row is 1.
    """
    rows, blocks, size, heads, _ = keys.shape
    grouped = query.float().view(rows, heads, -1, query.shape[-1])
    products = grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1) * query.shape[-1] ** -0.5
    products[..., tokens:] = float("-inf")
    return products.softmax(-1).unflatten(-1, (blocks, size)).sum(-1).mean((1, 2))
