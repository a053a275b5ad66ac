"""Compare the hits of the store's own evictor with an ideal and with LRU: `python -m tests.hot_prefix`.

Engines share a store. Requests begin with one of a few system prompts, and most belong to a conversation that goes on.
Each engine has a prefix cache of its own, as vLLM has, so that the store sees only the rest of a request. Engines
restart now and then. All policies see the same requests and hold equally many blocks:

- *ideal*: Belady's algorithm, which knows the future: of single blocks, so that no real policy reaches it;
- *LRU, all uses*: every use of every block counts at once, also those that the engine's own cache serves;
- *LRU, loads and saves*: only what the store sees counts, each block by itself;
- *UCM*: files in one directory, with several engines' evictors, on a simulated clock.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulated import repeatable
from ucm.store.base import BlockGeometry, BlockTransfer
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.testing.blocks import Memory, content, in_order, key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey, KVStore

NAMESPACE = "n"
SMALL = BlockGeometry((4096,), b"small geometry16")
FILE = HeaderCodec(NAMESPACE, SMALL).file_nbytes
ENGINES, OWN_BLOCKS = 3, 150
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 4, 12
TOUCH_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """A request.

    Args:
        engine: The engine that serves it.
        blocks: The numbers of its blocks.
        own: How many of these the engine's own cache serves.
    """

    engine: int
    blocks: tuple[int, ...]
    own: int


def trace(requests: int, restart: int, seed: int = 1) -> list[Asked]:
    """Return requests of conversations, and how many blocks of each the engine's own cache serves.

    Args:
        requests: The number of requests.
        restart: After how many requests one of the engines restarts.
        seed: Of the random choices.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    fresh = iter(range(1_000, 10_000_000))
    prompts = [[100 * number + place for place in range(SYSTEM_BLOCKS)] for number in range(SYSTEM_PROMPTS)]
    weights = [1 / (number + 1) for number in range(SYSTEM_PROMPTS)]
    going: list[list[int]] = []
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(ENGINES)]
    found = []
    for number in range(requests):
        if going and chance.random() < 0.6:
            blocks = going.pop(min(len(going) - 1, int(chance.expovariate(0.08))))
        else:
            blocks = list(chance.choices(prompts, weights)[0])
        blocks = [*blocks, *(next(fresh) for _ in range(chance.randint(2, 8)))]
        if chance.random() < 0.75:
            going.insert(0, blocks)
        engine = chance.randrange(ENGINES)
        if number % restart == restart - 1:
            caches[chance.randrange(ENGINES)].clear()
        cache = caches[engine]
        own = next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > OWN_BLOCKS:
            cache.popitem(last=False)
        found.append(Asked(engine, tuple(blocks), own))
    return found


def ideal(asked: Sequence[Asked], capacity: int) -> list[int]:
    """Return each request's hits if the block whose next use is farthest away is always the one to go."""
    following: dict[int, list[int]] = {}
    for number in range(len(asked) - 1, -1, -1):
        for block in asked[number].blocks[asked[number].own :]:
            following.setdefault(block, []).append(number)
    held: set[int] = set()
    hits = []
    never = len(asked)

    def next_use(block: int) -> int:
        return following[block][-1] if following.get(block) else never

    for one in asked:
        needed = one.blocks[one.own :]
        hits.append(next((place for place, block in enumerate(needed) if block not in held), len(needed)))
        for block in needed:
            following[block].pop()
        held.update(block for block in one.blocks if next_use(block) < never)
        while len(held) > capacity:
            held.remove(max(held, key=next_use))
    return hits


def lru(asked: Sequence[Asked], capacity: int, *, all_uses: bool) -> list[int]:
    """Return each request's hits if the least recently used block goes.

    Args:
        asked: The requests.
        capacity: The most blocks.
        all_uses: Whether uses of blocks that the engine's own cache serves count; else a prefix is stored again only
            if its last block is missing.
    """
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for one in asked:
        needed = one.blocks[one.own :]
        hits.append(next((place for place, block in enumerate(needed) if block not in held), len(needed)))
        stored_again = one.own and one.blocks[one.own - 1] not in held
        for block in reversed(one.blocks) if all_uses else one.blocks if stored_again else needed:
            held[block] = None
            held.move_to_end(block)
            if len(held) > capacity:
                held.popitem(last=False)
    return hits


def ucm(asked: Sequence[Asked], capacity: int, *, touch_seconds: float = TOUCH_SECONDS) -> list[int]:
    """Return each request's hits with the store and its evictors; a request every ten seconds."""
    directory = tempfile.mkdtemp(dir="/dev/shm")
    clock = repeatable(1)
    config = StoreConfig(
        directories=(directory,),
        posix_capacity_bytes=capacity * FILE,
        touch_seconds=touch_seconds,
    )
    try:
        with ExitStack() as opened:
            stores = [opened.enter_context(open_store(config, NAMESPACE, SMALL, clock=clock)) for _ in range(ENGINES)]
            hits = []
            for one in asked:
                clock.advance(10.0)
                hits.append(serve(stores[one.engine], [key(block) for block in one.blocks], one.own))
            return hits
    finally:
        shutil.rmtree(directory)


def serve(store: KVStore, keys: Sequence[BlockKey], own: int) -> int:
    """Do for a request what the connector does; return the blocks that the store had beyond those of the engine."""
    there = store.lookup_on_prefix(keys[:own])
    hit = store.lookup_on_prefix(keys[own:])
    store.renew(in_order(keys[: own + hit]))
    loaded = [Memory(block, SMALL) for block in keys[own : own + hit]]
    store.load([BlockTransfer(m.key, m.slices, depth=own + place) for place, m in enumerate(loaded)]).wait()
    for first, end in ((there, own), (own + hit, len(keys))):
        fresh = [Memory(block, SMALL, content(block, SMALL)) for block in keys[first:end]]
        store.save([BlockTransfer(m.key, m.slices, depth=first + n) for n, m in enumerate(fresh)]).wait()
    return hit


def table(requests: int, restart: int, shares: Sequence[float]) -> list[str]:
    """Return the table's lines: the share of the blocks that the stores were asked for and had, by capacity."""
    asked = trace(requests, restart)
    distinct = len({block for one in asked for block in one.blocks})
    wanted = sum(len(one.blocks) - one.own for one in asked)
    policies: dict[str, Callable[[int], list[int]]] = {
        "ideal (Belady)": lambda capacity: ideal(asked, capacity),
        "UCM": lambda capacity: ucm(asked, capacity),
        "LRU, all uses": lambda capacity: lru(asked, capacity, all_uses=True),
        "LRU, loads and saves": lambda capacity: lru(asked, capacity, all_uses=False),
    }
    lines = [
        f"{requests} requests for {distinct} distinct blocks, an engine restarts every {restart} requests",
        f"{wanted} block uses beyond the engines' own caches",
        "capacity             " + "".join(f"{share:9.1%}" for share in shares),
    ]
    for name, policy in policies.items():
        found = [sum(policy(int(share * distinct))) / wanted for share in shares]
        lines.append(f"{name:21s}" + "".join(f"{one:9.1%}" for one in found))
    return lines


if __name__ == "__main__":
    for restart in (800, 150):
        sys.stdout.write("\n".join([*table(2400, restart, (0.0125, 0.025, 0.05, 0.1)), ""]))
