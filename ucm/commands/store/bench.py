"""``ucm store bench``: measure a store's speed, compare it with plain copies and files, advise on compression."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import answer, table
from ucm.commands.store.text import progress
from ucm.config.load import read_store_settings
from ucm.config.settings import format_size
from ucm.errors import ConfigError, UcmError
from ucm.store.advice import (
    LOSSLESS,
    PLAIN,
    Comparison,
    compare,
    compressing_tiers,
    generated,
    stored_sample,
)
from ucm.store.bench import Figures, Workload, bench, beside, for_bench
from ucm.store.compression import check_installed
from ucm.store.config import StoreConfig
from ucm.store.memory.segment import LOCK_FILE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from ucm.store.advice import Sample

#: A block's layer slices, in number.
_SLICES = 16


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures; the exit code does not depend on them.

    Raises:
        UcmError: There is no such store, or nothing can be stored in it.
    """
    config = _config(options)
    slice_nbytes, rest = divmod(options.block, _SLICES)
    if not slice_nbytes or rest:
        what = f"a block has {_SLICES} slices of equal size"
        raise UcmError(what, where="--block", fix=f"give it a multiple of {_SLICES} bytes")
    if config.parts == ["Empty"]:
        raise UcmError("the store 'Empty' keeps nothing that could be measured", fix="name another one")
    workload = Workload(options.blocks, _SLICES, slice_nbytes, options.rounds)
    figures = Figures(workload)
    new = "Posix" not in config.parts and not Path(config.dram_directory).exists()
    try:
        with progress("measuring", None, "steps") as bar:
            bench(config, figures, partial(_step, bar))
    finally:
        if new:
            with suppress(OSError):
                Path(config.dram_directory, LOCK_FILE).unlink(missing_ok=True)
                Path(config.dram_directory).rmdir()
    sample, compared = _compression(config, options, workload)
    data = {**_data(config, figures), **_compression_data(sample, compared)}
    answer(options, data, [*_text(config, figures), *_compression_text(sample, compared)])
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


def _compression(
    config: StoreConfig, options: argparse.Namespace, workload: Workload
) -> tuple[Sample | None, dict[str, Comparison | str]]:
    """Compare every tier that can compress with itself; return the sample and, by tier, the result or a reason.

    Raises:
        UcmError: There are no blocks where ``--sample`` says.
    """
    found: dict[str, Comparison | str] = dict.fromkeys(compressing_tiers(config), "")
    if not found:
        return None, found
    try:
        check_installed("compression")
    except ConfigError as error:
        return None, dict.fromkeys(found, str(error).splitlines()[0])
    given = None if options.sample is None else [str(options.sample)]
    own = config.directories if "Posix" in config.parts else ()
    sample = stored_sample(own if given is None else given, workload.nbytes)
    if given is not None and sample is None:
        raise UcmError(
            "there are no blocks in files", where=f"--sample {given[0]}", fix="name a Posix tier's directory"
        )
    sample = sample or generated(workload.nbytes)
    with progress("compressing", None, "steps") as bar:
        for tier in found:
            try:
                found[tier] = compare(config, tier, workload, sample, partial(_step, bar))
            except UcmError as error:
                found[tier] = str(error).splitlines()[0]
    return sample, found


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


def _compression_text(sample: Sample | None, compared: Mapping[str, Comparison | str]) -> list[str]:
    lines = [f"{tier}: compression was not measured: {one}" for tier, one in compared.items() if isinstance(one, str)]
    rows: list[tuple[str, ...]] = [
        ("compression", "write", "read", "save plain", "compressed", "load plain", "compressed")
    ]
    done = [one for one in compared.values() if isinstance(one, Comparison)]
    for one in done:
        rates = (f"{1 / one.seconds_per_gb(operation, PLAIN):.2f} GB/s" for operation in ("save", "load"))
        times = (
            f"{one.seconds_per_gb(operation, side):.2f} s/GB"
            for operation in ("save", "load")
            for side in (PLAIN, LOSSLESS)
        )
        rows.append((one.tier, *rates, *times))
    if sample is not None and done:
        codec = done[0].codec
        lines += [
            *table(rows, right=(1, 2, 3, 4, 5, 6)),
            (
                f"Sample: {sample.what}: {codec.ratio:.2f} times smaller. A core compresses "
                f"{codec.compress / 1e9:.2f} GB/s and decompresses {codec.decompress / 1e9:.2f} GB/s."
            ),
            *(f"{one.tier}: {one.advice}." for one in done),
        ]
    return ["", *lines] if lines else []


def _compression_data(sample: Sample | None, compared: Mapping[str, Comparison | str]) -> dict[str, Any]:
    tiers = [
        {"tier": tier, "problem": one}
        if isinstance(one, str)
        else {
            "tier": tier,
            "problem": None,
            **asdict(one.codec),
            "seconds": one.figures.seconds,
            "gains": one.gains,
            "advice": one.advice,
        }
        for tier, one in compared.items()
    ]
    return {"compression": {"sample": None if sample is None else sample.what, "tiers": tiers}}


def _data(config: StoreConfig, figures: Figures) -> dict[str, Any]:
    return {
        "workload": asdict(figures.workload),
        "seconds": figures.seconds,
        "shares": {one: {"of": plain, "share": share} for one, (plain, share) in _shares(config, figures).items()},
    }
