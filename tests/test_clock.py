"""Threads of a simulated clock take turns, and time passes when none can go on."""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING

import pytest

from tests.clock import SimulatedClock, StuckError
from ucm.clock import SYSTEM, system_started

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucm.clock import Clock

HOUR = 3600.0


def start(clock: Clock, target: Callable[[], object], name: str = "worker") -> None:
    clock.thread(target, name).start()


def test_time_passes_only_while_everyone_waits(clock: SimulatedClock) -> None:
    begun, woken = clock.monotonic(), list[float]()

    def sleeper(seconds: float) -> None:
        clock.sleep(seconds)
        woken.append(clock.monotonic() - begun)

    for hours in (3, 1, 2):
        start(clock, partial(sleeper, hours * HOUR))
    clock.run_until_idle()
    assert (woken, clock.monotonic()) == ([], begun)
    clock.advance(2 * HOUR)
    assert woken == [HOUR, 2 * HOUR]
    clock.run_until(lambda: len(woken) == 3)
    assert woken[-1] == 3 * HOUR


def test_a_timeout_is_the_last_resort_and_not_the_machines_business(clock: SimulatedClock) -> None:
    answers, event = clock.queue(), clock.event()

    def work() -> None:
        sum(range(2_000_000))  # as slow as the machine is
        answers.put("computed")
        event.wait(1.0)
        answers.put("waited")

    start(clock, work)
    assert answers.get(timeout=1e-9) == "computed"
    assert answers.get(timeout=1.0) == "waited"
    with pytest.raises(Empty):
        answers.get(timeout=HOUR)


def test_a_condition_wakes_one_or_all_and_times_out(clock: SimulatedClock) -> None:
    changed, found = clock.condition(), list[bool]()

    def wait(timeout: float | None) -> None:
        with changed, changed:  # reentrant: the wait releases both
            found.append(changed.wait(timeout))

    for timeout in (None, None, None, 5.0):
        start(clock, partial(wait, timeout))
    clock.run_until_idle()
    with changed:
        changed.notify()
    clock.run_until_idle()
    assert found == [True]
    clock.advance(5.0)
    assert found == [True, False]
    with changed:
        changed.notify_all()
    clock.run_until_idle()
    assert found == [True, False, True, True]
    assert not clock.alive
    with changed:
        assert changed.wait_for(lambda: len(found), HOUR) == 4
        assert not changed.wait_for(lambda: False, HOUR)


def test_a_lock_is_one_threads_at_a_time_also_while_its_holder_waits(clock: SimulatedClock) -> None:
    lock, order = clock.lock(), list[str]()

    def hold(name: str) -> None:
        with lock:
            order.append(name)
            clock.sleep(1.0)
            order.append(name)

    for name in "abc":
        start(clock, partial(hold, name))
    clock.run_until_idle()
    assert not lock.acquire(timeout=0.5)
    assert not lock.acquire(blocking=False)
    clock.advance(HOUR)
    assert order == list("aabbcc")
    assert lock.acquire()
    assert not lock.acquire(timeout=1)  # not reentrant


def test_a_test_that_cannot_go_on_fails_at_once_and_says_who_waits_where(clock: SimulatedClock) -> None:
    never = clock.event()

    def a_worker_that_waits() -> None:
        never.wait()

    start(clock, a_worker_that_waits, "stuck-1")
    with pytest.raises(StuckError, match=r"(?s)the test waited.*stuck-1:.*a_worker_that_waits"):
        never.wait()
    with pytest.raises(StuckError, match=r"did not become true within 10 s"):
        clock.run_until(never.is_set, within=10)
    assert clock.alive == ["stuck-1"]


def test_threads_that_wake_periodically_do_not_keep_a_test_going_for_ever(clock: SimulatedClock) -> None:
    def tick() -> None:
        while True:
            clock.sleep(60)

    start(clock, tick)
    with pytest.raises(StuckError):
        clock.event().wait()


def test_closing_ends_every_thread_and_runs_its_clean_up() -> None:
    clock, cleaned = SimulatedClock(), list[int]()

    def work() -> None:
        try:
            clock.event().wait()
        finally:
            cleaned.append(1)

    for _ in range(3):
        start(clock, work)
    clock.run_until_idle()
    start(clock, work)  # never had a turn
    clock.close()
    assert (len(cleaned), clock.alive) == (3, [])


def test_what_a_thread_raises_is_told_before_the_test_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that had ended by then would pass."""
    told = list[str]()

    def slow_hook(args: threading.ExceptHookArgs) -> None:
        time.sleep(0.05)
        told.append(f"{args.thread and args.thread.name}: {args.exc_value}")

    monkeypatch.setattr(threading, "excepthook", slow_hook)
    clock = SimulatedClock()

    def fail() -> None:
        clock.sleep(HOUR)
        raise ValueError("wrong")

    start(clock, fail)
    clock.advance(HOUR)
    assert told == ["worker: wrong"]
    assert not clock.alive
    clock.close()


def test_the_time_of_day_passes_only_with_the_clock(tmp_path: Path) -> None:
    clock = SimulatedClock()
    began = clock.time_ns()
    file = tmp_path / "file"
    file.touch()
    assert (clock.time_ns(), clock.time()) == (began, began / 1e9)
    assert file.stat().st_mtime_ns < began
    clock.advance(HOUR)
    assert clock.time_ns() == began + int(HOUR * 1e9)
    assert SimulatedClock(time_of_day=HOUR).time() == HOUR


def test_a_thread_from_elsewhere_is_refused(clock: SimulatedClock) -> None:
    event, refused = clock.event(), list[str]()

    def foreign() -> None:
        try:
            event.wait()
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=foreign, name="foreign")
    thread.start()
    thread.join()
    assert "'foreign' does not take part" in refused[0]


def test_joining_waits_for_the_end(clock: SimulatedClock) -> None:
    thread = clock.thread(lambda: clock.sleep(HOUR), "worker")
    with pytest.raises(RuntimeError, match="not started"):
        thread.join()
    thread.start()
    thread.join(HOUR / 2)
    assert thread.is_alive()
    thread.join()
    assert not thread.is_alive()
    thread.join()


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_is_another_order_and_always_the_same(seed: int) -> None:
    def order() -> list[int]:
        clock, found = SimulatedClock(seed), list[int]()

        def work(number: int) -> None:
            with lock:
                found.append(number)

        lock = clock.lock()
        for number in range(6):
            start(clock, partial(work, number))
        clock.run_until(lambda: not clock.alive)
        clock.close()
        return found

    assert order() == order()
    assert sorted(order()) == list(range(6))


def test_seeds_find_a_race_that_the_plain_order_hides() -> None:
    def lost(seed: int | None) -> bool:
        clock, total = SimulatedClock(seed), [0]
        guard = clock.lock()

        def add() -> None:
            was = total[0]
            with guard:  # too late
                total[0] = was + 1

        for _ in range(4):
            start(clock, add)
        clock.run_until(lambda: not clock.alive)
        clock.close()
        return total[0] != 4

    assert not lost(None)
    assert any(lost(seed) for seed in range(20))


def test_the_systems_clock_is_the_standard_library() -> None:
    event, answers, changed = SYSTEM.event(), SYSTEM.queue(), SYSTEM.condition(SYSTEM.lock())
    thread = SYSTEM.thread(partial(answers.put, 1), "worker")
    thread.start()
    assert answers.get() == 1
    thread.join()
    start(SYSTEM, event.set)
    event.wait()
    with changed:
        changed.notify_all()
    assert isinstance(thread, threading.Thread)
    assert thread.daemon


def test_a_question_may_give_the_threads_work(clock: SimulatedClock) -> None:
    asked, answers = clock.queue(), clock.queue()
    clock.thread(lambda: answers.put(asked.get()), "answers").start()

    def answered() -> bool:
        asked.put("?")
        return not answers.empty()

    clock.run_until(answered)
    assert clock.monotonic() == 1000.0


def test_pauses_between_two_clocks_make_the_system_no_older() -> None:
    passed, pauses = [500.0], iter([0.7, 0.5, 0.9, 0.4, 0.6, 0.0, 0.8, 0.5, 0.7, 0.4])

    def uptime() -> float:
        passed.append(passed[-1] + next(pauses))
        return passed[-1]

    assert system_started(lambda: 1_000_000.0 + passed[-1], uptime) == 1_000_000.0
