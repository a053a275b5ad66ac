"""Find where rules of several owners meet in one overlay. The lock records each place, so a reviewer accepts it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import attachments
from transforms.engine.report import Status

if TYPE_CHECKING:
    from transforms.engine.tree import Path
    from transforms.pipeline.rewrite import Overlay, RewrittenModule


def conflicts(overlay: Overlay) -> list[str]:
    """Return conflicts: rules of two owners on one anchor, and switches that turn off another owner's hooks."""
    return [
        told
        for module in overlay.modules
        if len(_owners(module, overlay)) > 1
        for told in [*_shared_anchors(module, overlay), *_shared_switches(module, overlay)]
    ]


def shared_groups(overlay: Overlay) -> dict[str, set[str]]:
    """Return, for each group, the groups that share a module with it, and so are switched off together."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in overlay.modules:
        groups = {transform.module.group for transform in module.transforms}
        for group in groups:
            found[group] |= groups - {group}
    return found


def _owners(module: RewrittenModule, overlay: Overlay) -> list[str]:
    return list(dict.fromkeys(overlay.product.owner_of(t.id).owner for t in module.transforms))


def _shared_anchors(module: RewrittenModule, overlay: Overlay) -> list[str]:
    """Return the anchors that rules of several owners attach to, with the order of their insertions."""
    upstream = cst.parse_module(module.upstream)
    applied = {outcome.rule: outcome for outcome in module.outcomes if outcome.status is Status.APPLIED}
    at: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for transform in module.transforms:
        for rule in transform.rules:
            if rule.id in applied:
                for place in attachments(upstream, rule, applied[rule.id].variant):
                    at[place].append(rule.id)
    found = []
    for (_, side), rules in sorted(at.items(), key=lambda item: item[1]):
        if len({overlay.product.owner_of(rule).owner for rule in rules}) > 1:
            # An insertion after a statement, or at a start, goes before earlier insertions.
            order = rules if side in {"before", "AtEnd"} else rules[::-1]
            found.append(f"{module.path}: one anchor has {' and '.join(rules)}; their order there: {', '.join(order)}")
    return found


def _shared_switches(module: RewrittenModule, overlay: Overlay) -> list[str]:
    groups = {t.module.group: overlay.product.owner_of(t.id).title for t in module.transforms}
    return [
        f"{module.path}: switching {group} off also takes the hooks of {', '.join(others)} along"
        for group, owner in groups.items()
        if (others := sorted({title for title in groups.values() if title != owner}))
    ]
