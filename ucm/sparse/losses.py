"""How workers tell the scheduler that they cannot bring back a request's blocks: vLLM has no way for it.

The scheduler's side makes an empty file and sends its path along; a worker appends a line. Each step the scheduler
looks at the file's length, and reads it only when that has changed.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from ucm.logger import get_logger


class Losses:
    """The scheduler's end; the file is the user's own, and goes with the process."""

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="ucm-sparse-", suffix=".losses")
        os.close(descriptor)
        self._read = 0
        self._admissions: set[int] = set()
        self._end = Finalize(self, _remove, (self.path,), exitpriority=10)

    def admissions(self) -> set[int]:
        """Those that have lost something."""
        with suppress(OSError):
            if os.stat(self.path).st_size > self._read:  # noqa: PTH116 - once per step: a Path costs as much as the call
                content = Path(self.path).read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                self._read = len(whole)
                self._admissions = {int(line) for line in whole.split()}
        return self._admissions


def tell_loss(path: str, admission: int) -> None:
    """A worker's end: say that something of an admission is lost; on another host the scheduler cannot hear it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"%d\n" % admission)
        finally:
            os.close(descriptor)
    except OSError as error:
        get_logger().error(
            "[UCM.Sparse] a request goes on without its lost blocks: no word to the scheduler: %s", error
        )


def _remove(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
