"""SIGKILL while processes save, lease, evict and drop in one store: no lease is lost, and none lasts for ever."""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.campaign.figures import Figures
from tests.campaign.kill import burn, dawdle, save_in_calls
from tests.campaign.processes import Child, in_new_process
from tests.campaign.scene import NAMESPACE, Scene, Stage, below, inspect, reopen
from ucm.store.factory import open_store, open_tier
from ucm.store.inspection import stored_blocks
from ucm.store.posix.layout import IDENTITY, MARKER
from ucm.store.posix.space import USAGE_FILE
from ucm.store.tier import DEEPEST, LeaseRules, kept_until, pinned_until, used_until

if TYPE_CHECKING:
    from tests.campaign.processes import Reporter
    from ucm.store.base import BlockKey, BlockTransfer, KVStore
    from ucm.store.tier import Tier

#: How many processes use a store at once; each is killed.
_TOGETHER = 3
#: The number of blocks, and of those among them that are leased for long and never dropped.
_BLOCKS, _KEPT = 60, 4
#: The fewest blocks that a store has room for: half of its share of one directory can be pinned.
_LEAST = 6 * _KEPT
#: How long other blocks are leased at most, and the kept ones at least and at most, in seconds.
_SOON, _LATE, _LATEST = 100.0, 300.0, 600.0
#: After how many actions a process may be killed, and how long after the last of these.
_MOST_ACTIONS, _MOMENT, _LONGEST_LIFE = 40, 0.02, 10.0


def run(count: int, stage: Stage) -> Figures:
    """Kill this many processes; after those of each store, check its leases, and load what it has.

    Args:
        count: The number of processes.
        stage: Where the stores are created.
    """
    figures = Figures()
    scenes: list[Scene] = []
    while figures.trials < count:
        scene = _scene(stage)
        scenes.append(scene)
        leased: dict[int, list[int]] = {}
        for child in _killed(stage, scene, min(_TOGETHER, count - figures.trials)):
            figures.add(child.end())
            figures.trials += 1
            for index, stamp in child.values("leased"):
                leased.setdefault(index, []).append(stamp)
            stage.tick()
        figures.committed += len(leased)
        figures.add(_judge(scene, leased))
        figures.add(in_new_process(_lease_again, scene)[1])
        figures.add(inspect(scene, sorted(leased)))
    figures.add(reopen(scenes))
    return figures


def _scene(stage: Stage) -> Scene:
    """Return a store that is too small for its blocks."""
    scene = stage.scene(_BLOCKS, pipeline="Posix", touch_seconds=stage.rng.choice((0.0, 0.5, 60.0)))
    room = stage.rng.randrange(_LEAST, _BLOCKS) * (scene.corpus.geometry.nbytes * 9 // 8 + 8192)
    return replace(scene, config=replace(scene.config, posix_capacity_bytes=room))


def _killed(stage: Stage, scene: Scene, count: int) -> list[Child]:
    """Return processes that used a store together until the last one was killed."""
    rng = stage.rng
    children = []
    for _ in range(count):
        fuse = rng.choice((None, None, rng.randrange(100), rng.randrange(1000)))
        children.append(Child(live_until_killed, scene, rng.getrandbits(32), fuse))
    for child in children:
        enough, deadline = rng.randrange(_MOST_ACTIONS), time.monotonic() + _LONGEST_LIFE
        while child.alive and len(child.values("acted")) < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, _MOMENT))
        child.kill()
    return children


def live_until_killed(reporter: Reporter, scene: Scene, seed: int, fuse: int | None) -> None:
    """Save, use, lease and drop random blocks, and report leases of the kept ones.

    Args:
        reporter: Receives each action and each lease that is set, with the time that the block's file then has.
        scene: The store.
        seed: The seed of all random choices.
        fuse: See ``save_until_killed``.
    """
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    corpus, config = scene.corpus, scene.config
    reporter.tell("begun")
    dawdle(rng)
    if fuse is not None:
        burn(fuse, rng)
    store, tier = open_store(config, NAMESPACE, corpus.geometry), open_tier(config, config.pipeline, NAMESPACE)
    save_in_calls(store, [_saved(scene, index, rng) for index in range(_KEPT)], rng)  # as all do at once
    while True:
        for index in rng.sample(range(_KEPT), 2):
            if stamp := _lease(tier, corpus.key(index), rng):
                reporter.tell("leased", (index, stamp))
        for _ in range(rng.randrange(8)):
            _act(scene, store, tier, rng)
            reporter.tell("acted")


def _act(scene: Scene, store: KVStore, tier: Tier, rng: random.Random) -> None:
    """Do one thing with random blocks; of those that are kept, nothing that ends a lease."""
    some = rng.sample(range(_BLOCKS), rng.randrange(1, 6))
    others = {scene.corpus.key(index): depth for depth, index in enumerate(some) if index >= _KEPT}
    until, action = time.time() + rng.uniform(1.0, _SOON), rng.randrange(7)
    if action < 3:  # what is evicted is saved again
        save_in_calls(store, [_saved(scene, index, rng) for index in some], rng)
    elif action == 3:
        store.renew({scene.corpus.key(index): depth for depth, index in enumerate(some)})
    elif action == 4:
        store.retain(others, until)
    elif action == 5:
        tier.lease(others, until if rng.random() < 0.5 else 0.0, pinned=False)
    else:
        tier.drop(list(others))


def _saved(scene: Scene, index: int, rng: random.Random) -> BlockTransfer:
    """Return a transfer that saves a block, in some cases with a short lease."""
    until = time.time() + rng.uniform(1.0, _SOON) if rng.random() < 0.3 else 0.0
    return replace(scene.corpus.transfer(index), depth=rng.randrange(4), retain_until=until)


def _lease(tier: Tier, key: BlockKey, rng: random.Random) -> int:
    """Retain or pin a kept block for long; return the time that its file has at least; 0 if it is not stored."""
    until, pinned = time.time() + rng.uniform(_LATE, _LATEST), rng.random() < 0.5
    stamp = kept_until(until, 0)
    return (pinned_until(stamp) if pinned else stamp) if tier.lease({key: 0}, until, pinned=pinned).leased else 0


def _judge(scene: Scene, leased: dict[int, list[int]]) -> Figures:
    """Compare the times of files, and their sizes, with what the dead processes have been told."""
    figures, config, now = Figures(), scene.config, time.time_ns()
    rules = LeaseRules.of(config)
    stamps = {block.key: block.used_ns for root in scene.roots for block in stored_blocks(root)}
    for index, known in leased.items():
        stamp = stamps.get(scene.corpus.key(index), 0)
        is_pinned = not any(rules.is_pinned(one, now) for one in known) or rules.is_pinned(stamp, now)
        if not is_pinned or stamp < max(known) // 1000 * 1000:
            figures.lost += 1
            figures.notes.append(f"the lease of a block ends {(max(known) - stamp) / 1e9:.3f} s too early")
    latest = max(now / 1e9 + _LATEST, used_until(now / 1e9, config.touch_seconds, 0) / 1e9)
    figures.immortal += sum(stamp > kept_until(latest, -DEEPEST) for stamp in stamps.values())
    for root in scene.roots:
        held, share = _held(root), (config.posix_capacity_bytes or 0) / len(scene.roots)
        if held > share:
            figures.oversized += 1
            figures.notes.append(f"{held:,} bytes are in a directory that may hold {share:,.0f}")
    return figures


def _held(root: str) -> int:
    """Return the bytes of a directory's blocks, also of unfinished ones, but not of what was never written of them.

    The last unit of a file counts as far as it is used, as in the scans of a tier: the capacity is one of bytes.
    """
    files = [path.lstat() for path in below(root) if path.is_file() and path.name not in {USAGE_FILE, MARKER, IDENTITY}]
    return sum(min(file.st_size, 512 * file.st_blocks) for file in files)


def _lease_again(reporter: Reporter, scene: Scene) -> None:
    """Lease all blocks: the dead hold none of their files."""
    keys = {scene.corpus.key(index): 0 for index in range(_BLOCKS)}
    with closing(open_tier(scene.config, scene.config.pipeline, NAMESPACE)) as tier:
        done = tier.lease(keys, time.time() + _SOON, pinned=False)
    reporter.tell("figures", Figures(stuck=done.stored - done.leased))
