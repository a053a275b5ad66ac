"""No space: a full disk, and a limit on the size of files."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.damage import block_files
from tests.campaign.figures import Figures
from tests.campaign.kill import save_in_calls
from tests.campaign.processes import Child, in_new_process
from tests.campaign.scene import NAMESPACE, Scene, Stage, inspect, temporaries
from ucm.store.factory import open_store
from ucm.store.memory.segment import directory_of
from ucm.store.posix.layout import namespaces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.campaign.processes import Reporter
    from ucm.store.base import BlockKey

_BLOCKS = 60
_MIB = 1 << 20
_PATIENCE = 30.0
_ROOT = Path(__file__).parents[2]


def run(count: int, stage: Stage) -> Figures:
    """Fill this many disks; half of the time, limit the size of files instead.

    Args:
        count: The number of disks.
        stage: Where the stores are created.
    """
    small = stage.disk / "small"
    small.mkdir(exist_ok=True)
    figures = Figures()
    rounds = count - count // 2
    privately = _private_mounts()
    if privately is None:
        figures.notes.append("no disk can be mounted by this user here: only a limit on the size of files was tried")
        rounds = 0
    else:
        words = [*privately, sys.executable, "-m", __name__, str(small), str(rounds), str(stage.rng.getrandbits(32))]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=_ROOT)
        if done.returncode:
            figures.crashes += 1
            figures.notes.append(done.stderr)
        else:
            figures.add(Figures.from_data(json.loads(done.stdout)))
        for _ in range(rounds):
            stage.tick()
    for _ in range(count - rounds):
        figures.add(_with_limited_files(stage))
        stage.tick()
    return figures


def _private_mounts() -> list[str] | None:
    """Return the prefix that gives a command its own mounts, which vanish with it; None if that is impossible."""
    unshare = shutil.which("unshare")
    for options in ([], ["--user", "--map-root-user"]):
        words = [unshare or "", *options, "--mount"]
        probe = [*words, "mount", "-t", "tmpfs", "-o", "size=1m", "ucm-campaign", "/mnt"]
        if unshare and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return words
    return None


def main(small: Path, rounds: int, seed: int) -> Figures:
    """Fill disks, in a process whose mounts are its own.

    Args:
        small: The mount point.
        rounds: The number of disks.
        seed: The seed of all random choices.
    """
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    figures = Figures()
    for _ in range(rounds):
        posix, dram = small / "posix", small / "dram"
        for folder in (posix, dram):
            folder.mkdir(exist_ok=True)
            options = f"size={rng.randrange(_MIB, 6 * _MIB)},mode=700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ucm-campaign", folder], check=True)  # noqa: S607
        figures.add(_one_disk(rng, posix, dram))
        for folder in (posix, dram):
            subprocess.run(["umount", "--lazy", folder], check=True)  # noqa: S607
    return figures


def _one_disk(rng: random.Random, posix: Path, dram: Path) -> Figures:
    # A capacity beyond the disk's makes the store delete old blocks when the disk is full; without one it never does.
    capacity = rng.choice((None, 64 * _MIB))
    stage = Stage(rng, posix, dram)
    scene = stage.scene(_BLOCKS, posix_capacity_bytes=capacity)
    figures = Figures(trials=1)
    child = Child(_fill_up, scene, rng.getrandbits(32))
    if child.await_word("full"):
        figures.add(inspect(scene, [] if capacity else child.values("full")[0]))
        figures.left_by_faults += temporaries(scene)
        for root in scene.roots:
            for block in block_files(Path(root)):
                block.path.unlink(missing_ok=True)
            for layout in namespaces(root):
                shutil.rmtree(directory_of(layout), ignore_errors=True)
    figures.add(child.end())
    figures.add(inspect(scene))
    figures.left_over += temporaries(scene)
    return figures


def _fill_up(reporter: Reporter, scene: Scene, seed: int) -> None:
    """Save more than fits, wait until there is space, and save again."""
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    figures = Figures()
    corpus = scene.corpus
    with open_store(scene.config, NAMESPACE, corpus.geometry) as store:

        def save(indices: list[int]) -> Mapping[BlockKey, str]:
            result = save_in_calls(store, [corpus.transfer(index) for index in indices], rng)
            figures.committed += len(result.done)
            figures.refused += len(result.failed)
            return result.done

        order = rng.sample(range(corpus.count), corpus.count)
        committed = []
        while order:
            step = rng.randrange(1, 8)
            done = save(order[:step])
            # Blocks that only the Dram tier took may be evicted there for later ones.
            committed += [index for index in order[:step] if done.get(corpus.key(index)) == "posix"]
            order = order[step:]
        reporter.tell("full", committed)
        deadline = time.monotonic() + _PATIENCE
        while any(block_files(Path(root)) for root in scene.roots) and time.monotonic() < deadline:
            time.sleep(scene.config.rest_seconds)
        while not save([rng.randrange(corpus.count)]):
            if time.monotonic() > deadline:
                figures.stuck += 1
                break
            time.sleep(scene.config.rest_seconds)
    reporter.tell("figures", figures)


def _with_limited_files(stage: Stage) -> Figures:
    """Blocks longer than any file may be."""
    scene = replace(stage, shared=None).scene(_BLOCKS)
    _, figures = in_new_process(_save_too_long, scene, stage.rng.random())
    figures.trials += 1
    figures.add(inspect(scene))
    figures.left_over += temporaries(scene)
    return figures


def _save_too_long(reporter: Reporter, scene: Scene, share: float) -> None:
    figures = Figures()
    corpus = scene.corpus
    keys = [corpus.key(index) for index in range(corpus.count)]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_store(scene.config, NAMESPACE, corpus.geometry) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * corpus.geometry.nbytes), hard))
        result = store.save([corpus.transfer(index) for index in range(corpus.count)]).wait()
        figures.refused = len(result.failed)
        figures.corrupt_hits = sum(store.lookup(keys))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        time.sleep(2 * scene.config.rest_seconds)
        done = store.save([corpus.transfer(0)]).wait().done
        figures.committed = len(done)
        figures.stuck = keys[0] not in done
    reporter.tell("figures", figures)


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps(found.as_data()))
