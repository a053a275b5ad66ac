"""Failing inputs that the search finds are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import fuzz

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PROFILE = "import hypothesis\nhypothesis.settings.register_profile('fuzz')\n"
FAILING = """
from hypothesis import given
from hypothesis import strategies as st

@given(number=st.integers(0, 9))
def test_number(number):
    assert number != 7
"""


def test_what_fails_becomes_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    monkeypatch.setattr(fuzz, "STORAGE", tmp_path / "storage")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take seconds to load
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin,pytest_timeout")
    (tmp_path / "conftest.py").write_text(PROFILE, encoding="utf-8")
    failing = tmp_path / "test_it.py"
    failing.write_text(FAILING, encoding="utf-8")
    assert fuzz.main(["--minutes", "1", "--seed", "1"]) == 1
    assert "test_it.py fails with seed 1" in capsys.readouterr().out
    text = failing.read_text(encoding="utf-8")
    assert "from hypothesis import example, given\nfrom hypothesis import strategies" in text
    assert "@example(\n    number=7,\n)" in text
