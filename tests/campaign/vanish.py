"""A store's directory goes away while a process saves and loads, and comes back."""

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

#: How many removals a store goes through, with this many blocks.
_REMOVALS, _BLOCKS = 5, 40
_MOMENT = 0.15


def run(count: int, stage: Stage) -> Figures:
    """Remove directories so many times.

    Args:
        count: How many times.
        stage: Where.
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
    """Remove or hide a directory or a part of it; what was hidden comes back."""
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
        # The store was quicker: it made the directory again, or a file in it.
        shutil.rmtree(aside, ignore_errors=True)


def _bring_back(aside: Path, chosen: Path) -> None:
    """Put a directory back where the store may have made a new one meanwhile: that one goes."""
    if chosen.exists():
        shutil.rmtree(chosen)
    aside.rename(chosen)
