"""Reading and writing many buffers at one place of a file, through the page cache or past it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.errors import StoreError, StoreFullError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import Buffer

#: What O_DIRECT wants of places, lengths and memory; enough for every common device.
ALIGNMENT = 4096
_MOST_BUFFERS = 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_local = threading.local()


def store_error(error: OSError, where: str) -> StoreError:
    """What the operating system refused, in our terms."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFullError(f"no room: {reason}", where=where, fix="free some, or give the store a smaller capacity")
    return StoreUnavailableError(f"the medium does not answer: {reason}", where=where)


def read_into(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> int:
    """Fill buffers from one place on.

    Args:
        descriptor: An open file.
        buffers: Contiguous and writable.
        offset: Where to begin.
        nbytes: Of all buffers together.

    Returns:
        The bytes read; fewer than asked for only at the end of the file.
    """
    if len(buffers) <= _MOST_BUFFERS:
        done = os.preadv(descriptor, buffers, offset)
        if done in (nbytes, 0):
            return done
    else:
        done = 0
    while done < nbytes:
        step = os.preadv(descriptor, _beyond(buffers, done), offset + done)
        if step == 0:
            break
        done += step
    return done


def write_from(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
    """Write all of these contiguous buffers from one place on; see ``read_into``."""
    done = os.pwritev(descriptor, buffers, offset) if len(buffers) <= _MOST_BUFFERS else 0
    while done < nbytes:
        done += os.pwritev(descriptor, _beyond(buffers, done), offset + done)


def read_direct(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> int:
    """Like ``read_into``, for a file opened with O_DIRECT."""
    lead = offset % ALIGNMENT
    bounce = _bounce(lead + nbytes)
    done = 0
    while done < len(bounce):
        step = os.preadv(descriptor, [bounce[done:]], offset - lead + done)
        done += step
        if step == 0 or done % ALIGNMENT:  # the end of the file
            break
    at = lead
    for buffer in buffers:
        target = np.frombuffer(buffer, dtype=np.uint8)
        np.copyto(target, np.frombuffer(bounce, dtype=np.uint8, count=target.size, offset=at))
        at += target.size
    return max(0, min(done - lead, nbytes))


def write_direct(descriptor: int, buffers: Sequence[Buffer | bytearray], nbytes: int) -> None:
    """Write a whole file opened with O_DIRECT."""
    bounce = _bounce(nbytes)
    at = 0
    for buffer in buffers:
        source = np.frombuffer(buffer, dtype=np.uint8)
        np.copyto(np.frombuffer(bounce, dtype=np.uint8, count=source.size, offset=at), source)
        at += source.size
    write_from(descriptor, [bounce], 0, len(bounce))
    os.ftruncate(descriptor, nbytes)


def _beyond(buffers: Sequence[Buffer | bytearray], skip: int) -> list[Buffer]:
    """What is left of the buffers after so many bytes, as far as one call takes it."""
    rest: list[Buffer] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if skip < len(view):
            rest.append(view[skip:])
        skip = max(0, skip - len(view))
        if len(rest) == _MOST_BUFFERS:
            break
    return rest


def _bounce(nbytes: int) -> Buffer:
    """This thread's own aligned memory, rounded up to the alignment."""
    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory: mmap.mmap | None = getattr(_local, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _local.memory = mmap.mmap(-1, nbytes)
    return memoryview(memory)[:nbytes]
