"""Every case of every transform: the rule rewrites it as expected, and refuses it with fewer or more anchors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
import pytest

from tests.transforms.mutations import deleted, doubled
from transforms.engine.apply import apply_rule
from transforms.engine.report import Outcome, Status
from transforms.pipeline.product import products

if TYPE_CHECKING:
    from transforms.engine.cases import Case
    from transforms.engine.rule import Rule
    from transforms.engine.transform import Transform

TRANSFORMS = [transform for product in products() for transform in product.transforms]
CASES = [
    pytest.param(transform, case, id=f"{case.rule}-{case.release}")
    for transform in TRANSFORMS
    for case in transform.cases
]


def rule_of(transform: Transform, case: Case) -> Rule:
    return next(rule for rule in transform.rules if rule.id == case.rule)


def tried(rule: Rule, code: str, release: str) -> tuple[str, Outcome]:
    module, outcome = apply_rule(cst.parse_module(code), rule, "m.py", release)
    return module.code, outcome


@pytest.mark.parametrize(("transform", "case"), CASES)
def test_before_becomes_after(transform: Transform, case: Case) -> None:
    rule = rule_of(transform, case)
    result, outcome = tried(rule, case.before, case.release)
    assert outcome.status is Status.APPLIED, outcome.describe()
    assert result == case.after
    compile(result, "m.py", "exec", dont_inherit=True)


@pytest.mark.parametrize(("transform", "case"), CASES)
def test_a_second_run_changes_nothing(transform: Transform, case: Case) -> None:
    result, outcome = tried(rule_of(transform, case), case.after, case.release)
    assert (result, outcome.status) == (case.after, Status.PRESENT)


@pytest.mark.parametrize(("transform", "case"), CASES)
def test_without_its_anchor_it_is_missing(transform: Transform, case: Case) -> None:
    rule = rule_of(transform, case)
    code = deleted(cst.parse_module(case.before), rule, case.release).code
    result, outcome = tried(rule, code, case.release)
    assert result == code
    assert outcome.status in {Status.MISSING, Status.ENDED}


@pytest.mark.parametrize(("transform", "case"), CASES)
def test_with_its_scope_doubled_it_is_ambiguous(transform: Transform, case: Case) -> None:
    rule = rule_of(transform, case)
    code = doubled(cst.parse_module(case.before), rule, case.release).code
    result, outcome = tried(rule, code, case.release)
    assert (result, outcome.status) == (code, Status.AMBIGUOUS)


def test_every_rule_has_a_case() -> None:
    shown = {case.rule for transform in TRANSFORMS for case in transform.cases}
    assert shown == {rule.id for transform in TRANSFORMS for rule in transform.rules}


def test_ids_are_used_once() -> None:
    ids = [rule.id for transform in TRANSFORMS for rule in transform.all_rules]
    assert len(ids) == len(set(ids))
    assert len({transform.id for transform in TRANSFORMS}) == len(TRANSFORMS)


def test_what_a_transform_needs_is_there() -> None:
    groups = {transform.module.group for transform in TRANSFORMS}
    assert {need for transform in TRANSFORMS for need in transform.needs} <= groups
