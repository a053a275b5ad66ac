"""docs/troubleshooting.md names settings, metrics, causes and links that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ucm.cli import main
from ucm.config import ConnectorConfig, StoreSettings
from ucm.integration.vllm.metric_names import METRICS
from ucm.store import errors

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_metric_that_is_named_exists() -> None:
    named = set(re.findall(r"ucm:\w+", TEXT))
    assert named
    assert named <= set(METRICS)


def test_every_setting_that_is_named_exists() -> None:
    for name in re.findall(r"`store\.(\w+)`", TEXT):
        assert name in StoreSettings.model_fields, name
    for name in ("min_hit_tokens", "hit_ratio", "save_decode_blocks"):
        assert f"`{name}" in TEXT
        assert name in ConnectorConfig.model_fields


def test_every_cause_has_its_row() -> None:
    causes = {error.cause for error in vars(errors).values() if hasattr(error, "cause")} - {"other"}
    table = TEXT[TEXT.index("| cause |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == causes


def test_every_command_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {tuple(found.split()) for found in re.findall(r"`ucm ((?:store )?[a-z]+)", TEXT)}
    assert commands == {("doctor",), ("store", "stat"), ("store", "verify"), ("store", "gc"), ("store", "bench")}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
        assert f"usage: ucm {' '.join(command)} " in capsys.readouterr().out


def test_every_section_and_file_that_is_linked_exists() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", TEXT):
        if target:
            assert (DOCS / target).exists(), target
        else:
            assert section in headings, section
