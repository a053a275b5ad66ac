"""Write the review as one HTML file without network resources: modules side by side, records beside the changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup

from transforms.pipeline.changes import Change
from transforms.pipeline.package import folder_name
from transforms.pipeline.pages import write_page
from transforms.pipeline.review.highlight import highlighted
from transforms.pipeline.review.regions import lines_of, regions
from transforms.place import BUILD, command

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.report import Outcome
    from transforms.pipeline.changes import RuleChange
    from transforms.pipeline.review.model import ModuleReview, Review
    from transforms.pipeline.review.regions import Region
    from transforms.pipeline.surroundings import Surrounding

CONTEXT = 10
#: The changes that a reviewer must read; shifted lines alone need no reading.
TELLING = (Change.NEW, Change.GONE, Change.REWORDED, Change.MOVED)


@dataclass(frozen=True)
class ShownRow:
    """One row with its code as HTML."""

    old: int | None
    new: int | None
    left: Markup
    right: Markup
    changed: bool


@dataclass(frozen=True)
class ShownSurrounding:
    """The function around a rule, and its diff line by line.

    Attributes:
        summary: The change, in a few words.
        lines: Each line of the diff: its sign, and its code as HTML.
    """

    summary: str
    lines: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True)
class ShownRegion:
    """A change with its context, or folded lines.

    Attributes:
        rows: The rows to show; empty if folded.
        folded: The folded lines as HTML.
        old: The first line's number in the upstream file.
        new: The first line's number in the rewritten file.
        count: The number of folded lines.
        scope: The class or function of the change.
        rules: The rules of the change, with their outcomes and their changes since the release before.
        around: The functions around the rules that no earlier region has shown.
    """

    rows: tuple[ShownRow, ...]
    folded: Markup
    old: int
    new: int
    count: int
    scope: str
    rules: tuple[tuple[Outcome, RuleChange | None], ...]
    around: tuple[ShownSurrounding, ...] = ()


def write_review(review: Review, out: Path = BUILD) -> Path:
    """Write the page of a review, as ``review/vllm-X/index.html`` below a directory, and return its path.

    Pages of other owners have their names in front: ``review/acme-vllm-X/index.html``.
    """
    reasons = groupby(review.lock["not_inserted"], key=lambda entry: (entry["status"], entry["reason"]))
    return write_page(
        out / "review" / folder_name(review.overlay.product, review.overlay.release) / "index.html",
        "review.html.j2",
        review=review,
        shown=[(module, _regions(module, review)) for module in review.modules],
        not_inserted=[(*reason, [entry["rule"] for entry in entries]) for reason, entries in reasons],
        accept=command(f"nox -s review -- {review.release} --accept"),
        telling=TELLING,
        to_read=[(rule, c) for rule, c in review.changes.rules.items() if c.change in TELLING],
        changes=list(Change),
        counts={transform: _counts(transform, review) for transform in review.changes.modules},
        news={module.id: _news(module, review) for module in review.modules},
    )


def _news(module: ModuleReview, review: Review) -> int:
    """Return how many of a module's rules a reviewer must read again."""
    changes = (review.changes.rules.get(rule) for rule in module.outcomes)
    return sum(change is not None and change.change in TELLING for change in changes)


def _counts(transform: str, review: Review) -> str:
    rules = review.changes.rules.items()
    counts = Counter(c.change for rule, c in rules if rule.rpartition(".")[0] == transform)
    return ", ".join(f"{counts[change]} {change.value}" for change in Change if counts[change])


def _regions(module: ModuleReview, review: Review) -> list[ShownRegion]:
    new = highlighted(lines_of(module.module.rewritten))
    old_lines = lines_of(module.module.upstream)
    shown: set[str] = set()
    return [_region(region, module, review, new, old_lines, shown) for region in regions(module.module, CONTEXT)]


def _region(
    region: Region, module: ModuleReview, review: Review, new: list[str], old_lines: list[str], shown: set[str]
) -> ShownRegion:
    first = region.rows[0]
    start = (first.old or 1, first.new or 1)
    if not region.changed:
        folded = "\n".join(new[row.new - 1] for row in region.rows if row.new)
        return ShownRegion((), _html(folded), *start, len(region.rows), "", ())
    rows = []
    for row in region.rows:
        right = new[row.new - 1] if row.new else ""
        left = right if not row.changed else highlighted([old_lines[row.old - 1]])[0] if row.old else ""
        rows.append(ShownRow(row.old, row.new, _html(left), _html(right), row.changed))
    rules = tuple((module.outcomes[rule], review.changes.rules.get(rule)) for rule in region.rules)
    around = [a for a in review.around.distinct(region.rules) if a.name not in shown]
    shown.update(a.name for a in around)
    return ShownRegion(
        tuple(rows), _html(""), *start, 0, region.scope, rules, tuple(_surrounding(a, review) for a in around)
    )


def _surrounding(around: Surrounding, review: Review) -> ShownSurrounding:
    code = highlighted([line[1:] for line in around.diff])
    lines = ((line[:1], _html(html)) for line, html in zip(around.diff, code, strict=True))
    return ShownSurrounding(around.summary(review.changes.since), tuple(lines))


def _html(text: str) -> Markup:
    """Mark HTML as safe, because `highlighted` has escaped it."""
    return Markup(text)  # noqa: S704 - escaped by `highlighted`
