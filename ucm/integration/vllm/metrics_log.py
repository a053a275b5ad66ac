"""Says what happened in the log, at once after a quiet time and then once per interval; with failures, as a warning."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from ucm.integration.vllm.stats_data import has_failures, merge, sentence
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.integration.vllm.stats_data import StatsData


def _later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


class MetricsLog:
    """The lines of one process.

    What comes during an interval is said at its end by a timer, so that the last request before a quiet time is said
    as well; while nothing happens there is no timer.

    Args:
        interval: Seconds between two lines, more than 0.
        clock: Seconds that only rise.
        later: Calls something after some seconds; its result can be cancelled.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], threading.Timer] = _later,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._data: StatsData = {}
        self._next = 0.0
        self._timer: threading.Timer | None = None

    def add(self, data: StatsData) -> None:
        """Take note of a step's counts."""
        with self._lock:
            merge(self._data, data)
            wait = self._next - self._clock()
            if wait <= 0:
                self._say()
            elif self._timer is None:
                self._timer = self._later(wait, self._on_time)

    def close(self) -> None:
        """Say what is left."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._say()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            self._say()

    def _say(self) -> None:
        text, level = sentence(self._data), logging.WARNING if has_failures(self._data) else logging.INFO
        self._data = {}
        if text:
            self._next = self._clock() + self._interval
            get_logger().log(level, "[UCM.Connector] %s", text)
