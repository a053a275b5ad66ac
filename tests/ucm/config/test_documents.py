"""docs/configuration.md and its example have exactly the existing settings, docs/ucm_files.md UCM's keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ucm.config import ConnectorConfig, StoreSettings, load_connector_config, upstream
from ucm.config.settings import BlendSettings, parse_size

if TYPE_CHECKING:
    from pydantic import BaseModel

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "configuration.md").read_text(encoding="utf-8")
UCMS_FILES = (DOCS / "ucm_files.md").read_text(encoding="utf-8")
EXAMPLE = (DOCS / "ucm_config.example.yaml").read_text(encoding="utf-8")
MODELS: list[tuple[str, type[BaseModel]]] = [
    ("## Settings\n", ConnectorConfig),
    ("## Settings of the store", StoreSettings),
    ("## Settings of blend", BlendSettings),
]

#: Settings whose default is a size.
SIZES = frozenset({"save_queue", "write_behind"})


def default(model: type[BaseModel], name: str) -> object:
    return model.model_fields[name].get_default(call_default_factory=True)


def table(heading: str) -> dict[str, str]:
    """Return the defaults in a table, as written there, by setting."""
    lines = TEXT[TEXT.index(heading) :].split("\n\n")[1].splitlines()[2:]
    cells = [re.split(r" \| ", line.strip("|").strip(), maxsplit=2) for line in lines]
    return {name.strip("`"): shown.strip("`") for name, shown, _ in cells}


@pytest.mark.parametrize(("heading", "model"), MODELS)
def test_every_setting_has_its_row_with_its_default(heading: str, model: type[BaseModel]) -> None:
    shown = table(heading)
    assert list(shown) == list(model.model_fields)
    for name, text in shown.items():
        if name in ("store", "dram_directory"):
            continue
        expected = default(model, name)
        read: object = None if text == "none" else yaml.safe_load(text)
        if name in SIZES:
            read = parse_size(read)
        assert read == (list(expected) if isinstance(expected, tuple) else expected), name


def example(**changes: str) -> dict[str, Any]:
    """Return the example with some lines uncommented."""
    text = EXAMPLE
    for name, value in changes.items():
        text, count = re.subn(rf"^( *)(?:# )?{name}:.*$", rf"\g<1>{name}: {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_example_works(tmp_path: Path) -> None:
    path = tmp_path / "ucm_config.yaml"
    path.write_text(EXAMPLE.replace("/var/cache/ucm", str(tmp_path / "kv")).replace("200GiB", "2MiB"), "utf-8")
    config = load_connector_config({"UCM_CONFIG_FILE": str(path)})
    assert config.store.pipeline == "Cache|Posix"
    assert config.store.directories == (str(tmp_path / "kv"),)
    assert config.store.posix_capacity == 2 << 20


@pytest.mark.parametrize(("model", "indent"), [(ConnectorConfig, ""), (StoreSettings, "  ")])
def test_every_setting_is_in_the_example_with_its_default(model: type[BaseModel], indent: str) -> None:
    set_there = {"store", "pipeline", "directories", "posix_capacity"}
    for name in model.model_fields:
        if name in set_there:
            assert re.search(rf"^{indent}{name}:", EXAMPLE, re.MULTILINE), name
            continue
        lines = re.findall(rf"^{indent}# {name}: (.*)$", EXAMPLE, re.MULTILINE)
        assert len(lines) == 1, name
        if lines[0].endswith("(not set by default)"):
            assert default(model, name) is None
        elif name != "dram_directory":
            value = yaml.safe_load(lines[0])
            assert (parse_size(value) if name in SIZES else value) == default(model, name), name


def test_every_line_of_the_example_can_be_switched_on(tmp_path: Path) -> None:
    """A commented-out setting, uncommented, is valid."""
    names = re.findall(r"^ *# (\w+): ", EXAMPLE, re.MULTILINE)
    known = {*ConnectorConfig.model_fields, *StoreSettings.model_fields}
    assert set(names) <= known
    settings = example(connector="layerwise", hit_ratio="0.5", dram_capacity="1MiB", load_failure="fail")
    settings["store"] |= {"directories": [str(tmp_path)], "posix_capacity": "1MiB"}
    config = load_connector_config(settings)
    assert (config.connector, config.hit_ratio, config.load_failure) == ("layerwise", 0.5, "fail")
    assert config.store.dram_capacity == 1 << 20


def test_what_it_says_of_ucms_keys_is_so() -> None:
    rules = {**upstream.TOP, **upstream.STORE, **upstream.CONNECTOR, **upstream.BLENDING}
    translated = [name.strip("()") for name, rule in rules.items() if not isinstance(rule, str)]
    for name in [*translated, *upstream.STORE_NAMES]:
        assert re.search(rf"\b{re.escape(name)}\b", UCMS_FILES), name
    for name in upstream.PIPELINES_NOT_IN_THIS_VERSION:
        assert name.replace("|", "\\|") in UCMS_FILES or name in UCMS_FILES
    for name in ("enable_event_sync", "load_only_first_rank"):
        assert isinstance(upstream.TOP[name], str)
    for name in ("posix_io_engine", "stream_number", "buffer_number", "timeout_ms"):
        assert any(re.fullmatch(key, name) for key, rule in upstream.STORE.items() if isinstance(rule, str))


def test_every_linked_file_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT + UCMS_FILES):
        assert (DOCS / target).exists(), target
