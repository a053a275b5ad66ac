"""Time the look at every function that the overlay changed: `hooked_checks.py` prints milliseconds as JSON.

All of its modules are loaded first, as in a process that is scheduler and worker at once. ``plugin`` is the first look,
of vLLM's plug-in; ``feature`` the median of later ones.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING

from ucm.overlay.activation import check_active, check_feature
from ucm.overlay.finder import boots, manifest_of

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 51


def milliseconds(check: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    check()
    return 1000 * (time.perf_counter() - begin)


if __name__ == "__main__":
    (boot,) = boots()
    needs = list(manifest_of(boot.DIRECTORY).needs)
    for name in manifest_of(boot.DIRECTORY).modules:
        importlib.import_module(name)
    found = {
        "plugin": milliseconds(lambda: check_active(boot.FINDER, boot.DIRECTORY)),
        "feature": statistics.median(milliseconds(lambda: check_feature(needs)) for _ in range(REPEATS)),
    }
    assert not check_feature(needs), "this environment's own packages replace what the overlay hooks"
    sys.stdout.write(f"{json.dumps(found)}\n")
