"""Read and write block files, through the page cache or past it, and quarantine unusable ones.

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
import mmap
import os
import stat
import threading
import time
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from ucm.store.base import (
    BlockMissingError,
    BlockUnreadableError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.store.format import (
    MOST_BUFFERS,
    UNIT,
    aligned_buffer,
    beyond,
    decode,
    gather,
    header_nbytes,
    nbytes_of,
    scatter,
    verify,
)
from ucm.store.posix.layout import is_quarantined, owner_name, unlink_private
from ucm.store.posix.paths import (
    NewFile,
    NotAFileError,
    list_directory,
    make_directory,
    open_file,
    remove_directory,
    rename,
    status_of,
    unlink,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Buffer
    from ucm.store.format import BlockHeader, HeaderCodec
    from ucm.store.posix.layout import Layout
    from ucm.store.posix.tier import Directory

    T = TypeVar("T")

#: The alignment that O_DIRECT needs for offsets, lengths and memory; enough for every common device.
ALIGNMENT = 4096
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_local = threading.local()


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


def read_direct(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> int:
    """Fill buffers like ``read_into``, from a file opened with O_DIRECT."""
    lead = offset % ALIGNMENT
    bounce = _bounce(lead + nbytes)
    begin = done = 0
    while done < lead + nbytes:
        step = os.preadv(descriptor, [bounce[begin:]], offset - lead + begin)
        if begin + step <= done:  # the end of the file
            break
        done = begin + step
        begin = done - done % ALIGNMENT  # after a short read, continue from an aligned offset
    scatter(bounce[lead:], [memoryview(buffer) for buffer in buffers])
    return max(0, min(done - lead, nbytes))


def write_direct(descriptor: int, buffers: Sequence[Buffer | bytearray], nbytes: int) -> None:
    """Write a whole file that was opened with O_DIRECT."""
    bounce = _bounce(nbytes)
    gather(buffers, bounce)
    write_from(descriptor, [bounce], 0, len(bounce))
    os.ftruncate(descriptor, nbytes)


def _bounce(nbytes: int) -> Buffer:
    """Return this thread's aligned buffer, its size rounded up to the alignment."""
    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory: mmap.mmap | None = getattr(_local, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _local.memory = mmap.mmap(-1, nbytes)
    return memoryview(memory)[:nbytes]


#: Errors about one file rather than the medium, provided that the file can be moved away.
_OF_ONE_FILE = frozenset(
    {
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.EUCLEAN,
        errno.EBADMSG,
        errno.ENODATA,
        errno.EOVERFLOW,
        errno.EREMOTEIO,
    }
)


def read_block(directory: Directory, codec: HeaderCodec, block: BlockTransfer, path: str) -> int:
    """Load a block's layer slices into memory and verify them.

    Args:
        directory: The directory of the block.
        codec: The codec of the expected header.
        block: The layer slices to read, and their memory.
        path: The block's file.

    Returns:
        The file's time of last use, in nanoseconds since the epoch.

    Raises:
        BlockMissingError: There is no such block.
        BlockCorruptError: The block is damaged; the caller quarantines it.
        BlockForeignError: The file is not the expected block; the caller quarantines it.
        BlockUnreadableError: The medium cannot read it; the caller quarantines it, or treats the medium as broken.
        StoreError: The directory rests or cannot be read.
    """
    if not directory.reads.allows():
        raise directory.reads.refusal(directory.layout.root)
    try:
        used, refusal = directory.directly(partial(_read, path, codec, block))
    except OSError as error:
        raise _failure(directory, block.key, path, error) from error
    except StoreError as error:
        error.where = path
        raise
    directory.reads.succeeded()
    if refusal is not None:
        refusal.where = path
        raise refusal
    return used


def read_file(
    directory: Directory,
    geometry: BlockGeometry | None,
    key: BlockKey,
    path: str,
    authenticator: Authenticator | None = None,
) -> Buffer:
    """Return a block's whole file, decompressed, verified against its own header.

    Args:
        directory: The directory that it is in.
        geometry: The expected geometry; None: any.
        key: The block's key.
        path: Its file.
        authenticator: Authenticates blocks; None: they have checksums alone.

    Raises:
        StoreError: As for ``read_block``.
    """
    namespace = directory.layout.namespace
    try:
        return check_file(path, key, authenticator, namespace=namespace, geometry=geometry)[1]
    except OSError as error:
        raise _failure(directory, key, path, error) from error
    except StoreError as error:
        error.where = path
        raise


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
        # No more than the block should have, and a byte that shows that there are too many.
        nbytes = min(status.st_size, _header(descriptor).file_nbytes + 1)
        content = aligned_buffer(nbytes)
        content = content[: read_into(descriptor, [content], 0, nbytes)]
        return verify(content, key, authenticator, namespace=namespace, geometry=geometry, any_key=any_key)
    except StoreError as error:
        error.file = status.st_dev, status.st_ino
        raise
    finally:
        os.close(descriptor)


def _failure(directory: Directory, key: BlockKey, path: str, error: OSError) -> StoreError:
    """Return the error of a block that cannot be read, which may be the block's or the medium's."""
    if isinstance(error, FileNotFoundError):
        if directory.reads.probing:
            directory.reads.succeeded()  # the medium answers
        return BlockMissingError(f"block {key.hex()} is not in the store", where=path)
    if isinstance(error, NotAFileError):
        return BlockUnreadableError("there is something else in the block's place", where=path)
    if error.errno in _OF_ONE_FILE:
        return BlockUnreadableError(f"the block cannot be read: {error.strerror}", where=path)
    return directory.read_failed(error, path)


def _read(path: str, codec: HeaderCodec, block: BlockTransfer, direct: bool) -> tuple[int, StoreError | None]:
    """Read and verify a block; return its time of last use, and what is wrong with it or None."""
    descriptor, status = open_file(path, os.O_RDONLY | os.O_DIRECT if direct else os.O_RDONLY)
    read = read_direct if direct else read_into
    nbytes, first, slices = status.st_size, block.first_slice, block.slices
    begin, wanted = codec.offsets[first], block.nbytes
    header: bytearray | None
    try:
        if nbytes == codec.file_nbytes:
            header = stored = bytearray(codec.nbytes)
            if first == 0:
                is_read = read(descriptor, [header, *slices], 0, begin + wanted) == begin + wanted
            else:
                is_read = read(descriptor, [header], 0, codec.nbytes) == codec.nbytes
                is_read = is_read and read(descriptor, slices, begin, wanted) == wanted
        else:  # compressed, or damaged
            nbytes = min(nbytes, codec.file_nbytes)
            content = aligned_buffer(nbytes)
            is_read = read(descriptor, [content], 0, nbytes) == nbytes
            stored = bytearray(content[: codec.nbytes])
            header = codec.unpack(content, first, slices)
        if is_read and header is not None and codec.is_sound(header, block.key, first, slices):
            return status.st_mtime_ns, None
    finally:
        os.close(descriptor)
    refusal = codec.refusal(stored, block.key, status.st_size)
    refusal.file = status.st_dev, status.st_ino
    return status.st_mtime_ns, refusal


def write_block(directory: Directory, key: BlockKey, pieces: Sequence[Buffer | bytearray]) -> None:
    """Write a block's file under a private name, and rename it into its place.

    If another writer was faster, its block stays: it may have a lease.

    Args:
        directory: The directory of the block.
        key: The block's key.
        pieces: The file's content.

    Raises:
        StoreError: The directory rests, has no room, or cannot be written.
    """
    if not directory.writes.allows():
        raise directory.writes.refusal(directory.layout.root)
    where = directory.layout.temporary
    file, published = None, False
    try:
        file = directory.directly(partial(_write, directory, pieces, nbytes_of(pieces)))
        where = directory.layout.block(key)
        with suppress(FileExistsError):
            directory.publish(file, key)
            published = True
    except StoreFullError:  # the evictor is behind, which is no failure of the medium
        directory.writes.succeeded()
        raise
    except OSError as error:
        failure = directory.write_failed(error, where)
        if isinstance(failure, StoreFullError):
            directory.evictor.full()
        raise failure from error
    finally:
        if file is not None:
            file.close(deletes=not published)
    directory.writes.succeeded()


def _reserve(directory: Directory, descriptor: int, nbytes: int) -> None:
    """Account for an empty file and give it its size; if there is no room, ask the evictor for it and wait briefly.

    The file has its size before it counts: a scan that begins later finds it, and one that began earlier adds what was
    accounted for since. So none misses it, and the directory never holds more than it may.
    """

    def reserve() -> None:
        os.ftruncate(descriptor, nbytes)
        try:
            directory.reserve(nbytes)
        except StoreFullError:
            os.ftruncate(descriptor, 0)
            raise

    try:
        reserve()
    except StoreFullError:
        directory.evictor.behind()
        directory.wait_for_room(reserve)


def _write(directory: Directory, pieces: Sequence[Buffer | bytearray], nbytes: int, direct: bool) -> NewFile:
    """Write a new file, if wanted past the page cache."""
    flags = os.O_WRONLY | os.O_DIRECT if direct else os.O_WRONLY
    path, descriptor = f"{directory.layout.temporary}/{owner_name()}", -1
    try:
        descriptor = directory.with_directories(partial(directory.layout.new_file, path, flags))
        file = NewFile(descriptor)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        unlink_private(path)  # also where the file system refuses O_DIRECT, Linux has made it
        raise
    try:
        try:
            directory.with_directories(partial(_reserve, directory, descriptor, nbytes))
            if directory.claims_space and nbytes >= CLAIM_FROM:
                directory.claims_space = claim_space(descriptor, nbytes)
            if direct:
                write_direct(descriptor, pieces, nbytes)
            else:
                write_from(descriptor, pieces, 0, nbytes)
            if directory.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # where a network file system may report that it could not write
    except BaseException:
        file.close(deletes=True)
        raise
    return file


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
    fallocate = _fallocate()
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


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found: Callable[[int, int, int, int], int] = function
    return found


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
