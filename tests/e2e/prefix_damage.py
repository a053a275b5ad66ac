"""Prompts whose stored blocks are damaged, and the kinds of damage."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.workload import Request

#: The number of requests with a common prefix in one batch.
SHARERS = 4
#: The number of steps after which the first of them is aborted.
ABORT_STEPS = (0, 1, 2, 3)
CROWD = 14


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    if len(content) > abs(offset):  # otherwise it was already truncated
        content[offset] ^= 4
        path.write_bytes(content)


#: The kinds of damage, by name: functions of a block's file and another block's.
DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the header": lambda path, _: flip(path, 130),
    "a bit of the first layer": lambda path, _: flip(path, 4096 + 7),
    "the last bits": lambda path, _: flip(path, -1),
    "cut short": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut within the header": lambda path, _: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path, _: path.write_bytes(b""),
    "a byte too many": lambda path, _: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "another block": lambda path, other: path.write_bytes(other.read_bytes()),
    "gone": lambda path, _: path.unlink(),
}
#: The counted cause of some, None of what a lookup does not find; the others count as corrupt.
CAUSES = {"another block": "foreign", "gone": None}


def victim(name: str, blocks: int = 6) -> Request:
    """Return a request of some full blocks and a part of another."""
    return request(prompt(blocks * BLOCK + 9, f"victim {name}"), 10)


def sharers(name: str) -> list[Request]:
    """Return requests with the same first blocks and different ends."""
    common = prompt(6 * BLOCK, f"common {name}")
    return [request([*common, *prompt(20 + n, f"sharer {name} {n}")], 30) for n in range(SHARERS)]


def crowd() -> list[Request]:
    """Return more requests than the KV cache can hold at once."""
    return [request(prompt(41 + 9 * n, "crowd"), 160) for n in range(CROWD)]


def bystanders() -> list[Request]:
    """Return requests that keep generating meanwhile."""
    return [request(prompt(7 + n, "bystander"), 60) for n in range(3)]


def all_requests() -> dict[str, list[Request]]:
    """Return all requests of the damage tests, by batch, for the reference."""
    victims = {name: [victim(name)] for name in (*DAMAGES, "healed", "two", "beside", "lost", "back")}
    shared = {f"shared {name}": sharers(name) for name in ("alike", *map(str, ABORT_STEPS))}
    return {**victims, "long": [victim("long", 16)], **shared, "crowd": crowd(), "bystanders": bystanders()}


def damage_some(files: list[Path], seed: int) -> int:
    """Damage about half of some files, each in a different way; return how many."""
    source = random.Random(seed)  # noqa: S311 - what to damage, no secrets
    ways = list(DAMAGES.values())
    chosen = [path for path in sorted(files) if source.random() < 0.5]
    for path in chosen:
        source.choice(ways)(path, next(other for other in files if other != path and other.exists()))
    return len(chosen)
