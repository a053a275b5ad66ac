"""How workers tell the scheduler that they cannot bring back a request's blocks: vLLM has no way for it.

Its own way back, the model runner's output, comes from one rank, and what all ranks say of a step is only gathered for
a KV connector. So the scheduler's side makes an empty file and sends its path along; a worker appends a line. Each step
the scheduler looks at the file, and reads it only when that has changed. Before the first request every worker has said
that it reaches the file: one on another node does not, unless the directory is shared.
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
        self._seen = (0, 0)
        self._admissions: set[int] = set()
        self._end = Finalize(self, _remove, (self.path,), exitpriority=10)

    def admissions(self) -> set[int]:
        """Those that have lost something."""
        with suppress(OSError):
            now = os.stat(self.path)  # noqa: PTH116 - once per step: a Path costs as much as the call
            if (now.st_ino, now.st_size) != self._seen and now.st_size:
                content = Path(self.path).read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                self._seen = (now.st_ino, len(whole))
                self._admissions |= {int(line) for line in whole.split()}
        return self._admissions


def out_of_reach(path: str) -> str:
    """Why a worker cannot tell a loss; empty if it can.

    Args:
        path: The file that the scheduler has made.
    """
    if os.access(path, os.W_OK):
        return ""
    return f"it does not reach the scheduler's {path}, through which it says what it loses"


def tell_loss(path: str, admission: int) -> None:
    """A worker's end: say that something of an admission is lost.

    What cleans up a directory for temporary files may have taken the scheduler's file away: then it is made again.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, b"%d\n" % admission)
        finally:
            os.close(descriptor)
    except OSError as error:
        get_logger(__name__).error(
            "[UCM.Sparse] a request goes on without its lost blocks: no word to the scheduler: %s", error
        )


def _remove(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
