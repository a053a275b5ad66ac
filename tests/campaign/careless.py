"""A broken store that writes blocks in place and checks nothing; the campaign has to notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.base import BlockMissingError
from ucm.store.posix.files import BlockFileWriter
from ucm.store.posix.paths import FILE_MODE, KeptDirectory, make_directory
from ucm.store.posix.tier import PosixTier

if TYPE_CHECKING:
    from ucm.store.base import BlockKey, BlockTransfer
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec
    from ucm.store.posix.paths import NewFile
    from ucm.store.tier import TierOptions, TierPlace

CARELESS = f"{__name__}:CarelessTier"


class CarelessWriter(BlockFileWriter):
    def _create(self, flags: int) -> tuple[int, NewFile]:
        bucket, _, name = self._path.rpartition("/")
        return KeptDirectory(bucket).new_file(name, os.O_WRONLY | flags, FILE_MODE, None)

    def commit(self) -> None:
        self._close()
        self._file = None
        self._listener.committed(self._directory, self._key)


class CarelessTier(PosixTier):
    def __init__(self, config: StoreConfig, namespace: str, codec: HeaderCodec) -> None:
        self._shapes = codec
        super().__init__("posix", config.directories, namespace, codec, config, None)

    @classmethod
    def open(cls, options: TierOptions, place: TierPlace) -> CarelessTier:
        del options
        assert place.codec is not None
        return cls(place.config, place.namespace, place.codec)

    def writer(self, key: BlockKey, file_nbytes: int) -> BlockFileWriter | None:
        directory = self._directory(key)
        if directory.holds(key):
            return None
        directory.layout.make()
        make_directory(str(Path(directory.layout.block(key)).parent))
        return CarelessWriter(directory, key, file_nbytes, self)

    def read(self, block: BlockTransfer) -> bool:
        try:
            descriptor = os.open(self._directory(block.key).layout.block(block.key), os.O_RDONLY)
        except FileNotFoundError as error:
            raise BlockMissingError(block.key.hex()) from error
        os.preadv(descriptor, block.slices, self._shapes.nbytes)
        os.close(descriptor)
        return False
