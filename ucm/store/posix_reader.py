"""Reading a block: one call for the header and the shards, then every checksum."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.errors import BlockMissingError, StoreError, StoreUnavailableError
from ucm.store.format import UNIT, header_nbytes, sums_of, verify
from ucm.store.posix_io import read_direct, read_into

if TYPE_CHECKING:
    from ucm.store.base import BlockKey, BlockTransfer, Buffer
    from ucm.store.format import HeaderCodec
    from ucm.store.posix_directory import Directory

_OPEN = os.O_RDONLY | os.O_CLOEXEC


def read_block(directory: Directory, codec: HeaderCodec, block: BlockTransfer, path: str) -> bool:
    """Fill memory with a block's shards and verify them.

    Args:
        directory: Where the block is.
        codec: What it must look like.
        block: Which shards, and their memory.
        path: The block's file.

    Returns:
        Whether its time of last use is old.

    Raises:
        BlockMissingError: It is not there.
        BlockCorruptError: It is damaged; the caller sets it aside.
        BlockForeignError: It is not what it should be; the caller sets it aside.
        StoreUnavailableError: The directory rests, or cannot be read.
    """
    if not directory.reads.allows():
        raise StoreUnavailableError("the directory failed often and rests", where=directory.layout.root)
    try:
        try:
            used, refusal = _read(path, codec, block, direct=directory.direct_io)
        except OSError as error:
            if error.errno != errno.EINVAL or not directory.direct_io:
                raise
            directory.no_direct_io(error)
            used, refusal = _read(path, codec, block, direct=False)
    except FileNotFoundError:
        if directory.reads.probing:
            directory.reads.succeeded()  # the medium answers
        raise BlockMissingError(f"block {block.key.hex()} is not in the store", where=path) from None
    except OSError as error:
        raise directory.read_failed(error, path) from error
    directory.reads.succeeded()
    if refusal is not None:
        refusal.where = path
        raise refusal
    return time.time() - used > directory.touch_seconds


def read_file(directory: Directory, key: BlockKey, path: str) -> Buffer:
    """A block's whole file, verified by what its own header says.

    Raises:
        StoreError: As ``read_block``.
    """
    try:
        with Path(path).open("rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            content = memoryview(bytearray(nbytes))
            got = read_into(file.fileno(), [content], 0, nbytes)
    except FileNotFoundError:
        raise BlockMissingError(f"block {key.hex()} is not in the store", where=path) from None
    except OSError as error:
        raise directory.read_failed(error, path) from error
    try:
        verify(content[:got], key)
    except StoreError as error:
        error.where = path
        raise
    return content


def _read(path: str, codec: HeaderCodec, block: BlockTransfer, *, direct: bool) -> tuple[float, StoreError | None]:
    """Read and verify: the time of last use, and what is wrong."""
    descriptor = os.open(path, _OPEN | os.O_DIRECT if direct else _OPEN)
    try:
        status = os.fstat(descriptor)
        if status.st_size == codec.file_nbytes and _is_sound(descriptor, codec, block, direct=direct):
            return status.st_mtime, None
        return status.st_mtime, _refusal(descriptor, codec, block, status.st_size)
    finally:
        os.close(descriptor)


def _is_sound(descriptor: int, codec: HeaderCodec, block: BlockTransfer, *, direct: bool) -> bool:
    """Read a file of the right length; False if anything in it is not as it was stored."""
    read = read_direct if direct else read_into
    shards, first = block.shards, block.first_shard
    begin, end = codec.offsets[first], codec.offsets[first + len(shards)]
    header = bytearray(codec.nbytes)
    if first == 0:
        if read(descriptor, [header, *shards], 0, end) != end:
            return False
    elif (
        read(descriptor, [header], 0, codec.nbytes) != codec.nbytes
        or read(descriptor, shards, begin, end - begin) != end - begin
    ):
        return False
    stored = codec.checksums(header)
    # One comparison of the whole header says that all its fields are as they should be, and that it is unchanged.
    return tuple(sums_of(shards)) == stored[first : first + len(shards)] and header == codec.encode(block.key, stored)


def _refusal(descriptor: int, codec: HeaderCodec, block: BlockTransfer, file_nbytes: int) -> StoreError:
    """What is wrong with a block, read again as far as needed."""
    header = _pread(descriptor, UNIT)
    try:
        header = _pread(descriptor, header_nbytes(header))
    except StoreError as error:
        return error
    return codec.refusal(header, block.key, file_nbytes)


def _pread(descriptor: int, nbytes: int) -> bytes:
    """The file's first bytes, whatever way it was opened."""
    memory = bytearray(nbytes)
    return bytes(memory[: read_direct(descriptor, [memory], 0, nbytes)])
