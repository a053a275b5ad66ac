"""Time the overlay's own part of loading its modules: `content_checks.py OVERLAY NAME …` prints seconds as JSON.

The names are the shadowed modules that a process loads. ``checks`` is what the finder does beside finding them,
``compiled`` what the loader does then, and ``cached`` what Python's own loader would do with bytecode in its cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.overlay.finder import OverlayLoader, check_upstream
from ucm.overlay.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS = 7


def checks(directory: Path, names: list[str]) -> float:
    """Seconds for reading the manifest once and checking vLLM's own file of each module."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise SystemExit("no vLLM is installed")
    root = Path(package.origin).parents[1]
    begin = time.perf_counter()
    manifest = read_manifest(directory)
    for name in names:
        module = manifest.modules[name]
        check_upstream(manifest, module, root / module.path)
    return time.perf_counter() - begin


def loading(manifest: Manifest, names: list[str]) -> tuple[float, float]:
    """Seconds for the code of all modules: checked and compiled, and from bytecode; medians of alternating pairs."""
    modules = [manifest.modules[name] for name in names]
    sides: tuple[Sequence[SourceFileLoader], ...] = (
        [OverlayLoader(module, manifest.file(module), manifest.file(module)) for module in modules],
        [SourceFileLoader(module.name, str(manifest.file(module))) for module in modules],
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS + 1):
        for loaders, kept in zip(sides, seconds, strict=True):
            begin = time.perf_counter()
            for loader in loaders:
                loader.get_code(loader.name)
            kept.append(time.perf_counter() - begin)
    compiled, cached = (statistics.median(kept[1:]) for kept in seconds)
    return compiled, cached


if __name__ == "__main__":
    place, wanted = Path(sys.argv[1]), sys.argv[2:]
    checked = checks(place, wanted)
    with tempfile.TemporaryDirectory() as directory:
        sys.pycache_prefix, sys.dont_write_bytecode = directory, False
        compiled, cached = loading(read_manifest(place), wanted)
    print(json.dumps({"checks": checked, "compiled": compiled, "cached": cached}))
