"""A store tier outside UCM: each block is one file in a configured directory.

``docs/write_store.md`` explains it from top to bottom.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ucm.api import BlockMissingError, StoreFullError, StoreUnavailableError, TierOptions, ValueTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.api import BlockKey, Buffer, TierPlace


class ShelfOptions(TierOptions):
    """The settings of the tier.

    Attributes:
        path: The directory; it must exist.
        timeout: The time limit of a lookup, in seconds.
    """

    path: str
    timeout: float = Field(default=1.0, gt=0)


class ShelfTier(ValueTier):
    """Keeps each block as a file whose name is the block's key.

    Args:
        options: The settings.
        place: The namespace and geometry for which the tier is opened.
    """

    Options = ShelfOptions

    def __init__(self, options: ShelfOptions, place: TierPlace) -> None:
        super().__init__("shelf", place, timeout=options.timeout)
        self._directory = Path(options.path, place.namespace.replace("/", "+"))

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Ask the file system for each block."""
        del deadline  # a file system cannot be interrupted; a client of a server passes the time left on
        return [self._file(key).exists() for key in keys]

    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        """Read a block's file; the store compares its checksums."""
        del deadline
        with self._named_errors():
            try:
                return memoryview(self._file(key).read_bytes())
            except FileNotFoundError as error:
                raise BlockMissingError("the block is not on the shelf", where=str(self._directory)) from error

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Write a file under a temporary name, and rename it when it is complete."""
        del deadline
        unfinished = self._directory / f".{os.getpid()}-{os.urandom(8).hex()}"
        with self._named_errors():
            self._directory.mkdir(exist_ok=True)
            try:
                with unfinished.open("wb") as file:
                    for piece in pieces:
                        file.write(piece)
                unfinished.rename(self._file(key))
            except OSError:
                with suppress(OSError):
                    unfinished.unlink()
                raise

    def remove(self, key: BlockKey, deadline: float) -> None:
        """Delete a block's file; a damaged block is removed this way."""
        del deadline
        with self._named_errors():
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: BlockKey) -> Path:
        return self._directory / key.hex()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn the medium's errors into errors that the store counts, and after which it pauses the tier."""
        try:
            yield
        except OSError as error:
            kind = StoreFullError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreUnavailableError
            raise kind(f"the shelf does not answer: {error.strerror}", where=str(self._directory)) from error
