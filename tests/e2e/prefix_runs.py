"""The engines of the prefix-cache tests: each runs once, on first use, for many assertions."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.prefix_damage import all_requests, damage_some
from tests.e2e.prefix_engine import PrefixEngine, connector, posix
from tests.e2e.prefix_workload import COLD, REFERENCE, WARM, Played, computed_blocks, play, play_phase
from tests.e2e.processes import IN_PROCESS
from ucm.store.inspection import stored_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments
    from tests.e2e.shared import Shared
    from ucm.store.inspection import StoredBlock

#: Seconds within which all saved blocks become visible on a busy machine.
SAVED = 120.0
_BLOCK_FILE = re.compile(r"[0-9a-f]{62}")


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        part: The part of the workload that it runs.
        overlay: Whether the overlay is installed; None for neither overlay nor runtime.
        connector: The connector's class; empty for none.
        store: The scenario whose store it starts with; empty for an empty store.
        damage: Whether about half of that store's blocks are damaged.
        settings: Further settings of the connector.
        switches: Environment variables.
    """

    part: str
    overlay: bool | None
    connector: str = ""
    store: str = ""
    damage: bool = False
    settings: Mapping[str, Any] | None = None
    switches: Mapping[str, str] | None = None


VERBOSE = {"UCM_PATCH_VERBOSE": "1"}
SCENARIOS = {
    "reference": Scenario(REFERENCE, None, switches=IN_PROCESS),
    "cold direct": Scenario(COLD, overlay=False, connector="UCMDirectConnector"),
    "cold layer-wise": Scenario(
        COLD, overlay=True, connector="UCMLayerWiseConnector", switches={**VERBOSE, **IN_PROCESS}
    ),
    "warm direct": Scenario(
        WARM,
        overlay=True,
        connector="UCMDirectConnector",
        store="cold layer-wise",
        switches={**VERBOSE, **IN_PROCESS},
    ),
    "warm layer-wise": Scenario(WARM, overlay=False, connector="UCMLayerWiseConnector", store="cold direct"),
    "mock": Scenario(
        WARM,
        overlay=False,
        connector="UCMMockConnector",
        store="cold direct",
        settings={"hit_ratio": 0.5},
        switches=IN_PROCESS,
    ),
    "damaged direct": Scenario(
        WARM, overlay=False, connector="UCMDirectConnector", store="cold direct", damage=True, switches=IN_PROCESS
    ),
    "damaged layer-wise": Scenario(
        WARM, overlay=False, connector="UCMLayerWiseConnector", store="cold direct", damage=True, switches=IN_PROCESS
    ),
}


@dataclass(frozen=True)
class Record:
    """The result of one engine.

    Attributes:
        phases: By name.
        log: The output of its processes.
        environment: Its environment.
        store: Its store's directory.
        blocks: The names of the block files in it at the end.
    """

    phases: dict[str, Played]
    log: str
    environment: Environment
    store: Path
    blocks: frozenset[str]


class PrefixRuns:
    """The scenarios of one release."""

    def __init__(self, environments: Environments, shared: Shared) -> None:
        self.environments: dict[bool | None, Environment] = {
            None: environments.plain,
            False: environments.runtime,
            True: environments.overlay,
        }
        self._shared = shared

    def __getitem__(self, name: str) -> Record:
        return self._shared.get(f"prefix {name}", lambda: self._run(name))

    def _run(self, name: str) -> Record:
        scenario = SCENARIOS[name]
        environment = self.environments[scenario.overlay]
        directory = self._shared.directory / f"prefix-{name.replace(' ', '-')}"
        store = directory.with_name(f"{directory.name}-store")
        if scenario.store:
            shutil.copytree(self[scenario.store].store, store)
        if scenario.damage:
            damage_some(list(block_files(store).values()), seed=0)
        arguments = {}
        if scenario.connector:
            arguments = connector(posix(store), scenario.connector, **(scenario.settings or {}))
        known = None if scenario.part == REFERENCE else self["reference"].phases
        started = PrefixEngine(environment, directory, arguments, scenario.switches)
        with started:
            phases = play(started, scenario.part, known)
            if scenario.part == REFERENCE:
                phases |= {damage_phase(name): play_phase(started, [batch]) for name, batch in all_requests().items()}
            if scenario.part == COLD:
                wait_for_blocks(store, len(computed_blocks(phases.values())))
        return Record(phases, started.log, environment, store, frozenset(block_files(store)))


def damage_phase(name: str) -> str:
    """Return the reference's phase name for a batch of `tests.e2e.prefix_damage.all_requests`."""
    return f"damage: {name}"


def block_files(store: Path) -> dict[str, Path]:
    """Return the files of visible blocks below a directory, by the blocks' names."""
    found = {}
    for path in store.rglob("*"):
        if _BLOCK_FILE.fullmatch(path.name):
            found[path.parent.name + path.name] = path
    return found


def nbytes_of(files: Iterable[Path]) -> int:
    """Return the size of files; one that an evictor deletes meanwhile counts as none."""
    total = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def blocks_in_memory(store: Path) -> list[StoredBlock]:
    """Return the visible blocks of a Dram tier's directory."""
    return [block for block in stored_blocks(str(store)) if block.slot is not None] if store.is_dir() else []


def wait_for_blocks(store: Path, number: int, patience: float = SAVED) -> None:
    """Wait until this many blocks are visible, or time is up; the caller asserts the result."""
    deadline = time.monotonic() + patience
    while len(block_files(store)) + len(blocks_in_memory(store)) < number and time.monotonic() < deadline:
        time.sleep(0.1)
