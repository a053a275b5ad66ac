"""``ucm store stat``: show how much a store holds, by namespace."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ucm.commands.options import answer, many, table
from ucm.commands.store.places import Directory, Places, find_places, opened_server
from ucm.commands.store.text import NO_STORE, about_unmarked, ago, blocks_and_bytes, iso, progress
from ucm.config.settings import format_size
from ucm.errors import ConfigError
from ucm.salts import NO_SALT, tag_name
from ucm.store.base import StoreError
from ucm.store.config import LOCAL
from ucm.store.factory import ask_tier
from ucm.store.inspection import NamespaceStock, take_stock, unmarked

#: How many salts are listed; a program gets all.
_MOST_SALTS = 10

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def run(options: argparse.Namespace) -> int:
    """Count, and print; return 1 if a directory cannot be read, or a namespace lacks its marker.

    Raises:
        UcmError: The options match nothing.
    """
    places = find_places(options, servers=True)
    stocks: dict[Directory, list[NamespaceStock]] = {directory: [] for directory in places.directories}
    with progress("counting", None, "blocks") as bar:
        for directory, layout in places.chosen():
            stocks[directory].append(take_stock(layout, places.config, bar.update))
    bare = places.bare()
    directories = [_directory(one, held, bare=one in bare) for one, held in stocks.items()]
    servers = _ask_servers(places, every=options.tier is None)
    tiers = _tiers(places, directories)
    paragraphs = [_text(*one) for one in zip(stocks.items(), directories, strict=True)]
    paragraphs += [
        [f"The {tier['tier']} tier uses {format_size(tier['bytes'])} of the {format_size(most)} that it may use."]
        for tier in tiers
        if (most := tier["capacity_bytes"]) is not None
    ]
    text = "\n\n".join("\n".join(lines) for lines in [*paragraphs, *map(_server_text, servers)])
    answer(options, {"directories": directories, "tiers": tiers, "servers": servers}, text.splitlines())
    failed = not all(one["answers"] for one in servers)
    return int(bool(places.broken) or any(one["unmarked"] for one in directories) or failed)


def _ask_servers(places: Places, *, every: bool) -> list[dict[str, Any]]:
    """Return whether the tiers on servers answer, and the contents of our own tiers."""
    found = []
    for name in places.config.parts if every else places.servers:
        if name in LOCAL:
            continue
        one: dict[str, Any] = {"tier": name, "answers": False, "said": "", "namespaces": []}
        found.append(one)
        try:
            one["said"], one["answers"] = ask_tier(places.config, name), True
            if name in places.listed:
                one["namespaces"] = _server_stock(places, name)
        except (ConfigError, StoreError) as error:
            listed = f"{one['said']}; what it holds cannot be listed: " if one["answers"] else ""
            one["said"] = f"{listed}{str(error).splitlines()[0]}"
    return found


def _server_stock(places: Places, name: str) -> list[dict[str, Any]]:
    """Count the blocks of a tier on servers, by namespace, which a server knows by its digest only."""
    meant, known = places.digests(), places.names()
    sizes: dict[str, list[int]] = {}
    with progress(f"counting {name}", None, "blocks") as bar, opened_server(places.config, name) as tier:
        for value in tier.stored():
            bar.update()
            if meant is None or value.digest in meant:
                sizes.setdefault(value.digest, []).append(value.nbytes)
    return [
        {"digest": digest, "namespace": known.get(digest), "blocks": len(of_one), "bytes": sum(of_one)}
        for digest, of_one in sorted(sizes.items())
    ]


def _server_text(one: dict[str, Any]) -> list[str]:
    held = one["namespaces"]
    rows = [("namespace", "blocks", "bytes")]
    rows += [(it["namespace"] or it["digest"], f"{it['blocks']:,}", format_size(it["bytes"])) for it in held]
    return [f"{one['tier']}: {one['said']}", *(f"  {line}" for line in table(rows, right=(1, 2)) if held)]


def _directory(directory: Directory, stocks: Sequence[NamespaceStock], *, bare: bool) -> dict[str, Any]:
    """Return a directory's contents as ``--json`` prints them."""
    system = None if directory.problem else os.statvfs(directory.path)
    salts: dict[str, list[int]] = {}
    for digits, counts in (one for stock in stocks for one in stock.by_salt.items()):
        name = tag_name(digits)
        salts[name] = [sum(pair) for pair in zip(counts, salts.get(name, (0, 0, 0)), strict=True)]
    return {
        "directory": directory.path,
        "tier": directory.tier,
        "problem": directory.problem or None,
        "blocks": sum(stock.blocks for stock in stocks),
        "bytes": sum(stock.bytes for stock in stocks),
        "side_bytes": sum(stock.side_bytes for stock in stocks),
        "free_bytes": system.f_bavail * system.f_frsize if system else 0,
        "total_bytes": system.f_blocks * system.f_frsize if system else 0,
        "bare": bare,
        "unmarked": unmarked(directory.path) if system else [],
        "salts": [
            {"salt": name, "blocks": blocks, "bytes": nbytes, "pinned_bytes": pinned}
            for name, (blocks, nbytes, pinned) in sorted(salts.items(), key=lambda one: (-one[1][1], one[0]))
        ],
        "namespaces": [
            {
                **{name: value for name, value in asdict(one).items() if name != "by_salt"},
                "oldest_use": iso(one.oldest_use),
                "newest_use": iso(one.newest_use),
            }
            for one in stocks
        ],
    }


def _tiers(places: Places, directories: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    own = [data for one, data in zip(places.directories, directories, strict=True) if not one.offloaded]
    return [
        {
            "tier": tier,
            "bytes": sum(data["bytes"] + data["side_bytes"] for data in own if data["tier"] == tier),
            "capacity_bytes": places.capacities.get(tier),
        }
        for tier in dict.fromkeys(data["tier"] for data in own)
    ]


def _text(stocks_of: tuple[Directory, Sequence[NamespaceStock]], data: dict[str, Any]) -> list[str]:
    directory, stocks = stocks_of
    if directory.problem:
        return [directory.complaint]
    free = f"{format_size(data['free_bytes'])} of {format_size(data['total_bytes'])} free on its file system"
    held = f"{many(len(stocks), 'namespace', 'namespaces')}, {blocks_and_bytes(data['blocks'], data['bytes'])}"
    lines = [f"{directory.path} ({directory.tier}): {held}; {free}"]
    if stocks:
        lines += [f"  {line}" for line in _namespace_table(stocks)]
        leased = sum(one.leased_bytes for one in stocks)
        pinned = format_size(sum(one.pinned_bytes for one in stocks))
        lines += [f"  {format_size(leased)} in blocks with a lease, {pinned} of them pinned"] if leased else []
        lines += [f"  {line}" for line in _salt_table([tuple(one.values()) for one in data["salts"]])]
    elif data["bare"]:
        lines.append(f"  There is {NO_STORE}.")
    return lines + [f"  {line}" for path in data["unmarked"] for line in about_unmarked(path)]


def _namespace_table(stocks: Sequence[NamespaceStock]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    rows.append(("namespace", "blocks", "bytes", "last used", "first to go", "writing", "left behind", "damaged"))
    for stock in stocks:
        counts = (stock.temporaries, stock.left_behind, stock.quarantined)
        rows.append(
            (
                stock.namespace,
                f"{stock.blocks:,}",
                _sizes(stock),
                ago(stock.newest_use),
                ago(stock.oldest_use),
                *(f"{number:,}" for number in counts),
            )
        )
    lines = table(rows, right=(1, 2, 5, 6, 7))
    told: dict[str, str] = {}
    for stock in stocks:
        if stock.identity is not None:
            told.setdefault(_summary(stock.identity), stock.namespace.partition("/")[0])
    return [*lines, *(f"{name}: {summary}" for summary, name in told.items())]


def _salt_table(salts: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the salts that hold most; nothing if no request had one."""
    if all(name == NO_SALT for name, *_ in salts):
        return []
    listed, others = salts[:_MOST_SALTS], salts[_MOST_SALTS:]
    if others:
        _, *counts = zip(*others, strict=True)
        blocks, nbytes, pinned = map(sum, counts)
        listed = [*listed, (many(len(others), "other salt", "other salts"), blocks, nbytes, pinned)]
    rows = [("salt", "blocks", "bytes", "pinned")]
    rows += [(name, f"{blocks:,}", format_size(nbytes), format_size(pinned)) for name, blocks, nbytes, pinned in listed]
    return table(rows, right=(1, 2, 3))


def _sizes(stock: NamespaceStock) -> str:
    """Format what blocks take, and how many times as much they would take if they were not compressed."""
    plain, nbytes = stock.uncompressed_bytes or 0, format_size(stock.bytes)
    return f"{nbytes}, {plain / stock.bytes:.2f} times compressed" if plain > stock.bytes else nbytes


def _summary(identity: dict[str, Any]) -> str:
    """Summarise the identity of a namespace."""
    cache, more = identity.get("cache"), identity.get("more")
    said = [
        ("model", identity.get("name")),
        ("vLLM", identity.get("vllm")),
        ("KV cache", cache.get("cache_dtype") if isinstance(cache, dict) else None),
        ("identity", str(identity.get("digest"))[:16]),
        ("authentication key", more.get("authentication") if isinstance(more, dict) else None),
    ]
    return ", ".join(f"{name} {value}" for name, value in said if value is not None)
