"""ReRoPE by its definition: keys that were never rotated, and two whole matrices of scores, in double precision.

Imported only where torch is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

HEAD, BASE = 64, 10_000.0


@dataclass(frozen=True)
class Style:
    """How a model rotates: the share of a head that it does, and which numbers are a pair."""

    rotated: int = HEAD
    neox: bool = True


STYLES = [Style(), Style(neox=False), Style(HEAD // 2), Style(HEAD // 4, neox=False)]


def turned(heads: torch.Tensor, angles_at: torch.Tensor, style: Style) -> torch.Tensor:
    """Numbers as another position would have them, in double precision."""
    half = style.rotated // 2
    frequencies = BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = angles_at.double()[:, None] * frequencies
    found = heads.double().clone()
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    numbers = torch.arange(half)
    pair = (numbers, numbers + half) if style.neox else (2 * numbers, 2 * numbers + 1)
    one, other = (heads.double()[..., places] for places in pair)
    found[..., pair[0]], found[..., pair[1]] = one * cosine - other * sine, other * cosine + one * sine
    return found


@dataclass(frozen=True)
class Way:
    """Which distances a query sees."""

    window: int
    leak: float = math.inf
    training_length: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"window": self.window, "training_length": self.training_length, "leak": self.leak}
        return {name: value for name, value in given.items() if value not in {None, math.inf}}

    def attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, style: Style
    ) -> torch.Tensor:
        """Of queries and keys that were never rotated, from a position on."""
        own, other = torch.arange(first, first + len(query)), torch.arange(len(keys))
        grouped = [of.double().repeat_interleave(query.shape[1] // keys.shape[1], 1) for of in (keys, values)]
        near = turned(query, own, style), turned(grouped[0], other, style)
        far_own = self.window - self.window / self.leak + own / self.leak
        far = turned(query, far_own, style), turned(grouped[0], other / self.leak, style)
        distance = own[:, None] - other
        near_scores, far_scores = (torch.einsum("qhd,khd->hqk", *of) for of in (near, far))
        scores = torch.where(distance < self.window, near_scores, far_scores) * HEAD**-0.5
        if self.training_length is not None:
            scores = scores * ((own + 1).log() / math.log(self.training_length)).clamp(min=1)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(distance < 0, -math.inf).softmax(-1), grouped[1])
