"""Rotate keys as vLLM's rotary embedding does, for features that move keys to other positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def turned(values: Tensor, factors: tuple[Tensor, Tensor], *, neox: bool) -> Tensor:
    """Multiply pairs of elements by complex factors; elements past the rotated part of a head are unchanged.

    Args:
        values: ``[n, heads, head_size]``.
        factors: Real and imaginary parts, each ``[n, rotary_dim / 2]``, float32.
        neox: Whether a pair has one element of each half (NeoX), or else two neighbours (GPT-J).

    Returns:
        A tensor of the same shape and dtype, computed in float32.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    real, imaginary = (part[:, None] for part in factors)
    half = real.shape[-1]
    given = values.float()
    found = torch.empty_like(given)
    if neox:
        first, second = given[..., :half], given[..., half : 2 * half]
        to_first, to_second = found[..., :half], found[..., half : 2 * half]
    else:
        first, second = given[..., 0 : 2 * half : 2], given[..., 1 : 2 * half : 2]
        to_first, to_second = found[..., 0 : 2 * half : 2], found[..., 1 : 2 * half : 2]
    torch.mul(first, real, out=to_first)
    to_first.addcmul_(second, imaginary, value=-1)
    torch.mul(second, real, out=to_second)
    to_second.addcmul_(first, imaginary)
    found[..., 2 * half :] = given[..., 2 * half :]
    return found.to(values.dtype)
