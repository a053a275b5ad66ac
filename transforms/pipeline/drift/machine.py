"""The JSON format of drift: `drift --json`.

schema     1
ok         whether every rule applies and every place of the census is classified, in all requested releases; the exit
           code says the same
releases   a list, one object per release:
  release    the release as requested, or as the sources state it
  reviewed   whether overlays/ has a lock for it
  since      the reviewed release that it is compared with; "" for none
  upstream   {kind, name, sha256} of the artefact that the sources were read from; null if they could not be read
  ok         whether an overlay can be built
  problem    why the checks of the rewritten modules failed, or why there are no sources; ""
  rules      a list in the order of the transforms:
    id, transform
    status      applied, present, missing, ended, ambiguous, forbidden, upstreamed, not applicable
    path        the module; "" if the release has none
    scope, variant, hits    the scope of the anchor, the variant that matched, and its number of matches
    lines       where the insertions start in the rewritten module
    detail      the reason, for every status but applied
    candidates  [{line, code}]: the nearest places, for a failure
    change      null, or the change since the release before: {kind, notes, lines_before}; the kinds are new, gone,
                other text, other place, other line, unchanged
  census     a list of all places of the kinds that rules hook:
    census, path, name    the kind of place, and the class or function that contains it
    count, hooked         how many such places it contains, and how many of them rules hook
    consequence, reason   the classification of the others; "" if there are none, or if they are not classified
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
    """Return the drift of some releases in the format of the module's docstring."""
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
