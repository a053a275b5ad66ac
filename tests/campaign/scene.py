"""A store in its own directories, and its inspection by a new process."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign.content import Corpus, random_corpus
from tests.campaign.figures import Figures
from tests.campaign.processes import in_new_process
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.directory import in_memory
from ucm.store.posix.layout import namespaces
from ucm.store.posix.scan import side_files

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.campaign.processes import Reporter
    from ucm.store.base import KVStore

NAMESPACE = "campaign/rank0"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - directories with random names and mode 0700 are made in it
#: The probability of slow ways of writing.
_SELDOM = 0.2
#: The time limit, in seconds, for deleting what dead writers left; the evictor starts after some seconds.
_TIDY_PATIENCE = 60.0


@dataclass(frozen=True)
class Scene:
    """A store.

    Args:
        config: The store's configuration.
        corpus: The blocks to store.
    """

    config: StoreConfig
    corpus: Corpus

    @property
    def roots(self) -> list[str]:
        """All directories of the store."""
        dram = [self.config.dram_directory] if "Cache" in self.config.pipeline else []
        return [*self.config.directories, *dram]

    def views(self) -> list[StoreConfig]:
        """The store as configured and, if it has several tiers, each of them alone."""
        if "|" not in self.config.pipeline:
            return [self.config]
        return [self.config, *(replace(self.config, pipeline=tier) for tier in ("Posix", "Dram"))]


@contextmanager
def folders() -> Iterator[tuple[Path, Path | None]]:
    """Create two directories, on the disk and in memory if the system has a tmpfs; delete them at the end."""
    disk = Path(tempfile.mkdtemp(prefix="ucm-campaign-"))
    shared = None
    if in_memory(_SHARED_MEMORY) and os.access(_SHARED_MEMORY, os.W_OK):
        shared = Path(tempfile.mkdtemp(prefix="ucm-campaign-", dir=_SHARED_MEMORY))
    try:
        yield disk, shared
    finally:
        for folder in (disk, shared):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Stage:
    """The environment of a part of the campaign.

    Args:
        rng: The source of all random choices.
        disk: The directory of the stores.
        shared: The directory of their Dram tiers; without it there are none.
        tick: Called after each trial.
        options: Options of every store, in place of random ones.
    """

    rng: random.Random
    disk: Path
    shared: Path | None
    tick: Callable[[], object] = int
    options: Mapping[str, Any] = field(default_factory=dict)

    def scene(self, blocks: int, **options: Any) -> Scene:
        """Create a store with random tiers, threads and ways of writing.

        Args:
            blocks: How many blocks its corpus has.
            options: Further options of the store, as they are.
        """
        rng = self.rng
        name = f"{rng.getrandbits(64):016x}"
        directories = tuple(str(self.disk / f"{name}-{number}") for number in range(rng.choice((1, 1, 2))))
        for directory in directories:
            Path(directory).mkdir(mode=0o700)
        chosen: dict[str, Any] = {
            "pipeline": rng.choice(("Posix", "Cache|Posix")) if self.shared else "Posix",
            "dram_directory": str(self.shared / name) if self.shared else "",
            "fsync": rng.random() < _SELDOM,
            "save_threads": rng.randrange(1, 4),
            "load_threads": rng.randrange(1, 4),
            "save_nice": 0,
            "rest_seconds": 0.05,
        }
        config = StoreConfig(directories=directories, **{**chosen, **options, **self.options})
        return Scene(config, random_corpus(rng, blocks))

    def stop_file(self) -> Path:
        """Return the path of a file that does not exist yet."""
        return self.disk / f"stop-{self.rng.getrandbits(64):016x}"


def below(root: str | Path) -> list[Path]:
    """Return everything below a directory, in order; entries that vanish meanwhile may be included."""
    return sorted(Path(folder, name) for folder, *names in os.walk(root) for name in itertools.chain(*names))


def temporaries(scene: Scene) -> int:
    """Return the number of temporary files in a store."""
    count = 0
    for root in scene.roots:
        for layout in namespaces(root) if Path(root).is_dir() else []:
            count += len(side_files(layout.temporary))
    return count


def loose_files(scene: Scene) -> int:
    """Return the number of files in directories without a marker, which the evictor does not scan."""
    count = 0
    for root in scene.roots:
        known = {Path(layout.base) for layout in namespaces(root)} if Path(root).is_dir() else set()
        count += sum(
            len([path for path in below(folder) if path.is_file()])
            for folder in below(root)
            if folder.parent == Path(root) and folder not in known
        )
    return count


def inspect(scene: Scene, committed: Sequence[int] = (), *, editions: int = 1, damaged: bool = False) -> Figures:
    """Load everything visible in a new process, through all tiers and through each one alone.

    Args:
        scene: The store.
        committed: The blocks that must exist.
        editions: The number of valid editions of a block.
        damaged: Whether files were damaged, so that loads may fail; a block that failed must then be a miss.
    """
    figures = Figures()
    for number, view in enumerate(scene.views()):
        child, found = in_new_process(_load_all, view, scene.corpus, editions, damaged)
        figures.add(found)
        if number == 0:
            figures.lost += sum(len(set(committed) - set(visible)) for visible in child.values("visible"))
    return figures


def _load_all(reporter: Reporter, config: StoreConfig, corpus: Corpus, editions: int, damaged: bool) -> None:
    figures = Figures()
    keys = [corpus.key(index) for index in range(corpus.count)]
    with open_store(config, NAMESPACE, corpus.geometry) as store:
        visible = [index for index, there in enumerate(store.lookup(keys)) if there]
        figures.visible = len(visible)
        rooms = {index: corpus.room(index) for index in visible}
        result = store.load(list(rooms.values())).wait()
        for index, room in rooms.items():
            if room.key in result.failed:
                figures.refused += 1
            elif corpus.edition_of(index, room, editions) is None:
                figures.wrong_bytes += 1
            else:
                figures.loaded += 1
        failed = {key: error for key, error in result.failed.items() if error.cause in {"corrupt", "foreign"}}
        figures.corrupt_hits = sum(store.lookup(list(failed))) if damaged else len(failed)
        figures.notes = [] if damaged else [f"torn: {error}" for error in failed.values()]
    reporter.tell("figures", figures)
    reporter.tell("visible", visible)


def reopen(scenes: Sequence[Scene]) -> Figures:
    """Open stores again like an engine, and check that leftovers of dead writers are deleted."""
    return in_new_process(_reopen, scenes)[1]


def _reopen(reporter: Reporter, scenes: Sequence[Scene]) -> None:
    figures = Figures(left_by_faults=sum(temporaries(scene) + loose_files(scene) for scene in scenes))
    stores = [open_store(scene.config, NAMESPACE, scene.corpus.geometry) for scene in scenes]
    idle = list(zip(scenes, stores, strict=True))
    deadline = time.monotonic() + _TIDY_PATIENCE
    while time.monotonic() < deadline:
        # A full store takes nothing before its evictor has begun.
        idle = [(scene, store) for scene, store in idle if not _takes(store, scene.corpus)]
        figures.left_over = sum(temporaries(scene) + loose_files(scene) for scene in scenes)
        if not (idle or figures.left_over):
            break
        time.sleep(0.2)
    figures.stuck = len(idle)
    for store in stores:
        store.close()
    reporter.tell("figures", figures)


def _takes(store: KVStore, corpus: Corpus) -> bool:
    """Return whether a store takes a block that it has never had, or has it by now."""
    new = corpus.transfer(corpus.count)
    return new.key in store.save([new]).wait().done
