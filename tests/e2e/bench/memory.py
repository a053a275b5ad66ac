"""Host memory that the connector adds to an engine's processes, compared with the same engine without it.

The measure is the proportional set size of all of an engine's processes: shared memory counts once. Mapped files do not
count: a page of a library counts less, the more processes of the whole machine map it. Each engine runs alone, in the
same environment, with the same prompts: a few long ones, and then thousands of short ones on a tiny model, to see
whether memory grows with every request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers import NO_CONNECTOR, OURS, OURS_LAYERWISE, Place, Setup, make_setup
from tests.e2e.bench.peers_install import runtime_python
from tests.e2e.bench.ttft_model import kv_bytes, prompt
from tests.e2e.bench.ttft_model import write_model as write_long
from tests.e2e.bench.ttft_quiet import Quiet
from tests.e2e.bench.ttft_side import Side
from tests.e2e.engine import MODEL
from tests.e2e.model import VOCABULARY as WORDS
from tests.e2e.model import write_model
from transforms.place import BUILD
from ucm.store.memory.slab import KEEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens of a prompt, and how many prompts are saved.
LENGTH, PROMPTS = 4_096, 6
MOST_MEGABYTES = 64.0
#: Seconds within which running saves end, and after which an idle engine has given back what it keeps for a while.
SAVING, IDLE = 3.0, 2 * KEEP_SECONDS + 40.0
#: Makes the C library return large freed pieces, of which it otherwise retains a varying hundred megabytes.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
_SIZE = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
#: Short prompts: how many, of how many tokens, how many of them are new, and after how many memory is measured. A
#: prompt that is not new is one of a few before, which the engine's own cache holds no more.
REQUESTS, TOKENS, NEW, EVERY = 2_000, 96, 0.5, 250
#: Requests after which an engine has started all that it needs; growth counts from there.
WARM = 500
SMALL: dict[str, Any] = {
    "model": str(MODEL),
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "kv_cache_memory_bytes": 1 << 22,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "dtype": "float32",
}


def figures(release: str) -> Iterator[Figure]:
    """Megabytes beyond those of the engine without a connector, and those by which engines grow."""
    yield from growth(release)
    yield from beyond(release)


def growth(release: str, requests: int = REQUESTS) -> Iterator[Figure]:
    """Megabytes by which an engine grows while it answers short prompts, beyond one without a connector.

    The C library is as operators have it.
    """
    python = runtime_python(release)
    write_model(MODEL)
    root = BUILD / "bench" / "growth"
    shutil.rmtree(root, ignore_errors=True)
    found: dict[str, dict[int, float]] = {}
    for number, name in enumerate((NO_CONNECTOR, OURS)):
        place = _place(root / str(number), 0)
        setup = dataclasses.replace(make_setup(name, release, place), python=python)
        found[name] = _sizes(setup, place, root / str(number), requests)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    without, ours = (max(of[at] for at in of if at > WARM) - of[WARM] for of in found.values())
    yield Figure(f"{OURS}: growth from request {WARM} to {requests}", ours - without, "MB", 0.0, {"megabytes": found})
    shutil.rmtree(root, ignore_errors=True)


def _sizes(setup: Setup, place: Place, scratch: Path, requests: int) -> dict[int, float]:
    """Return the megabytes in use after so many requests."""
    source = random.Random("growth")  # noqa: S311 - prompts, no secrets
    asked: list[list[int]] = []
    found = {}
    side = Side(setup, place, scratch, Quiet())
    side.start(**SMALL)
    try:
        for number in range(1, requests + 1):
            again = asked and source.random() > NEW
            tokens = source.choice(asked[-50:]) if again else [source.randrange(3, WORDS) for _ in range(TOKENS + 2)]
            asked.append(tokens)
            side.engine.ask(tokens)
            if number % EVERY == 0:
                time.sleep(SAVING)
                found[number] = resident(side.engine.process.pid) / 1e6
        return found
    finally:
        side.close()


def beyond(release: str) -> Iterator[Figure]:
    """Megabytes beyond those of the engine without a connector, after a few long prompts."""
    python = runtime_python(release)
    write_long(python)
    root = BUILD / "bench" / "memory"
    shutil.rmtree(root, ignore_errors=True)
    without: dict[str, float] = {}
    for number, name in enumerate((NO_CONNECTOR, OURS, OURS_LAYERWISE)):
        place = _place(root / str(number), PROMPTS * kv_bytes(LENGTH))
        setup = dataclasses.replace(make_setup(name, release, place), python=python, variables=GIVE_BACK)
        used = _used(setup, place, root / str(number))
        if name == NO_CONNECTOR:
            without = used
            continue
        for when, megabytes in used.items():
            detail = {"megabytes": megabytes, "without": without[when]}
            what = f"{name}: host memory beyond no connector, {when}"
            yield Figure(what, megabytes - without[when], "MB", MOST_MEGABYTES, detail)
    shutil.rmtree(root, ignore_errors=True)


def _used(setup: Setup, place: Place, scratch: Path) -> dict[str, float]:
    """Return the megabytes in use after some prompts were computed, saved, and hit again, at once and a while later."""
    side = Side(setup, place, scratch, Quiet())
    side.start()
    try:
        prompts = [prompt(LENGTH, str(number)) for number in range(PROMPTS)]
        side.ask(*prompts)
        time.sleep(SAVING)
        side.ask(*prompts)
        found = {"at once": resident(side.engine.process.pid) / 1e6}
        time.sleep(IDLE)
        return {**found, "idle": resident(side.engine.process.pid) / 1e6}
    finally:
        side.stop()


def _place(scratch: Path, nbytes: int) -> Place:
    return Place(scratch / "store", scratch / "memory", f"ucm-memory-{os.getpid()}", 0, nbytes)


def resident(group: int) -> int:
    """Return the proportional set size of a process group without mapped files, in bytes."""
    kilobytes = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    kilobytes += sum(int(size) for size in _SIZE.findall((entry / "smaps_rollup").read_text("utf-8")))
    return kilobytes << 10
