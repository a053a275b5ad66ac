"""Reads UCM's metrics file (``metrics_config_path``), of which one setting means something here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.config.problems import Place, unknown, wrong
from ucm.config.yaml_file import read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.config.translation import Translation

LOG_INTERVAL = "log_interval"
_SAME = "the metrics of docs/metrics.md are exported, all of them, through vLLM's own /metrics"
WITHOUT_EFFECT = {
    "counter": _SAME,
    "gauge": _SAME,
    "histogram": _SAME,
    "histogram_max_length": "observations are counted in buckets where they are made, so that nothing piles up",
    "metric_prefix": "metrics are called ucm:… as the dashboard expects",
    "multiproc_dir": "vLLM's own setting, PROMETHEUS_MULTIPROC_DIR, rules",
}


def read_log_interval(path: Path, out: Translation) -> float | None:
    """The seconds between log lines that a metrics file asks for; None if it says nothing.

    Args:
        path: The file.
        out: Takes what has no effect, and what is wrong.

    Raises:
        ConfigError: If the file cannot be read.
    """
    settings = read_yaml(path)
    for key, value in settings.items():
        place = Place(str(path), key)
        if key in WITHOUT_EFFECT:
            out.without_effect(place, WITHOUT_EFFECT[key])
        elif key != LOG_INTERVAL:
            out.problems.append(unknown(place, value, {LOG_INTERVAL, *WITHOUT_EFFECT}))
    interval = settings.get(LOG_INTERVAL)
    if interval is None:
        return None
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not interval >= 0:
        problem = wrong(Place(str(path), LOG_INTERVAL), "not a number of seconds", "write a number", interval)
        out.problems.append(problem)
        return None
    return float(interval)
