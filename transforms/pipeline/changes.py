"""Compare an overlay with that of the previous reviewed release."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.hunks import Inserted, inserted
from transforms.pipeline.lock import Lock, make_lock, read_lock
from transforms.pipeline.product import UCM

if TYPE_CHECKING:
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay


class Change(Enum):
    """How a rule's insertion differs from the one in the previous release."""

    NEW = "new"
    GONE = "gone"
    REWORDED = "other text"
    MOVED = "other place"
    SHIFTED = "other line"
    SAME = "unchanged"


@dataclass(frozen=True)
class RuleChange:
    """How one rule changed since the previous release.

    Attributes:
        change: The kind of change; if there are several, the one that most needs review.
        notes: Descriptions of all changes.
        lines: Where its insertions start now.
        lines_before: Where they started.
    """

    change: Change
    notes: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    lines_before: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModuleChange:
    """How a module changed since the previous release.

    Attributes:
        path: Its path; empty if it is no longer rewritten.
        path_before: Its path then; empty if it was not rewritten.
        upstream_changed: Whether vLLM's own file changed; None unless both releases rewrite the module.
    """

    path: str
    path_before: str
    upstream_changed: bool | None


@dataclass(frozen=True)
class Changes:
    """All changes since the previous release.

    Attributes:
        since: The previous release; empty if there is none, and then no changes are listed.
        rules: By rule, for those inserted in either release.
        modules: By transform, for those rewritten in either release.
    """

    since: str
    rules: dict[str, RuleChange]
    modules: dict[str, ModuleChange]


def previous_reviewed(release: str, product: Product = UCM) -> str:
    """Return the newest reviewed release before this one; empty if there is none."""
    older = [r for r in product.reviewed() if Version(r) < Version(release)]
    return older[-1] if older else ""


def changes_since_previous(overlay: Overlay) -> Changes:
    """Compare an overlay with that of the previous reviewed release."""
    since = previous_reviewed(overlay.release, overlay.product)
    before = read_lock(since, overlay.product) if since else None
    if before is None:
        return Changes("", {}, {})
    now = make_lock(overlay, before["serial"])
    diff = overlay.product.directory(since) / "changes.diff"
    then = inserted(diff.read_text(encoding="utf-8"), overlay.product.transforms)
    rules = _rules(before, now, then, inserted(overlay_diff(overlay), overlay.product.transforms))
    order = [outcome.rule for outcome in overlay.outcomes]
    known = {rule: rules[rule] for rule in order if rule in rules}
    return Changes(since, known | rules, _modules(before, now))


def _rules(before: Lock, now: Lock, then: dict[str, Inserted], present: dict[str, Inserted]) -> dict[str, RuleChange]:
    was_there, is_there = _forms(before), _forms(now)
    was_not, is_not = _reasons(before), _reasons(now)
    nothing, found = Inserted("", (), ()), {}
    for rule in sorted(was_there.keys() | is_there.keys()):
        old, new = then.get(rule, nothing), present.get(rule, nothing)
        if rule not in was_there:
            found[rule] = RuleChange(Change.NEW, _reason("was", was_not.get(rule)), new.lines)
        elif rule not in is_there:
            found[rule] = RuleChange(Change.GONE, _reason("now", is_not.get(rule)), (), old.lines)
        else:
            found[rule] = _compared(old, new, was_there[rule], is_there[rule])
    return found


def _forms(lock: Lock) -> dict[str, str]:
    """Return the variant of each inserted rule."""
    return {
        rule["id"]: rule.get("variant", "") or "the only form" for module in lock["modules"] for rule in module["rules"]
    }


def _reasons(lock: Lock) -> dict[str, str]:
    """Return why each of the other rules is not inserted."""
    return {entry["rule"]: f"{entry['status']}: {entry['reason']}" for entry in lock["not_inserted"]}


def _reason(when: str, reason: str | None) -> tuple[str, ...]:
    return (f"{when} {reason}",) if reason else ()


def _compared(was: Inserted, now: Inserted, form_before: str, form: str) -> RuleChange:
    moves = [f"from {was.path}"] * (was.path != now.path)
    moves += [f"variant {form}, was {form_before}"] * (form_before != form)
    shifted = was.path == now.path and was.lines != now.lines
    notes = {
        Change.MOVED: "; ".join(moves),
        Change.SHIFTED: shift(was.lines, now.lines) if shifted else "",
        Change.REWORDED: f"it inserted `{' / '.join(was.text)}`" if was.text != now.text else "",
    }
    kind = next((c for c in (Change.REWORDED, Change.MOVED, Change.SHIFTED) if notes[c]), Change.SAME)
    return RuleChange(kind, tuple(filter(None, notes.values())), now.lines, was.lines)


def shift(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    """Describe how far lines moved, or list the old ones."""
    by = {new - old for old, new in zip(before, now, strict=False)}
    if len(before) == len(now) and len(by) == 1:
        distance = by.pop()
        return f"{distance:+d} line{'s' if abs(distance) != 1 else ''}"
    return f"was at {', '.join(map(str, before))}"


def _modules(before: Lock, now: Lock) -> dict[str, ModuleChange]:
    was, is_now = _by_transform(before), _by_transform(now)
    found = {}
    for transform in [*is_now, *(t for t in was if t not in is_now)]:
        old, new = was.get(transform), is_now.get(transform)
        changed = old["upstream_sha256"] != new["upstream_sha256"] if old and new else None
        found[transform] = ModuleChange(new["path"] if new else "", old["path"] if old else "", changed)
    return found


def _by_transform(lock: Lock) -> dict[str, dict[str, Any]]:
    """Return the modules of a lock by the transforms that changed them, which the rules' ids name."""
    return {module["rules"][0]["id"].rpartition(".")[0]: module for module in lock["modules"] if module["rules"]}
