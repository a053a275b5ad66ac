"""Adopt a release: try everything on it, and write its lock if nothing is left to decide.

The steps run in order, and all of them run, so that one page lists everything that a person must decide. Nothing is
written below ``overlays/`` until the list is empty.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from packaging.version import Version

from transforms.engine.errors import OverlayError
from transforms.engine.report import Status
from transforms.pipeline.build import check_complete, complete, ordered
from transforms.pipeline.census import census_path, census_summary, census_text, hooks_of_outcomes, judge
from transforms.pipeline.changes import changes_since_previous
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.decisions import Decision, decisions
from transforms.pipeline.generate import shown, write_changed, write_generated
from transforms.pipeline.lock import accepted_files
from transforms.pipeline.pages import templates
from transforms.pipeline.product import UCM
from transforms.pipeline.rebindings import fates, pair
from transforms.pipeline.review.model import make_review
from transforms.pipeline.review.page import write_review
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.surroundings import surroundings
from transforms.pipeline.trial import check_answered, check_cases
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transforms.pipeline.census import Site
    from transforms.pipeline.product import Product
    from transforms.pipeline.rebindings import Fate
    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import SourceTree

Done = TypeVar("Done")

#: The first release of each package for which there are rules, candidates included.
FIRST = "0.9.0rc1"


class TooOldError(OverlayError):
    """There are no rules for a release."""


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: What was done.
        result: How it ended, in a few words.
        seconds: How long it took.
    """

    name: str
    result: str
    seconds: float


@dataclass
class Adoption:
    """The adoption of one release.

    Attributes:
        named: The release, as a command line names it.
        title: The package and the release, in prose.
        steps: What was done, in order.
        decisions: What a person must decide; nothing is written until this is empty.
        since: The reviewed release before it.
        read: What changed around the rules since then.
        page: The review page, if the overlay was made.
        written: The files that were written, relative to the repository.
    """

    named: str
    title: str
    steps: list[Step] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    since: str = ""
    read: list[str] = field(default_factory=list)
    page: str = ""
    written: list[Path] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The outcome, in a sentence."""
        count = len(self.decisions)
        if count:
            return f"{count} decision{'s' * (count != 1)} of yours {'are' if count != 1 else 'is'} missing."
        return "Every rule applies, and every place is hooked or classified."

    def markdown(self) -> str:
        """The adoption as one page."""
        return templates().get_template("adoption.md.j2").render(adoption=self)


def adopt(named: str, product: Product, release: str, out: Path = BUILD) -> Adoption:
    """Adopt a published release.

    Args:
        named: The release, as a command line names it.
        product: Its package, and the rules to apply.
        release: The release.
        out: The directory for the wheels and the page.

    Returns:
        What was done, and what is left to do. Its page is in ``adopt/`` below ``out``.

    Raises:
        OverlayError: If the sources cannot be read, or are older than the rules.
    """
    check_not_older(release, product)
    adoption = Adoption(named, f"{product.package.title} {release}")
    timed = _Timed(adoption.steps)
    tree = timed("sources", lambda: open_sources(release, package=product.package), lambda t: t.artefact.name)
    overlay = timed("rules", lambda: rewrite(tree, product), _rules)
    around = surroundings(overlay, changes_since_previous(overlay).since)
    adoption.since = around.since
    changed = around.distinct(list(around.rules))
    adoption.read = [one.summary(around.since) for one in changed if one.diff or not one.name_before]
    text = timed("census", lambda: census_text(tree, product), lambda t: census_summary(_judged(t, overlay)))
    sites = _judged(text, overlay)
    lost = timed("replaced functions", lambda: lost_hooks(overlay, tree), lambda found: f"{len(found)} take hooks away")
    adoption.decisions = decisions(overlay, tree, sites, lost)
    adoption.decisions += _problems(timed, overlay)
    adoption.decisions += _paired(overlay)
    if not adoption.decisions:
        found = json.loads(text)["sites"]
        check_complete(overlay, found, tree)
        adoption.page = str(shown(write_review(make_review(overlay))))
        files = {**accepted_files(overlay), census_path(release, product): text}
        adoption.written = timed("lock, diff, census", lambda: write_changed(files), _changed)
        pages = timed("generated files", lambda: write_generated(product), _changed)
        adoption.written += pages
        timed("wheels", lambda: _wheels(named, out), lambda built: f"{len(built)} built")
    target = out / "adopt" / f"{named}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(adoption.markdown(), encoding="utf-8")
    return adoption


def check_not_older(release: str, product: Product) -> None:
    """Refuse a release that is older than all rules.

    Raises:
        TooOldError: If it is.
    """
    if Version(release) < Version(FIRST):
        oldest = next(iter(product.reviewed()), FIRST)
        raise TooOldError(
            f"{product.package.title} {release} is older than every rule",
            where=f"the rules begin with {FIRST}",
            fix=f"use {product.package.title} {oldest} or newer",
        )


def lost_hooks(overlay: Overlay, tree: SourceTree) -> list[Fate]:
    """Return the replacements of a package that take hooks away from vLLM's overlay; none if that is not reviewed."""
    if not overlay.product.package.rebinds or pair(overlay.release) not in UCM.reviewed():
        return []
    own = hooks_of_outcomes(overlay.outcomes, overlay.product)
    return [fate for fate in fates(overlay.release, overlay.product, own, tree) if fate.lost]


def published(product: Product) -> list[str]:
    """Return all published releases of a product's package for which there are rules, oldest first.

    Raises:
        SourceError: If no index can be reached.
    """
    from transforms.pipeline.sources.index import Index  # noqa: PLC0415 - as in `open_sources`

    return [one for one in Index(package=product.package).releases()[::-1] if Version(one) >= Version(FIRST)]


class _Timed:
    """Runs steps, and writes down how each ended."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    def __call__(self, name: str, run: Callable[[], Done], told: Callable[[Done], str]) -> Done:
        begun = time.monotonic()
        done = run()
        self._steps.append(Step(name, told(done), time.monotonic() - begun))
        return done


def _changed(written: list[Path]) -> str:
    return f"{len(written)} changed"


def _rules(overlay: Overlay) -> str:
    counts = {status: sum(o.status is status for o in overlay.outcomes) for status in Status}
    return ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)


def _judged(text: str, overlay: Overlay) -> list[Site]:
    hooks = hooks_of_outcomes(overlay.outcomes, overlay.product)
    return judge(json.loads(text)["sites"], hooks, overlay.release, overlay.product)


def _problems(timed: _Timed, overlay: Overlay) -> Iterator[Decision]:
    """Yield what the records, the cases and the checks of the rewritten modules find."""

    def failure(check: Callable[[], None]) -> OverlayError | None:
        try:
            check()
        except OverlayError as error:
            return error
        return None

    checks: dict[str, Callable[[], None]] = {
        "records": lambda: check_answered(overlay.product),
        "cases": lambda: check_cases(overlay.product),
        "checks of the rewritten modules": lambda: check_overlay(overlay),
    }
    for name, check in checks.items():
        error = timed(name, functools.partial(failure, check), lambda error: "failed" if error else "passed")
        if error is not None:
            where = (error.where,) if error.where else ()
            yield Decision(f"{name}: {error.what}", where, error.fix or "correct the rule that inserts it")


def _paired(overlay: Overlay) -> Iterator[Decision]:
    """Yield the decision to adopt the vLLM that a package belongs to, if it has no overlay."""
    if overlay.product.package.rebinds and pair(overlay.release) not in UCM.reviewed():
        number = pair(overlay.release)
        what = f"{overlay.title} belongs to vLLM {number}, which has no reviewed overlay"
        yield Decision(what, (), f"adopt it first: `nox -s adopt -- {number}`")


def _wheels(named: str, out: Path) -> list[Path]:
    built = [one.build(out, all_hooks=False) for one in ordered([named], None, all_hooks=False)]
    return [wheel for wheels in complete(built).values() for wheel in wheels]


@dataclass(frozen=True)
class Row:
    """One published release in the table.

    Attributes:
        release: The release.
        paired: The vLLM release that it belongs to; empty for vLLM itself.
        inserted: The number of inserted rules.
        failed: The number of rules that do not apply.
        unclassified: The number of unclassified places.
        lost: The number of replacements that take hooks away.
        reviewed: Whether it has a lock.
        problem: Why it could not be tried, or fails its checks; empty if neither.
        waits_for: The vLLM release that it belongs to, if that has no reviewed overlay.
    """

    release: str
    paired: str
    inserted: int = 0
    failed: int = 0
    unclassified: int = 0
    lost: int = 0
    reviewed: bool = False
    problem: str = ""
    waits_for: str = ""

    @property
    def state(self) -> str:
        """What an operator can do with the release."""
        if self.reviewed:
            return "reviewed"
        if self.problem:
            return self.problem.partition("\n")[0]
        if self.failed or self.unclassified or self.lost:
            return "decisions are missing"
        return "ready to adopt" if not self.waits_for else f"needs an overlay of vLLM {self.waits_for}"


def row(named: str, product: Product, release: str) -> Row:
    """Try everything on one release, and write nothing."""
    paired = pair(release) if product.package.rebinds else ""
    reviewed = release in product.reviewed()
    try:
        tree = open_sources(release, package=product.package)
        overlay = rewrite(tree, product)
        sites = _judged(census_text(tree, product), overlay)
        if not overlay.failures:
            check_overlay(overlay)
        return Row(
            release,
            paired,
            sum(o.status is Status.APPLIED for o in overlay.outcomes),
            len(overlay.failures),
            sum(not site.is_known for site in sites),
            len(lost_hooks(overlay, tree)),
            reviewed,
            waits_for=paired if paired and paired not in UCM.reviewed() else "",
        )
    except OverlayError as error:
        return Row(release, paired, reviewed=reviewed, problem=f"{named}: {error.what}")


def releases_page(rows: dict[str, list[Row]]) -> str:
    """Return the page of all published releases, as Markdown.

    Args:
        rows: The rows of each product, by its title.
    """
    return templates().get_template("releases.md.j2").render(rows=rows)
