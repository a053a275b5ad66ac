"""Background threads do not inherit their starter's CPU affinity, and nothing waits for them for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ucm.background import call_all, call_later, call_within, wait_for_all, wait_while_it_shrinks
from ucm.clock import SYSTEM, Clock
from ucm.store.health import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clock import SimulatedClock

#: Runs in a separate process, because CPU affinity cannot be undone. One thread is started before, as by a library.
PROGRAM = """
import os, threading
from tests.ucm.test_background import processors_of_a_job
over = threading.Event()
threading.Thread(target=over.wait).start()
first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
print(*sorted(processors_of_a_job()))
over.set()
"""


def processors_of_a_job() -> set[int]:
    """Return the CPUs on which a pool's thread may run."""
    found: set[int] = set()
    pool = Pool("test", 1, 1)
    pool.submit([lambda: found.update(os.sched_getaffinity(threading.get_native_id()))])
    pool.close()
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind threads to processors")
def test_a_bound_starter_does_not_bind_its_threads() -> None:
    given = os.sched_getaffinity(0)
    if len(given) < 2:
        pytest.skip("there is one processor only")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert {int(word) for word in done.stdout.split()} == given


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind threads to processors")
def test_a_process_keeps_to_what_it_was_given() -> None:
    given = os.sched_getaffinity(0)
    program = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
        "from tests.ucm.test_background import processors_of_a_job; print(*processors_of_a_job())"
    )
    for one in sorted(given)[:2]:
        done = subprocess.run([sys.executable, "-c", program, str(one)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(one)]


def test_what_gets_on_is_waited_for(clock: SimulatedClock) -> None:
    left = iter((3, 3, 2, 1, 1, 0))
    assert wait_while_it_shrinks(lambda: next(left), 60.0, clock=clock) == 0
    assert list(left) == []


def test_what_does_not_get_on_is_left(clock: SimulatedClock) -> None:
    seen: list[int] = []

    def left() -> int:
        seen.append(len(seen))
        return max(5, 8 - len(seen))

    began = clock.monotonic()
    assert wait_while_it_shrinks(left, 60.0, clock=clock) == 5
    assert 60 <= clock.monotonic() - began < 61
    assert wait_while_it_shrinks(lambda: 0, 60.0, clock=clock) == 0


def test_a_call_that_takes_too_long_is_left_to_its_thread(clock: SimulatedClock) -> None:
    over = clock.event()

    def wait() -> None:
        over.wait()

    assert not call_within(wait, "ucm-test", 60.0, clock=clock)
    assert clock.alive == ["ucm-test"]
    over.set()
    clock.run_until_idle()
    assert clock.alive == []
    assert call_within(wait, "ucm-test", 60.0, clock=clock)


def test_what_a_later_call_returns_or_raises_is_had_where_it_is_wanted(clock: SimulatedClock) -> None:
    goes_on = clock.event()

    def call() -> str:
        goes_on.wait()
        return "done"

    slow, wrong = call_later(call, "ucm-test", clock=clock), call_later(lambda: 1 / 0, "ucm-test", clock=clock)
    began = clock.monotonic()
    wait_for_all([slow, wrong], 5.0, clock=clock)
    assert (clock.monotonic() - began, slow.done(), wrong.done()) == (5.0, False, True)
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    goes_on.set()
    assert slow.result() == "done"


def test_threads_of_an_engine_keep_no_process_from_ending() -> None:
    assert SYSTEM.thread(int, "ucm-test").daemon


class Refusing(Clock):
    """The clock of a system that starts no more threads."""

    def started(self, target: Callable[[], object], name: str) -> None:
        del target, name


@pytest.mark.parametrize("clock", [Clock(), Refusing()])
def test_who_helps_makes_the_calls_that_no_thread_makes(clock: Clock) -> None:
    found = call_all([partial(abs, -number) for number in range(20)], "ucm-test", 3, helps=True, clock=clock)
    assert [one.result() for one in found] == list(range(20))
