"""Rotate keys and queries to other angles than those of vLLM's rotary embedding, or undo its rotation.

Rotary embedding turns each pair of a head's numbers, as a complex number, by an angle in proportion to the position.
vLLM multiplies with cosines and sines from a table, rounded to the model's dtype, so its factor is not quite of length
one. Dividing by that very factor gives the number before the rotation back, up to the rounding of the cached result;
another rotation in the same multiplication puts it at any other angle. The table may contain any function of the
position, also one that scales (YaRN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a layer's keys.

    Attributes:
        table: ``[positions, rotary_dim]``: cosines followed by sines, as vLLM multiplies with them.
        neox: Whether a pair has one element of each half (NeoX), or else two neighbours (GPT-J).
    """

    table: Tensor
    neox: bool

    def taken_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys before their rotation.

        Args:
            keys: ``[n, heads, head_size]`` as cached; elements after the rotated part of a head are unchanged.
            positions: ``[n]``, int64: the positions at which they were computed.

        Returns:
            A tensor of the same shape and dtype, computed in float32.
        """
        cosine, sine = self._factors(positions)
        length = cosine.square() + sine.square()
        return turned(keys, (cosine / length, -sine / length), neox=self.neox)

    def done(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys as vLLM would cache them at some positions; the inverse of `taken_back`."""
        return turned(keys, self._factors(positions), neox=self.neox)

    def _factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self.table[positions].float().chunk(2, dim=-1)
        return cosine, sine


@dataclass(frozen=True, eq=False)
class Rotary(Rotation):
    """A plain rotation, whose angles are multiples of the position.

    Attributes:
        frequencies: ``[rotary_dim / 2]``, float32: radians per position.
    """

    frequencies: Tensor

    def factors(self, positions: Tensor, angles_at: Tensor) -> tuple[Tensor, Tensor]:
        """What turns numbers that vLLM has rotated to where another position would have put them.

        Args:
            positions: ``[n]``, int64: where vLLM has put them.
            angles_at: ``[n]``, or one, float32: where they shall be; a position that need not be whole.

        Returns:
            Real and imaginary parts, each ``[n, rotary_dim / 2]``, float32.
        """
        cosines, sines = self._factors(positions)
        length = cosines.square() + sines.square()
        angles = angles_at.to(self.frequencies)[:, None] * self.frequencies
        cosine, sine = angles.cos(), angles.sin()
        return (cosine * cosines + sine * sines) / length, (sine * cosines - cosine * sines) / length


def differs(loaded: Tensor, computed: Tensor) -> Tensor:
    """Return each token's relative difference between loaded and computed KV.

    Args:
        loaded: ``[n, …]``.
        computed: The same.

    Returns:
        ``[n]``, float32; NaN and infinities count as infinite.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    given, wanted = loaded.float().flatten(1), computed.float().flatten(1)
    ratio = (given - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-6)
    return torch.nan_to_num(ratio, nan=torch.inf)


def tolerance(dtype: Any) -> float:
    """Return the largest value of `differs` for KV that is equal up to rounding."""
    import torch  # noqa: PLC0415 - vLLM brings it

    # Caching, two rotations, storing, and computing in other batches: a few roundings each.
    return max(1e-3, 16 * float(torch.finfo(dtype).eps))
