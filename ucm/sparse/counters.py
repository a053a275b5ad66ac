"""Counters of one process in a memory-mapped file: always current, and preserved when the process dies.

A file ``<stem>-<pid>.bin`` has a header (magic, version, a bit per role, the length of the JSON), a JSON object with
the process and the names of its counters, and from the next multiple of eight on one u64 per name. All numbers have
the machine's byte order. A file gets its name by a rename when it is complete; an
earlier one of the same process id is replaced.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.errors import UcmError
from ucm.sparse.base import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAGIC = b"UCMCOUNT"
VERSION = 1
HEADER = struct.Struct("=8sHBxI")
_ROLES_OFFSET = 10
_ROLES = tuple(Role)


@dataclass(frozen=True)
class ProcessReport:
    """The counters of one process.

    Attributes:
        pid: The process id.
        process: Its name, as `multiprocessing` has it: ``MainProcess``, ``EngineCore``, ``Worker``, ….
        roles: The sides of the engine that it serves.
        counts: The counters in the order of their declaration, including zeros.
    """

    pid: int
    process: str
    roles: tuple[Role, ...]
    counts: dict[str, int]


class Counters:
    """The counters of the current process: a forked child starts its own file, from zero.

    There is no lock, which a fork could leave locked: a counter has one writing thread at a time.

    Args:
        directory: The directory of the files; it must exist.
        stem: The prefix of their names.
        names: The names of the counters.
    """

    def __init__(self, directory: Path, stem: str, names: Sequence[str]) -> None:
        self._directory = directory
        self._stem = stem
        self._names = tuple(names)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._pid = 0
        self._memory: mmap.mmap
        self._values: memoryview

    def enter(self, role: Role) -> None:
        """Record that this process serves a role; the first call in a process creates the file.

        Raises:
            OSError: If the file cannot be created.
        """
        # The process name is set some time after a fork, so os.register_at_fork would be too early.
        if os.getpid() != self._pid:
            self._create()
        self._memory[_ROLES_OFFSET] |= 1 << _ROLES.index(role)

    def add(self, name: str, role: Role) -> None:
        """Count one event of a role."""
        self.enter(role)
        self._values[self._places[name]] += 1

    def _create(self) -> None:
        pid = os.getpid()
        about = {"pid": pid, "process": multiprocessing.current_process().name, "names": self._names}
        text = json.dumps(about).encode()
        start = _values_start(len(text))
        path = self._directory / f"{self._stem}-{pid}.bin"
        draft = path.with_suffix(".tmp")
        content = HEADER.pack(MAGIC, VERSION, 0, len(text)) + text
        draft.write_bytes(content.ljust(start, b"\0") + bytes(8 * len(self._names)))
        with draft.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        draft.replace(path)
        self._values = memoryview(self._memory)[start:].cast("Q")
        self._pid = pid


def read_counters(path: Path) -> ProcessReport:
    """Return the current counters of a process, which may be running.

    Raises:
        UcmError: If the file cannot be read, or is not one of `Counters`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UcmError(f"a counter file cannot be read: {error.strerror}", where=str(path)) from error
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise _unreadable(path, "it does not start as one")
    _, version, roles, length = HEADER.unpack_from(content)
    if version != VERSION:
        raise _unreadable(path, f"it has version {version}, this UCM reads {VERSION}")
    try:
        about = json.loads(content[HEADER.size : HEADER.size + length])
        pid, process, names = int(about["pid"]), str(about["process"]), [str(name) for name in about["names"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, "its description is damaged") from error
    values = content[_values_start(length) :]
    if len(values) != 8 * len(names):
        raise _unreadable(path, f"it holds {len(values)} bytes of counters, {len(names)} counters need 8 each")
    counts = dict(zip(names, memoryview(values).cast("Q"), strict=True))
    return ProcessReport(pid, process, tuple(role for bit, role in enumerate(_ROLES) if roles >> bit & 1), counts)


def _values_start(text_length: int) -> int:
    return (HEADER.size + text_length + 7) // 8 * 8


def _unreadable(path: Path, why: str) -> UcmError:
    return UcmError(
        f"not a whole counter file: {why}",
        where=str(path),
        fix="remove it, or let each run write to an empty directory of its own",
    )
