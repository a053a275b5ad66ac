"""A measured figure, and the comparison of two sides."""

from __future__ import annotations

import statistics
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Figure:
    """A figure and its goal.

    Attributes:
        name: The measured quantity.
        value: The measured value.
        unit: Its unit; empty for a ratio.
        goal: The maximum desired value; None if there is no goal.
        detail: The numbers behind it.
    """

    name: str
    value: float
    unit: str
    goal: float | None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.value <= self.goal


def alternate(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Measure each side once per round, in alternating order; return the results of each side."""
    results: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            results[side].append(sides[side]())
    return results


def seconds_of(command: Sequence[object], **options: Any) -> float:
    """Return the wall-clock time of a command that must succeed."""
    words = [str(word) for word in command]
    begin = time.perf_counter()
    subprocess.run(words, check=True, **options)
    return time.perf_counter() - begin


def median_ratio(without: Sequence[float], with_: Sequence[float]) -> float:
    """Return the median with the overlay divided by the median without."""
    return statistics.median(with_) / statistics.median(without)
