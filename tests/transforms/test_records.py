"""Every rule of every transform in every lock; `nox -s regenerate` compares the locks with the published sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from transforms.engine.report import Status
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import products

if TYPE_CHECKING:
    from transforms.engine.rule import Rule
    from transforms.engine.transform import Transform
    from transforms.pipeline.product import Product

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
    pytest.param(product, release, id=product.named(release))
    for product in products()
    for release in product.reviewed()
]


def expected(transform: Transform, release: str) -> dict[str, Status]:
    """Return the status of each rule that the definitions of a transform imply for a release."""
    if any(release in absent.releases for absent in (*transform.module.absent, *transform.module.unused)):
        return dict.fromkeys((rule.id for rule in transform.all_rules), Status.NOT_APPLICABLE)
    found = {rule.id: _expected(rule, release) for rule in transform.rules}
    imported = Status.APPLIED if Status.APPLIED in found.values() else Status.NOT_APPLICABLE
    return {rule.id: found.get(rule.id, imported) for rule in transform.all_rules}


def _expected(rule: Rule, release: str) -> Status:
    since = UPSTREAMED_SINCE.get(rule.id)
    if since is not None and Version(release) >= Version(since) and _there(rule, release):
        return Status.UPSTREAMED
    return Status.NOT_APPLICABLE if rule.absence(release) else Status.APPLIED


def _there(rule: Rule, release: str) -> bool:
    """Return whether a release has the evidence that it does not need the rule."""
    return not (rule.id == "ascend.recompute_scheduler.init" and Version(release) >= Version("0.27.1rc1"))


@pytest.mark.parametrize(("product", "release"), EACH)
def test_a_lock_says_of_every_rule_what_its_record_says(product: Product, release: str) -> None:
    lock = read_lock(release, product)
    assert lock is not None
    inserted = {rule["id"]: (module["path"], rule) for module in lock["modules"] for rule in module["rules"]}
    said = {one["rule"]: Status(one["status"]) for one in lock["not_inserted"] if one["reason"]}
    said |= dict.fromkeys(inserted, Status.APPLIED)
    assert said == {rule: status for one in product.transforms for rule, status in expected(one, release).items()}
    for transform in product.transforms:
        for rule in transform.all_rules:
            if rule.id in inserted:
                path, found = inserted[rule.id]
                assert path == transform.module.candidates(release)[0]
                assert found["hits"] == rule.expect
                assert release in next(v for v in rule.variants if v.name == found.get("variant", "")).releases


def test_rules_with_an_upstreamed_sign_are_listed() -> None:
    signs = {r.id for product in products() for t in product.transforms for r in t.rules if r.upstreamed}
    assert signs - UPSTREAMED_SINCE.keys() == {"ascend.update_states.update-states"}  # the copy never calls super()
    assert UPSTREAMED_SINCE.keys() <= signs
