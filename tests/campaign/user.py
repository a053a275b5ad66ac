"""A process that saves and loads without pause, like an engine, whatever happens to the store."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign.figures import Figures
from tests.campaign.kill import save_in_calls
from tests.campaign.scene import NAMESPACE, Scene
from ucm.errors import ConfigError
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from tests.campaign.processes import Reporter
    from ucm.store.base import BlockTransfer, TaskResult

#: How long a store may take to work again once a fault is over.
_PATIENCE = 30.0


def use(
    reporter: Reporter,
    scene: Scene,
    seed: int,
    stop: str,
    *,
    user_id: int | None = None,
    editions: int = 1,
) -> None:
    """Save, load and compare random blocks until a file appears; from then on everything must work again.

    Args:
        reporter: Receives ``working`` after the first block, and the figures at the end.
        scene: The store.
        seed: The seed of all random choices.
        stop: The file.
        user_id: The user to become first; None to stay the same user.
        editions: The number of valid editions of a block; the seed chooses the one to save.
    """
    if user_id is not None:
        os.setgroups([])
        os.setgid(user_id)
        os.setuid(user_id)
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    user = User(scene, rng, rng.randrange(editions), editions)
    while not Path(stop).exists():
        user.save_some()
        user.load_some()
        if user.figures.committed:
            reporter.tell("working")
    user.recover()
    user.store.close()
    reporter.tell("figures", user.figures)


def open_refused(reporter: Reporter, scene: Scene, user_id: int | None) -> None:
    """Open a store that cannot be used, which must raise an error that says so."""
    if user_id is not None:
        os.setgroups([])
        os.setgid(user_id)
        os.setuid(user_id)
    figures = Figures()
    try:
        open_store(scene.config, NAMESPACE, scene.corpus.geometry).close()
    except ConfigError:
        figures.refused += 1
    else:
        figures.stuck += 1
        figures.notes.append("a store that cannot be written was opened without a word")
    reporter.tell("figures", figures)


class User:
    """One engine's side of a store.

    Args:
        scene: The store.
        rng: The source of all random choices.
        edition: The edition of the blocks to save.
        editions: The number of valid editions.
    """

    def __init__(self, scene: Scene, rng: random.Random, edition: int, editions: int) -> None:
        self.figures = Figures()
        self._corpus = scene.corpus
        self._rng = rng
        self._edition, self._editions = edition, editions
        self.store = open_store(scene.config, NAMESPACE, scene.corpus.geometry)

    def save_some(self) -> bool:
        """Save some blocks; return whether all saves succeeded."""
        corpus, rng = self._corpus, self._rng
        batch = rng.sample(range(corpus.count), rng.randrange(1, 4))
        result = save_in_calls(self.store, [corpus.transfer(index, self._edition) for index in batch], rng)
        self.figures.committed += len(result.done)
        self.figures.refused += len(result.failed)
        return not result.failed

    def load_some(self) -> bool:
        """Load some blocks; return whether some were found and all of these loads succeeded."""
        corpus, rng, store = self._corpus, self._rng, self.store
        batch = rng.sample(range(corpus.count), 4)
        promised = store.lookup([corpus.key(index) for index in batch])
        rooms = {index: corpus.room(index) for index, there in zip(batch, promised, strict=True) if there}
        result = store.load(list(rooms.values())).wait()
        self._judge(rooms, result)
        return bool(rooms) and not result.failed

    def _judge(self, rooms: dict[int, BlockTransfer], result: TaskResult) -> None:
        figures = self.figures
        figures.visible += len(rooms)
        for index, room in rooms.items():
            error = result.failed.get(room.key)
            if error is not None:
                figures.refused += 1
                if error.cause in {"corrupt", "foreign"}:
                    figures.corrupt_hits += 1
                    figures.notes.append(f"torn: {error}")
            elif self._corpus.edition_of(index, room, self._editions) is None:
                figures.wrong_bytes += 1
            else:
                figures.loaded += 1

    def recover(self) -> None:
        """Continue until a save and a load have succeeded."""
        deadline = time.monotonic() + _PATIENCE
        saved = loaded = False
        while not (saved and loaded):
            saved = self.save_some() or saved
            loaded = self.load_some() or loaded
            if time.monotonic() > deadline:
                self.figures.stuck += 1
                return
