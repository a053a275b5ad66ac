"""The two pages for troubleshooting name existing settings, metrics, causes and links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ucm.cli import main
from ucm.config import ConnectorConfig, StoreSettings
from ucm.integration.vllm.connector.sides import LAYERS
from ucm.integration.vllm.metrics import METRICS, ConnectorCounters, sentence
from ucm.store import base

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("troubleshooting.md", "troubleshooting_start.md")}
TEXT = "\n".join(PAGES.values())
#: Other pages that show lines of the log.
CACHE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("prefix_cache.md", "identity.md"))
#: A log line; the group starts at its area.
LINE = re.compile(r"^ {4,}(?:\w+ [\d-]+ [\d:,]+ pid=\d+ \S+ )?(\[UCM\.\w+\] .+)$", re.MULTILINE)


def formats() -> list[str]:
    """Return the format strings of the runtime's log lines that have more than an area."""
    code = [path.read_text(encoding="utf-8") for path in (DOCS.parent / "ucm").rglob("*.py")]
    calls = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    first = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    logged = [text for text in first if isinstance(text, str) and text.startswith(("[UCM.", "[%s]", "%s block"))]
    return [text for text in logged if re.sub(r"^\[.*?\]|%s|\W", "", text)]


def as_pattern(text: str) -> str:
    """Return a regular expression for the results of a format string."""
    kinds = {"%s": r".+", "%d": r"\d+", "%.0f": r"\d+", "%.1f": r"\d+\.\d", "%.2f": r"\d+\.\d\d"}
    return "".join(kinds.get(part) or re.escape(part) for part in re.split(r"(%(?:\.\d)?[sdf])", text))


def summaries() -> list[str]:
    """Return the runtime's summaries of the steps that the page shows."""
    found = []
    for calls in (
        [("looked_up", 640, 0, 0.001)],
        [("looked_up", 640, 512, 0.001)],
        [("saved", 5, 700_000, 0.0731)],
        [("loaded", 4, 500_000, 0.0012, ["posix"] * 4)],
        [
            ("loaded", 4, 500_000, 0.0007, ["posix"] * 4),
            ("saved", 5, 500_000, 0.0028),
            ("failed", "load", "corrupt", 4),
        ],
    ):
        counters = ConnectorCounters()
        for name, *arguments in calls:
            getattr(counters, str(name))(*arguments)
        data = counters.take_data()
        assert data is not None
        found.append(f"[UCM.Connector] {sentence(data)}")
    return found


def test_every_line_of_the_log_is_one_that_is_written() -> None:
    written = [*map(as_pattern, formats()), *map(re.escape, summaries())]
    layers = re.escape(LAYERS).replace(r"\{\}", r"\w+")
    written += [rf"\[UCM\.Connector\] (?:direct|layerwise|mock): {layers}(?:; {layers})*"]
    lines = LINE.findall(TEXT) + LINE.findall(CACHE)
    assert len(lines) >= 10
    assert [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in written)] == []


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
    causes = {error.cause for error in vars(base).values() if hasattr(error, "cause")} - {"other"}
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


def test_the_module_that_is_to_be_named_exists() -> None:
    named = set(re.findall(r"ucm\.integration\.vllm\.\w+", TEXT))
    assert named == {"ucm.integration.vllm.ucm_connector", "ucm.integration.vllm.connector"}
    for name in named:
        place = DOCS.parent.joinpath(*name.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file(), name


@pytest.mark.parametrize("page", PAGES)
def test_every_section_and_file_that_is_linked_exists(page: str) -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in PAGES[page].splitlines()
        if line.startswith("#")
    }
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", PAGES[page]):
        if target:
            assert (DOCS / target).exists(), target
        else:
            assert section in headings, section
