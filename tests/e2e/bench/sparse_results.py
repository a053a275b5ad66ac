"""The measurements of sparse methods: ratios to dense attention, and the ratios that memory bandwidth predicts.

Ratios are taken within a round, in which both sides were measured in succession; the result is the median over
rounds. Rounds in which other processes disturbed a side count only if there are no others.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.sparse_model import TOKEN_BYTES, block_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.e2e.bench.sparse_side import Sample


@dataclass
class Group:
    """Sides that were measured side by side at one length.

    Attributes:
        length: Tokens of the prompt.
        budget: The share of them that a decode step may read, 0 to 1; 1 where nothing is left out.
        samples: In the order in which they were taken.
        failures: Why a side was not measured, by side.
        bandwidth: Bytes per second at which an engine reads memory; 0 if it was not measured.
        prefill_s: The seconds of the prompt, by side.
        most: The maximum KV blocks that the request held between the steps of its prompt, by side.
        held: The blocks that it held at the end, by side.
        tokens: The generated tokens, by side.
        repeats: Whether all generated tokens are the same one.
    """

    length: int
    budget: float
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0
    prefill_s: dict[str, float] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    repeats: bool = False

    def of(self, side: str) -> dict[int, Sample]:
        """A side's samples by round."""
        return {sample.round: sample for sample in self.samples if sample.side == side}

    def median(self, side: str, value: Callable[[Sample], float]) -> float:
        """A side's median.

        Raises:
            statistics.StatisticsError: If it was not measured.
        """
        found = self.of(side).values()
        return statistics.median(_undisturbed([(value(sample), sample.disturbed) for sample in found]))

    def ratios(self, side: str, to: str, value: Callable[[Sample], float]) -> list[float]:
        """One side's over another's, of each round that both have."""
        one, other = self.of(side), self.of(to)
        rounds = [n for n in one if n in other]
        return _undisturbed([(value(one[n]) / value(other[n]), one[n].disturbed or other[n].disturbed) for n in rounds])

    @property
    def disturbed(self) -> int:
        """How many samples were."""
        return sum(sample.disturbed for sample in self.samples)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def step(sample: Sample) -> float:
    """Seconds of a step."""
    return sample.step


def attention(sample: Sample) -> float:
    """Seconds of a step in attention, and in choosing what it reads."""
    return sample.attention + sample.method


def predicted(group: Group, side: str, dense: str) -> tuple[float, float]:
    """Return the prediction by bytes read, as if attention and selection only read memory.

    Bytes are those of the keys and values within the budget and, where something is left out, of the bounds of all
    blocks: of each a least and a greatest key. The rest of a step is taken to be what it is with dense attention.

    Returns:
        The seconds that a side's attention takes in a step, and the dense side's step over that side's; NaN if the
        bandwidth was not measured.
    """
    whole = group.length * TOKEN_BYTES / (group.bandwidth or math.nan)
    share = 1.0 if side == dense else min(1.0, group.budget + 1 / block_size(group.length))
    rest = group.median(dense, lambda sample: sample.step - attention(sample))
    return share * whole, (rest + whole) / (rest + share * whole)


def _undisturbed(values: Sequence[tuple[float, bool]]) -> list[float]:
    """The values that nothing disturbed; all of them if there are none."""
    return [value for value, disturbed in values if not disturbed] or [value for value, _ in values]
