"""Try every rule on a release, and compare the result with the reviewed release before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.engine.report import Outcome, Status
from transforms.pipeline.census import Site, current, hooks_of_outcomes, judge
from transforms.pipeline.changes import Change, ModuleChange, RuleChange, changes_since_previous
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.hunks import inserted
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import UCM
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.surroundings import Surroundings, surroundings
from transforms.pipeline.trial import check_cases

if TYPE_CHECKING:
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import Artefact, Opener, SourceTree


@dataclass(frozen=True)
class RuleDrift:
    """One rule in one release.

    Attributes:
        transform: The rule's transform.
        outcome: The outcome of applying the rule.
        lines: The first lines of its insertions in the rewritten module.
        change: The change since the release before; None if there is nothing to compare.
    """

    transform: str
    outcome: Outcome
    lines: tuple[int, ...]
    change: RuleChange | None

    @property
    def failed(self) -> bool:
        """Whether the rule prevents an overlay from being built."""
        return self.outcome.status.failed or self.outcome.status is Status.PRESENT

    @property
    def moved(self) -> bool:
        """Whether the rule is new, or applied by another path, variant or text than in the release before."""
        return self.change is not None and self.change.change not in {Change.SAME, Change.SHIFTED}


@dataclass(frozen=True)
class Drift:
    """All rules in one release.

    Attributes:
        release: The release, as given on a command line.
        reviewed: Whether it has a lock.
        since: The reviewed release before it; empty if there is none.
        artefact: The artefact that its sources were read from; None if they could not be read.
        rules: The rules, in the order of the transforms.
        modules: The change of each module since the release before, by transform.
        problem: Why the checks of the rewritten modules failed, or why there are no sources; empty if neither.
        census: All places in the package of the kinds that rules hook.
        around: The changes around each insertion since the release before.
        title: The package and the release, in prose.
    """

    release: str
    reviewed: bool
    since: str
    artefact: Artefact | None
    rules: tuple[RuleDrift, ...]
    modules: dict[str, ModuleChange]
    problem: str
    census: tuple[Site, ...] = ()
    around: Surroundings = Surroundings("", {})  # noqa: RUF009 - Surroundings is frozen as well
    title: str = ""

    @property
    def unclassified(self) -> list[Site]:
        """The unhooked places whose consequences are not classified."""
        return [site for site in self.census if not site.is_known]

    @property
    def passes(self) -> bool:
        """Whether an overlay can be built and every unhooked place is classified."""
        return self.applies and not self.unclassified

    @property
    def failures(self) -> list[RuleDrift]:
        """The rules that prevent an overlay from being built."""
        return [rule for rule in self.rules if rule.failed]

    @property
    def applies(self) -> bool:
        """Whether an overlay can be built."""
        return not self.problem and not self.failures

    @property
    def counts(self) -> Counter[Status]:
        """The number of rules with each status."""
        return Counter(rule.outcome.status for rule in self.rules)


def measure(release: str | None, origin: str | None = None, product: Product = UCM) -> Drift:
    """Try every rule on a release.

    Args:
        release: The release; may be None if ``origin`` states it.
        origin: None for the package index, ``installed``, or a path.
        product: The rules to try, and their package.
    """
    try:
        return measure_tree(open_sources(release, origin, package=product.package), product)
    except OverlayError as error:
        named = product.named(release or str(origin))
        return Drift(named, False, "", None, (), {}, str(error), title=f"{product.package.title} {release or origin}")


def measure_tree(
    tree: SourceTree,
    product: Product,
    opened: Opener = open_sources,
) -> Drift:
    """Try every rule on a source tree, and take its census.

    Args:
        tree: The source tree.
        product: The rules to try, and their package.
        opened: Opens the sources of the reviewed release before.

    Raises:
        SourceError: The tree's files cannot be read.
    """
    overlay = rewrite(tree, product)
    changes = changes_since_previous(overlay)
    lines = {rule: found.lines for rule, found in inserted(overlay_diff(overlay), product.transforms).items()}
    owner = {rule.id: transform.id for transform in product.transforms for rule in transform.all_rules}
    rules = tuple(
        RuleDrift(owner[o.rule], o, lines.get(o.rule, ()), changes.rules.get(o.rule)) for o in overlay.outcomes
    )
    reviewed = read_lock(overlay.release, product) is not None
    return Drift(
        overlay.named,
        reviewed,
        changes.since,
        overlay.artefact,
        rules,
        changes.modules,
        _problem(overlay),
        tuple(_census(tree, overlay)),
        surroundings(overlay, changes.since, opened),
        overlay.title,
    )


def _census(tree: SourceTree, overlay: Overlay) -> list[Site]:
    hooks = hooks_of_outcomes(overlay.outcomes, overlay.product)
    return judge(current(tree, overlay.product), hooks, overlay.release, overlay.product)


def _problem(overlay: Overlay) -> str:
    try:
        check_cases(overlay.product)
        check_overlay(overlay)
    except OverlayError as error:
        return str(error)
    return ""
