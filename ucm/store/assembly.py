"""A block being put together from shards that arrive in any order, in all tiers at once."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import IncompleteBlockError, StoreError
from ucm.store.format import sums_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey, BlockTransfer
    from ucm.store.format import HeaderCodec
    from ucm.store.tasks import TransferTask
    from ucm.store.tier import BlockWriter, Tier


class Assembly:
    """One block, from its first shard to ``finish`` or ``abort``.

    ``pending``, ``commit``, ``discarded`` and ``touched`` belong to the store and are guarded by its lock.

    Args:
        key: The block.
        codec: What its file looks like.
        tiers: Where it goes.
    """

    def __init__(self, key: BlockKey, codec: HeaderCodec, tiers: Sequence[Tier]) -> None:
        self.key = key
        self.pending = 0  #: transfers queued or under way
        self.commit: TransferTask | None = None  #: the task that waits for it
        self.discarded = False
        self.touched = 0.0  #: when the last transfer was queued, in the store's seconds of use
        self._codec = codec
        self._tiers = tiers
        self._lock = Lock()
        self._begun = False
        self._sums: list[int | None] = [None] * len(codec.geometry.shard_sizes)
        self._writers: list[tuple[Tier, BlockWriter]] = []
        self._present: list[Tier] = []  # those that had the block from the beginning
        self._error: StoreError | None = None

    def refuse(self, error: StoreError) -> None:
        """Let the block fail with this error, if it has not already."""
        self._error = self._error or error

    def take(self, block: BlockTransfer) -> tuple[str, int]:
        """Write shards into every tier that takes them.

        Returns:
            The lowest tier that has them, and the bytes that were moved: none if the block was there.

        Raises:
            StoreError: No tier took them, now or before.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.discarded:
                raise IncompleteBlockError(f"block {self.key.hex()} was discarded before it was written")
            if not self._begun:
                self._begin()
            if self._writers:
                self._write(block)
            return self._lowest(), sum(shard.nbytes for shard in block.shards) if self._writers else 0

    def finish(self) -> tuple[str, int]:
        """Make the block visible.

        Returns:
            The lowest tier that has it, and its bytes: none if it was there.

        Raises:
            IncompleteBlockError: Some shards did not arrive, or no tier took them; what the dump reported is its cause.
            StoreError: No tier has it.
        """
        with self._lock:
            error = self._error
            if error is not None:
                # The dump has said and counted it: as an error of the commit's own it would count twice.
                self._abort()
                what = f"block {self.key.hex()} was not dumped and cannot be committed: {error.what}"
                raise IncompleteBlockError(what, where=error.where, fix=error.fix) from error
            if self._writers and None in self._sums:
                missing = f"{self._sums.count(None)} of its {len(self._sums)} shards"
                incomplete = IncompleteBlockError(f"block {self.key.hex()} was committed without {missing}")
                self._writers[-1][0].counters.failed("commit", incomplete)
                self._abort()
                raise incomplete
            self._everywhere("commit", lambda writer: writer.commit())
            nbytes = self._codec.geometry.nbytes
            for tier, _ in self._writers:
                tier.counters.dumped(nbytes)
            return self._lowest(), nbytes if self._writers else 0

    def abort(self) -> None:
        """Drop what was written."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        for _, writer in self._writers:
            writer.abort()
        self._writers.clear()

    def _begin(self) -> None:
        self._begun = True
        for tier in self._tiers:
            writer = tier.writer(self.key, self._codec.file_nbytes)
            if writer is None:
                self._present.append(tier)
            else:
                self._writers.append((tier, writer))

    def _write(self, block: BlockTransfer) -> None:
        codec, first, shards = self._codec, block.first_shard, block.shards
        self._sums[first : first + len(shards)] = sums_of(shards)
        begin, end = codec.offsets[first], codec.offsets[first + len(shards)]
        if len(shards) == len(self._sums):
            header = codec.encode(self.key, self._known_sums())
            self._everywhere("dump", lambda writer: writer.write([header, *shards], 0, end))
        else:
            self._everywhere("dump", lambda writer: writer.write(shards, begin, end - begin))
            if None not in self._sums:
                header = codec.encode(self.key, self._known_sums())
                self._everywhere("dump", lambda writer: writer.write([header], 0, codec.nbytes))
        for _, writer in self._writers:
            writer.pause()

    def _lowest(self) -> str:
        """The lowest tier that has what came so far."""
        having = [*self._present, *(tier for tier, _ in self._writers)]
        return max(having, key=self._tiers.index).name

    def _known_sums(self) -> list[int]:
        return [value for value in self._sums if value is not None]

    def _everywhere(self, operation: str, action: Callable[[BlockWriter], None]) -> None:
        """Do something in every tier that has not failed; a tier that fails is left out from then on."""
        left = []
        for tier, writer in self._writers:
            try:
                action(writer)
            except StoreError as error:
                tier.counters.failed(operation, error)
                writer.abort()
                self._error = error
            else:
                left.append((tier, writer))
        self._writers = left
        if left or self._present:
            self._error = None
        elif self._error is not None:
            raise self._error
