"""When a file was made, which Linux tells and Python, before 3.15, does not ask for."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from typing import Any

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_STATX_NBYTES = 256
#: ``stx_mask`` and, 80 bytes on, ``stx_btime`` of ``struct statx``; see statx(2).
_MASK, _BTIME = struct.Struct("=I"), struct.Struct("=qI")
_BTIME_AT = 80


@cache
def _statx() -> Any:
    return getattr(ctypes.CDLL(None), "statx", None)


def made(path: str) -> float | None:
    """The time in seconds since the epoch; None if the system or the file system does not know."""
    statx = _statx()
    if statx is None:
        return None
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, found):
        return None
    if not _MASK.unpack_from(found)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = _BTIME.unpack_from(found, _BTIME_AT)
    return float(seconds + nanoseconds / 1e9)
