"""Every rule names tests that exist, and mutants insert nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
import pytest

from tests.mutants import ROOT, mutants, mutated
from transforms.engine.apply import apply_rule
from transforms.pipeline.product import products

if TYPE_CHECKING:
    from transforms.engine.transform import Transform

EACH = [
    pytest.param(rule.id, transform, id=rule.id)
    for product in products()
    for transform in product.transforms
    for rule in transform.rules
]


@pytest.mark.parametrize(("rule", "transform"), EACH)
def test_each_rule_names_an_end_to_end_test_that_exists(rule: str, transform: Transform) -> None:
    file, _, name = transform.engine_test(rule).partition("[")[0].partition("::")
    assert bool(file) is not bool(transform.not_run)
    if file:
        assert not name or f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("product", products(), ids=lambda one: one.module)
def test_each_rule_of_the_newest_release_has_a_case_of_its_form(product: object) -> None:
    for own in products():
        if own == product:
            assert [one.rule.id for one in mutants(own, own.reviewed()[-1]) if not one.tests] == []


def test_a_mutant_inserts_nothing_and_ends() -> None:
    transform = next(t for t in products()[0].transforms if t.id == "scheduler")
    case = next(c for c in transform.cases if c.rule == "scheduler.freed")
    rule = next(r for r in transform.rules if r.id == case.rule)
    with mutated(rule):
        made = apply_rule(cst.parse_module(case.before), rule, "", case.release)[0].code
    assert made == case.after.replace("_ucm_hooks.request_freed(self, request)", "pass")
    assert apply_rule(cst.parse_module(case.before), rule, "", case.release)[0].code == case.after
