"""The cost of scoring blocks by codes: `python -m tests.e2e.bench.selectors`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.e2e.engine import variables
from tests.e2e.environment import with_overlay
from tests.e2e.processes import INSIDE

RELEASE = "0.32.0"
HEADS, HEAD_SIZE = 8, 128
CASES = [(tokens, block) for tokens in (4_096, 16_384, 32_768) for block in (16, 128)]


def main() -> int:
    """Time all cases and print a table."""
    about = {"heads": HEADS, "head_size": HEAD_SIZE}
    spec = [{"tokens": tokens, "block": block, **about} for tokens, block in CASES]
    with tempfile.TemporaryDirectory() as name:
        told, results = Path(name, "spec.json"), Path(name, "results.json")
        told.write_text(json.dumps(spec), encoding="utf-8")
        python = with_overlay(RELEASE).python
        environment = variables(Path(name), {"PYTHONPATH": ""})
        subprocess.run([python, INSIDE / "selector_cost.py", told, results], env=environment, cwd=name, check=True)
        found = json.loads(results.read_text(encoding="utf-8"))
    table = Table("tokens", "block", "ms", title="milliseconds of one thread to score a layer")
    for (tokens, block), seconds in zip(CASES, found, strict=True):
        table.add_row(f"{tokens:,}", str(block), f"{1000 * seconds:.2f}")
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
