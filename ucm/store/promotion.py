"""Copy blocks from lower tiers into the first one, in the background."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import BlockMissingError, StoreError
from ucm.store.format import aligned_buffer
from ucm.store.guard import unexpected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer
    from ucm.store.format import HeaderCodec
    from ucm.store.guard import Guard

#: How many blocks may wait to be read from a lower tier; more would be outdated by the time they arrive.
_MOST_WAITING = 1024


class Promoter:
    """Copies just loaded blocks from memory into the first tier; other blocks are read from a lower tier.

    Args:
        tiers: The store's tiers, fastest first.
        codec: The codec of stored blocks; None in a store that does not load.
        limit: Bytes of loaded blocks that may wait to be written; further blocks are not copied.
    """

    def __init__(self, tiers: Sequence[Guard], codec: HeaderCodec | None, limit: int) -> None:
        self._first, self._lower = tiers[0], tiers[1:]
        self._codec = codec
        self._limit = limit
        self._lock = Lock()
        self._waiting: set[BlockKey] = set()
        self._nbytes = 0  # bytes copied and not yet written
        self._closed = False

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Copy blocks into the first tier; with only one tier, let it read ahead."""
        if self._lower:
            missing = [key for key, there in zip(keys, self._first.contains(keys), strict=True) if not there]
            for key in missing:
                self.promote(key)
        else:
            for key in keys:
                self._first.save_later(key, partial(self._first.tier.prefetch, key))

    def promote(self, key: BlockKey) -> None:
        """Copy a block from a lower tier, unless it is being copied already or too many are."""
        with self._lock:
            if self._closed or key in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting.add(key)
        with suppress(ValueError):  # closed meanwhile
            self._lower[0].save_later(key, partial(self._fetch, 0, key), partial(self._forget, key))

    def keep(self, block: BlockTransfer) -> None:
        """Copy a block that was just loaded from a lower tier; its memory is copied before this returns."""
        codec = self._codec
        if codec is None or len(block.slices) < len(codec.geometry.slice_sizes):
            self.promote(block.key)
            return
        with self._lock:
            if self._closed or block.key in self._waiting or self._nbytes + codec.file_nbytes > self._limit:
                return
            self._waiting.add(block.key)
            self._nbytes += codec.file_nbytes
        try:
            content = aligned_buffer(codec.file_nbytes)
        except MemoryError as error:
            self._first.counters.failed("promote", unexpected(error))
            self._forget(block.key, codec.file_nbytes)
            return
        for number, layer_slice in enumerate(block.slices):
            content[codec.offsets[number] : codec.offsets[number + 1]] = layer_slice.cast("B")
        with suppress(ValueError):  # closed meanwhile
            self._first.save_later(
                block.key,
                partial(self._write_loaded, codec, block.key, content),
                partial(self._forget, block.key, codec.file_nbytes),
            )

    def close(self) -> None:
        """Skip queued copies."""
        with self._lock:
            self._closed = True

    def _fetch(self, number: int, key: BlockKey) -> None:
        """Read a block from a lower tier and queue it to be written."""
        following, job = None, partial(self._fetch, number + 1, key)
        try:
            content = self._lower[number].read_file(key)
        except StoreError as error:
            if number + 1 < len(self._lower):
                following = self._lower[number + 1]
            if not isinstance(error, BlockMissingError):
                self._first.counters.failed("promote", error)
        else:
            following, job = self._first, partial(self._write, key, content)
        if following is None or self._closed:
            self._forget(key)
        else:
            with suppress(ValueError):  # closed meanwhile
                following.save_later(key, job, partial(self._forget, key))

    def _write_loaded(self, codec: HeaderCodec, key: BlockKey, content: Buffer) -> None:
        slices = [content[begin:end] for begin, end in zip(codec.offsets, codec.offsets[1:], strict=False)]
        content[: codec.nbytes] = codec.encode(key, codec.seal(slices))
        self._write(key, content, codec.file_nbytes)

    def _write(self, key: BlockKey, content: Buffer, counted: int = 0) -> None:
        try:
            if not self._closed:
                self._first.put(key, content)
        except StoreError as error:
            self._first.counters.failed("promote", error)
        except Exception as error:  # noqa: BLE001 - otherwise the block would count as being copied for ever
            self._first.counters.failed("promote", unexpected(error))
        finally:
            self._forget(key, counted)

    def _forget(self, key: BlockKey, nbytes: int = 0) -> None:
        with self._lock:
            self._waiting.discard(key)
            self._nbytes -= nbytes
