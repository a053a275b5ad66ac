"""Broken stores; the campaign has to notice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.store.base import BlockMissingError
from ucm.store.format import known_codec
from ucm.store.posix.paths import FILE_MODE, make_directory
from ucm.store.posix.tier import PosixTier
from ucm.store.tier import LeaseRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer
    from ucm.store.tier import CompressingOptions, Leased, TierPlace

CARELESS = f"{__name__}:CarelessTier"


class CarelessTier(PosixTier):
    """A tier that writes blocks in place and checks nothing."""

    def __init__(self, options: CompressingOptions, place: TierPlace) -> None:
        super().__init__(options, replace(place, authenticator=None))
        self._shapes = known_codec(place.codec)

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        del deadline
        layout = self._directory(key).layout
        layout.make()
        path = Path(layout.block(key))
        make_directory(str(path.parent))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        os.writev(descriptor, pieces)
        os.close(descriptor)

    def read(self, block: BlockTransfer) -> bool:
        try:
            descriptor = os.open(self._directory(block.key).layout.block(block.key), os.O_RDONLY)
        except FileNotFoundError as error:
            raise BlockMissingError(block.key.hex()) from error
        os.preadv(descriptor, block.slices, self._shapes.nbytes)
        os.close(descriptor)
        return False


class _LastOneWins(LeaseRules):
    def joined(self, old: int, new: int, now: int) -> int:
        del old, now
        return new


class ForgetfulTier(PosixTier):
    """A tier in which a use ends a lease."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for evictor in self._evictors:
            evictor.leases = _LastOneWins(evictor.leases.longest_ns)


class EndlessTier(PosixTier):
    """A tier that leases for a year."""

    def lease(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool) -> Leased:
        return super().lease(depths, until + 365 * 86400.0, pinned=pinned)


class RoomyTier(PosixTier):
    """A tier that holds more than it may."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for evictor in self._evictors:
            evictor.share = None
