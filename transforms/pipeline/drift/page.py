"""Write drift as a page: a matrix of rules and releases, and what moved in each release."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from transforms.engine.report import Status
from transforms.pipeline.census import advice, census_summary
from transforms.pipeline.changes import Change
from transforms.pipeline.drift.terminal import MOVED, NO_SOURCES, SYMBOLS, explain, symbol
from transforms.pipeline.pages import write_page
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transforms.pipeline.drift.model import Drift, RuleDrift


@dataclass(frozen=True)
class Cell:
    """One rule in one release.

    Attributes:
        mark: The symbol.
        kind: The class in the style sheet.
        told: A description in one line.
    """

    mark: str
    kind: str
    told: str


@dataclass(frozen=True)
class Row:
    """One rule in all releases."""

    rule: str
    cells: tuple[Cell, ...]

    @property
    def varies(self) -> bool:
        """Whether the symbol differs between releases."""
        return len({cell.mark for cell in self.cells}) > 1


def write_drift(drifts: Sequence[Drift], out: Path = BUILD) -> Path:
    """Write the page and return its path.

    Args:
        drifts: The releases, oldest first.
        out: The directory below which ``drift/index.html`` is written.
    """
    legend = [(mark, status.name.lower().replace("_", "-"), status.value) for status, (mark, _) in SYMBOLS.items()]
    legend.append((MOVED, "moved", "applied; new since the release before, or by another module, variant or text"))
    return write_page(
        out / "drift" / "index.html",
        "drift.html.j2",
        drifts=drifts,
        groups=[
            (transform, list(rows)) for transform, rows in groupby(_rows(drifts), lambda r: r.rule.rpartition(".")[0])
        ],
        legend=legend,
        advice={drift.release: [advice(s, drift.census, drift.title) for s in drift.unclassified] for drift in drifts},
        census={drift.release: census_summary(drift.census) for drift in drifts if drift.census},
        around={drift.release: drift.around.distinct(list(drift.around.rules)) for drift in drifts},
        told={drift.release: [r for r in drift.rules if r.moved or r.failed] for drift in drifts},
        shifted={drift.release: _shifted(drift) for drift in drifts},
        explain=explain,
        symbol=lambda rule: symbol(rule)[0],
    )


def _rows(drifts: Sequence[Drift]) -> list[Row]:
    found = {drift.release: {rule.outcome.rule: rule for rule in drift.rules} for drift in drifts}
    rules = dict.fromkeys(rule.outcome.rule for drift in drifts for rule in drift.rules)
    return [Row(rule, tuple(_cell(found[d.release].get(rule), d.release, rule) for d in drifts)) for rule in rules]


def _cell(rule: RuleDrift | None, release: str, name: str) -> Cell:
    if rule is None:
        return Cell(NO_SOURCES, "unknown", f"{name} in {release}: not tried")
    outcome = rule.outcome
    where = f", line {', '.join(map(str, rule.lines))} of {outcome.path}" if rule.lines else ""
    status = outcome.status
    note = explain(rule).removeprefix(status.value).lstrip(":, ")
    kind = "moved" if status is Status.APPLIED and rule.moved else status.name.lower().replace("_", "-")
    told = f"{name} in {release}: {status.value}{where}{'; ' if note else ''}{note}"
    return Cell(symbol(rule)[0], kind, told)


def _shifted(drift: Drift) -> int:
    return sum(rule.change is not None and rule.change.change is Change.SHIFTED for rule in drift.rules)
