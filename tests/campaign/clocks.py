"""Make clocks jump, in processes and in the times of files, while old blocks are evicted."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.figures import Figures
from tests.campaign.processes import Child
from tests.campaign.scene import Scene, Stage, below, inspect, reopen
from tests.campaign.user import use

if TYPE_CHECKING:
    from tests.campaign.processes import Reporter

_BLOCKS = 40
_LONGEST = 0.5
_YEAR = 365 * 86400.0
_JUMPS = (0.0, 1.0, -1.0, 3700.0, -3700.0, _YEAR, -_YEAR, 80 * _YEAR)


def run(count: int, stage: Stage) -> Figures:
    """Make clocks jump in this many stores.

    Args:
        count: The number of stores.
        stage: Where they are created.
    """
    figures = Figures()
    scenes: list[Scene] = []
    for _ in range(count):
        scene = stage.scene(_BLOCKS, touch_seconds=0.0)
        capacity = stage.rng.randrange(2, _BLOCKS) * scene.corpus.geometry.nbytes
        scenes.append(replace(scene, config=replace(scene.config, posix_capacity_bytes=capacity)))
        figures.add(_live(stage.rng, scenes[-1], stage.stop_file()))
        figures.trials += 1
        stage.tick()
    figures.add(reopen(scenes))
    return figures


def _live(rng: random.Random, scene: Scene, stop: Path) -> Figures:
    figures = Figures()
    users = [Child(_use_another_time, scene, rng.getrandbits(32), str(stop)) for _ in range(2)]
    for user in users:
        user.await_word("working")
    deadline = time.monotonic() + rng.uniform(0.05, _LONGEST)
    while time.monotonic() < deadline:
        for root in scene.roots:
            _shift(rng, Path(root))
        time.sleep(0.01)
    stop.touch()
    for user in users:
        figures.add(user.end())
    figures.add(inspect(scene))
    return figures


def _use_another_time(reporter: Reporter, scene: Scene, seed: int, stop: str) -> None:
    """Use a store with a clock that jumps at each call."""
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    real = time.time
    time.time = lambda: real() + rng.choice(_JUMPS)
    use(reporter, scene, seed, stop)


def _shift(rng: random.Random, root: Path) -> None:
    """Change the time of last use of some files and directories."""
    for path in below(root):
        if rng.random() < 0.2:
            moment = max(0.0, time.time() + rng.choice(_JUMPS))
            try:
                os.utime(path, (moment, moment))
            except FileNotFoundError:
                continue
