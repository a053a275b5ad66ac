"""See it work: `python -m tests.e2e.demo [RELEASE]` generates a little on a real vLLM and asks `ucm doctor --run`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.engine import run_engine
from tests.e2e.environment import with_overlay
from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.workload import Request

PARAMS = {"max_tokens": 12, "temperature": 0.0}
BATCH: list[Request] = [{"prompt": [5, 60, 7], "params": PARAMS}, {"prompt": list(range(3, 200)), "params": PARAMS}]


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, generate, show; returns the doctor's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__)
    parser.add_argument("release", nargs="?", default="0.32.0")
    release = parser.parse_args(arguments).release
    print(f"1. vLLM {release} for the CPU, our two wheels beside it (the first time takes minutes)", flush=True)
    try:
        environment = with_overlay(release)
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"   {environment.python}\n\n2. a tiny model with random weights generates (about a minute)", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        run = run_engine(environment, Path(directory), switches={"UCM_PATCH_VERBOSE": "1"}, batches={"demo": [BATCH]})
    if run.code:
        print(run.log[-3000:], file=sys.stderr)
        return 1
    for line in run.log.splitlines():
        if "[UCM.Patch]" in line:
            print("   " + line.partition(",")[2].partition(" ")[2].partition(" is loaded from")[0])
    for request, tokens in zip(BATCH, run.tokens["demo"], strict=True):
        print(f"   {len(request['prompt'])} tokens in, out: {tokens}")
    print("\n3. ucm doctor --run", flush=True)
    return subprocess.run([environment.directory / "bin" / "ucm", "doctor", "--run"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
