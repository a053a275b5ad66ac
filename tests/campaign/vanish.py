"""A store's directory vanishes while a process saves and loads, and comes back."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.figures import Figures
from tests.campaign.processes import Child
from tests.campaign.scene import Scene, Stage, below, inspect, reopen
from tests.campaign.user import use

if TYPE_CHECKING:
    import random

#: The number of removals per store, and the number of its blocks.
_REMOVALS, _BLOCKS = 5, 40
_MOMENT = 0.15


def run(count: int, stage: Stage) -> Figures:
    """Remove directories this many times.

    Args:
        count: How many times.
        stage: Where the stores are created.
    """
    figures = Figures()
    rng = stage.rng
    scenes: list[Scene] = []
    while figures.trials < count:
        scene = stage.scene(_BLOCKS)
        scenes.append(scene)
        stop = stage.stop_file()
        child = Child(use, scene, rng.getrandbits(32), str(stop))
        child.await_word("working")
        for _ in range(min(_REMOVALS, count - figures.trials)):
            time.sleep(rng.uniform(0, _MOMENT))
            _take_away(rng, scene)
            figures.trials += 1
            stage.tick()
        stop.touch()
        figures.add(child.end())
        for root in scene.roots:
            Path(root).mkdir(mode=0o700, exist_ok=True)
        figures.add(inspect(scene))
    figures.add(reopen(scenes))
    return figures


def _take_away(rng: random.Random, scene: Scene) -> None:
    """Remove or hide a directory or a part of it; hidden parts come back."""
    root = Path(rng.choice(scene.roots))
    parts = [path for path in below(root) if path.is_dir()]
    chosen = rng.choice([root, root, *parts])
    way = rng.randrange(4)
    aside = root.with_name(f"{root.name}-hidden")
    try:
        if way == 0:
            shutil.rmtree(chosen)
        elif way == 1:
            chosen.rename(aside)
            time.sleep(rng.uniform(0, _MOMENT))
            _bring_back(aside, chosen)
        elif way == 2:
            chosen.rename(aside)
            chosen.write_bytes(b"a file where a directory was")
            time.sleep(rng.uniform(0, _MOMENT))
            chosen.unlink()
            _bring_back(aside, chosen)
        else:
            shutil.rmtree(root)
            time.sleep(rng.uniform(0, _MOMENT))
            root.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        # The store was faster: it has created the directory again, or a file in it.
        shutil.rmtree(aside, ignore_errors=True)


def _bring_back(aside: Path, chosen: Path) -> None:
    """Restore a directory, and delete the one that the store may have created meanwhile."""
    if chosen.exists():
        shutil.rmtree(chosen)
    aside.rename(chosen)
