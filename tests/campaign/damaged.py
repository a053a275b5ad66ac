"""Damaged files: they must never be loaded, must be quarantined, and must be written again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.damage import DAMAGES, block_files, damage_memory
from tests.campaign.figures import Figures
from tests.campaign.processes import in_new_process
from tests.campaign.scene import NAMESPACE, Scene, Stage, inspect
from ucm.store.factory import open_store

if TYPE_CHECKING:
    import random

    from tests.campaign.processes import Reporter

_BLOCKS = 40


def run(count: int, stage: Stage) -> Figures:
    """Damage this many files, each once.

    In each store, all copies of all blocks are damaged, loaded by a new process, saved again, and loaded again.

    Args:
        count: The number of files.
        stage: Where the stores are created.
    """
    figures = Figures()
    ways: Counter[str] = Counter()
    while figures.trials < count:
        scene = stage.scene(min(_BLOCKS, count - figures.trials))
        figures.add(fill(scene))
        for way in _damage_all(scene, stage.rng):
            ways[way] += 1
            figures.trials += 1
            stage.tick()
        found = inspect(scene, damaged=True)
        # All loads must have failed: a block that was loaded is a damaged block that was served.
        found.wrong_bytes += found.loaded
        found.loaded = 0
        figures.add(found)
        figures.add(fill(scene))
        figures.add(inspect(scene, range(scene.corpus.count)))
    figures.notes.append(", ".join(f"{way} {ways[way]}" for way in DAMAGES if ways[way]))
    return figures


def fill(scene: Scene) -> Figures:
    """Save every block of a scene's corpus in a new process."""
    return in_new_process(_fill, scene)[1]


def _fill(reporter: Reporter, scene: Scene) -> None:
    corpus = scene.corpus
    with open_store(scene.config, NAMESPACE, corpus.geometry) as store:
        done = store.save([corpus.transfer(index) for index in range(corpus.count)]).wait().done
    reporter.tell("figures", Figures(committed=len(done), stuck=corpus.count - len(done)))


def _damage_all(scene: Scene, rng: random.Random) -> list[str]:
    """Damage each block in one way, the same in all tiers; return the kind of damage by block."""
    keys = [scene.corpus.key(index) for index in range(scene.corpus.count)]
    ways = {key: rng.choice(sorted(DAMAGES)) for key in keys}
    for root in scene.roots:
        found = block_files(Path(root))
        for block in found:
            DAMAGES[ways[block.key]](block.path, rng, found)
        damage_memory(Path(root), rng, ways.get)
    return list(ways.values())
