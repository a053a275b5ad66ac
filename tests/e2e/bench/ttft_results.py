"""The measurements, the ratios of the goals, and the comparison of first tokens.

A ratio is taken within a round, in which both of its sides ran in succession; the result is the median over
all rounds of every group with both. Rounds in which other processes disturbed a side count only if
there are no others.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers import NO_CONNECTOR, OURS, OURS_CACHE, OURS_CHUNKS, OURS_LAYERWISE
from tests.e2e.bench.ttft_model import RANDOM, Workload
from tests.e2e.bench.ttft_stages import COLD, HIT, NEXT, PLAIN_COPY, PLAIN_READ, RESET, RESTART, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALL_OURS = (OURS, OURS_CHUNKS, OURS_CACHE, OURS_LAYERWISE)
MOST_FOR_SAVING, MOST_FOR_LOADING, MOST_DELAY = 1.03, 1.25, 1.05
#: The phases in which ours must be faster than every peer.
COMPARED = {
    COLD: "cold with saving",
    RESET: "loaded after a reset",
    RESTART: "loaded after a restart",
    NEXT: "next request while saving",
}
#: The phases in which blocks are loaded, each with the one of the in-engine hit that was measured beside it.
LOADED = {RESET: HIT, RESTART: f"{RESTART} {HIT}"}


class Results:
    """The samples of all groups.

    Args:
        lengths: The loaded tokens of the prompts.
        workload: What is asked.

    Attributes:
        failures: The sides that were not measured, or not to the end, with the reason.
        groups: The samples of each group.
    """

    def __init__(self, lengths: list[int], workload: Workload = RANDOM) -> None:
        self.lengths, self.workload = lengths, workload
        self.failures: dict[str, str] = {}
        self.groups: list[list[Sample]] = []

    def add_group(self, samples: Iterable[Sample]) -> None:
        """Take a group's samples as they come."""
        self.groups.append([])
        for sample in samples:
            self.groups[-1].append(sample)

    def sides(self) -> list[str]:
        """All sides."""
        return list({sample.side: None for group in self.groups for sample in group})

    def of(self, group: int, side: str, phase: str, length: int) -> dict[int, Sample]:
        """The samples of one phase by round."""
        wanted = (side, phase, length)
        return {s.number: s for s in self.groups[group] if (s.side, s.phase, s.length) == wanted}

    def seconds(self, group: int, side: str, phase: str, length: int) -> list[float]:
        """The seconds of the rounds that count; empty if it was not measured."""
        return _undisturbed([(s.seconds, s.disturbed) for s in self.of(group, side, phase, length).values()])

    def ratios(self, of: tuple[str, str], to: tuple[str, str], length: int) -> list[float]:
        """Seconds of one side and phase over those of another, of each round of each group that has both."""
        pairs = [(self.of(group, *of, length), self.of(group, *to, length)) for group in range(len(self.groups))]
        return _undisturbed(
            [
                (one[n].seconds / other[n].seconds, one[n].disturbed or other[n].disturbed)
                for one, other in pairs
                for n in one
                if n in other
            ]
        )

    def differing_tokens(self) -> list[str]:
        """Answers that are not those of the engine without a connector; warm ones are compared with its hit."""
        expected = {(s.length, s.number, s.phase): s.tokens for g in self.groups for s in g if s.side == NO_CONNECTOR}
        found = []
        for sample in (s for group in self.groups for s in group if s.tokens):
            phase = sample.phase if sample.phase in {COLD, NEXT} else HIT
            number = 0 if sample.side == NO_CONNECTOR and sample.phase.endswith(" " + HIT) else sample.number
            tokens = expected.get((sample.length, number, phase), sample.tokens)
            if tokens != sample.tokens:
                said = f"{list(sample.tokens)}, not {list(tokens)}"
                found.append(f"{sample.side}, {sample.length} tokens, {sample.phase}: {said}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        groups = [[sample.as_dict() for sample in group] for group in self.groups]
        return {"lengths": self.lengths, "failures": self.failures, "groups": groups}


def goals(results: Results) -> Iterator[Figure]:
    """The figures that have a goal."""
    compared = sum(bool(sample.tokens) for group in results.groups for sample in group)
    differ = results.differing_tokens()
    what = "first tokens" if results.workload.answer == 1 else f"answers of {results.workload.answer} tokens"
    yield Figure(f"{what} that differ", len(differ), "", 0, {"compared": compared, "differ": differ})
    for ours in (name for name in ALL_OURS if name in results.sides()):
        for length in results.lengths:
            yield from _goals(results, ours, length)


def _goals(results: Results, ours: str, length: int) -> Iterator[Figure]:
    def figure(name: str, values: list[float], goal: float, **detail: Any) -> Iterator[Figure]:
        if values:
            median = statistics.median(values)
            yield Figure(f"{ours}, {length} tokens: {name}", median, "", goal, {"each": values, **detail})

    none = NO_CONNECTOR
    saving = results.ratios((ours, COLD), (none, COLD), length)
    yield from figure("cold with saving, to no connector", saving, MOST_FOR_SAVING)
    for phase, hit in LOADED.items():
        loads = _to_hit_and_read(results, ours, length, phase, hit)
        yield from figure(f"{COMPARED[phase]}, to the in-engine hit and a plain read", loads, MOST_FOR_LOADING)
    delay = results.ratios((ours, NEXT), (none, NEXT), length)
    yield from figure("next request while saving, to no connector", delay, MOST_DELAY)
    for phase, name in COMPARED.items():
        peers = {
            peer: results.ratios((ours, phase), (peer, phase), length)
            for peer in results.sides()
            if peer not in {*ALL_OURS, none, PLAIN_READ, PLAIN_COPY}
        }
        measured = {peer: values for peer, values in peers.items() if values}
        if measured:
            best = max(measured, key=lambda peer: statistics.median(measured[peer]))
            yield from figure(f"{name}, to the best peer ({best})", measured[best], 1.0)


def _to_hit_and_read(results: Results, side: str, length: int, phase: str, hit: str) -> list[float]:
    """Return the time of loading in each round, relative to a hit in an engine plus a plain read of the same bytes."""
    found = []
    for group in range(len(results.groups)):
        loaded = results.of(group, side, phase, length)
        hits = results.of(group, NO_CONNECTOR, hit, length)
        reads = results.of(group, PLAIN_READ, phase, length)
        found += [
            (loaded[n].seconds / (hits[n].seconds + reads[n].seconds), loaded[n].disturbed or hits[n].disturbed)
            for n in loaded
            if n in hits and n in reads
        ]
    return _undisturbed(found)


def _undisturbed(values: list[tuple[float, bool]]) -> list[float]:
    """Return the undisturbed values, or all if there are none."""
    return [value for value, disturbed in values if not disturbed] or [value for value, _ in values]
