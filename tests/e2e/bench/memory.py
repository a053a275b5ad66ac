"""Host memory that the connector adds to an engine's processes, compared with the same engine without it.

The measure is the proportional set size of all of an engine's processes: shared memory counts once, and pages
of cached files do not count. Each engine runs alone, in the same environment, with the same prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers import NO_CONNECTOR, OURS, OURS_LAYERWISE, Place, Setup, make_setup
from tests.e2e.bench.peers_install import runtime_python
from tests.e2e.bench.ttft_model import kv_bytes, prompt, write_model
from tests.e2e.bench.ttft_quiet import Quiet
from tests.e2e.bench.ttft_side import Side
from transforms.pipeline.package import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens of a prompt, and how many prompts are saved.
LENGTH, PROMPTS = 4_096, 6
MOST_MEGABYTES = 100.0
#: Seconds within which running saves end.
SAVING = 3.0
#: Makes the C library return large freed pieces, of which it otherwise retains a varying hundred megabytes.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
_SIZE = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


def figures(release: str) -> Iterator[Figure]:
    """Megabytes beyond those of the engine without a connector."""
    python = runtime_python(release)
    write_model(python)
    root = BUILD / "bench" / "memory"
    shutil.rmtree(root, ignore_errors=True)
    without = 0.0
    for number, name in enumerate((NO_CONNECTOR, OURS, OURS_LAYERWISE)):
        place = Place(root / str(number) / "store", Path(), "", 0, PROMPTS * kv_bytes(LENGTH))
        setup = dataclasses.replace(make_setup(name, release, place), python=python, variables=GIVE_BACK)
        used = _used(setup, place, root / str(number)) / 1e6
        if name == NO_CONNECTOR:
            without = used
        else:
            detail = {"megabytes": used, "without": without}
            yield Figure(f"{name}: host memory beyond no connector", used - without, "MB", MOST_MEGABYTES, detail)
    shutil.rmtree(root, ignore_errors=True)


def _used(setup: Setup, place: Place, scratch: Path) -> int:
    """Return the bytes in use after some prompts were computed, saved, and hit again."""
    side = Side(setup, place, scratch, Quiet())
    side.start()
    try:
        prompts = [prompt(LENGTH, str(number)) for number in range(PROMPTS)]
        side.ask(*prompts)
        time.sleep(SAVING)
        side.ask(*prompts)
        return resident(side.engine.process.pid)
    finally:
        side.stop()


def resident(group: int) -> int:
    """Return the proportional set size of a process group, in bytes."""
    kilobytes = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    kilobytes += sum(int(size) for size in _SIZE.findall((entry / "smaps_rollup").read_text("utf-8")))
    return kilobytes << 10
