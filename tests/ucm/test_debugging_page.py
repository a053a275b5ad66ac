"""docs/debugging.md names existing files, functions and log lines; `tests/e2e/test_try.py` runs them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.ucm.debugging_page import ROOT, TEXT, names, steps
from tests.ucm.test_troubleshooting import as_pattern, formats
from ucm import cli
from ucm.config.document import FILE_KEY
from ucm.integration.vllm.connector.sides import LAYERS


def defined(file: str) -> set[str]:
    """Return the functions and classes of a file, and ``Class.method`` for methods."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".j2"):
        return set(re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_there_are_ten_steps() -> None:
    assert [row.number for row in steps() if row.number] == list(range(1, 11))


@pytest.mark.parametrize("row", steps(), ids=lambda row: row.functions[0])
def test_every_function_exists(row: object) -> None:
    for found in steps():
        if found == row:
            assert found.functions
            assert set(found.functions) <= defined(found.file)


def test_every_name_of_ours_exists() -> None:
    assert len(names()) >= 15
    for file, name in names():
        assert name in defined(file), (file, name)


def test_every_log_line_is_one_that_is_written() -> None:
    lines = [row.line for row in steps() if row.line]
    assert len(lines) >= 10
    layers = re.escape(LAYERS).replace(r"\{\}", r"\w+")
    patterns = [*map(as_pattern, formats()), rf"\[UCM\.Connector\] (?:direct|layerwise|mock): {layers}"]
    patterns.append(rf"\[UCM\.Connector\] settings come from \S+ \({FILE_KEY}\)")  # one of several notices
    assert [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in patterns)] == []


def test_every_option_of_the_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["try", "--help"])
    usage = capsys.readouterr().out
    for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT):
        assert option in usage
