"""Writing a block: a temporary file of its own, then one atomic rename."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from ucm.store.errors import StoreUnavailableError
from ucm.store.posix_io import write_direct, write_from
from ucm.store.posix_layout import FILE_MODE, make_directory, owner_name, unlink_private
from ucm.store.posix_space import CLAIM_FROM, claim_space
from ucm.store.tier import BlockWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, Buffer
    from ucm.store.errors import StoreError
    from ucm.store.posix_directory import Directory

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REOPEN = os.O_WRONLY | os.O_CLOEXEC


class WriterListener(Protocol):
    """What a writer's tier hears."""

    def committed(self, directory: Directory, key: BlockKey, file_nbytes: int) -> None:
        """The block is visible."""

    def refused(self, directory: Directory, error: StoreError) -> None:
        """It could not be written."""


class BlockFileWriter(BlockWriter):
    """Writes one block's file.

    Args:
        directory: Where.
        key: The block.
        file_nbytes: How long the file will be.
        listener: Hears how it ends.
    """

    def __init__(self, directory: Directory, key: BlockKey, file_nbytes: int, listener: WriterListener) -> None:
        self._directory = directory
        self._key = key
        self._file_nbytes = file_nbytes
        self._listener = listener
        self._path = directory.layout.block(key)
        self._temporary = f"{directory.layout.temporary}/{owner_name()}"
        self._created = False
        self._descriptor = -1

    def write(self, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
        """Write at once."""
        directory = self._directory
        if not directory.writes.allows():
            raise StoreUnavailableError("the directory failed often and rests", where=directory.layout.root)
        try:
            if directory.direct_io and not self._created and nbytes == self._file_nbytes:
                if self._write_direct(buffers, nbytes):
                    return
            elif self._descriptor < 0:
                self._open(0)
            write_from(self._descriptor, buffers, offset, nbytes)
        except OSError as error:
            raise self._failure(error, self._temporary) from error
        directory.writes.succeeded()

    def pause(self) -> None:
        """Close the file."""
        self._close()

    def commit(self) -> None:
        """Rename it into its place; the file before it, if there is one, is replaced."""
        directory = self._directory
        try:
            if directory.fsync:
                if self._descriptor < 0:
                    self._open(0)
                os.fsync(self._descriptor)
            self._close()
            self._publish()
        except OSError as error:
            raise self._failure(error, self._path) from error
        self._created = False
        self._listener.committed(directory, self._key, self._file_nbytes)

    def abort(self) -> None:
        """Delete the temporary file."""
        self._close()
        if self._created:
            self._created = False
            unlink_private(self._temporary)

    def _failure(self, error: OSError, path: str) -> StoreError:
        failure = self._directory.write_failed(error, path)
        self._listener.refused(self._directory, failure)
        return failure

    def _write_direct(self, buffers: Sequence[Buffer | bytearray], nbytes: int) -> bool:
        """Try to write the whole file past the page cache; if the file system refuses, leave it open and empty."""
        try:
            self._open(os.O_DIRECT)
            write_direct(self._descriptor, buffers, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._directory.no_direct_io(error)
            self._close()
            self._open(0)
            return False
        self._directory.writes.succeeded()
        return True

    def _open(self, flags: int) -> None:
        directory = self._directory
        if self._created:
            self._descriptor = os.open(self._temporary, _REOPEN | flags)
        else:
            try:
                self._descriptor = os.open(self._temporary, _CREATE | flags, FILE_MODE)
            except FileNotFoundError:
                directory.make()
                self._descriptor = os.open(self._temporary, _CREATE | flags, FILE_MODE)
            self._created = True
            if directory.claims_space and self._file_nbytes >= CLAIM_FROM:
                directory.claims_space = claim_space(self._descriptor, self._file_nbytes)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _publish(self) -> None:
        try:
            os.rename(self._temporary, self._path)  # noqa: PTH104 - a Path costs as much as the call
        except FileNotFoundError:
            make_directory(os.path.dirname(self._path))  # noqa: PTH120 - see above
            os.rename(self._temporary, self._path)  # noqa: PTH104
