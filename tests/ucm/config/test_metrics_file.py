"""UCM's metrics file: its interval is used, the rest is told to have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.config import load_connector_config
from ucm.config.metrics_file import WITHOUT_EFFECT
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def load(path: Path, text: str, **more: object) -> float:
    path.write_text(text, "utf-8")
    extra = {"store": {"pipeline": "Empty"}, "metrics_config_path": str(path), **more}
    return load_connector_config(extra).metrics_log_interval


def test_its_interval_is_used(tmp_path: Path) -> None:
    assert load(tmp_path / "m.yaml", "log_interval: 5\n") == 5


def test_a_setting_of_ours_wins(tmp_path: Path) -> None:
    assert load(tmp_path / "m.yaml", "log_interval: 5\n", metrics_log_interval=2) == 2


def test_one_that_says_nothing_of_it(tmp_path: Path, said: list[str]) -> None:
    assert load(tmp_path / "m.yaml", "metric_prefix: 'kv:'\n") == 10
    told = f"[UCM.Connector] {tmp_path}/m.yaml: metric_prefix has no effect here: {WITHOUT_EFFECT['metric_prefix']}"
    assert said == [told]


@pytest.mark.parametrize("value", ["-1", "true", "often", ".nan"])
def test_an_interval_that_is_none(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a number of seconds") as caught:
        load(tmp_path / "m.yaml", f"log_interval: {value}\n")
    assert caught.value.where.startswith(f"{tmp_path}/m.yaml: log_interval = ")


def test_a_key_that_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'log_intervall' is not a setting") as caught:
        load(tmp_path / "m.yaml", "log_intervall: 3\n")
    assert caught.value.fix == "did you mean 'log_interval'?"
