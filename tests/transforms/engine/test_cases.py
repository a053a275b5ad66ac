"""A text of rewritten code is read as one case per rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from transforms.engine.cases import Case, cases_beside, cases_in
from transforms.engine.errors import RuleDefinitionError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
# What this is about.

# release 0.32.0
def run(step):
    begin(step)  # ucm: a.begin
    work(step)
    if not end(step):  # ucm: a.end
        step.fail()

        return None
    return step

# release 0.9.0
class Table:
    def add(self):
        pass

    def clear(self):  # ucm: a.clear
        hooks.clear(self)
"""


def test_each_rule_has_a_case_with_only_its_insertion() -> None:
    begin, end, clear = cases_in(TEXT)
    before = "def run(step):\n    work(step)\n    return step\n"
    assert begin == Case(
        "a.begin", before, before.replace("    work", "    begin(step)  # ucm: a.begin\n    work"), "0.32.0"
    )
    inserted = "    if not end(step):  # ucm: a.end\n        step.fail()\n\n        return None\n"
    assert end == Case("a.end", before, before.replace("    return", f"{inserted}    return"), "0.32.0")
    table = "class Table:\n    def add(self):\n        pass\n"
    method = "\n    def clear(self):  # ucm: a.clear\n        hooks.clear(self)\n"
    assert clear == Case("a.clear", table, table + method, "0.9.0")


def test_two_lines_of_one_rule_are_one_insertion() -> None:
    (case,) = cases_in("# release 1.0\na()\nb()  # ucm: r\nc()\nd()  # ucm: r\n")
    assert (case.before, case.after) == ("a()\nc()\n", "a()\nb()  # ucm: r\nc()\nd()  # ucm: r\n")


@pytest.mark.parametrize("text", ["", "a()  # ucm: r\n", "# release 1.0\na()\n", TEXT + "# release 1.0\nb()\n"])
def test_code_without_an_insertion_is_an_error(text: str) -> None:
    with pytest.raises(RuleDefinitionError, match=r"a case has no insertion[\s\S]*somewhere"):
        cases_in(text, "somewhere")


def test_cases_are_read_beside_the_rules(tmp_path: Path) -> None:
    rules = str(tmp_path / "rules.py")
    with pytest.raises(RuleDefinitionError, match=r"cannot be read[\s\S]*first\.py"):
        cases_beside(rules, "first")
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "first.py").write_text(TEXT, encoding="utf-8")
    assert cases_beside(rules, "first") == cases_in(TEXT)
