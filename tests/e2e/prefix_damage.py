"""Prompts whose stored blocks get damaged, and how."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.workload import Request

#: Requests that begin alike, in one batch.
SHARERS = 4
#: After so many steps the first of them is aborted.
ABORT_STEPS = (0, 1, 2, 3)
CROWD = 14


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    if len(content) > abs(offset):  # else it was cut short before
        content[offset] ^= 4
        path.write_bytes(content)


#: By name: what to do to a block's file, given another block's.
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
#: What is counted for each; the rest counts as corrupt.
CAUSES = {"another block": "foreign", "gone": "missing"}


def victim(name: str, blocks: int = 6) -> Request:
    """A request of some whole blocks and a little more."""
    return request(prompt(blocks * BLOCK + 9, f"victim {name}"), 10)


def sharers(name: str) -> list[Request]:
    """Requests with the same first blocks and other ends."""
    common = prompt(6 * BLOCK, f"common {name}")
    return [request([*common, *prompt(20 + n, f"sharer {name} {n}")], 30) for n in range(SHARERS)]


def crowd() -> list[Request]:
    """More than the KV cache holds at once."""
    return [request(prompt(41 + 9 * n, "crowd"), 160) for n in range(CROWD)]


def bystanders() -> list[Request]:
    """Requests that go on generating meanwhile."""
    return [request(prompt(7 + n, "bystander"), 60) for n in range(3)]


def all_requests() -> dict[str, list[Request]]:
    """Everything that the tests of damage ask for, by batch, for the reference."""
    victims = {name: [victim(name)] for name in (*DAMAGES, "healed", "two", "beside", "lost", "back")}
    shared = {f"shared {name}": sharers(name) for name in ("alike", *map(str, ABORT_STEPS))}
    return {**victims, "long": [victim("long", 16)], **shared, "crowd": crowd(), "bystanders": bystanders()}


def damage_some(files: list[Path], seed: int) -> int:
    """Damage about half of some files, each in its way; returns how many."""
    source = random.Random(seed)  # noqa: S311 - what to damage, no secrets
    ways = list(DAMAGES.values())
    chosen = [path for path in sorted(files) if source.random() < 0.5]
    for path in chosen:
        source.choice(ways)(path, next(other for other in files if other != path and other.exists()))
    return len(chosen)
