"""Run the unit tests again and again on a busy machine, in another order each time: ``nox -s flaky``.

Two processes burn two cores meanwhile. Every round has a seed of its own, which decides the order of the tests (by
pytest-randomly) and how many processes share them. Nothing is tried again: a test that fails once is reported, with the
command that repeats its round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PROCESSES = (0, 2, 3, 4)
_BURNERS = 2
#: Ends with its parent, however that ends.
_BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Round:
    """One run of the tests.

    Attributes:
        seed: The seed of the order.
        processes: The number of processes that share the tests; 0: pytest's own.
        paths: What to run.
    """

    seed: int
    processes: int
    paths: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        options = ("-q", f"--randomly-seed={self.seed}", "-n", str(self.processes))
        return [sys.executable, "-m", "pytest", *options, *self.paths]


@contextlib.contextmanager
def busy() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Burn two cores; give the processes that do."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN, str(os.getpid())]) for _ in range(_BURNERS)]
    try:
        yield burners
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its exit code and its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def main(arguments: Sequence[str], run: Callable[[Sequence[str]], tuple[int, str]] = run) -> int:
    """Run the rounds, and tell how many passed.

    Args:
        arguments: The command line.
        run: Runs a command, and returns its exit code and its output.

    Returns:
        The exit code: 0 if every round passed.
    """
    parser = argparse.ArgumentParser(prog="nox -s flaky --", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often to run the tests; default: %(default)s")
    parser.add_argument("--seed", type=int, help="the seed of the first round; by default another one each time")
    parser.add_argument("paths", nargs="*", default=["tests/ucm", "tests/transforms"], help="what to run")
    wanted = parser.parse_args(arguments)
    if wanted.rounds < 1:
        parser.error(f"--rounds {wanted.rounds}: at least one round is needed")
    first = random.SystemRandom().randrange(1 << 31) if wanted.seed is None else wanted.seed
    passed = 0
    with busy():
        for number in range(wanted.rounds):
            seed = first + number
            one = Round(seed, _PROCESSES[seed % len(_PROCESSES)], tuple(wanted.paths))
            code, output = run(one.command)
            last = output.rstrip().rpartition("\n")[2]
            print(f"round {number + 1}, seed {seed}, {one.processes} processes: {last}", flush=True)
            passed += code == 0
            if code:
                failed = sorted(set(_FAILED.findall(output)))
                print(*(f"  failed: {test}" for test in failed), sep="\n") if failed else print(output.rstrip())
                print(f"  again: nox -s flaky -- --rounds 1 --seed {seed} {' '.join(wanted.paths)}", flush=True)
    print(f"passed {passed} of {wanted.rounds}")
    return 0 if passed == wanted.rounds else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
