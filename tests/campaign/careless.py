"""A store as it must not be: it writes blocks in their places and checks nothing. The campaign has to notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.errors import BlockMissingError
from ucm.store.format import HeaderCodec
from ucm.store.posix import PosixTier
from ucm.store.posix_layout import make_directory

if TYPE_CHECKING:
    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer
    from ucm.store.config import StoreConfig
    from ucm.store.posix_writer import BlockFileWriter

CARELESS = f"{__name__}:CarelessTier"


class CarelessTier(PosixTier):
    def __init__(self, config: StoreConfig, namespace: str, geometry: BlockGeometry) -> None:
        self._shapes = HeaderCodec(namespace, geometry)
        super().__init__("posix", config.directories, namespace, self._shapes, config, None)

    def writer(self, key: BlockKey, file_nbytes: int) -> BlockFileWriter | None:
        writer = super().writer(key, file_nbytes)
        if writer is not None:
            writer._directory.layout.make()
            make_directory(str(Path(writer._path).parent))
            writer._temporary = writer._path
        return writer

    def read(self, block: BlockTransfer, lease: str | None) -> bool:
        del lease
        try:
            descriptor = os.open(self._directory(block.key).layout.block(block.key), os.O_RDONLY)
        except FileNotFoundError as error:
            raise BlockMissingError(block.key.hex()) from error
        os.preadv(descriptor, block.shards, self._shapes.nbytes)
        os.close(descriptor)
        return False
