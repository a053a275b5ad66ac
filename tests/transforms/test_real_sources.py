"""Every rule of every transform on the published sources of every reviewed release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.releases import REVIEWED
from tests.transforms.upstream import parsed
from transforms.engine.apply import apply_rules
from transforms.engine.report import Status
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from transforms.engine.rule import Rule
    from transforms.engine.transform import Transform

#: The first release that has of itself what a rule with an `upstreamed` sign inserts.
UPSTREAMED_SINCE = {"block_table.clear-row": "0.19.1", "block_table.clear-row-groups": "0.19.1"}


def expected(rule: Rule, release: str) -> Status:
    """What a rule's own record says of a release."""
    if rule.absence(release):
        return Status.NOT_APPLICABLE
    since = UPSTREAMED_SINCE.get(rule.id)
    upstreamed = since is not None and REVIEWED.index(release) >= REVIEWED.index(since)
    return Status.UPSTREAMED if upstreamed else Status.APPLIED


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.id)
@pytest.mark.parametrize("release", REVIEWED)
def test_every_rule_does_what_its_record_says(release: str, transform: Transform) -> None:
    found = parsed(transform, release)
    if found is None:
        assert any(release in absent.releases for absent in transform.module.absent)
        return
    path, module = found
    assert path == transform.module.candidates(release)[0]
    changed, outcomes = apply_rules(module, transform.all_rules, path, release)
    assert {o.rule: o.status for o in outcomes} == {r.id: expected(r, release) for r in transform.all_rules}, "\n".join(
        outcome.describe() for outcome in outcomes
    )
    for rule, outcome in zip(transform.all_rules, outcomes, strict=True):
        if outcome.status is Status.APPLIED:
            assert outcome.hits == rule.expect
            assert release in next(v for v in rule.variants if v.name == outcome.variant).releases
    compile(changed.bytes, path, "exec", dont_inherit=True)

    again, repeated = apply_rules(changed, transform.all_rules, path, release)
    assert again.bytes == changed.bytes
    second = {Status.APPLIED: Status.PRESENT}
    assert [o.status for o in repeated] == [second.get(o.status, o.status) for o in outcomes]


def test_rules_with_an_upstreamed_sign_are_listed() -> None:
    assert {r.id for t in TRANSFORMS for r in t.rules if r.upstreamed} == UPSTREAMED_SINCE.keys()
