"""The counts that travel from a connector to the process that exports them to Prometheus.

Plain dictionaries of plain values, because they cross processes as msgpack: by metric name, the value or list
of observations by label values, joined by dots.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from ucm.integration.vllm import metric_names as names
from ucm.integration.vllm.metric_names import METRICS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

Values: TypeAlias = "dict[str, float | list[float]]"
StatsData: TypeAlias = "dict[str, Values]"


def copied(data: StatsData) -> StatsData:
    """Return a deep copy."""
    return {
        name: {key: list(value) if isinstance(value, list) else value for key, value in values.items()}
        for name, values in data.items()
    }


def merge(into: StatsData, data: StatsData) -> None:
    """Add the counts of another rank, or of the other side, in the same step."""
    for name, values in data.items():
        mine = into.setdefault(name, {})
        largest = name in METRICS and METRICS[name].kind is Kind.GAUGE
        for key, value in values.items():
            before = mine.get(key)
            if isinstance(value, list):
                mine[key] = [*before, *value] if isinstance(before, list) else list(value)
            elif not isinstance(before, int | float):
                mine[key] = value
            else:
                mine[key] = max(before, value) if largest else before + value


def total(data: StatsData, metric: names.Metric, key: str | None = None) -> float:
    """Return the sum of a metric's values, or one value; for a histogram, the sum of observations."""
    found = data.get(metric.name, {})
    values = found.values() if key is None else [found.get(key, 0)]
    return sum(sum(value) if isinstance(value, list) else value for value in values)


def observations(data: StatsData, metric: names.Metric) -> int:
    """Return the number of a histogram's observations."""
    return sum(len(value) for value in data.get(metric.name, {}).values() if isinstance(value, list))


def summary(data: StatsData) -> dict[str, float]:
    """Return a few figures for vLLM's own log line."""
    wanted = {
        "queried tokens": total(data, names.QUERIED_TOKENS),
        "matched tokens": total(data, names.MATCHED_TOKENS),
        "loaded blocks": total(data, names.LOAD_BLOCKS),
        "loaded MB": round(total(data, names.LOAD_BYTES) / 1e6, 1),
        "saved blocks": total(data, names.SAVE_BLOCKS),
        "saved MB": round(total(data, names.SAVE_BYTES) / 1e6, 1),
        "failed blocks": total(data, names.FAILURES),
    }
    return {f"UCM {name}": value for name, value in wanted.items() if value}


def has_failures(data: StatsData) -> bool:
    """Return whether a block failed to load, or to save in some tier."""
    return bool(total(data, names.FAILURES) or not_saved(data))


def not_saved(data: StatsData) -> dict[str, Counter[str]]:
    """Return each tier's failed saves and commits by cause; another tier may have saved the block.

    A commit of an incomplete block does not count, because the earlier failure does.
    """
    found: dict[str, Counter[str]] = {}
    for key, value in _labelled(data, names.TIER_FAILURES):
        tier, operation, cause = key.rsplit(".", 2)
        if operation in {"save", "commit"} and cause != "incomplete":
            found.setdefault(tier, Counter())[cause] += int(value)
    return found


def sentence(data: StatsData) -> str:
    """Return a log line about the counts; empty if there is nothing to report."""
    return "; ".join(_parts(data))


def _parts(data: StatsData) -> Iterator[str]:
    lookups = int(total(data, names.LOOKUPS))
    if lookups:
        hits, queried = int(total(data, names.LOOKUPS, "hit")), total(data, names.QUERIED_TOKENS)
        matched = total(data, names.MATCHED_TOKENS)
        share = 100 * matched / queried if queried else 0
        said = (_many(lookups, "lookup"), _many(hits, "hit"), _many(lookups - hits, "miss", "misses"))
        yield "{}: {}, {}".format(*said)
        yield f"{matched:.0f} of {queried:.0f} tokens found ({share:.1f} %)"
    for verb, blocks, nbytes, duration in (
        ("loaded", names.LOAD_BLOCKS, names.LOAD_BYTES, names.LOAD_DURATION),
        ("saved", names.SAVE_BLOCKS, names.SAVE_BYTES, names.SAVE_DURATION),
    ):
        count = total(data, blocks)
        if count or total(data, nbytes):
            each = 1e3 * total(data, duration) / max(1, observations(data, duration))
            tiers = ", ".join(f"{key} {value:.0f}" for key, value in _labelled(data, blocks))
            where = f" (from {tiers})" if tiers else ""
            what = f"{_many(int(count), 'block')}{where}"
            yield f"{verb} {what}, {total(data, nbytes) / 1e6:.1f} MB, {each:.1f} ms a transfer"
    if failed := _labelled(data, names.FAILURES):
        yield "failed: " + ", ".join(f"{key.replace('.', ' ')} {value:.0f}" for key, value in failed)
    for tier, causes in not_saved(data).items():
        yield f"not on {tier}: {causes.total()} ({', '.join(f'{cause} {causes[cause]}' for cause in sorted(causes))})"


def _many(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or f'{one}s'}"


def _labelled(data: StatsData, metric: names.Metric) -> list[tuple[str, float]]:
    values = data.get(metric.name, {})
    return [(key, value) for key, value in sorted(values.items()) if key and not isinstance(value, list)]
