"""Each kind of insertion, in every layout of the surrounding code."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import libcst as cst
import pytest

from transforms.engine.apply import apply_rule
from transforms.engine.edits import AtEnd, AtStart, after, before
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.members import Field, Keyword, Method, Parameter
from transforms.engine.report import Outcome, Status
from transforms.engine.rule import rule
from transforms.engine.scope import Scope

if TYPE_CHECKING:
    from transforms.engine.edits import Edit

CALL = Keyword("call(...)", "k", "v(1)")
PARAMETER = Parameter("p: int = 0")


def tried(code: str, edit: Edit, scope: str = "f", expect: int = 1) -> tuple[str, Outcome]:
    module, outcome = apply_rule(cst.parse_module(code), rule("t.r", Scope(scope), edit, expect=expect), "m.py", "1.0")
    return module.code, outcome


def inserted(code: str, edit: Edit, scope: str = "f", expect: int = 1) -> str:
    """Return the code with the insertion; check that it compiles and that a second run finds the insertion."""
    result, outcome = tried(code, edit, scope, expect)
    assert outcome.status is Status.APPLIED, outcome.describe()
    assert outcome.hits == expect
    compile(result, "m.py", "exec", dont_inherit=True)
    again, outcome = tried(result, edit, scope, expect)
    assert (again, outcome.status, outcome.hits) == (result, Status.PRESENT, expect)
    return result


def refused(code: str, edit: Edit, scope: str = "f") -> str:
    """Return why nothing is inserted."""
    result, outcome = tried(code, edit, scope)
    assert outcome.status is Status.MISSING, outcome.describe()
    assert result == code
    return outcome.detail


def body(text: str) -> str:
    return "def f():\n" + textwrap.indent(textwrap.dedent(text), "    ")


class TestBeside:
    def test_before_and_after_a_statement(self) -> None:
        assert inserted(body("a()\nb()\n"), before("b()", "new()")) == body("a()\nnew()  # ucm: t.r\nb()\n")
        assert inserted(body("a()\nb()\n"), after("a()", "new()")) == body("a()\nnew()  # ucm: t.r\nb()\n")

    def test_attaches_to_the_statement_around_an_expression(self) -> None:
        given = body("x = g(\n    a(),\n)\n")
        assert inserted(given, before("a()", "new()")) == body("new()  # ucm: t.r\nx = g(\n    a(),\n)\n")

    def test_inner_stays_in_the_block_and_outer_leaves_it(self) -> None:
        given = body("if x:\n    a()\nb()\n")
        assert inserted(given, after("a()", "new()")) == body("if x:\n    a()\n    new()  # ucm: t.r\nb()\n")
        assert inserted(given, after("a()", "new()", "outer")) == body("if x:\n    a()\nnew()  # ucm: t.r\nb()\n")

    def test_after_a_whole_compound_statement(self) -> None:
        given = body("if x:\n    a()\nb()\n")
        assert inserted(given, after("if x: ...", "new()")) == body("if x:\n    a()\nnew()  # ucm: t.r\nb()\n")

    def test_inserts_a_compound_statement_with_its_mark_in_the_head(self) -> None:
        code = "if x:\n    x = new()\n"
        result = inserted(body("a()\n"), after("a()", code))
        assert result == body("a()\nif x:  # ucm: t.r\n    x = new()\n")

    def test_inserts_several_statements_under_one_mark(self) -> None:
        assert inserted(body("a()\n"), after("a()", "b()\nc()")) == body("a()\nb()  # ucm: t.r\nc()\n")

    def test_comments_stay_with_their_statement(self) -> None:
        given = body("# why a\na()  # what a\n\n# why b\nb()\n")
        wanted = body("# why a\na()  # what a\nnew()  # ucm: t.r\n\n# why b\nb()\n")
        assert inserted(given, after("a()", "new()")) == wanted
        assert inserted(given, before("b()", "new()")) == wanted

    def test_every_expected_match_gets_one(self) -> None:
        given = body("a()\nif x:\n    a()\n")
        wanted = body("a()\nnew()  # ucm: t.r\nif x:\n    a()\n    new()  # ucm: t.r\n")
        assert inserted(given, after("a()", "new()"), expect=2) == wanted

    @pytest.mark.parametrize("block", ["try:", "with x:", "for y in x:", "while x:", "if x:", "async def g():"])
    def test_in_a_nested_block(self, block: str) -> None:
        tail = "except E:\n    pass\n" if block == "try:" else ""
        given = body(f"{block}\n    a()\n{tail}")
        assert inserted(given, before("a()", "new()")) == body(f"{block}\n    new()  # ucm: t.r\n    a()\n{tail}")

    @pytest.mark.parametrize("clause", ["else:", "elif y:"])
    def test_in_another_branch(self, clause: str) -> None:
        given = body(f"if x:\n    pass\n{clause}\n    a()\n")
        assert inserted(given, after("a()", "new()")) == given + "        new()  # ucm: t.r\n"

    def test_in_a_match_statement(self) -> None:
        given = body("match x:\n    case 1:\n        a()\n")
        assert inserted(given, after("a()", "new()")) == given + "            new()  # ucm: t.r\n"

    @pytest.mark.parametrize("indent", ["\t", "  ", "        "])
    def test_follows_the_indentation(self, indent: str) -> None:
        given = f"def f():\n{indent}if x:\n{indent * 2}a()\n"
        assert inserted(given, after("a()", "if y:\n    new()\n")) == (
            f"{given}{indent * 2}if y:  # ucm: t.r\n{indent * 3}new()\n"
        )

    def test_follows_an_indentation_that_differs_from_the_module_s(self) -> None:
        given = "if x:\n    pass\ndef f():\n  a()\n"
        assert inserted(given, after("a()", "new()")) == given + "  new()  # ucm: t.r\n"

    def test_follows_the_line_endings(self) -> None:
        assert inserted("def f():\r\n    a()\r\n", after("a()", "new()")).endswith("()\r\n    new()  # ucm: t.r\r\n")

    def test_in_a_module_without_a_last_newline(self) -> None:
        assert inserted("def f():\n    a()", after("a()", "new()")) == "def f():\n    a()\n    new()  # ucm: t.r"

    @pytest.mark.parametrize("code", ["if x: a()\n", "for y in x: a()\n", "if x: pass\nelse: a()\n", "a(); b()\n"])
    def test_refuses_a_statement_that_shares_its_line(self, code: str) -> None:
        assert "it is not alone on its lines" in refused(body(code), after("a()", "new()"))
        assert "it is not alone on its lines" in refused(body(code), before("a()", "new()"))

    def test_outer_gets_past_a_one_line_suite(self) -> None:
        assert inserted(body("if x: a()\n"), after("a()", "new()", "outer")) == body("if x: a()\nnew()  # ucm: t.r\n")

    def test_refuses_the_condition_of_an_elif(self) -> None:
        assert "alone on its lines" in refused(body("if x:\n    pass\nelif a():\n    pass\n"), before("a()", "new()"))
        given = body("if x:\n    pass\nelif y:\n    pass\n")
        assert "alone on its lines" in refused(given, after("if y: ...", "new()"))

    def test_takes_a_conditional_expression(self) -> None:
        given = body("x = y if z else a()\n")
        assert inserted(given, after("a()", "new()")) == given + "    new()  # ucm: t.r\n"

    @pytest.mark.parametrize("code", ["return a()\n", "raise a()\n", "if x:\n    return a()\nelse:\n    return\n"])
    def test_refuses_what_control_never_gets_past(self, code: str) -> None:
        assert refused(body(code), after("a()", "new()", "outer")).endswith("control never gets past it")
        assert inserted(body(code), before("a()", "new()", "outer")) == body(f"new()  # ucm: t.r\n{code}")

    def test_a_return_itself_may_be_the_anchor(self) -> None:
        assert "never gets past" in refused(body("return 1\n"), after("return _", "new()"))
        assert inserted(body("return 1\n"), before("return _", "new()")) == body("new()  # ucm: t.r\nreturn 1\n")

    @pytest.mark.parametrize("head", ["def f(x=a()):", "@a()\ndef f():", "def f(x: a()):"])
    @pytest.mark.parametrize("level", ["inner", "outer"])
    def test_refuses_the_head_of_its_own_scope(self, head: str, level: str) -> None:
        edit = before("a()", "new()", "outer") if level == "outer" else before("a()", "new()")
        assert "alone on its lines" in refused(f"{head}\n    pass\n", edit)

    def test_refuses_the_scope_itself(self) -> None:
        assert "alone on its lines" in refused("class f:\n    x = 1\n", after("class f: ...", "new()", "outer"))

    @pytest.mark.parametrize("level", ["inner", "outer"])
    def test_refuses_the_body_of_a_one_line_function(self, level: str) -> None:
        edit = before("a()", "new()", "outer") if level == "outer" else before("a()", "new()")
        assert "alone on its lines" in refused("def f(): a()\n", edit)

    def test_in_the_module_itself(self) -> None:
        assert inserted("a()\n", after("a()", "new()"), scope="") == "a()\nnew()  # ucm: t.r\n"


class TestAtStart:
    def test_before_the_first_statement(self) -> None:
        assert inserted(body("a()\n"), AtStart("new()")) == body("new()  # ucm: t.r\na()\n")

    @pytest.mark.parametrize("doc", ['"""Doc."""', "'''Doc.\n\n    More.\n    '''", '"one" "two"', 'r"""Doc."""'])
    def test_after_a_docstring(self, doc: str) -> None:
        given = f"def f():\n    {doc}\n"
        assert inserted(given + "    a()\n", AtStart("new()")) == given + "    new()  # ucm: t.r\n    a()\n"

    def test_of_a_function_that_is_all_docstring(self) -> None:
        assert inserted(body('"""Doc."""\n'), AtStart("new()")) == body('"""Doc."""\nnew()  # ucm: t.r\n')

    def test_under_decorators_and_comments(self) -> None:
        given = "@one\n# between\n@two\nasync def f(\n    a,\n):\n    # first\n    a()\n"
        assert inserted(given, AtStart("new()")) == given.replace("    # first", "    new()  # ucm: t.r\n    # first")

    @pytest.mark.parametrize(
        "head",
        [
            "",
            '"""Doc."""\n',
            "# SPDX\n",
            '# SPDX\n"""Doc."""\nfrom __future__ import annotations\n',
            "from __future__ import annotations\nfrom __future__ import division\n",
        ],
    )
    def test_of_a_module_is_after_what_must_come_first(self, head: str) -> None:
        assert inserted(f"{head}import a\n", AtStart("import b"), scope="") == f"{head}import b  # ucm: t.r\nimport a\n"

    def test_of_a_loop(self) -> None:
        module = cst.parse_module(body("for x in y:\n    a()\n"))
        loop = rule("t.r", Scope("f", loop_with="a()"), AtStart("new()"))
        assert apply_rule(module, loop, "m.py", "1")[0].code == body("for x in y:\n    new()  # ucm: t.r\n    a()\n")

    def test_refuses_a_body_on_the_line_of_its_head(self) -> None:
        assert refused("def f(): a()\n", AtStart("new()")).endswith("its body is on one line")


class TestAtEnd:
    def test_after_the_last_statement(self) -> None:
        assert inserted(body("a()\nif b:\n    c()\n"), AtEnd("new()")) == body(
            "a()\nif b:\n    c()\nnew()  # ucm: t.r\n"
        )

    def test_is_inside_the_function_when_another_follows(self) -> None:
        given = "class C:\n    def f(self):\n        a()\n\n    # other\n    def g(self):\n        pass\n"
        wanted = given.replace("a()\n", "a()\n        new()  # ucm: t.r\n")
        assert inserted(given, AtEnd("new()"), scope="C.f") == wanted

    @pytest.mark.parametrize(
        "code",
        [
            "return\n",
            "a()\nraise E\n",
            "if a:\n    return 1\nelse:\n    return 2\n",
            "with a:\n    return 1\n",
            "try:\n    return 1\nexcept E:\n    raise\n",
            "while True:\n    a()\n",
        ],
    )
    def test_refuses_an_end_that_is_never_reached(self, code: str) -> None:
        assert refused(body(code), AtEnd("new()")).endswith("control never reaches its end")

    @pytest.mark.parametrize("code", ["if a:\n    return 1\n", "for a in b:\n    if a:\n        return\n"])
    def test_refuses_an_end_that_a_return_may_skip(self, code: str) -> None:
        assert refused(body(code), AtEnd("new()")).endswith("the function may return before its end")

    @pytest.mark.parametrize(
        "code", ["def g():\n    return 1\n", "if a:\n    raise E\n", "while True:\n    break\n", "with a:\n    b()\n"]
    )
    def test_takes_an_end_that_may_be_reached(self, code: str) -> None:
        assert inserted(body(code), AtEnd("new()")) == body(f"{code}new()  # ucm: t.r\n")

    def test_refuses_a_body_on_the_line_of_its_head(self) -> None:
        assert refused("def f(): a()\n", AtEnd("new()")).endswith("its body is on one line")


class TestKeyword:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            ("call()", "call(k=v(1))"),
            ("call(a)", "call(a, k=v(1))"),
            ("call(a, b=1)", "call(a, b=1, k=v(1))"),
            ("call(a,b=1)", "call(a,b=1, k=v(1))"),
            ("call(a, b,)", "call(a, b, k=v(1),)"),
            ("call( a )", "call( a, k=v(1) )"),
            ("call(*a)", "call(*a, k=v(1))"),
            ("call(a, **kw)", "call(a, **kw, k=v(1))"),
            ("call((x for x in y))", "call((x for x in y), k=v(1))"),
        ],
    )
    def test_on_one_line(self, given: str, wanted: str) -> None:
        assert inserted(body(f"x = {given}\n"), CALL) == body(f"x = {wanted}\n")

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            ("call(\n    a,\n    b=1,\n)", "call(\n    a,\n    b=1,\n    k=v(1),  # ucm: t.r\n)"),
            ("call(\n    a,\n)", "call(\n    a,\n    k=v(1),  # ucm: t.r\n)"),
            ("call(\n    a,\n    b=1\n)", "call(\n    a,\n    b=1,\n    k=v(1)  # ucm: t.r\n)"),
            ("call(\n    a\n)", "call(\n    a,\n    k=v(1)  # ucm: t.r\n)"),
            ("call(\n    a, b=1\n)", "call(\n    a, b=1, k=v(1)  # ucm: t.r\n)"),
            ("call(a,\n     b=1)", "call(a,\n     b=1,\n     k=v(1))"),
            ("call(a,  # one\n     b=1)", "call(a,  # one\n     b=1,\n     k=v(1))"),
            ("call(a, b,\n     c)", "call(a, b,\n     c,\n     k=v(1))"),
            ("call(a,\n     b, c)", "call(a,\n     b, c, k=v(1))"),
            ("call(\n    *a,\n    **kw,\n)", "call(\n    *a,\n    **kw,\n    k=v(1),  # ucm: t.r\n)"),
        ],
    )
    def test_on_several_lines(self, given: str, wanted: str) -> None:
        assert inserted(body(f"x = {given}\n"), CALL) == body(f"x = {wanted}\n")

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (
                "call(\n    a,  # one\n    b,  # two\n)",
                "call(\n    a,  # one\n    b,  # two\n    k=v(1),  # ucm: t.r\n)",
            ),
            ("call(\n    a,\n    b  # two\n)", "call(\n    a,\n    b,  # two\n    k=v(1)  # ucm: t.r\n)"),
            (
                "call(\n    a,\n    b,\n    # no more\n)",
                "call(\n    a,\n    b,\n    k=v(1),  # ucm: t.r\n    # no more\n)",
            ),
            ("call(\n    a,\n\n    # two\n    b,\n)", "call(\n    a,\n\n    # two\n    b,\n    k=v(1),  # ucm: t.r\n)"),
            ("call(\n    a, b,  # both\n)", "call(\n    a, b,  # both\n    k=v(1),  # ucm: t.r\n)"),
            ("call(a, b  # both\n)", "call(a, b,  # both\nk=v(1)  # ucm: t.r\n)"),
        ],
    )
    def test_loses_and_moves_no_comment(self, given: str, wanted: str) -> None:
        assert inserted(body(f"x = {given}\n"), CALL) == body(f"x = {wanted}\n")

    def test_in_a_call_within_a_call(self) -> None:
        assert inserted(body("g(call(a), 1)\n"), CALL) == body("g(call(a, k=v(1)), 1)\n")

    def test_at_every_expected_call_also_nested_ones(self) -> None:
        assert inserted(body("call(call(a))\n"), CALL, expect=2) == body("call(call(a, k=v(1)), k=v(1))\n")

    def test_refuses_a_call_that_gives_it_already(self) -> None:
        assert refused(body("call(a, k=1)\n"), CALL).endswith("it already passes k")
        assert refused(body("call(a, k=v(1).x)\n"), CALL).endswith("it already passes k")

    def test_refuses_a_generator_without_brackets(self) -> None:
        assert "generator" in refused(body("call(x for x in y)\n"), CALL)


class TestParameter:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            ("()", "(p: int = 0)"),
            ("(a)", "(a, p: int = 0)"),
            ("(a, b=1)", "(a, b=1, p: int = 0)"),
            ("(a, b=1,)", "(a, b=1, p: int = 0,)"),
            ("(a: int, b: str = '') -> None", "(a: int, b: str = '', p: int = 0) -> None"),
            ("(a, *, b)", "(a, p: int = 0, *, b)"),
            ("(*, b)", "(p: int = 0, *, b)"),
            ("(a, /)", "(a, /, p: int = 0)"),
            ("(a, /, b)", "(a, /, b, p: int = 0)"),
            ("(a, /, *, b)", "(a, /, p: int = 0, *, b)"),
            ("(a=1, /)", "(a=1, /, p: int = 0)"),
            ("(**kw)", "(p: int = 0, **kw)"),
            ("(a, **kw)", "(a, p: int = 0, **kw)"),
            ("(a, *, b, **kw)", "(a, p: int = 0, *, b, **kw)"),
            ("(a, b=lambda p: p)", "(a, b=lambda p: p, p: int = 0)"),
        ],
    )
    def test_on_one_line(self, given: str, wanted: str) -> None:
        assert inserted(f"def f{given}:\n    pass\n", PARAMETER) == f"def f{wanted}:\n    pass\n"

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            ("(\n    a,\n    b=1,\n)", "(\n    a,\n    b=1,\n    p: int = 0,  # ucm: t.r\n)"),
            ("(\n    a,\n)", "(\n    a,\n    p: int = 0,  # ucm: t.r\n)"),
            ("(\n    a,\n    b=1\n)", "(\n    a,\n    b=1,\n    p: int = 0  # ucm: t.r\n)"),
            ("(\n    a, b=1\n)", "(\n    a, b=1, p: int = 0  # ucm: t.r\n)"),
            ("(a,\n      b=1)", "(a,\n      b=1,\n      p: int = 0)"),
            (
                "(\n    a,\n    *,\n    b,\n)",
                "(\n    a,\n    p: int = 0,  # ucm: t.r\n    *,\n    b,\n)",
            ),
            (
                "(\n    a,\n    **kw,\n)",
                "(\n    a,\n    p: int = 0,  # ucm: t.r\n    **kw,\n)",
            ),
            (
                "(\n    a,\n    b: int,  # two\n    # no more\n)",
                "(\n    a,\n    b: int,  # two\n    p: int = 0,  # ucm: t.r\n    # no more\n)",
            ),
            ("(\n    a,\n    b  # two\n)", "(\n    a,\n    b,  # two\n    p: int = 0  # ucm: t.r\n)"),
        ],
    )
    def test_on_several_lines(self, given: str, wanted: str) -> None:
        assert inserted(f"def f{given}:\n    pass\n", PARAMETER) == f"def f{wanted}:\n    pass\n"

    def test_of_a_decorated_method(self) -> None:
        given = "class C:\n    @one\n    async def f(self): pass\n"
        assert inserted(given, PARAMETER, "C.f") == given.replace("(self)", "(self, p: int = 0)")

    def test_refuses_to_take_from_a_star(self) -> None:
        assert "*args" in refused("def f(a, *args):\n    pass\n", PARAMETER)

    def test_finds_none_in_a_class(self) -> None:
        assert "matches 0 times" in refused("class f:\n    pass\n", PARAMETER)

    def test_a_name_within_the_function_is_no_parameter(self) -> None:
        given = "def f(a):\n    def g(p): pass\n    return lambda p: p\n"
        assert inserted(given, PARAMETER) == given.replace("f(a)", "f(a, p: int = 0)")

    @pytest.mark.parametrize("given", ["(p)", "(a, *, p)", "(p, /)"])
    def test_is_present_where_the_name_is(self, given: str) -> None:
        code = f"def f{given}:\n    pass\n"
        result, outcome = tried(code, PARAMETER)
        assert (result, outcome.status) == (code, Status.PRESENT)

    def test_needs_a_default(self) -> None:
        with pytest.raises(RuleDefinitionError, match="no default"):
            tried("def f(a):\n    pass\n", Parameter("p: int"))


class TestField:
    def test_after_the_last_field(self) -> None:
        given = '@dataclass\nclass f:\n    """Doc."""\n    a: int\n    b: int = 1  # one\n\n    def g(self): pass\n'
        assert inserted(given, Field("c: object = None")) == given.replace(
            "# one\n", "# one\n    c: object = None  # ucm: t.r\n"
        )

    def test_of_a_class_that_ends_with_it(self) -> None:
        assert (
            inserted("class f:\n    a: int\n", Field("c: int = 0"))
            == "class f:\n    a: int\n    c: int = 0  # ucm: t.r\n"
        )

    @pytest.mark.parametrize("code", ['"""Doc."""', "a = 1", "pass", "def g(self): pass"])
    def test_finds_none_in_a_class_without_fields(self, code: str) -> None:
        assert "`its fields` matches 0 times" in refused(f"class f:\n    {code}\n", Field("c: int = 0"))

    @pytest.mark.parametrize("code", ["class f: a: int\n", "def f():\n    a: int = 1\n"])
    def test_finds_none_elsewhere(self, code: str) -> None:
        assert "matches 0 times" in refused(code, Field("c: int = 0"))


class TestMethod:
    CODE = "def new(self) -> None:\n    go(self)\n"
    ADDED = "\n    def new(self) -> None:  # ucm: t.r\n        go(self)\n"

    def test_after_a_method(self) -> None:
        head, tail = "class f:\n    def a(self):\n        pass\n", "\n    @one\n    def b(self):\n        pass\n"
        assert inserted(head + tail, Method("a", self.CODE)) == head + self.ADDED + tail
        assert inserted(head, Method("a", self.CODE)) == head + self.ADDED

    @pytest.mark.parametrize("code", ["class f:\n    pass\n", "class f: pass\n", "def f():\n    def a(): pass\n"])
    def test_finds_none_elsewhere(self, code: str) -> None:
        assert "`a` matches 0 times" in refused(code, Method("a", self.CODE))

    def test_two_of_its_name_are_ambiguous(self) -> None:
        code = "class f:\n    @property\n    def a(self): pass\n    @a.setter\n    def a(self, x): pass\n"
        result, outcome = tried(code, Method("a", self.CODE))
        assert (result, outcome.status) == (code, Status.AMBIGUOUS)
