"""``ucm store bench``: measure a store's speed, and compare it with plain copies and files."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import answer, table
from ucm.commands.store.text import progress
from ucm.config.load import read_store_settings
from ucm.config.settings import format_size
from ucm.errors import UcmError
from ucm.store.bench import Figures, Run, Workload, beside, for_bench
from ucm.store.config import StoreConfig
from ucm.store.memory.segment import LOCK_FILE

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures; the exit code does not depend on them.

    Raises:
        UcmError: There is no such store, or nothing can be stored in it.
    """
    config = _config(options)
    if not options.block:
        raise UcmError("a block has no bytes", where="--block", fix="give it a size such as 4MiB")
    if config.parts == ["Empty"]:
        raise UcmError("the store 'Empty' keeps nothing that could be measured", fix="name another one")
    workload = Workload(options.blocks, options.block, options.rounds)
    figures = Figures(workload)
    new = "Posix" not in config.parts and not Path(config.dram_directory).exists()
    try:
        with progress("measuring", None, "steps") as bar, ExitStack() as stack:
            Run(config, workload, stack).measure(figures, partial(_step, bar))
    finally:
        if new:
            with suppress(OSError):
                Path(config.dram_directory, LOCK_FILE).unlink(missing_ok=True)
                Path(config.dram_directory).rmdir()
    answer(options, _data(config, figures), _text(config, figures))
    return 0


def _step(bar: Any, operation: str) -> None:
    bar.set_postfix_str(operation, refresh=False)
    bar.update()


def _config(options: argparse.Namespace) -> StoreConfig:
    if options.config is None:
        config = StoreConfig(directories=tuple(dict.fromkeys(map(str, options.directory))))
    else:
        config = read_store_settings(options.config).as_store_config()
    return for_bench(config)


def _shares(config: StoreConfig, figures: Figures) -> dict[str, tuple[str, float]]:
    """Return, for each figure of the store, a plain one and the share of it that the store reaches."""
    compared = {one: plain for one, plain in beside(config).items() if one in figures.seconds}
    return {one: (plain, figures.ratio(one, plain)[1]) for one, plain in compared.items()}


def _text(config: StoreConfig, figures: Figures) -> list[str]:
    work, shares = figures.workload, _shares(config, figures)
    rows = [("operation", "best", "median", "")]
    for operation in figures.seconds:
        best, median = figures.rate(operation)
        plain, share = shares.get(operation, ("", 0.0))
        whose = f"the store, {share:.0%} of a plain {plain}" if plain else "plain"
        rows.append((operation, f"{best:.2f} GB/s", f"{median:.2f} GB/s", whose))
    return [
        f"{config.pipeline}: {work.blocks} blocks of {format_size(work.geometry.nbytes)}, {work.rounds} rounds",
        *table(rows, right=(1, 2)),
    ]


def _data(config: StoreConfig, figures: Figures) -> dict[str, Any]:
    return {
        "workload": asdict(figures.workload),
        "seconds": figures.seconds,
        "shares": {one: {"of": plain, "share": share} for one, (plain, share) in _shares(config, figures).items()},
    }
