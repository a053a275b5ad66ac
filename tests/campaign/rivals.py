"""Several processes write the same blocks at the same time, each with its own bytes; some are killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.damage import block_files
from tests.campaign.figures import Figures
from tests.campaign.processes import Child
from tests.campaign.scene import Scene, Stage, inspect, reopen
from tests.campaign.user import use

if TYPE_CHECKING:
    import random

_BLOCKS, _EDITIONS = 30, 4
_LONGEST = 0.5


def run(count: int, stage: Stage) -> Figures:
    """Let writers compete in this many stores.

    Each also loads blocks of all writers. Blocks are deleted meanwhile, so they are written again and again.

    Args:
        count: The number of stores.
        stage: Where they are created.
    """
    figures = Figures()
    scenes: list[Scene] = []
    for _ in range(count):
        scenes.append(stage.scene(_BLOCKS))
        figures.add(_meet(stage.rng, scenes[-1], stage.stop_file()))
        figures.trials += 1
        stage.tick()
    figures.add(reopen(scenes))
    return figures


def _meet(rng: random.Random, scene: Scene, stop: Path) -> Figures:
    figures = Figures()
    writers = [
        Child(use, scene, rng.getrandbits(32), str(stop), editions=_EDITIONS) for _ in range(rng.randrange(2, 5))
    ]
    for writer in writers:
        writer.await_word("working")
    victim = writers[0] if rng.random() < 0.5 else None
    deadline = time.monotonic() + rng.uniform(0.05, _LONGEST)
    while time.monotonic() < deadline:
        for root in scene.roots:
            _thin_out(rng, Path(root))
        time.sleep(0.01)
    if victim is not None:
        victim.kill()
    stop.touch()
    for writer in writers:
        figures.add(writer.end())
    figures.add(inspect(scene, editions=_EDITIONS))
    return figures


def _thin_out(rng: random.Random, root: Path) -> None:
    """Delete some blocks, like an eviction."""
    for block in block_files(root):
        if rng.random() < 0.2:
            block.path.unlink(missing_ok=True)
