"""A stand-in for the part of prometheus_client that the metrics use, which is a dependency of vLLM."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from ucm.integration.vllm.metrics import Kind


class Child:
    """A metric at fixed label values."""

    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def inc(self, value: float) -> None:
        assert value >= 0
        self.value += value

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class Metric:
    """A metric with label names; its name must be unique."""

    taken: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        assert name not in self.taken
        assert documentation
        self.taken[name] = self
        self.labelnames = labelnames
        self.children: defaultdict[tuple[str, ...], Child] = defaultdict(Child)

    def labels(self, *values: object) -> Child:
        assert len(values) == len(self.labelnames)
        return self.children[tuple(map(str, values))]


class Gauge(Metric):
    """A gauge has a mode for merging several processes' values."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str) -> None:
        super().__init__(name, documentation, labelnames)
        assert multiprocess_mode == "mostrecent"


class Histogram(Metric):
    """A histogram has bounds."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: list[float]) -> None:
        super().__init__(name, documentation, labelnames)
        assert buckets == sorted(set(buckets))


CLASSES: dict[Kind, Any] = {Kind.COUNTER: Metric, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
