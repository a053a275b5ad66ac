"""Assemble a block from layer slices that arrive in any order, in the first tier that accepts it."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import IncompleteBlockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, BlockTransfer
    from ucm.store.format import HeaderCodec, Seal
    from ucm.store.guard import Guard
    from ucm.store.tasks import TransferTask
    from ucm.store.tier import BlockWriter


class Assembly:
    """One block being assembled, from its first layer slice to ``finish`` or ``abort``.

    The store's lock guards ``pending``, ``commit``, ``discarded``, ``touched`` and ``is_expected``.

    Args:
        key: The block's key.
        codec: The codec of the block's stored form.
        tiers: The tiers to try, in order.
    """

    def __init__(self, key: BlockKey, codec: HeaderCodec, tiers: Sequence[Guard]) -> None:
        self.key = key
        self.pending = 0  #: transfers queued or in progress
        self.commit: TransferTask | None = None  #: the commit task waiting for this block
        self.discarded = False
        self.touched = 0.0  #: when the last transfer was queued, in the store's seconds of use
        self.is_expected = False  #: whether the tiers were told to expect the block
        self._codec = codec
        self._tiers = tiers
        self._lock = Lock()
        self._seals: list[Seal] = [None] * len(codec.geometry.slice_sizes)
        self._tier: Guard | None = None  # the tier that has the block or receives it
        self._writer: BlockWriter | None = None  # None if the tier already had the block
        self._error: StoreError | None = None

    def refuse(self, error: StoreError) -> None:
        """Fail the block with this error, unless it has failed already."""
        self._error = self._error or error

    def take(self, block: BlockTransfer) -> tuple[str, int]:
        """Write layer slices into the first tier that accepts them; later ones of the block go to the same tier.

        Returns:
            The tier's name, and the bytes written: 0 if the tier already had the block.

        Raises:
            StoreError: No tier accepted these layer slices or earlier ones.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.discarded:
                raise IncompleteBlockError(f"block {self.key.hex()} was discarded before it was written")
            nbytes = sum(layer_slice.nbytes for layer_slice in block.slices)
            if self._tier is not None:
                if self._writer is None:
                    return self._tier.name, 0
                try:
                    self._write(self._tier, self._writer, block)
                except StoreError as error:
                    self._tier.counters.failed("save", error)
                    self._abort()
                    self._error = error
                    raise
                return self._tier.name, nbytes
            self._begin(block)
            return self._known_tier().name, 0 if self._writer is None else nbytes

    def finish(self) -> tuple[str, int]:
        """Make the block visible.

        Returns:
            The name of the tier that has the block, and the block's bytes: 0 if the tier already had it.

        Raises:
            IncompleteBlockError: Layer slices are missing, or no tier accepted them, for the reason that the save gave.
            StoreError: The tier failed to commit the block.
        """
        with self._lock:
            error = self._error
            if error is not None:
                # The save has already reported and counted this error: reporting it as is would count it twice.
                self._abort()
                what = f"block {self.key.hex()} was not saved and cannot be committed: {error.what}"
                raise IncompleteBlockError(what, where=error.where, fix=error.fix) from error
            tier, writer = self._known_tier(), self._writer
            if writer is None:
                return tier.name, 0
            if None in self._seals:
                missing = f"{self._seals.count(None)} of its {len(self._seals)} layer slices"
                incomplete = IncompleteBlockError(f"block {self.key.hex()} was committed without {missing}")
                tier.counters.failed("commit", incomplete)
                self._abort()
                raise incomplete
            try:
                tier.write(writer.commit)
            except StoreError as failure:
                tier.counters.failed("commit", failure)
                self._abort()
                raise
            nbytes = self._codec.geometry.nbytes
            tier.counters.saved(nbytes)
            return tier.name, nbytes

    def abort(self) -> None:
        """Drop the layer slices written so far."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _begin(self, block: BlockTransfer) -> None:
        """Write the first layer slices into the first tier that accepts them."""
        for tier in self._tiers:
            writer = None
            try:
                writer = tier.writer(self.key, self._codec.file_nbytes)
                if writer is not None:
                    self._write(tier, writer, block)
            except StoreError as error:
                tier.counters.failed("save", error)
                if writer is not None:
                    writer.abort()
                self._error = error
            else:
                self._tier, self._writer, self._error = tier, writer, None
                return
        if self._error is not None:
            raise self._error

    def _write(self, tier: Guard, writer: BlockWriter, block: BlockTransfer) -> None:
        codec, first, slices = self._codec, block.first_slice, block.slices
        self._seals[first : first + len(slices)] = codec.seal(slices)
        begin, end = codec.offsets[first], codec.offsets[first + len(slices)]
        whole = len(slices) == len(self._seals)
        header = None if None in self._seals else codec.encode(self.key, self._seals)

        def write() -> None:
            if whole and header is not None:
                writer.write([header, *slices], 0, end)
            else:
                writer.write(slices, begin, end - begin)
                if header is not None:
                    writer.write([header], 0, codec.nbytes)
            writer.pause()

        tier.write(write)

    def _known_tier(self) -> Guard:
        if self._tier is None:
            raise IncompleteBlockError(f"block {self.key.hex()} was committed without any of its layer slices")
        return self._tier
