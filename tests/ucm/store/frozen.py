"""A directory whose server is gone: every system call on it hangs until it is thawed."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

from ucm.clock import SYSTEM
from ucm.store.posix import paths

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from ucm.clock import Clock


class FrozenDirectory:
    """The tests' control of such a directory.

    Args:
        monkeypatch: The test's, which replaces the system calls.
        root: The directory.
        clock: What the calls hang on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: str, *, clock: Clock = SYSTEM) -> None:
        self._root = root
        self._count = threading.Lock()
        self.calls = 0  #: the calls that hang or have hung
        self.held, self.thawed = clock.event(), clock.event()
        for name in ("access", "stat", "lstat", "mkdir", "open", "statvfs"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, create_autospec(real, side_effect=partial(self._call, real)))
        open_safely = paths._open()
        monkeypatch.setattr(paths, "_open", lambda: partial(self._call, open_safely))

    def _call(self, real: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if not self.thawed.is_set() and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._root):
            with self._count:
                self.calls += 1
            self.held.set()
            self.thawed.wait()
        return real(path, *args, **options)
