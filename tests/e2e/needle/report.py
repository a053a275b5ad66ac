"""The results as a table, and as a plot of accuracy against budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib import ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from tests.e2e.needle.settings import DENSE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from tests.e2e.needle.asking import Result

#: Beside its colour, what tells a method where lines cover each other.
MARKERS = "osD^vPX"


def share_of_dense(result: Result, results: Sequence[Result]) -> float:
    """A result's accuracy over that of dense attention at the same length; NaN where either is missing."""
    length = result.setting.length
    dense = [r.accuracy for r in results if r.setting.method == DENSE and r.setting.length == length]
    return result.accuracy / dense[0] if dense and dense[0] > 0 else math.nan


def table(results: Sequence[Result]) -> Table:
    """One row for each setting; records within the newest tokens of the budget are counted apart from those before."""
    made = Table("method", title="answers to questions for a record in a long context")
    for column in ("tokens", "budget", "right", "of dense", "within budget of the end", "before", "s/question"):
        made.add_column(column, justify="right")
    for result in results:
        setting = result.setting
        cells = [f"{setting.length}", f"{setting.budget:.0%} = {setting.tokens}"]
        if result.error:
            made.add_row(setting.method, *cells, result.error.strip().splitlines()[-1])
            continue
        near, far = result.accuracy_of(0, setting.tokens), result.accuracy_of(setting.tokens + 1, setting.length)
        shares = (result.accuracy, share_of_dense(result, results), near, far)
        cells += ["" if math.isnan(share) else f"{share:.1%}" for share in shares]
        made.add_row(setting.method, *cells, f"{result.seconds / len(result.questions):.3f}")
    return made


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw one panel for each length, with a line for each method, into an image file."""
    lengths = sorted({result.setting.length for result in results})
    figure = Figure(figsize=(4.2 * len(lengths) + 1.6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        _draw(panel, [result for result in results if result.setting.length == length and not result.error])
        panel.set_title(f"{length} tokens")
        panel.set_xlabel("budget, share of the context")
    panels[0].set_ylabel("answers right")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(panel: Axes, results: Sequence[Result]) -> None:
    dense = [result.accuracy for result in results if result.setting.method == DENSE]
    if dense:
        panel.axhline(dense[0], color="black", linestyle="--", label=DENSE)
    methods = list(dict.fromkeys(result.setting.method for result in results if result.setting.method != DENSE))
    for number, method in enumerate(methods):
        points = sorted((r.setting.budget, r.accuracy) for r in results if r.setting.method == method)
        marker = MARKERS[number % len(MARKERS)]
        panel.plot([x for x, _ in points], [y for _, y in points], label=method, marker=marker, color=f"C{number}")
    budgets = sorted({result.setting.budget for result in results if result.setting.method != DENSE})
    panel.set_xscale("log")
    panel.set_xticks(budgets, [f"{budget:.0%}" for budget in budgets])
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    panel.set_ylim(-0.03, 1.05)
    panel.grid(alpha=0.3)
