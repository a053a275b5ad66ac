"""Invalid definitions of rules, transforms and governance records are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from transforms.engine.cases import Case
from transforms.engine.edits import AtEnd, AtStart, after, before
from transforms.engine.errors import OverlayError, RuleDefinitionError
from transforms.engine.governance import QUESTIONS, Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Keyword
from transforms.engine.releases import ALL_RELEASES, Absent, Releases
from transforms.engine.report import Candidate, Outcome, Status
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import DEFAULT_SEAM, EngineTest, Transform

WORDS = "six words that answer the question"
RECORD = Governance(
    why=WORDS,
    how=WORDS,
    processes=(Process.WORKER,),
    upstream=Upstream(UpstreamStatus.NOT_SUBMITTED, WORDS, "https://example.org/1"),
    removal=WORDS,
)
MODULE = Module(
    "t", "t", (ModulePath("pkg/new.py", Releases(since="2")), ModulePath("pkg/old.py", Releases(before="2")))
)


def _rule(id_: str, code: str = "_ucm_hooks.go()") -> Rule:
    return rule(id_, Scope("f"), AtEnd(code))


def _transform(*rules: Rule, cases: tuple[str, ...] | None = None, record: Governance = RECORD) -> Transform:
    shown = cases if cases is not None else tuple(r.id for r in rules)
    return Transform("t", MODULE, record, rules, tuple(Case(r, "a", "b", "1") for r in shown), not_counted=WORDS)


class TestRule:
    def test_needs_a_variant(self) -> None:
        with pytest.raises(RuleDefinitionError, match="at least one variant"):
            Rule("t.r", ())

    def test_needs_a_match(self) -> None:
        with pytest.raises(RuleDefinitionError, match="one match"):
            rule("t.r", Scope("f"), AtEnd("a()"), expect=0)

    def test_its_variants_have_different_names(self) -> None:
        variant = Variant(Scope("f"), AtEnd("a()"), name="x")
        with pytest.raises(RuleDefinitionError, match="one name") as caught:
            Rule("t.r", (variant, variant))
        assert "t.r" in str(caught.value)

    def test_says_why_it_is_absent(self) -> None:
        absent = (Absent(Releases("1", "2"), "first"), Absent(Releases(since="3"), "second"))
        given = rule("t.r", Scope("f"), AtEnd("a()"), absent=absent)
        assert [given.absence(r) for r in ("0.9", "1.5", "2", "3.1")] == [None, "first", None, "second"]

    @pytest.mark.parametrize(
        ("code", "problem"),
        [
            ("return 1", "unconditionally"),
            ("raise ValueError(self)", "unconditionally"),
            ("if self.a:\n    return 1\nelse:\n    raise ValueError", "unconditionally"),
            ("while True:\n    self.a()", "unconditionally"),
            ("with self.lock:\n    return 1", "unconditionally"),
            ("self.a = yield", "a generator"),
            ("if self.a:\n    return 1", r"\(return\); its `diverts` is too short"),
            ("for x in self.a:\n    x()", r"\(for\); its `diverts` is too short"),
            ("assert self.a", r"\(assert\); its `diverts` is too short"),
            ("assert False", "unconditionally"),
            ("while 1:\n    self.a()", "unconditionally"),
            ("if self.a:\n    raise ValueError", r"\(raise\); its `diverts` is too short"),
        ],
    )
    def test_keeps_control_from_nothing_without_saying_why(self, code: str, problem: str) -> None:
        for edit in (AtStart(code), AtEnd(code), before("x", code), after("x", code)):
            with pytest.raises(RuleDefinitionError, match=problem) as caught:
                rule("t.r", Scope("f"), edit)
            assert "t.r" in str(caught.value)

    def test_may_leave_early_if_it_says_why(self) -> None:
        rule("t.r", Scope("f"), AtStart("if self.a:\n    return 1"), diverts=WORDS)
        with pytest.raises(RuleDefinitionError, match="jumps or loops"):
            rule("t.r", Scope("f"), AtStart("self.a()"), diverts=WORDS)

    def test_may_define_functions_that_return(self) -> None:
        rule("t.r", Scope("f"), AtStart("def call():\n    return 1"))


class TestModule:
    def test_the_known_place_comes_first_and_the_others_are_tried(self) -> None:
        assert MODULE.candidates("2.0") == ["pkg/new.py", "pkg/old.py"]
        assert MODULE.candidates("1.9") == ["pkg/old.py", "pkg/new.py"]


class TestTransform:
    def test_the_import_of_the_hooks_comes_first(self) -> None:
        given = _transform(_rule("t.a"), _rule("t.b"))
        assert [r.id for r in given.all_rules] == ["t.import", "t.a", "t.b"]
        assert given.all_rules[0].variants == (Variant(Scope(), AtStart(DEFAULT_SEAM.statement)),)

    def test_no_import_without_a_hook(self) -> None:
        assert [r.id for r in _transform(_rule("t.a", "x: int = 0")).all_rules] == ["t.a"]

    @pytest.mark.parametrize(
        ("ids", "cases", "problem"),
        [
            (("t.a", "t.a"), None, "id is used twice"),
            (("u.a",), None, "does not start with the transform's"),
            (("tt.a",), None, "does not start with the transform's"),
            (("t.a", "t.b"), ("t.a",), "has no case"),
            (("t.a",), ("t.a", "t.c"), "names no rule"),
        ],
    )
    def test_is_refused(self, ids: tuple[str, ...], cases: tuple[str, ...] | None, problem: str) -> None:
        with pytest.raises(RuleDefinitionError, match=problem) as caught:
            _transform(*map(_rule, ids), cases=cases)
        assert "where: t: " in str(caught.value)

    def test_a_question_is_not_its_own_answer(self) -> None:
        changed: dict[str, Any] = {"why": f"REPLACE: {QUESTIONS['why']}.", "removal": QUESTIONS["removal"]}
        upstream = Upstream(UpstreamStatus.NOT_SUBMITTED, QUESTIONS["upstream.reason"])
        record = dataclasses.replace(RECORD, upstream=upstream, **changed)
        asked = dataclasses.replace(_transform(_rule("t.a"), record=record), not_counted=QUESTIONS["not_counted"])
        assert asked.unanswered == ["why", "removal", "upstream.reason", "not_counted"]
        assert _transform(_rule("t.a")).unanswered == []

    def test_names_the_engine_test_of_each_rule(self) -> None:
        tests = (EngineTest("of_all.py"), EngineTest("of_one.py::test_it", ("t.b",)))
        transform = dataclasses.replace(_transform(_rule("t.a"), _rule("t.b")), engine_tests=tests)
        assert [transform.engine_test(rule) for rule in ("t.a", "t.b")] == ["of_all.py", "of_one.py::test_it"]
        assert _transform(_rule("t.a")).engine_test("t.a") == ""

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"engine_tests": (EngineTest("a.py", ("t.c",)),)}, "an engine test names no rule of its transform"),
            ({"engine_tests": (EngineTest("a.py"),), "not_run": WORDS}, "and the reason for none are given"),
            ({"not_run": "a b c d e f"}, "`not_run` is too short"),
        ],
    )
    def test_an_engine_test_or_a_reason_is_refused(self, changed: dict[str, Any], problem: str) -> None:
        with pytest.raises(RuleDefinitionError, match=problem):
            dataclasses.replace(_transform(_rule("t.a")), **changed)


class TestGovernance:
    def test_a_whole_record_passes(self) -> None:
        RECORD.check("t")

    @pytest.mark.parametrize("name", ["why", "how", "removal"])
    @pytest.mark.parametrize("text", ["", "because", "word " * 9, "a b c d e f", "it is so as it is so"])
    def test_every_question_is_answered(self, name: str, text: str) -> None:
        changed: dict[str, Any] = {name: text}
        with pytest.raises(RuleDefinitionError, match=f"`{name}` is too short"):
            _transform(_rule("t.a"), record=dataclasses.replace(RECORD, **changed))

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"processes": ()}, "names no process"),
            ({"upstream": Upstream(UpstreamStatus.SUBMITTED, "soon")}, "`upstream.reason` is too short"),
            ({"upstream": Upstream(UpstreamStatus.SUBMITTED, WORDS)}, "`submitted` has no link"),
            ({"upstream": Upstream(UpstreamStatus.ACCEPTED, WORDS)}, "`accepted` has no link"),
            ({"upstream": Upstream(UpstreamStatus.RELEASED, WORDS)}, "`released` has no link"),
            ({"why": f"TODO: {WORDS}"}, "`why` is a placeholder: 'TODO'"),
            ({"why": "foo bar baz qux quux"}, "`why` is a placeholder: 'foo bar'"),
            ({"how": "aaa bbb ccc ddd eee"}, "`how` is too short"),
            ({"upstream": Upstream(UpstreamStatus.REJECTED, WORDS)}, "`rejected` has no link"),
            ({"upstream": Upstream(UpstreamStatus.CLOSED, WORDS)}, "`closed` has no link"),
            ({"upstream": Upstream(UpstreamStatus.SUBMITTED, WORDS, "github.com/1")}, "not an https address"),
            ({"upstream": Upstream(UpstreamStatus.SUBMITTED, WORDS, "http://github.com/1")}, "not an https address"),
        ],
    )
    def test_is_refused(self, changed: dict[str, Any], problem: str) -> None:
        with pytest.raises(RuleDefinitionError, match=problem) as caught:
            dataclasses.replace(RECORD, **changed).check("area")
        assert "where: transform area" in str(caught.value)

    def test_a_link_may_be_lacking_where_a_reason_is_given(self) -> None:
        dataclasses.replace(RECORD, upstream=Upstream(UpstreamStatus.NOT_SUBMITTED, WORDS)).check("t")

    def test_a_release_may_show_itself_that_it_has_the_change(self) -> None:
        dataclasses.replace(RECORD, upstream=Upstream(UpstreamStatus.RELEASED, WORDS)).check("t", shown=True)


class TestReleases:
    @pytest.mark.parametrize(
        ("given", "inside", "outside", "text"),
        [
            (ALL_RELEASES, ("0.1", "99"), (), "all releases"),
            (Releases(since="0.10.0"), ("0.10.0", "0.10.1.1", "0.33.0"), ("0.9.2", "0.10.0rc1"), "since 0.10.0"),
            (Releases(before="0.10.0"), ("0.9.2", "0.9.10", "0.10.0rc1"), ("0.10.0", "0.10.0.post1"), "before 0.10.0"),
            (
                Releases("0.9.2", "0.18.1"),
                ("0.9.2", "0.18.0", "0.18.0.post1"),
                ("0.9.1", "0.18.1"),
                "0.9.2 up to, but not including, 0.18.1",
            ),
        ],
    )
    def test_is_half_open(self, given: Releases, inside: tuple[str, ...], outside: tuple[str, ...], text: str) -> None:
        assert all(release in given for release in inside)
        assert not any(release in given for release in outside)
        assert str(given) == text


class TestReport:
    def test_failed_are_those_that_stop_a_build(self) -> None:
        assert {s for s in Status if s.failed} == set(Status) - {
            Status.APPLIED,
            Status.PRESENT,
            Status.UPSTREAMED,
            Status.NOT_APPLICABLE,
        }

    def test_describes_a_plain_outcome_in_one_line(self) -> None:
        assert Outcome("t.r", Status.APPLIED, "m.py", "f").describe() == "applied: t.r in m.py (f)"

    def test_describes_everything_that_helps(self) -> None:
        outcome = Outcome("t.r", Status.MISSING, "", detail="it is gone", candidates=(Candidate(3, "a()"),))
        assert outcome.describe() == "missing: t.r in no module\n    it is gone\n    nearest: line 3: a()"

    def test_an_error_says_what_where_and_what_to_do(self) -> None:
        assert str(OverlayError("a")) == "a"
        assert str(OverlayError("a", where="b", fix="c")) == "a\n  where: b\n  to do: c"


def test_an_argument_that_would_make_a_generator_of_the_function() -> None:
    with pytest.raises(RuleDefinitionError, match="a generator"):
        rule("t.r", Scope("f"), Keyword("g(...)", "x", "(yield)"))
