"""Each failure is counted, and logged once per cause."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.clock import SimulatedClock
from ucm.integration.vllm.connector.failures import FailureLog
from ucm.logger import get_logger
from ucm.store.base import BlockCorruptError, BlockKey, BlockMissingError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    get_logger().addHandler(handler)
    yield lines
    get_logger().removeHandler(handler)


def test_each_is_counted_and_the_first_of_a_cause_is_logged(said: list[str]) -> None:
    log = FailureLog("[UCM.Load]", "its tokens are recomputed")
    log.record(
        {key(1): BlockCorruptError("the checksum of layer slice 3 is wrong"), key(2): BlockMissingError("not there")}
    )
    log.record({key(3): BlockCorruptError("cut short"), key(4): BlockCorruptError("no block"), key(5): StoreError("?")})
    assert log.counts == {"corrupt": 3, "missing": 1, "other": 1}
    assert len(said) == 3
    assert said[0].startswith(f"[UCM.Load] block {key(1).hex()[:16]}: the checksum of layer slice 3 is wrong")
    assert "cause corrupt; its tokens are recomputed" in said[0]


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_meet_a_cause_at_once_log_it_once(said: list[str], seed: int) -> None:
    clock = SimulatedClock(seed)

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            del record
            clock.sleep(0.05)

        def createLock(self) -> None:  # noqa: N802 - logging's: who waits for it would keep the turn
            self.lock = None

    slow, log = Slow(), FailureLog("[UCM.Load]", "its tokens are recomputed")
    get_logger().addHandler(slow)
    for number in range(8):
        clock.thread(partial(log.record, {key(number): BlockCorruptError("cut short")}), f"thread {number}").start()
    clock.advance(1.0)
    get_logger().removeHandler(slow)
    assert log.counts == {"corrupt": 8}
    assert len(said) == 1
    assert clock.alive == []


def test_nothing_failed(said: list[str]) -> None:
    log = FailureLog("[UCM.Save]", "the block is not stored")
    log.record({})
    assert not log.counts
    assert not said
