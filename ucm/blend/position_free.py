"""Undo vLLM's rotation of keys, and redo it for other positions.

vLLM multiplies each pair of a key's elements, as a complex number, by a cosine and a sine from a table. Division by the
same factor gives the key before the rotation, up to the rounding of the cached key. The table may therefore contain any
function of the position, also one that scales (YaRN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.rotary import turned

if TYPE_CHECKING:
    from torch import Tensor


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
