"""The parts of `nox -s tests` and `nox -s e2e`, which all run, also after one has failed: `python -m tests.parts`.

A failed unit test must not hide what the locks and a real engine say. So each part runs and is timed, except one that
needs another which has failed. A table says how each ended. The exit code is 1 if a part failed or was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Releases for the end-to-end tests: the newest with a CPU build, and the oldest that works with the same torch.
RELEASES = ("0.32.0", "0.27.1")
#: Many unit tests wait for servers and other processes, so there are three test processes for two cores. Each begins
#: with a third of the tests and takes some from the others at its end, so that all end at the same time.
UNIT_PROCESSES = str(max(2, 3 * (os.cpu_count() or 2) // 2))
#: Engines are single-threaded and often wait, so three run at a time on two cores. Tests of one file run in one process
#: and share fixtures.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
#: In a command, the file into which `tests.not_judged` writes what could not be judged.
REPORT = "{report}"
#: The part of the minutes of `nox -s e2e -- --minutes N` that the last release leaves to those before it.
SHARE_OF_FIRST = 0.75
PYTEST = (sys.executable, "-m", "pytest", "--not-judged", REPORT)


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: Its name in the table.
        command: The program and its arguments.
        environment: Variables that are set for it.
        after: The name of an earlier part without which this one cannot run; empty: none.
        beside: Whether it runs beside the others, one of its kind at a time, and shows its output only if it fails.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    after: str = ""
    beside: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        name: The part's.
        result: "passed", "failed" or why it was not run.
        seconds: How long it took.
        not_judged: What its tests could not judge on this system; empty: nothing.
    """

    name: str
    result: str
    seconds: float = 0.0
    not_judged: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was run and succeeded."""
        return self.result == "passed"


class Programs:
    """Runs commands; those that run beside others end with this context at the latest."""

    def __init__(self) -> None:
        self._beside: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, part: Part, command: Sequence[str]) -> int:
        """Run a command to its end.

        Returns:
            Its exit code.
        """
        environment = {**os.environ, **part.environment}
        if not part.beside:
            print("+", *command, flush=True)
            return subprocess.run(command, env=environment, check=False).returncode
        with tempfile.TemporaryFile() as log:
            # A process group of its own, so that it can be ended with all that it has started.
            self._beside = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            if self._closed:
                self.close()
            code = self._beside.wait()
            if code and not self._closed:
                log.seek(0)
                print(f"{part.name} failed:\n{log.read().decode(errors='replace')}", flush=True)
        return code

    def close(self) -> None:
        """Interrupt what runs beside: tests end their engines then."""
        self._closed = True
        if self._beside is not None and self._beside.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._beside.pid, signal.SIGINT)


def run_all(
    parts: Sequence[Part],
    run: Callable[[Part, Sequence[str]], int],
    close: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run all parts.

    Args:
        parts: In their order.
        run: Runs a part's command and returns its exit code.
        close: Ends those that run beside when this is left early.
        clock: Seconds.

    Returns:
        The outcome of each, in the same order.
    """
    found: dict[str, Future[Outcome]] = {}
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as beside:

        def outcome(part: Part) -> Outcome:
            if part.after and not found[part.after].result().passed:
                return Outcome(part.name, f"not run: {part.after} failed")
            report = Path(directory, f"{parts.index(part)}.txt")
            begin = clock()
            code = run(part, [str(report) if word == REPORT else word for word in part.command])
            not_judged = report.read_text(encoding="utf-8") if report.exists() else ""
            return Outcome(part.name, "failed" if code else "passed", clock() - begin, not_judged)

        try:
            for part in parts:
                if part.beside:
                    found[part.name] = beside.submit(outcome, part)
            for part in parts:
                if not part.beside:
                    found[part.name] = Future()
                    found[part.name].set_result(outcome(part))
            return [found[part.name].result() for part in parts]
        except BaseException:
            beside.shutdown(wait=False, cancel_futures=True)
            close()
            raise


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of a table of all parts, and one line that says what was not judged."""
    width = max(len(one.name) for one in outcomes)
    yield f"{'part':{width}}  minutes  result"
    for one in outcomes:
        yield f"{one.name:{width}}  {one.seconds / 60:7.1f}  {one.result}"
    if told := dict.fromkeys(what for one in outcomes for what in one.not_judged.split(", ") if what):
        yield f"not judged here: {', '.join(told)}"


def parts_of_tests() -> list[Part]:
    """The unit tests, and beside them on a real vLLM the core of the end-to-end tests, then all locks.

    Each of them alone leaves a fifth of two cores idle, because it waits for servers, files and processes.
    """
    newest = RELEASES[0]
    core = _engines(newest, (*PYTEST, *THREE_AT_A_TIME, "-m", "core", "tests/e2e"))
    return [
        _installation(newest),
        Part("unit tests", (*PYTEST, "-n", UNIT_PROCESSES, "--dist", "worksteal", "-m", "not e2e")),
        replace(core, beside=True),
        Part("locks", (sys.executable, "-m", "transforms", "regenerate"), beside=True),
    ]


def parts_of_e2e(releases: Sequence[str], begin: float = 0.0, minutes: float = math.inf) -> list[Part]:
    """The end-to-end tests on some releases, by default those that `nox -s tests` has not run, and then the mutants.

    Args:
        releases: The releases; empty: `RELEASES`.
        begin: The time now, in seconds since 1970.
        minutes: Tests that would begin later than so many minutes from now are not run. All releases but the last share
            `SHARE_OF_FIRST` of it.
    """
    parts = [_installation(release) for release in releases or RELEASES]
    if not releases:
        parts.append(Part("rules that insert nothing", (sys.executable, "-m", "tests.mutants")))
    for release in releases or RELEASES:
        which = "e2e and not older" if release == RELEASES[0] else "e2e and not older and not newest_only"
        if release not in RELEASES:
            which = "older"
        elif release == RELEASES[0] and not releases:
            which += " and not core"
        command = [*PYTEST, *THREE_AT_A_TIME, "--durations=20", "-m", which]
        if math.isfinite(minutes):
            last = release == (releases or RELEASES)[-1]
            command += ["--until", f"{begin + 60 * minutes * (1 if last else SHARE_OF_FIRST):.0f}"]
        parts.append(_engines(release, (*command, "tests/e2e")))
    return parts


def _installation(release: str) -> Part:
    command = (sys.executable, "-m", "tests.e2e.install_vllm", release)
    return Part(f"vLLM {release}, installation", command, beside=True)


def _engines(release: str, command: tuple[str, ...]) -> Part:
    name = f"engines of vLLM {release}"
    return Part(name, command, {"UCM_E2E_RELEASE": release}, after=f"vLLM {release}, installation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of a session.

    Returns:
        The exit code: 1 if a part failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.parts")
    parser.add_argument("session", choices=("tests", "e2e"))
    parser.add_argument("releases", nargs="*", help="of vLLM, for e2e")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which e2e begins no further test")
    chosen = parser.parse_args(arguments)
    if chosen.session == "tests" and (chosen.releases or math.isfinite(chosen.minutes)):
        parser.error("releases and minutes are for e2e")
    if not chosen.minutes > 0:
        parser.error("minutes must be above 0")
    of_e2e = chosen.session == "e2e"
    parts = parts_of_e2e(chosen.releases, time.time(), chosen.minutes) if of_e2e else parts_of_tests()
    programs = Programs()
    outcomes = run_all(parts, programs.run, programs.close)
    print("", *table(outcomes), sep="\n", flush=True)
    return int(not all(one.passed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
