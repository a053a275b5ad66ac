"""Figures of a store with processor time, of several sides, and beside another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from ucm.store.bench import Figures, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucm.store.bench import Workload
    from ucm.store.config import StoreConfig


@dataclass
class SideFigures(Figures):
    """The seconds, and those of this process's processor time.

    Args:
        elsewhere: Called at the end of each round; returns the seconds of operations that another process measured.
    """

    processor: dict[str, list[float]] = field(default_factory=dict)
    elsewhere: Callable[[], Mapping[str, float]] = dict

    def add(self, operation: str, run: Callable[[], None]) -> None:
        used = time.process_time()
        super().add(operation, run)
        self.processor.setdefault(operation, []).append(time.process_time() - used)

    def end_round(self) -> None:
        for operation, seconds in self.elsewhere().items():
            self.seconds.setdefault(operation, []).append(seconds)

    def merge(self, other: SideFigures, side: str = "") -> None:
        """Add the rounds of another measurement of as many bytes, its operations under names that begin with a side."""
        for own, new in ((self.seconds, other.seconds), (self.processor, other.processor)):
            for operation, rounds in new.items():
                own.setdefault(f"{side}{operation}", []).extend(rounds)

    def processor_per_gb(self, operation: str) -> float:
        """Return the median seconds of processor time that an operation takes for a GB."""
        return median(self.processor[operation]) / self.workload.nbytes * 1e9

    def checked(self, plain: str) -> str:
        """Return the name of an operation on plain files with checksums; empty if it was not measured."""
        return next((name for name in self.seconds if name.startswith(f"{plain} checked x")), "")


def measured(
    config: StoreConfig, workload: Workload, elsewhere: Callable[[], Mapping[str, float]] = dict, *, tidy: bool = True
) -> SideFigures:
    """Return what `bench` measures."""
    figures = SideFigures(workload, elsewhere=elsewhere)
    bench(config, figures, tidy=tidy)
    return figures
