"""Search with new seeds for what the tests' fixed seeds miss: `python -m tests.fuzz --minutes 10 --seed 1`.

An input that makes a test fail is written into the test as an ``@example``, so that every later run tries it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Where Hypothesis keeps failing inputs, for the next search, and its patches.
STORAGE = ROOT / "build" / "fuzz"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis"]
IMPORT = re.compile(r"^from hypothesis import (?=.*\bgiven\b)(?!.*\bexample\b)", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Run the property tests, file by file, with one seed after another."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description="Run the property tests with new seeds.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to search (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="the first seed; each round takes the next one (default: any)")
    parser.add_argument("paths", nargs="*", help="files or directories (default: all tests)")
    wanted = parser.parse_args(arguments)
    first = secrets.randbelow(2**32) if wanted.seed is None else wanted.seed
    end = time.monotonic() + 60 * wanted.minutes
    files, failed = property_tests(wanted.paths), list[str]()
    print(f"{len(files)} files, first seed {first}")
    for seed in itertools.count(first):
        for file in [file for file in files if file not in failed]:
            if time.monotonic() > end:
                print(f"{seed - first} whole rounds; failed: {', '.join(failed) or 'nothing'}")
                return bool(failed)
            if not passes(file, seed):
                failed.append(file)
        if len(failed) == len(files):
            return 1
    raise AssertionError("not reached")


def property_tests(paths: list[str]) -> list[str]:
    """Return the files with property tests."""
    command = [*PYTEST, "--collect-only", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise SystemExit(listed.stdout + listed.stderr)
    return list(dict.fromkeys(line.split("::")[0] for line in listed.stdout.splitlines() if "::" in line))


def passes(file: str, seed: int) -> bool:
    """Run a file's property tests with one seed; print failing inputs, and add them to the file."""
    command = [*PYTEST, "--timeout=0", "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", file]
    storage = {"HYPOTHESIS_STORAGE_DIRECTORY": str(STORAGE)}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **storage}, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True
    print(f"{file} fails with seed {seed}:\n{done.stdout}{done.stderr}")
    for patch in re.findall(r"`git apply (.+?)`", done.stdout):
        subprocess.run(["git", "apply", ROOT / patch], cwd=ROOT, check=True)  # noqa: S607
        path = ROOT / file
        path.write_text(IMPORT.sub("from hypothesis import example, ", path.read_text(encoding="utf-8")), "utf-8")
        print(f"{file} has the example now")
    return False


if __name__ == "__main__":
    sys.exit(main())
