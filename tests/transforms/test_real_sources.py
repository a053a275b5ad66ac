"""Every rule of every transform on the published sources of every reviewed release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from tests.releases import ASCEND, REVIEWED
from tests.transforms.upstream import parsed
from transforms.ascend.registry import REGISTRY as ASCEND_REGISTRY
from transforms.engine.apply import apply_rules
from transforms.engine.report import Status
from transforms.pipeline.product import UCM, compose, products

if TYPE_CHECKING:
    from transforms.engine.rule import Rule
    from transforms.engine.transform import Transform

#: The first release that no longer needs a rule with an `upstreamed` sign.
UPSTREAMED_SINCE = {
    "block_table.clear-row": "0.19.1",
    "block_table.clear-row-groups": "0.19.1",
    "ascend.block_table.clear-row": "0.23.0",
    "ascend.block_table.clear-row-groups": "0.23.0",
    "ascend.model_runner.update-states": "0.23.0",
    "ascend.recompute_scheduler.init": "0.13.0",
    "ascend.recompute_scheduler.sparse-meta": "0.13.0",
}
EACH = [
    pytest.param(transform, release, id=f"{release}-{transform.id}")
    for product, releases in ((UCM, REVIEWED), (compose(ASCEND_REGISTRY), ASCEND))
    for release in releases
    for transform in product.transforms
]


def expected(rule: Rule, release: str) -> Status:
    """Return the status that a rule's definition implies for a release."""
    since = UPSTREAMED_SINCE.get(rule.id)
    if since is not None and Version(release) >= Version(since) and _there(rule, release):
        return Status.UPSTREAMED
    return Status.NOT_APPLICABLE if rule.absence(release) else Status.APPLIED


def _there(rule: Rule, release: str) -> bool:
    """Return whether a release has the evidence that it does not need the rule."""
    return not (rule.id == "ascend.recompute_scheduler.init" and Version(release) >= Version("0.30.0rc1"))


@pytest.mark.parametrize(("transform", "release"), EACH)
def test_every_rule_does_what_its_record_says(transform: Transform, release: str) -> None:
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
    signs = {r.id for product in products() for t in product.transforms for r in t.rules if r.upstreamed}
    assert signs - UPSTREAMED_SINCE.keys() == {"ascend.update_states.update-states"}  # the copy never calls super()
    assert UPSTREAMED_SINCE.keys() <= signs
