"""Every rule names tests that exist, and mutants insert nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import libcst as cst
import pytest

from tests.e2e.processes import LATE
from tests.mutants import EARLY_MUTANT, MUTANT, ROOT, Outcomes, mutants, mutated, switchable, variable
from transforms.engine.apply import apply_rule
from transforms.engine.edits import after
from transforms.engine.members import Field, Keyword, Method
from transforms.engine.report import Status
from transforms.engine.rule import rule
from transforms.engine.scope import Scope
from transforms.pipeline.product import products

if TYPE_CHECKING:
    from transforms.engine.edits import Edit
    from transforms.engine.transform import Transform

EACH = [
    pytest.param(one.id, transform, id=one.id)
    for product in products()
    for transform in product.transforms
    for one in transform.rules
]


@pytest.mark.parametrize(("rule_id", "transform"), EACH)
def test_each_rule_names_an_end_to_end_test_that_exists(rule_id: str, transform: Transform) -> None:
    file, _, name = transform.engine_test(rule_id).partition("[")[0].partition("::")
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
    freed = next(r for r in transform.rules if r.id == case.rule)
    with mutated(freed):
        made = apply_rule(cst.parse_module(case.before), freed, "", case.release)[0].code
    assert made == case.after.replace("_ucm_hooks.request_freed(self, request)", "pass")
    assert apply_rule(cst.parse_module(case.before), freed, "", case.release)[0].code == case.after


#: Prints what each case of a rule becomes.
PREPARED = """\
import libcst as cst
from tests import mutants
mutants.switch_rules()
for transform in mutants.products()[0].transforms:
    rules = {rule.id: rule for rule in transform.rules}
    for case in transform.cases:
        made, found = mutants.apply_rule(cst.parse_module(case.before), rules[case.rule], "", case.release)
        print(case.rule, found.status.name, mutants.MUTANT in made.code)
"""


def test_the_rules_of_engines_can_be_switched_off() -> None:
    """Until the process ends that builds their overlays."""
    command = [sys.executable, "-c", PREPARED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert {rule for rule, *_ in told} == {rule.id for one in products()[0].transforms for rule in one.rules}
    assert {tuple(rest) for _, *rest in told} == {(Status.APPLIED.name, "True")}


SOURCE = """\
class Owner:
    known: int = 0

    def first(self):
        return []


def told(more=0):
    return more


def run():
    found = []
    found.append(told())
    return found, sorted(Owner.__annotations__), getattr(Owner, "second", Owner.first)(Owner())
"""
#: Each kind of edit, its scope, and what `run` returns with it and without.
EDITS: dict[str, tuple[Edit, str, Any, Any]] = {
    "statements": (
        after("found = []", "found.append(1)\nfound.append(2)"),
        "run",
        ([1, 2, 0], ["known"], []),
        ([0], ["known"], []),
    ),
    "keyword": (Keyword("told()", "more", "3"), "run", ([3], ["known"], []), ([None], ["known"], [])),
    "field": (Field("field: int = 4"), "Owner", ([0], ["field", "known"], []), ([0], ["known"], [])),
    "method": (
        Method("first", "def second(self):\n    return [5]"),
        "Owner",
        ([0], ["known"], [5]),
        ([0], ["known"], None),
    ),
}


def test_it_is_told_why_a_test_failed() -> None:
    """Not every mutant that is killed was killed by the rule that it lacks."""
    seen = Outcomes()
    where = "a.py::test", ("a.py", 0, "test"), dict[str, Any]()
    seen.pytest_runtest_logreport(pytest.TestReport(*where, "passed", None, "setup"))
    error = "    told()\nE   OSError: no room\n\na.py:1: OSError"
    seen.pytest_runtest_logreport(pytest.TestReport(*where, "failed", error, "call"))
    seen.pytest_runtest_logreport(pytest.TestReport(*where, "failed", "E   another", "teardown"))
    assert (seen.failed, seen.why) == ({"a.py::test"}, "OSError: no room")


def test_engines_share_an_import_of_vllm_unless_it_runs_the_mutant() -> None:
    assert MUTANT in LATE
    assert EARLY_MUTANT not in LATE


@pytest.mark.parametrize("kind", EDITS)
def test_what_is_switched_off_does_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    edit, scope, on, off = EDITS[kind]
    switched = rule(f"a.{kind}", Scope(scope), switchable(edit, f"a.{kind}"))
    made, found = apply_rule(cst.parse_module(SOURCE), switched, "", "1.0")
    assert found.status is Status.APPLIED
    for named, wanted in (("", on), ("a.other", on), (f"a.{kind}", off)):
        monkeypatch.setenv(variable(edit), named)
        names: dict[str, Any] = {}
        exec(made.code, names)  # noqa: S102 - ours
        assert names["run"]() == wanted
