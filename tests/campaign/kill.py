"""SIGKILL while blocks are being saved: after a random time, or within a system call."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.campaign.figures import Figures
from tests.campaign.processes import Child
from tests.campaign.scene import NAMESPACE, Scene, Stage, inspect, reopen
from ucm.store.base import TaskResult
from ucm.store.factory import open_store
from ucm.store.posix import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.campaign.processes import Reporter
    from ucm.store.base import BlockTransfer

#: The number of kills per store, and the number of its blocks.
_KILLS, _BLOCKS = 5, 120
#: A process is killed at a random moment after it has committed at most this many blocks, or at its fuse.
_MOST_COMMITTED = 30
_MOMENT, _LONGEST_LIFE = 0.02, 5.0
_CALLS = [
    *((os, name) for name in ("open", "write", "pwritev", "ftruncate", "fsync", "close", "rename", "mkdir", "unlink")),
    *((os, "utime"), (fcntl, "flock"), (paths, "rename_new")),
]
#: The probability that a process that dawdles waits before a call.
_SELDOM = 0.1


def run(count: int, stage: Stage) -> Figures:
    """Kill this many processes; after each, a new one loads everything visible.

    Args:
        count: The number of processes.
        stage: Where the stores are created.
    """
    figures = Figures()
    rng = stage.rng
    scenes: list[Scene] = []
    committed: set[int] = set()
    for number in range(count):
        if number % _KILLS == 0:
            scenes.append(stage.scene(_BLOCKS))
            committed = set()
        fuse = rng.choice((None, None, rng.randrange(30), rng.randrange(300)))
        child = Child(save_until_killed, scenes[-1], rng.getrandbits(32), fuse)
        enough = rng.randrange(_MOST_COMMITTED) if fuse is None else sys.maxsize
        deadline = time.monotonic() + _LONGEST_LIFE
        while child.alive and len(child.values("committed")) < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, _MOMENT))
        child.kill()
        figures.add(child.end())
        figures.trials += 1
        figures.committed += len(child.values("committed"))
        committed |= set(child.values("committed"))
        figures.add(inspect(scenes[-1], sorted(committed)))
        stage.tick()
    figures.add(reopen(scenes))
    return figures


def save_until_killed(reporter: Reporter, scene: Scene, seed: int, fuse: int | None) -> None:
    """Save random blocks, and report the committed ones.

    Args:
        reporter: Receives each committed block.
        scene: The store.
        seed: The seed of all random choices.
        fuse: The number of system calls after which the process dies within the next one; None for never.
    """
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    corpus = scene.corpus
    reporter.tell("begun")
    if fuse is not None:
        burn(fuse, rng)
    store = open_store(scene.config, NAMESPACE, corpus.geometry)
    while True:
        batch = rng.sample(range(corpus.count), rng.randrange(1, 6))
        done = save_in_calls(store, [corpus.transfer(index) for index in batch], rng).done
        for index in batch:
            if corpus.key(index) in done:
                reporter.tell("committed", index)


def save_in_calls(store: Any, blocks: Sequence[BlockTransfer], rng: random.Random) -> TaskResult:
    """Save blocks in random order and in calls of a random size, and wait after the last one; return all outcomes."""
    tasks, left = [], rng.sample(blocks, len(blocks))
    while left:
        step = rng.randrange(1, len(left) + 1)
        tasks.append(store.save(left[:step]))
        left = left[step:]
    results = [task.wait() for task in tasks]
    done = {key: tier for result in results for key, tier in result.done.items()}
    return TaskResult(done, {key: e for result in results for key, e in result.failed.items()}, 0, 0.0)


def burn(fuse: int, rng: random.Random) -> None:
    """Make this process die in a later system call: before it, after it, or half-way through."""
    left = [fuse]

    def deadly(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if name == "pwritev":
                    _tear(call, *arguments, rng=rng)
                elif rng.random() < 0.5:
                    call(*arguments, **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return wrapped

    _replace_calls(deadly)


def dawdle(rng: random.Random) -> None:
    """Make this process wait before some of its system calls, so that others are faster."""

    def slow(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        del name

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if rng.random() < _SELDOM:
                time.sleep(rng.uniform(0, _MOMENT))
            return call(*arguments, **keywords)

        return wrapped

    _replace_calls(slow)


def _replace_calls(replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put other functions in the places of `_CALLS`."""
    for module, name in _CALLS:
        setattr(module, name, replacement(name, getattr(module, name)))


def _tear(
    call: Callable[..., Any], descriptor: int, buffers: Sequence[Any], offset: int, *, rng: random.Random
) -> None:
    """Write only the beginning of the data."""
    whole = b"".join(bytes(buffer) for buffer in buffers)
    call(descriptor, [whole[: rng.randrange(len(whole) + 1)]], offset)
