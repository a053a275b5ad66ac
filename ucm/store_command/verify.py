"""``ucm store verify``: read every block and compare every checksum."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.config.units import format_size
from ucm.errors import UcmError
from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError, BlockUnreadableError
from ucm.store.inspection import StoredBlock, check_block, quarantine_block, stored_blocks
from ucm.store_command.places import Directory, Places, find_places
from ucm.store_command.text import NO_STORE, about_unmarked, blocks_and_bytes, many, progress, say, say_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from ucm.store.errors import StoreError


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged or unreadable block."""

    directory: Directory
    block: StoredBlock
    error: StoreError
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Lacks:
    """The parts of a store that cannot be verified.

    Args:
        broken: Directories that cannot be read.
        bare: Directories on disk without any part of a store; directories in memory are empty after a boot.
        unmarked: The paths of namespaces without a marker, which are not read.
    """

    broken: list[Directory]
    bare: list[Directory]
    unmarked: list[str]

    @classmethod
    def of(cls, places: Places) -> Lacks:
        """Return the parts of some directories that cannot be verified."""
        return cls(places.broken, [one for one in places.bare() if one.tier != "dram"], places.unmarked())

    @property
    def is_bad(self) -> bool:
        """Whether any part cannot be verified."""
        return bool(self.broken or self.bare or self.unmarked)

    def text(self) -> list[str]:
        """Return messages for the user."""
        return [
            *(one.complaint for one in self.broken),
            *(f"{one.path} ({one.tier}): {NO_STORE}" for one in self.bare),
            *(line for path in self.unmarked for line in about_unmarked(path)),
        ]

    def data(self) -> dict[str, Any]:
        """Return the parts as plain data."""
        return {
            "unreadable": [{"directory": one.path, "tier": one.tier, "reason": one.problem} for one in self.broken],
            "bare": [one.path for one in self.bare],
            "unmarked": self.unmarked,
        }


@dataclass
class Verdict:
    """The result of a verification."""

    blocks: int = 0
    nbytes: int = 0
    vanished: int = 0  #: blocks that an engine deleted between listing and reading
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    @property
    def by_cause(self) -> dict[str, int]:
        """Return the number of problems by cause."""
        causes = [problem.error.cause for problem in self.problems]
        return {cause: causes.count(cause) for cause in sorted(set(causes))}


def run(options: argparse.Namespace) -> int:
    """Verify, and print the result; return 1 if there are problems, or a part could not be verified.

    Raises:
        UcmError: The options match nothing.
    """
    if not options.threads:
        raise UcmError("somebody has to read", where="--threads 0", fix="give it 1 or more")
    places = find_places(options)
    verdict = verify(places, options.threads, options.quarantine)
    lacks = Lacks.of(places)
    if options.json:
        say_json({**_data(verdict), **lacks.data()})
    else:
        say(_text(verdict, lacks))
    return int(bool(verdict.problems) or lacks.is_bad)


def verify(places: Places, threads: int, quarantine: bool) -> Verdict:
    """Read every block.

    Args:
        places: Where.
        threads: How many read.
        quarantine: Whether to move damaged blocks into quarantine.
    """
    verdict = Verdict()
    chosen = places.chosen()
    with progress("listing", None, "blocks") as bar:
        total = sum(block.nbytes for _, block in _blocks(chosen) if bar.update() or True)
    began = time.perf_counter()
    with progress("reading", total, "B") as bar, ThreadPoolExecutor(threads) as pool:
        reader = _Reader(verdict, _blocks(chosen), bar, places.config.quarantine_keep if quarantine else None)
        try:
            for done in [pool.submit(reader.read) for _ in range(threads)]:
                done.result()
        finally:
            reader.stopped = True
    verdict.seconds = time.perf_counter() - began
    return verdict


def _blocks(chosen: list[tuple[Directory, Any]]) -> Iterator[tuple[Directory, StoredBlock]]:
    for directory, layout in chosen:
        for block in stored_blocks(layout.root, layout.namespace):
            yield directory, block


class _Reader:
    """The state that the threads of a run share."""

    def __init__(
        self, verdict: Verdict, blocks: Iterator[tuple[Directory, StoredBlock]], bar: Any, keep: int | None
    ) -> None:
        self.stopped = False
        self._verdict = verdict
        self._blocks = blocks
        self._bar = bar
        self._keep = keep
        self._lock = threading.Lock()

    def read(self) -> None:
        """Read blocks until there are no more."""
        while not self.stopped:
            with self._lock:
                directory, block = next(self._blocks, (None, None))
            if directory is None or block is None:
                return
            error = check_block(block)
            quarantined = self._quarantine(block, error)
            with self._lock:
                self._note(directory, block, error, quarantined)

    def _quarantine(self, block: StoredBlock, error: StoreError | None) -> bool:
        if self._keep is None or not isinstance(error, BlockCorruptError | BlockForeignError | BlockUnreadableError):
            return False
        return quarantine_block(block, error, self._keep)

    def _note(self, directory: Directory, block: StoredBlock, error: StoreError | None, quarantined: bool) -> None:
        self._bar.update(block.nbytes)
        if isinstance(error, BlockMissingError):
            self._verdict.vanished += 1
            return
        self._verdict.blocks += 1
        self._verdict.nbytes += block.nbytes
        if error is not None:
            self._verdict.problems.append(Problem(directory, block, error, quarantined))


def _text(verdict: Verdict, lacks: Lacks) -> list[str]:
    lines = lacks.text()
    for problem in verdict.problems:
        done = "; quarantined" if problem.quarantined else ""
        lines += [f"{problem.error.cause}: {problem.error.what}{done}", f"  {problem.block.path}"]
    rate = format_size(verdict.nbytes / verdict.seconds) if verdict.seconds else "0 B"
    gone = f"; {many(verdict.vanished, 'was', 'were')} deleted meanwhile" if verdict.vanished else ""
    lines.append(f"{blocks_and_bytes(verdict.blocks, verdict.nbytes)} read in {verdict.seconds:.1f} s, {rate}/s{gone}")
    bad = ", ".join(f"{count:,} {cause}" for cause, count in verdict.by_cause.items())
    if bad:
        return [*lines, f"Not as they should be: {bad}."]
    if not verdict.blocks:
        return [*lines, "Nothing was verified: there are no blocks."]
    if lacks.is_bad:
        return [*lines, "Every block that was read is as it was written; not all could be, see above."]
    return [*lines, "Every block is as it was written."]


def _data(verdict: Verdict) -> dict[str, Any]:
    return {
        "blocks": verdict.blocks,
        "bytes": verdict.nbytes,
        "seconds": verdict.seconds,
        "bytes_per_second": verdict.nbytes / verdict.seconds if verdict.seconds else 0.0,
        "vanished": verdict.vanished,
        "damaged": verdict.by_cause,
        "problems": [
            {
                "directory": problem.directory.path,
                "tier": problem.directory.tier,
                "namespace": problem.block.layout.namespace,
                "key": problem.block.key.hex(),
                "path": problem.block.path,
                "cause": problem.error.cause,
                "reason": problem.error.what,
                "quarantined": problem.quarantined,
            }
            for problem in verdict.problems
        ],
    }
