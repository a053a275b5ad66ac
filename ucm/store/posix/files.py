"""Read and write block files, and quarantine unusable ones.

A block is read with one call for its header and layer slices, then every checksum is compared. It is written to a
temporary file and becomes visible by one atomic rename. An unusable block is moved to quarantine, so that it is a miss;
a few are kept for inspection.

On ext4, allocating a file's space first makes buffered writing about a quarter faster, since blocks are then not
reserved page by page, and keeps the file contiguous for later cold reads. ``os.posix_fallocate`` is no alternative:
where the file system does not support it, glibc writes to every page instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ucm.store.base import (
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.store.format import (
    MOST_BUFFERS,
    UNIT,
    aligned_buffer,
    beyond,
    check_place,
    decode,
    header_nbytes,
    verify,
)
from ucm.store.posix.layout import is_quarantined
from ucm.store.posix.paths import (
    list_directory,
    make_directory,
    open_file,
    remove_directory,
    rename,
    status_of,
    system_call,
    unlink,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Buffer
    from ucm.store.format import BlockHeader, HeaderCodec
    from ucm.store.posix.layout import Layout

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def store_error(error: OSError, where: str) -> StoreError:
    """Return the StoreError for an error of the operating system."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFullError(f"no room: {reason}", where=where, fix="free some, or give the store a smaller capacity")
    return StoreUnavailableError(f"the medium does not answer: {reason}", where=where)


def read_into(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> int:
    """Fill buffers from a file, starting at an offset.

    Args:
        descriptor: An open file.
        buffers: Contiguous and writable.
        offset: The offset to start at.
        nbytes: The total size of the buffers.

    Returns:
        The bytes read; fewer than ``nbytes`` only at the end of the file.
    """
    if len(buffers) <= MOST_BUFFERS:
        done = os.preadv(descriptor, buffers, offset)
        if done in (nbytes, 0):
            return done
    else:
        done = 0
    while done < nbytes:
        step = os.preadv(descriptor, beyond(buffers, done), offset + done)
        if step == 0:
            break
        done += step
    return done


def write_from(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
    """Write contiguous buffers to a file, starting at an offset; see ``read_into``."""
    done = os.pwritev(descriptor, buffers, offset) if len(buffers) <= MOST_BUFFERS else 0
    while done < nbytes:
        done += os.pwritev(descriptor, beyond(buffers, done), offset + done)


def read_header(path: str) -> BlockHeader:
    """Return the header of a block's file, unauthenticated.

    Raises:
        StoreError: The file has none.
        OSError: The file cannot be read.
    """
    descriptor, _ = open_file(path, os.O_RDONLY)
    try:
        return _header(descriptor)
    finally:
        os.close(descriptor)


def _header(descriptor: int) -> BlockHeader:
    begin = os.pread(descriptor, UNIT, 0)
    return decode(os.pread(descriptor, header_nbytes(begin), 0))


def check_file(
    path: str,
    key: BlockKey,
    authenticator: Authenticator | None = None,
    *,
    namespace: str | None = None,
    geometry: BlockGeometry | None = None,
    any_key: bool = False,
) -> tuple[BlockHeader, Buffer]:
    """Read a block's whole file, and return its header and the block without compression; see ``verify``.

    Raises:
        StoreError: As for ``verify``.
        OSError: The file cannot be read.
    """
    descriptor, status = open_file(path, os.O_RDONLY)
    try:
        header = _header(descriptor)
        check_place(header, key, namespace, geometry)  # before there is memory for what it claims
        # No more than the block should have, and a byte that shows that there are too many.
        nbytes = min(status.st_size, header.file_nbytes + 1)
        content = aligned_buffer(nbytes)
        content = content[: read_into(descriptor, [content], 0, nbytes)]
        return verify(content, key, authenticator, namespace=namespace, geometry=geometry, any_key=any_key)
    except StoreError as error:
        error.file = status.st_dev, status.st_ino
        raise
    finally:
        os.close(descriptor)


def read_slices(path: str, codec: HeaderCodec, block: BlockTransfer) -> int:
    """Read layer slices of a block into memory, with one system call for a whole block, and verify them.

    Args:
        path: The block's file.
        codec: The codec of the expected header.
        block: The layer slices to read, and their memory.

    Returns:
        The file's time of last use, in nanoseconds since the epoch.

    Raises:
        StoreError: The file is not the expected block, or damaged.
        OSError: The file cannot be read.
    """
    descriptor, status = open_file(path, os.O_RDONLY)
    nbytes, first, slices = status.st_size, block.first_slice, block.slices
    begin, wanted = codec.offsets[first], block.nbytes
    header: bytearray | None
    try:
        if nbytes == codec.file_nbytes:
            header = stored = bytearray(codec.nbytes)
            if first == 0:
                is_read = read_into(descriptor, [header, *slices], 0, begin + wanted) == begin + wanted
            else:
                is_read = read_into(descriptor, [header], 0, codec.nbytes) == codec.nbytes
                is_read = is_read and read_into(descriptor, slices, begin, wanted) == wanted
        else:  # compressed, or damaged
            nbytes = min(nbytes, codec.file_nbytes)
            content = aligned_buffer(nbytes)
            is_read = read_into(descriptor, [content], 0, nbytes) == nbytes
            stored = bytearray(content[: codec.nbytes])
            header = codec.unpack(content, first, slices)
        if is_read and header is not None and codec.is_sound(header, block.key, first, slices):
            return status.st_mtime_ns
        raise codec.refusal(stored, block.key, status.st_size)
    except StoreError as error:
        error.file = status.st_dev, status.st_ino
        raise
    finally:
        os.close(descriptor)


#: Smaller files are written faster without claiming their space.
CLAIM_FROM = 256 * 1024
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM})


def claim_space(descriptor: int, nbytes: int) -> bool:
    """Allocate the space of a new file.

    Returns:
        False if the system does not support this, so that the caller need not try again.

    Raises:
        OSError: There is no room.
    """
    fallocate = system_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate is None:
        return False
    if fallocate(descriptor, 0, 0, nbytes) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    if number == errno.EINTR:
        return True
    raise OSError(number, os.strerror(number))


def quarantine(layout: Layout, key: BlockKey, error: StoreError, keep: int) -> bool:
    """Move the file at a block's path into the namespace's quarantine, or delete it if it cannot be moved.

    Args:
        layout: The namespace.
        key: The block's key.
        error: What is wrong with the block; its cause becomes part of the file name.
        keep: How many quarantined files to keep; the oldest are deleted.

    Returns:
        Whether the block is out of the way, also if it was gone already, or another process has replaced it.
    """
    path = layout.block(key)
    try:
        found = status_of(path)
        if error.file not in {None, (found.st_dev, found.st_ino)}:
            return True
        make_directory(layout.quarantine, layout.group)
        rename(path, f"{layout.quarantine}/{time.time_ns()}-{key.hex()}-{error.cause}")
    except FileNotFoundError:
        return True
    except OSError:
        if not _delete(path):
            return False
    with suppress(OSError):  # surplus files are deleted with the next quarantined block
        _delete_oldest(layout, keep)
    return True


def _delete(path: str) -> bool:
    """Delete a block, or a file that stands in the place of its directory."""
    try:
        unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        bucket = path.rpartition("/")[0]
        try:
            if stat.S_ISDIR(status_of(bucket).st_mode):
                return False
            unlink(bucket)
        except OSError:
            return False
    return True


def _delete_oldest(layout: Layout, keep: int) -> None:
    # The names sort by time.
    found = sorted(entry for entry in list_directory(layout.quarantine) if is_quarantined(entry[0]))
    for name, status in found[: max(0, len(found) - keep)]:
        path = f"{layout.quarantine}/{name}"
        with suppress(OSError):  # a directory that is not empty stays: its content is not ours
            if stat.S_ISDIR(status.st_mode):
                remove_directory(path)
            else:
                unlink(path)
