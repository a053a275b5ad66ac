"""The outcome of each rule, and the details that help to fix a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
import pytest

from transforms.engine.apply import apply_rule, apply_rules
from transforms.engine.edits import AtEnd, AtStart, after, before
from transforms.engine.members import Keyword, Method
from transforms.engine.releases import Absent, Releases
from transforms.engine.report import Candidate, Outcome, Status
from transforms.engine.rule import Rule, Upstreamed, Variant, rule
from transforms.engine.scope import Scope

if TYPE_CHECKING:
    from transforms.engine.edits import Edit

CODE = """\
# Licence

class Engine:
    def step(self, request):
        # the batch comes first
        batch = self.plan(request)
        if batch:
            self.run(batch, eager=True)
        return batch

    def stop(self):
        self.run(None)
"""
STEP = Scope("Engine.step")
RUN = after("self.run(batch, ...)", "hook(batch)")


def tried(rule: Rule, code: str = CODE, release: str = "1.0") -> tuple[str, Outcome]:
    module, outcome = apply_rule(cst.parse_module(code), rule, "pkg/engine.py", release)
    assert outcome.rule == rule.id
    assert outcome.path == "pkg/engine.py"
    return module.code, outcome


def unchanged(rule: Rule, code: str = CODE, release: str = "1.0") -> Outcome:
    result, outcome = tried(rule, code, release)
    assert result == code
    return outcome


def test_applied() -> None:
    result, outcome = tried(rule("t.r", STEP, RUN))
    assert outcome == Outcome("t.r", Status.APPLIED, "pkg/engine.py", "Engine.step", hits=1)
    assert result == CODE.replace("eager=True)\n", "eager=True)\n            hook(batch)  # ucm: t.r\n")
    assert not outcome.status.failed


def test_present() -> None:
    result, _ = tried(rule("t.r", STEP, RUN))
    outcome = unchanged(rule("t.r", STEP, RUN), result)
    assert (outcome.status, outcome.hits, outcome.scope) == (Status.PRESENT, 1, "Engine.step")


def test_the_mark_of_another_rule_is_not_ours() -> None:
    result, _ = tried(rule("t.other", STEP, RUN))
    assert tried(rule("t.r", STEP, RUN), result)[1].status is Status.APPLIED


def test_our_mark_on_other_code_is_not_ours() -> None:
    result, _ = tried(rule("t.r", STEP, after("self.run(batch, ...)", "older_hook(batch)")))
    assert tried(rule("t.r", STEP, RUN), result)[1].status is Status.APPLIED


def test_its_own_insertion_twice_is_ambiguous() -> None:
    result, _ = tried(rule("t.r", STEP, RUN))
    line = "            hook(batch)  # ucm: t.r\n"
    outcome = unchanged(rule("t.r", STEP, RUN), result.replace(line, line * 2))
    assert outcome.status is Status.AMBIGUOUS
    assert outcome.detail == "its insertion is already here 2 times; 1 expected"


def test_missing_anchor_shows_the_nearest_statements() -> None:
    outcome = unchanged(rule("t.r", STEP, after("self.run(batch, lazy=True)", "hook()")))
    assert outcome.status is Status.MISSING
    assert outcome.detail == "`self.run(batch, lazy=True)` matches 0 times; 1 expected"
    assert outcome.candidates[0] == Candidate(8, "self.run(batch, eager=True)")
    assert outcome.describe().splitlines()[:3] == [
        "missing: t.r in pkg/engine.py (Engine.step)",
        "    `self.run(batch, lazy=True)` matches 0 times; 1 expected",
        "    nearest: line 8: self.run(batch, eager=True)",
    ]
    assert outcome.status.failed


def test_a_comment_before_a_statement_does_not_hide_it() -> None:
    outcome = unchanged(rule("t.r", STEP, after("batch = self.schedule(request)", "hook()")))
    assert outcome.candidates[0] == Candidate(6, "batch = self.plan(request)")


def test_candidates_lie_in_the_whole_module_if_the_scope_has_none() -> None:
    outcome = unchanged(rule("t.r", Scope("Engine.step"), after("self.run(None, None)", "hook()")), CODE)
    assert Candidate(8, "self.run(batch, eager=True)") in outcome.candidates
    code = "def f():\n    pass\n\ndef g():\n    launch(rockets=3)\n"
    outcome = unchanged(rule("t.r", Scope("f"), after("launch(rockets=4)", "hook()")), code)
    assert outcome.candidates == (Candidate(5, "launch(rockets=3)"),)


def test_missing_without_anything_like_it_has_no_candidates() -> None:
    outcome = unchanged(rule("t.r", STEP, after("zzzz.qqqq[0]", "hook()")))
    assert (outcome.status, outcome.candidates) == (Status.MISSING, ())


def test_missing_scope_shows_the_nearest_definitions() -> None:
    outcome = unchanged(rule("t.r", Scope("Engine.steps"), RUN))
    assert outcome.status is Status.MISSING
    assert outcome.detail == "there is no Engine.steps"
    assert outcome.candidates[0] == Candidate(4, "def step(self, request):")


def test_nearest_definitions_are_those_of_the_right_class() -> None:
    code = "class A:\n    def go(self): pass\n\nclass Wagon:\n    @one\n    # two\n    def go(self): pass\n"
    outcome = unchanged(rule("t.r", Scope("Wagons.go"), RUN), code)
    assert outcome.candidates[0] == Candidate(7, "def go(self): pass")


def test_missing_loop_says_which() -> None:
    outcome = unchanged(rule("t.r", Scope("Engine.step", loop_with="self.run(...)"), RUN))
    assert outcome.detail == "there is no Engine.step, the loop with `self.run(...)`"


def test_too_few_matches_are_missing() -> None:
    outcome = unchanged(rule("t.r", STEP, RUN, expect=2))
    assert (outcome.status, outcome.hits) == (Status.MISSING, 1)
    assert outcome.detail.endswith("matches 1 times; 2 expected")


def test_an_anchor_twice_is_ambiguous() -> None:
    outcome = unchanged(rule("t.r", Scope("Engine"), before("self.run(...)", "hook()")))
    assert outcome.status is Status.AMBIGUOUS
    assert outcome.detail == "`self.run(...)` matches 2 times; 1 expected"
    assert outcome.candidates == (Candidate(8, "self.run(batch, eager=True)"), Candidate(12, "self.run(None)"))
    assert outcome.status.failed


def test_a_scope_twice_is_ambiguous() -> None:
    code = "if new:\n    def f(): a()\nelse:\n    @old\n    def f(): a()\n"
    outcome = unchanged(rule("t.r", Scope("f"), AtStart("hook()")), code)
    assert outcome.status is Status.AMBIGUOUS
    assert outcome.detail == "2 places match the scope f; exactly one must"
    assert outcome.candidates == (Candidate(2, "def f(): a()"), Candidate(5, "def f(): a()"))


def _variants(first: Releases, second: Releases) -> Rule:
    one = Variant(STEP, before("batch = self.plan(request)", "hook()"), first, "plan")
    other = Variant(STEP, before("self.run(batch, ...)", "hook(1)"), second, "run")
    return Rule("t.r", (one, other))


def test_two_variants_that_fit_are_ambiguous() -> None:
    outcome = unchanged(_variants(Releases(before="1"), Releases(before="1")))
    assert outcome.status is Status.AMBIGUOUS
    assert outcome.detail == "2 variants match (plan, run); exactly one must"
    assert [c.line for c in outcome.candidates] == [6, 8]
    assert unchanged(_variants(Releases(), Releases())).status is Status.AMBIGUOUS


def test_the_release_decides_between_two_variants_that_fit() -> None:
    result, outcome = tried(_variants(Releases(before="1"), Releases(since="1")))
    assert (outcome.status, outcome.variant) == (Status.APPLIED, "run")
    assert "hook(1)  # ucm: t.r" in result


def test_a_variant_is_tried_outside_its_releases() -> None:
    given = Rule("t.r", (Variant(STEP, RUN, Releases(before="0.1"), "old"), Variant(Scope("No"), RUN, name="new")))
    assert tried(given)[1].variant == "old"


def test_one_code_in_two_variants_is_present_once() -> None:
    def variant(anchor: str, name: str) -> Variant:
        return Variant(STEP, before(anchor, "hook()"), Releases(before="0.1"), name)

    given = Rule("t.r", (variant("self.run(batch, ...)", "run"), variant("self.walk()", "walk")))
    result, outcome = tried(given)
    assert outcome.variant == "run"
    assert unchanged(given, result).status is Status.PRESENT


def test_the_variant_of_the_release_is_the_one_that_is_reported() -> None:
    given = Rule(
        "t.r",
        (
            Variant(STEP, before("self.run(x)", "hook()"), Releases(before="1"), "old"),
            Variant(STEP, before("self.run(y)", "hook()"), Releases(since="1"), "new"),
        ),
    )
    outcome = unchanged(given)
    assert (outcome.status, outcome.variant) == (Status.MISSING, "new")
    assert "`self.run(y)`" in outcome.detail


def test_forbidden() -> None:
    outcome = unchanged(rule("t.r", STEP, RUN, never=("self.sleep()", "return _")))
    assert outcome.status is Status.FORBIDDEN
    assert outcome.detail == "`return _` occurs here, and must not"
    assert outcome.candidates == (Candidate(9, "return batch"),)
    assert outcome.status.failed


def test_what_is_forbidden_elsewhere_is_not_here() -> None:
    assert tried(rule("t.r", Scope("Engine.stop"), AtEnd("hook()"), never=("return _",)))[1].status is Status.APPLIED


def test_an_anchor_where_nothing_can_stand_is_missing_and_says_why() -> None:
    outcome = unchanged(rule("t.r", STEP, after("return batch", "hook()")))
    assert outcome.status is Status.MISSING
    assert outcome.detail == "nothing can be inserted at `return batch`: control never gets past it"
    assert outcome.candidates == (Candidate(9, "return batch"),)


NATIVE = Upstreamed(Scope("Engine.stop"), "Engine.stop is there from 1.0")


def test_upstreamed_by_a_definition() -> None:
    given = Rule("t.r", (Variant(Scope("Engine"), Method("step", "def stop(self):\n    hook()\n")),), upstreamed=NATIVE)
    outcome = unchanged(given)
    assert (outcome.status, outcome.detail) == (Status.UPSTREAMED, NATIVE.note)
    assert not outcome.status.failed


def test_its_own_definition_is_not_upstream_s() -> None:
    given = Rule("t.r", (Variant(Scope("Engine"), Method("step", "def stop(self):\n    hook()\n")),), upstreamed=NATIVE)
    result, outcome = tried(given, CODE.partition("    def stop")[0])
    assert outcome.status is Status.APPLIED
    assert unchanged(given, result).status is Status.PRESENT


def test_a_definition_that_another_rule_changed_is_upstream_s() -> None:
    changed, _ = tried(rule("t.other", Scope("Engine.stop"), AtStart("hook()")))
    given = Rule("t.r", (Variant(Scope("Engine"), Method("step", "def stop(self):\n    hook()\n")),), upstreamed=NATIVE)
    assert unchanged(given, changed).status is Status.UPSTREAMED


def test_upstreamed_by_a_pattern() -> None:
    given = Rule("t.r", (Variant(STEP, RUN),), upstreamed=Upstreamed(STEP, "it is eager", "self.run(..., eager=True)"))
    assert unchanged(given).status is Status.UPSTREAMED
    assert tried(given, CODE.replace("True", "False"))[1].status is Status.APPLIED


GONE = (Absent(Releases(since="2"), "the engine runs elsewhere"),)


@pytest.mark.parametrize("scope", ["Engine.walk", "Engine.stop", "Engine.step"])
def test_not_applicable_where_the_release_is_known_to_lack_it(scope: str) -> None:
    edit = after("return batch", "hook()")
    outcome = unchanged(rule("t.r", Scope(scope), edit, absent=GONE), release="2.1")
    assert (outcome.status, outcome.detail) == (Status.NOT_APPLICABLE, "the engine runs elsewhere")
    assert not outcome.status.failed
    assert unchanged(rule("t.r", Scope(scope), edit, absent=GONE), release="1.9").status is Status.MISSING


def test_an_anchor_that_is_there_counts_more_than_the_record() -> None:
    assert tried(rule("t.r", STEP, RUN, absent=GONE), release="2.1")[1].status is Status.APPLIED


def test_an_ambiguous_anchor_counts_more_than_the_record() -> None:
    given = rule("t.r", Scope("Engine"), before("self.run(...)", "hook()"), absent=GONE)
    assert unchanged(given, release="2.1").status is Status.AMBIGUOUS


def test_rules_build_on_each_other() -> None:
    rules = [
        rule("t.import", Scope(), AtStart("import hooks")),
        rule("t.one", STEP, AtStart("hooks.one()")),
        rule("t.two", STEP, after("hooks.one()", "hooks.two()")),
        rule("t.three", STEP, Keyword("self.run(...)", "hook", "hooks.three")),
    ]
    module, outcomes = apply_rules(cst.parse_module(CODE), rules, "pkg/engine.py", "1.0")
    assert [o.status for o in outcomes] == [Status.APPLIED] * 4
    assert module.code == CODE.replace("class", "import hooks  # ucm: t.import\nclass", 1).replace(
        "        # the",
        "        hooks.one()  # ucm: t.one\n        hooks.two()  # ucm: t.two\n        # the",
    ).replace("eager=True", "eager=True, hook=hooks.three")


def test_candidates_have_the_line_numbers_of_the_published_file() -> None:
    rules = [rule("t.import", Scope(), AtStart("import hooks")), rule("t.r", STEP, after("self.run(bat)", "hook()"))]
    _, outcomes = apply_rules(cst.parse_module(CODE), rules, "pkg/engine.py", "1.0")
    assert outcomes[1].candidates[0] == Candidate(8, "self.run(batch, eager=True)")


def test_a_failed_rule_leaves_the_others_alone() -> None:
    rules = [rule("t.bad", STEP, after("nothing()", "hook()")), rule("t.r", STEP, RUN)]
    module, outcomes = apply_rules(cst.parse_module(CODE), rules, "pkg/engine.py", "1.0")
    assert [o.status for o in outcomes] == [Status.MISSING, Status.APPLIED]
    assert "hook(batch)  # ucm: t.r" in module.code


def test_an_anchor_that_an_earlier_rule_doubled_is_never_called_applied() -> None:
    rules = [rule("t.one", STEP, AtStart("self.run(batch)")), rule("t.two", STEP, RUN)]
    module, outcomes = apply_rules(cst.parse_module(CODE), rules, "pkg/engine.py", "1.0")
    assert [o.status for o in outcomes] == [Status.APPLIED, Status.AMBIGUOUS]
    assert "t.two" not in module.code


@pytest.mark.parametrize("body", ["return 1\n    g()", "if a:\n        return\n    else:\n        return 2\n    g()"])
@pytest.mark.parametrize("edit", [before("g()", "h()"), Keyword("g(...)", "x", "h()")])
def test_an_anchor_that_control_never_reaches(body: str, edit: Edit) -> None:
    module = cst.parse_module(f"def f(a):\n    {body}\n")
    same, outcome = apply_rule(module, rule("t.r", Scope("f"), edit), "p.py", "1.0")
    assert outcome.status is Status.MISSING
    assert "control never reaches it" in outcome.detail
    assert same is module
