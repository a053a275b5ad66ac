"""Collect what a reviewer needs to know of an overlay: its changes, their reasons and the comparison with its lock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from transforms.pipeline.changes import Change, Changes, ModuleChange, changes_since_previous
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.lock import Lock, compare, make_lock, read_lock
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.surroundings import Surroundings, surroundings

if TYPE_CHECKING:
    from transforms.engine.report import Outcome
    from transforms.engine.transform import Transform
    from transforms.pipeline.rewrite import Overlay, RewrittenModule
    from transforms.pipeline.sources.tree import Opener


class Verdict(Enum):
    """The result of comparing an overlay with its lock."""

    SAME = "same"
    DIFFERS = "differs"
    UNREVIEWED = "unreviewed"


@dataclass(frozen=True)
class ModuleReview:
    """One rewritten module.

    Attributes:
        module: The module before and after.
        transforms: The transforms that changed it, with their governance records.
        upstream_sha256: The hash of vLLM's file.
        rewritten_sha256: The hash of the overlay's file.
        change: The change since the release before; None if there is none before.
        outcomes: The outcomes of the inserted rules, by rule.
    """

    module: RewrittenModule
    transforms: tuple[Transform, ...]
    upstream_sha256: str
    rewritten_sha256: str
    change: ModuleChange | None
    outcomes: dict[str, Outcome]

    @property
    def id(self) -> str:
        """The module's name on a page: that of the transforms that changed it."""
        return "+".join(transform.id for transform in self.transforms)

    @property
    def processes(self) -> list[str]:
        """The processes in which the module runs."""
        return list(dict.fromkeys(process.value for t in self.transforms for process in t.governance.processes))


@dataclass(frozen=True)
class Review:
    """An overlay with everything that a reviewer reads.

    Attributes:
        overlay: The overlay.
        lock: The lock that accepting the overlay would write.
        verdict: The result of comparing it with the existing lock.
        differences: The differences from that lock.
        changes: The changes since the reviewed release before.
        modules: The modules, in the order of the transforms.
        around: The changes around each insertion since that release.
    """

    overlay: Overlay
    lock: Lock
    verdict: Verdict
    differences: tuple[str, ...]
    changes: Changes
    modules: tuple[ModuleReview, ...]
    around: Surroundings

    @property
    def release(self) -> str:
        """The release."""
        return self.overlay.release

    @property
    def rules(self) -> int:
        """The number of inserted rules."""
        return sum(len(module.outcomes) for module in self.modules)

    @property
    def change_counts(self) -> Counter[Change]:
        """The number of rules with each kind of change since the release before."""
        return Counter(change.change for change in self.changes.rules.values())


def make_review(overlay: Overlay, opened: Opener = open_sources) -> Review:
    """Collect the review of an overlay.

    Args:
        overlay: The overlay.
        opened: Opens the sources of the reviewed release before.
    """
    reviewed = read_lock(overlay.release, overlay.product)
    lock = make_lock(overlay, reviewed["serial"] if reviewed else 1)
    differences = _differences(overlay, reviewed, lock) if reviewed else []
    verdict = Verdict.UNREVIEWED if reviewed is None else Verdict.DIFFERS if differences else Verdict.SAME
    changes = changes_since_previous(overlay)
    modules = tuple(_module(module, lock, changes) for module in overlay.modules)
    around = surroundings(overlay, changes.since, opened)
    return Review(overlay, lock, verdict, tuple(differences), changes, modules, around)


def _differences(overlay: Overlay, reviewed: Lock, made: Lock) -> list[str]:
    found = compare(reviewed, made)
    diff = overlay.directory / "changes.diff"
    if not found and diff.read_text(encoding="utf-8") != overlay_diff(overlay):
        return ["changes.diff is not the diff of these modules"]
    return found


def _module(module: RewrittenModule, lock: Lock, changes: Changes) -> ModuleReview:
    locked = next(entry for entry in lock["modules"] if entry["path"] == module.path)
    inserted = {rule["id"] for rule in locked["rules"]}
    return ModuleReview(
        module,
        module.transforms,
        locked["upstream_sha256"],
        locked["rewritten_sha256"],
        changes.modules.get(module.transforms[0].id),
        {outcome.rule: outcome for outcome in module.outcomes if outcome.rule in inserted},
    )


def summary(review: Review) -> list[str]:
    """Return the review in a few lines of text."""
    inserted = f"{review.rules} rules inserted, {len(review.lock['not_inserted'])} not"
    lines = [f"{review.overlay.title}: {len(review.modules)} modules, {inserted}"]
    verdicts = {
        Verdict.SAME: "this is the overlay that was reviewed",
        Verdict.DIFFERS: "this is not the overlay that was reviewed:",
        Verdict.UNREVIEWED: "this overlay has not been reviewed yet",
    }
    lines.append(f"compared with the lock: {review.verdict.value}; {verdicts[review.verdict]}")
    lines += [f"    {difference}" for difference in review.differences]
    lines += [f"owners meet: {conflict}" for conflict in review.lock.get("conflicts", ())]
    if review.changes.since:
        counts = review.change_counts
        told = ", ".join(f"{counts[change]} {change.value}" for change in Change if counts[change])
        lines.append(f"rules since {review.changes.since}: {told}")
        distinct = review.around.distinct(list(review.around.rules))
        moved = sum(bool(around.diff) for around in distinct)
        around = review.around.problem or f"{moved} of {len(distinct)} functions changed"
        lines.append(f"around the rules since {review.changes.since}: {around}")
    return lines
