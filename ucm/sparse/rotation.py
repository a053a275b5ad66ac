"""Turning keys and queries that vLLM has rotated to other angles.

Rotary embedding turns each pair of a head's numbers, as a complex number, by an angle in proportion to the position.
vLLM multiplies with cosines and sines that are rounded to the model's dtype, so its factor is not quite of length one.
Dividing by that very factor gives the number before the rotation back, up to the rounding of the cached result; another
rotation in the same multiplication puts it at any other angle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """A layer's rotary embedding, as vLLM applies it.

    Attributes:
        table: ``[positions, rotary_dim]``: cosines, and behind them sines, as vLLM multiplies with them.
        frequencies: ``[rotary_dim / 2]``, float32: radians per position.
        neox: Whether a pair is a number of the first half with one of the second, or else two neighbours (GPT-J).
    """

    table: Tensor
    frequencies: Tensor
    neox: bool

    def factors(self, positions: Tensor, angles_at: Tensor) -> tuple[Tensor, Tensor]:
        """What turns numbers that vLLM has rotated to where another position would have put them.

        Args:
            positions: ``[n]``, int64: where vLLM has put them.
            angles_at: ``[n]``, or one, float32: where they shall be; a position that need not be whole.

        Returns:
            Real and imaginary parts, each ``[n, rotary_dim / 2]``, float32.
        """
        cosines, sines = self.table[positions].float().chunk(2, dim=-1)
        length = cosines.square() + sines.square()
        angles = angles_at.to(self.frequencies)[:, None] * self.frequencies
        cosine, sine = angles.cos(), angles.sin()
        return (cosine * cosines + sine * sines) / length, (sine * cosines - cosine * sines) / length
