"""Drift for a program: `drift --json`.

schema     1
ok         whether every rule applies and every place of the census is known, in every release asked for; the exit
           code says the same
releases   a list, one object per release:
  release    as named, or as the sources state it
  reviewed   whether overlays/ has a lock for it
  since      the reviewed release that it is compared with; "" for none
  upstream   {kind, name, sha256} of what the sources were read from; null if they could not be
  ok         whether an overlay can be built
  problem    what the checks of the rewritten modules object to, or why there are no sources; ""
  rules      a list in the order of the transforms:
    id, transform
    status      applied, present, missing, ambiguous, forbidden, upstreamed, not applicable
    path        the module; "" if the release has none
    scope, variant, hits    where the anchor was sought, which form fitted, how often it matched
    lines       where the insertions start in the rewritten module
    detail      the reason, for every status but applied
    candidates  [{line, code}]: the nearest places, for a failure
    change      null, or since the release before: {kind, notes, lines_before}; the kinds are new, gone,
                other text, other place, other line, unchanged
  census     a list of every place that is of a kind that rules hook:
    census, path, name    its kind, and the class or function that holds it
    count, hooked         how many it holds, and how many of them rules hook
    consequence, reason   what is said of the others; "" where there are none, or nobody has said anything
  around     a list: {rule, name, name_before, added, removed}: the lines that changed, since the release before, in the
             function around the rule
  modules    a list: {transform, path, path_before, upstream_changed}; a path is "" where the module is not
             rewritten, and upstream_changed then null
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.pipeline.census import Site
    from transforms.pipeline.drift.model import Drift, RuleDrift

SCHEMA = 1


def as_data(drifts: Sequence[Drift]) -> dict[str, Any]:
    """The drift of some releases as the module's docstring describes it."""
    return {
        "schema": SCHEMA,
        "ok": all(drift.passes for drift in drifts),
        "releases": [_release(drift) for drift in drifts],
    }


def _release(drift: Drift) -> dict[str, Any]:
    upstream = drift.artefact
    return {
        "release": drift.release,
        "reviewed": drift.reviewed,
        "since": drift.since,
        "upstream": upstream and {"kind": upstream.kind, "name": upstream.name, "sha256": upstream.sha256},
        "ok": drift.applies,
        "problem": drift.problem,
        "rules": [_rule(rule) for rule in drift.rules],
        "census": [_site(site) for site in drift.census],
        "around": [
            {
                "rule": rule,
                "name": around.name,
                "name_before": around.name_before,
                "added": around.added,
                "removed": around.removed,
            }
            for rule, around in drift.around.rules.items()
        ],
        "modules": [
            {
                "transform": transform,
                "path": change.path,
                "path_before": change.path_before,
                "upstream_changed": change.upstream_changed,
            }
            for transform, change in drift.modules.items()
        ],
    }


def _site(site: Site) -> dict[str, Any]:
    return {
        "census": site.census.id,
        "path": site.path,
        "name": site.name,
        "count": site.count,
        "hooked": site.hooked,
        "consequence": site.said.consequence.value if site.said else "",
        "reason": site.said.reason if site.said else "",
    }


def _rule(rule: RuleDrift) -> dict[str, Any]:
    outcome, change = rule.outcome, rule.change
    return {
        "id": outcome.rule,
        "transform": rule.transform,
        "status": outcome.status.value,
        "path": outcome.path,
        "scope": outcome.scope,
        "variant": outcome.variant,
        "hits": outcome.hits,
        "lines": list(rule.lines),
        "detail": outcome.detail,
        "candidates": [{"line": c.line, "code": c.code} for c in outcome.candidates],
        "change": change
        and {"kind": change.change.value, "notes": list(change.notes), "lines_before": list(change.lines_before)},
    }
