"""``ucm store stat``: show how much a store holds, by namespace."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.commands.options import many, say, say_json, table
from ucm.commands.store.places import Directory, Places, find_places, opened_server
from ucm.commands.store.text import NO_STORE, about_unmarked, ago, blocks_and_bytes, iso, progress
from ucm.config.settings import format_size
from ucm.errors import ConfigError
from ucm.salts import NO_SALT, tag_name
from ucm.store.base import StoreError
from ucm.store.factory import ask_tier
from ucm.store.inspection import NamespaceStock, take_stock, unmarked

#: The tiers that are directories.
_DIRECTORY_TIERS = frozenset({"Posix", "Dram", "Cache"})
#: How many salts are listed; a program gets all.
_MOST_SALTS = 10

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


@dataclass
class DirectoryStock:
    """The contents of a directory."""

    directory: Directory
    namespaces: list[NamespaceStock] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)
    bare: bool = False  #: whether it contains no part of a store
    free: int = 0  #: free bytes of its file system for this user
    total: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks in all namespaces."""
        return sum(stock.blocks for stock in self.namespaces)

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return sum(stock.nbytes for stock in self.namespaces)

    @property
    def side_nbytes(self) -> int:
        """The size of all other files in bytes."""
        return sum(stock.side_nbytes for stock in self.namespaces)

    @property
    def salts(self) -> list[tuple[str, int, int, int]]:
        """The name of each salt's tag with its blocks, bytes, and pinned bytes in all namespaces; most bytes first."""
        found: dict[str, tuple[int, int, int]] = {}
        for stock in self.namespaces:
            for digits, (blocks, nbytes, pinned) in stock.by_salt.items():
                more = found.get(tag_name(digits), (0, 0, 0))
                found[tag_name(digits)] = more[0] + blocks, more[1] + nbytes, more[2] + pinned
        return sorted(((name, *counts) for name, counts in found.items()), key=lambda one: (-one[2], one[0]))


def run(options: argparse.Namespace) -> int:
    """Count, and print; return 1 if a directory cannot be read, or a namespace lacks its marker.

    Raises:
        UcmError: The options match nothing.
    """
    places = find_places(options, servers=True)
    stocks = _count(places)
    servers = _ask_servers(places, every=options.tier is None)
    if options.json:
        directories = [_directory_data(stock) for stock in stocks]
        say_json({"directories": directories, "tiers": _tier_data(places, stocks), "servers": servers})
    else:
        paragraphs = [*_text(places, stocks), *(_server_text(one) for one in servers)]
        say("\n\n".join("\n".join(lines) for lines in paragraphs).splitlines())
    failed = not all(one["answers"] for one in servers)
    return int(bool(places.broken) or any(stock.unmarked for stock in stocks) or failed)


def _ask_servers(places: Places, *, every: bool) -> list[dict[str, Any]]:
    """Return whether the tiers on servers answer, and the contents of our own tiers."""
    found = []
    for name in places.config.parts if every else places.servers:
        if name in _DIRECTORY_TIERS:
            continue
        one: dict[str, Any] = {"tier": name, "answers": False, "said": "", "namespaces": []}
        found.append(one)
        try:
            one["said"], one["answers"] = ask_tier(places.config, name), True
            if name in places.servers:
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


def _count(places: Places) -> list[DirectoryStock]:
    stocks = {directory: DirectoryStock(directory) for directory in places.directories}
    with progress("counting", None, "blocks") as bar:
        for directory, layout in places.chosen():
            stock = take_stock(layout, places.config, bar.update, in_memory=directory.in_memory)
            stocks[directory].namespaces.append(stock)
    for directory in places.readable:
        system = os.statvfs(directory.path)
        stocks[directory].free = system.f_bavail * system.f_frsize
        stocks[directory].total = system.f_blocks * system.f_frsize
        stocks[directory].unmarked = unmarked(directory.path)
    for directory in places.bare():
        stocks[directory].bare = True
    return list(stocks.values())


def _text(places: Places, stocks: Sequence[DirectoryStock]) -> list[list[str]]:
    paragraphs = [_directory_text(stock) for stock in stocks]
    for tier in _tier_data(places, stocks):
        if tier["capacity_bytes"] is not None:
            used, capacity = format_size(tier["bytes"]), format_size(tier["capacity_bytes"])
            paragraphs.append([f"The {tier['tier']} tier uses {used} of the {capacity} that it may use."])
    return paragraphs


def _directory_text(stock: DirectoryStock) -> list[str]:
    directory = stock.directory
    if directory.problem:
        return [directory.complaint]
    namespaces = many(len(stock.namespaces), "namespace", "namespaces")
    free = f"{format_size(stock.free)} of {format_size(stock.total)} free on its file system"
    lines = [
        f"{directory.path} ({directory.tier}): {namespaces}, {blocks_and_bytes(stock.blocks, stock.nbytes)}; {free}"
    ]
    if stock.namespaces:
        lines += [f"  {line}" for line in _namespace_table(stock.namespaces)]
        leased = sum(one.leased_nbytes for one in stock.namespaces)
        pinned = format_size(sum(one.pinned_nbytes for one in stock.namespaces))
        lines += [f"  {format_size(leased)} in blocks with a lease, {pinned} of them pinned"] if leased else []
        lines += [f"  {line}" for line in _salt_table(stock.salts)]
    elif stock.bare:
        lines.append(f"  There is {NO_STORE}.")
    for path in stock.unmarked:
        lines += [f"  {line}" for line in about_unmarked(path)]
    return lines


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
                ago(stock.newest),
                ago(stock.oldest),
                *(f"{number:,}" for number in counts),
            )
        )
    lines = table(rows, right=(1, 2, 5, 6, 7))
    told: dict[str, str] = {}
    for stock in stocks:
        if stock.identity is not None:
            told.setdefault(_summary(stock.identity), stock.namespace.partition("/")[0])
    return [*lines, *(f"{name}: {summary}" for summary, name in told.items())]


def _salt_table(salts: Sequence[tuple[str, int, int, int]]) -> list[str]:
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
    plain, nbytes = stock.plain_nbytes or 0, format_size(stock.nbytes)
    return f"{nbytes}, {plain / stock.nbytes:.2f} times compressed" if plain > stock.nbytes else nbytes


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


def _directory_data(stock: DirectoryStock) -> dict[str, Any]:
    directory = stock.directory
    return {
        "directory": directory.path,
        "tier": directory.tier,
        "problem": directory.problem or None,
        "blocks": stock.blocks,
        "bytes": stock.nbytes,
        "side_bytes": stock.side_nbytes,
        "free_bytes": stock.free,
        "total_bytes": stock.total,
        "bare": stock.bare,
        "unmarked": stock.unmarked,
        "salts": [
            {"salt": name, "blocks": blocks, "bytes": nbytes, "pinned_bytes": pinned}
            for name, blocks, nbytes, pinned in stock.salts
        ],
        "namespaces": [
            {
                "namespace": one.namespace,
                "identity": one.identity,
                "blocks": one.blocks,
                "bytes": one.nbytes,
                "uncompressed_bytes": one.plain_nbytes,
                "leased_bytes": one.leased_nbytes,
                "pinned_bytes": one.pinned_nbytes,
                "oldest_use": iso(one.oldest),
                "newest_use": iso(one.newest),
                "temporaries": one.temporaries,
                "left_behind": one.left_behind,
                "quarantined": one.quarantined,
                "side_bytes": one.side_nbytes,
            }
            for one in stock.namespaces
        ],
    }


def _tier_data(places: Places, stocks: Sequence[DirectoryStock]) -> list[dict[str, Any]]:
    stocks = [stock for stock in stocks if not stock.directory.offloaded]
    tiers = dict.fromkeys(stock.directory.tier for stock in stocks)
    return [
        {
            "tier": tier,
            "bytes": sum(stock.nbytes + stock.side_nbytes for stock in stocks if stock.directory.tier == tier),
            "capacity_bytes": places.capacities.get(tier),
        }
        for tier in tiers
    ]
