"""Processes that share only the files of a store, and report everything that goes wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from functools import cache
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign.figures import Figures
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

#: Forked from a process that has imported what is needed and has opened no store.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.campaign.preload"])
_ROOT = str(Path(__file__).parents[2])
#: The time limit, in seconds, for operations that normally take a moment.
PATIENCE = 120.0


@cache
def _start_server() -> None:
    """Start the process that all others are forked from, so that it finds us: it does not get our ``sys.path``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [before])])
    ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class Reporter:
    """Sends messages from a child to its parent; may be used from any thread.

    Args:
        connection: A pipe; a short message arrives completely or not at all, even if the sender is killed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, subject: str, value: Any = None) -> None:
        """Send a message."""
        with self._lock:
            self._connection.send((subject, value))


class Child:
    """A process that runs one function.

    Args:
        function: Called in the process with a ``Reporter`` and the arguments; importable, as they are.
        arguments: For it.
        keywords: For it.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        _start_server()
        self._receiver, sender = _context.Pipe(duplex=False)
        self.told: list[tuple[str, Any]] = []
        self._process = _context.Process(target=_run, args=(sender, function, arguments, keywords), daemon=True)
        self._killed = False
        self._process.start()
        sender.close()
        self._draining = threading.Thread(target=self._drain, daemon=True)
        self._draining.start()

    def _drain(self) -> None:
        try:
            while True:
                self.told.append(self._receiver.recv())
        except EOFError:
            pass

    def values(self, subject: str) -> list[Any]:
        """Return what the process has reported on a subject so far."""
        return [value for about, value in list(self.told) if about == subject]

    def await_word(self, subject: str) -> bool:
        """Wait for a report on a subject; return False if the process ends or takes too long before."""
        deadline = time.monotonic() + PATIENCE
        while not self.values(subject):
            if not self.alive or time.monotonic() > deadline:
                return bool(self.values(subject))
            time.sleep(0.001)
        return True

    @property
    def alive(self) -> bool:
        """Whether the process may still report something."""
        return self._draining.is_alive()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._killed = True
        self._process.kill()

    def end(self) -> Figures:
        """Wait for its end, at its own time or by ``kill``.

        Returns:
            The sum of the figures that it told, and a crash if it ended otherwise than it should.
        """
        figures = Figures()
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            figures.notes.append(f"a process did not end within {PATIENCE:.0f} s")
            self._process.kill()
            self._process.join()
        elif self._process.exitcode != (-signal.SIGKILL if self._killed else 0):
            figures.notes.append(f"a process ended with exit code {self._process.exitcode}")
        self._draining.join()
        self._receiver.close()
        self._process.close()
        figures.notes += map(str, self.values("crash"))
        figures.crashes = len(figures.notes)
        for value in self.values("figures"):
            figures.add(value)
        return figures


def in_new_process(function: Callable[..., None], *arguments: Any) -> tuple[Child, Figures]:
    """Run a function to its end; see ``Child``."""
    child = Child(function, *arguments)
    return child, child.end()


class _Alarm(logging.Handler):
    """Reports logged errors: a store logs one only if one of its threads fails unexpectedly."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.ERROR)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.tell("crash", self.format(record))


def _run(
    sender: Connection, function: Callable[..., None], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    reporter = Reporter(sender)
    logger = get_logger()
    logger.handlers[:] = [_Alarm(reporter)]
    threading.excepthook = lambda hook: reporter.tell("crash", repr(hook.exc_value))
    try:
        function(reporter, *arguments, **keywords)
    except Exception:  # noqa: BLE001 - whatever it is, it is counted
        reporter.tell("crash", traceback.format_exc())
