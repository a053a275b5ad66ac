"""An overlay with everything that its reviewer asks: what, why, since when, and whether it is what was reviewed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from transforms.pipeline.changes import Change, Changes, ModuleChange, changes_since_previous
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.lock import OVERLAYS, Lock, compare, directory, make_lock, read_lock
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.report import Outcome
    from transforms.engine.transform import Transform
    from transforms.pipeline.rewrite import Overlay, RewrittenModule


class Verdict(Enum):
    """How an overlay stands to its lock."""

    SAME = "same"
    DIFFERS = "differs"
    UNREVIEWED = "unreviewed"


@dataclass(frozen=True)
class ModuleReview:
    """One rewritten module.

    Attributes:
        module: The module before and after.
        transform: What changed it, with its governance record.
        upstream_sha256: The content that vLLM has.
        rewritten_sha256: The content that the overlay has.
        change: How it relates to the release before; None where there is none.
        outcomes: The outcomes of the rules that are inserted, by rule.
    """

    module: RewrittenModule
    transform: Transform
    upstream_sha256: str
    rewritten_sha256: str
    change: ModuleChange | None
    outcomes: dict[str, Outcome]


@dataclass(frozen=True)
class Review:
    """An overlay as it is read.

    Attributes:
        overlay: The overlay.
        lock: The lock that accepting it would write.
        verdict: How it stands to the lock that is there.
        differences: What differs from that lock.
        changes: What changed since the reviewed release before.
        modules: Its modules, in the order of the transforms.
    """

    overlay: Overlay
    lock: Lock
    verdict: Verdict
    differences: tuple[str, ...]
    changes: Changes
    modules: tuple[ModuleReview, ...]

    @property
    def release(self) -> str:
        """The release."""
        return self.overlay.release

    @property
    def rules(self) -> int:
        """How many rules are inserted."""
        return sum(len(module.outcomes) for module in self.modules)

    @property
    def change_counts(self) -> Counter[Change]:
        """How many rules changed in which way since the release before."""
        return Counter(change.change for change in self.changes.rules.values())


def make_review(overlay: Overlay, overlays: Path = OVERLAYS) -> Review:
    """Gather what is to be read of an overlay."""
    reviewed = read_lock(overlay.release, overlays)
    lock = make_lock(overlay, reviewed["serial"] if reviewed else 1)
    differences = _differences(overlay, reviewed, lock, overlays) if reviewed else []
    verdict = Verdict.UNREVIEWED if reviewed is None else Verdict.DIFFERS if differences else Verdict.SAME
    changes = changes_since_previous(overlay, overlays)
    modules = tuple(_module(module, lock, changes) for module in overlay.modules)
    return Review(overlay, lock, verdict, tuple(differences), changes, modules)


def _differences(overlay: Overlay, reviewed: Lock, made: Lock, overlays: Path) -> list[str]:
    found = compare(reviewed, made)
    diff = directory(overlay.release, overlays) / "changes.diff"
    if not found and diff.read_text(encoding="utf-8") != overlay_diff(overlay):
        return ["changes.diff is not the diff of these modules"]
    return found


def _module(module: RewrittenModule, lock: Lock, changes: Changes) -> ModuleReview:
    locked = next(entry for entry in lock["modules"] if entry["path"] == module.path)
    inserted = {rule["id"] for rule in locked["rules"]}
    return ModuleReview(
        module,
        next(transform for transform in TRANSFORMS if transform.id == module.transform),
        locked["upstream_sha256"],
        locked["rewritten_sha256"],
        changes.modules.get(module.transform),
        {outcome.rule: outcome for outcome in module.outcomes if outcome.rule in inserted},
    )


def summary(review: Review) -> list[str]:
    """The review in a few lines of text."""
    inserted = f"{review.rules} rules inserted, {len(review.lock['not_inserted'])} not"
    lines = [f"vLLM {review.release}: {len(review.modules)} modules, {inserted}"]
    verdicts = {
        Verdict.SAME: "this is the overlay that was reviewed",
        Verdict.DIFFERS: "this is not the overlay that was reviewed:",
        Verdict.UNREVIEWED: "this overlay has not been reviewed yet",
    }
    lines.append(f"compared with the lock: {review.verdict.value}; {verdicts[review.verdict]}")
    lines += [f"    {difference}" for difference in review.differences]
    if review.changes.since:
        counts = review.change_counts
        told = ", ".join(f"{counts[change]} {change.value}" for change in Change if counts[change])
        lines.append(f"rules since {review.changes.since}: {told}")
    return lines
