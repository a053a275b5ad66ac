"""Time the content checks of the installed overlay: `content_checks.py OVERLAY NAME …` prints seconds as JSON.

The names are the shadowed modules that a process loads; what is timed is what the finder does beside finding them.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from ucm.overlay.finder import check_rewritten, check_upstream
from ucm.overlay.manifest import read_manifest


def measure(directory: Path, names: list[str]) -> float:
    """Seconds for reading the manifest once and checking both contents of each module."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise SystemExit("no vLLM is installed")
    root = Path(package.origin).parents[1]
    begin = time.perf_counter()
    manifest = read_manifest(directory)
    for name in names:
        module = manifest.modules[name]
        check_upstream(manifest, module, root / module.path)
        check_rewritten(manifest, module)
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2:])))
