"""Withdraw permissions while a process saves and loads, and restore them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.figures import Figures
from tests.campaign.processes import Child, in_new_process
from tests.campaign.scene import Scene, Stage, below, inspect, reopen
from tests.campaign.user import open_refused, use

if TYPE_CHECKING:
    import random

#: How often a store's permissions are withdrawn, and how many blocks it has.
_TIMES, _BLOCKS = 5, 40
_MOMENT = 0.15
_NOBODY = 65534


def run(count: int, stage: Stage) -> Figures:
    """Withdraw permissions this many times.

    Args:
        count: How many times.
        stage: Where the stores are created.
    """
    # Root may do everything, so its processes become another user first.
    user = _NOBODY if os.geteuid() == 0 else None
    stage.disk.chmod(0o711)
    rng = stage.rng
    figures = Figures()
    scenes: list[Scene] = []
    while figures.trials < count:
        # A Dram tier of another user is refused at the start, so nothing can be withdrawn from it.
        scene = replace(stage, shared=None).scene(_BLOCKS)
        scenes.append(scene)
        for root in scene.roots:
            _give(Path(root), user)
        figures.add(_refused_at_open(scene, user))
        stop = stage.stop_file()
        child = Child(use, scene, rng.getrandbits(32), str(stop), user_id=user)
        child.await_word("working")
        for _ in range(min(_TIMES, count - figures.trials)):
            time.sleep(rng.uniform(0, _MOMENT))
            _withdraw(rng, scene)
            figures.trials += 1
            stage.tick()
        stop.touch()
        figures.add(child.end())
        for root in scene.roots:
            for path in (Path(root), *below(root)):
                _give(path, os.geteuid())  # a store that is another user's is refused
        figures.add(inspect(scene))
    figures.add(reopen(scenes))
    return figures


def _give(path: Path, user: int | None) -> None:
    if user is not None:
        os.chown(path, user, user)


def _refused_at_open(scene: Scene, user: int | None) -> Figures:
    """A store that cannot be written must be refused with an error that says so."""
    root = Path(scene.roots[0])
    root.chmod(0o500)
    _, figures = in_new_process(open_refused, scene, user)
    root.chmod(0o700)
    return figures


def _withdraw(rng: random.Random, scene: Scene) -> None:
    """Forbid writing or all access, in one place, for a moment."""
    root = Path(rng.choice(scene.roots))
    path = rng.choice([root, root, *below(root)])
    try:
        mode = path.stat().st_mode & 0o777
        path.chmod(rng.choice((0o000, 0o400, 0o500)))
        time.sleep(rng.uniform(0, _MOMENT))
        path.chmod(mode)
    except FileNotFoundError:
        pass  # a temporary file, and it is gone
