"""The file of one block: a header, then the shards back to back.

The header is a multiple of 4096 bytes, all integers little endian::

    offset  bytes  what
         0      8  magic
         8      2  format version
        10      2  length of the header in units of 4096 bytes
        12      4  number of shards, n
        16      8  bytes of all shards
        24     16  fingerprint of the geometry
        40     16  BLAKE2b digest of the namespace
        56      1  length of the key, then 7 bytes of zeros
        64     64  key, filled up with zeros
       128    8*n  bytes of each shard
             8*n  XXH3-64 of each shard
               …  zeros
     end-8      8  XXH3-64 of everything before it

A shard's checksum guards its bytes, the header's checksum guards the rest, and the namespace, key and fingerprint guard
against a whole block in the wrong place.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ucm.store.base import BlockKey
from ucm.store.errors import BlockCorruptError, BlockForeignError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.base import BlockGeometry, Buffer
    from ucm.store.errors import StoreError

VERSION = 1
#: Headers are multiples of this, so that shards are read and written at aligned places.
UNIT = 4096
#: No header is longer than so many units: room for 260,000 shards.
MAX_UNITS = 1024
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
FINGERPRINT_BYTES = 16

_MAGIC = b"\x89UCMKV\r\n"
_FIXED = struct.Struct("<8sHHIQ16s16sB7x64s")
_SUM = struct.Struct("<Q")
_KEY_AT = 56

#: The checksum of a shard: fast enough (more than 50 GB/s where AVX2 is there) to be always on.
checksum = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block's file says about itself."""

    key: BlockKey
    namespace_digest: bytes
    fingerprint: bytes
    shard_sizes: tuple[int, ...]
    checksums: tuple[int, ...]
    nbytes: int  #: of the header; the first shard begins there

    @property
    def file_nbytes(self) -> int:
        """How long the file must be."""
        return self.nbytes + sum(self.shard_sizes)


def namespace_digest(namespace: str) -> bytes:
    """How a namespace is told from others within a header."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


def header_nbytes(first_unit: bytes | bytearray) -> int:
    """How long the header is that begins so.

    Args:
        first_unit: The file's first 4096 bytes.

    Raises:
        BlockCorruptError: It is no header.
        BlockForeignError: It is one of another format version.
    """
    if len(first_unit) < UNIT:
        raise BlockCorruptError(f"the file ends after {len(first_unit)} bytes, within its header")
    magic, version, units = _FIXED.unpack_from(first_unit)[:3]
    if magic != _MAGIC:
        raise BlockCorruptError("the file does not begin like a block")
    if version != VERSION:
        raise BlockForeignError(f"the block has format version {version}, not {VERSION}")
    if not 1 <= units <= MAX_UNITS:
        raise BlockCorruptError(f"the header claims {units} units")
    return int(units) * UNIT


def decode(header: bytes | bytearray) -> BlockHeader:
    """Read a whole header, as long as ``header_nbytes`` says.

    Raises:
        BlockCorruptError: It is no header, or was changed.
        BlockForeignError: It is one of another format version.
    """
    nbytes = header_nbytes(header)
    if len(header) != nbytes:
        raise BlockCorruptError(f"the file ends after {len(header)} bytes, within its header of {nbytes}")
    if _SUM.unpack_from(header, nbytes - _SUM.size)[0] != checksum(memoryview(header)[: -_SUM.size]):
        raise BlockCorruptError("the header's checksum is wrong")
    _, _, _, count, body, fingerprint, digest, key_nbytes, key = _FIXED.unpack_from(header)
    if _FIXED.size + 16 * count + _SUM.size > nbytes or not MIN_KEY_BYTES <= key_nbytes <= MAX_KEY_BYTES:
        raise BlockCorruptError("the header contradicts itself")
    table = struct.unpack_from(f"<{2 * count}Q", header, _FIXED.size)
    if sum(table[:count]) != body:
        raise BlockCorruptError("the header contradicts itself")
    return BlockHeader(BlockKey(key[:key_nbytes]), digest, fingerprint, table[:count], table[count:], nbytes)


def verify(content: Buffer, key: BlockKey) -> BlockHeader:
    """Check a whole file against its own header, and that it is the block of this key.

    Raises:
        BlockCorruptError: Any byte of it was changed, or some are missing or too many.
        BlockForeignError: It is another block, or of another format version.
    """
    header = decode(bytes(content[: header_nbytes(bytes(content[:UNIT]))]))
    if header.key != key:
        raise BlockForeignError(f"the block's key is {header.key.hex()}")
    if len(content) != header.file_nbytes:
        raise BlockCorruptError(f"the file has {len(content)} bytes, not {header.file_nbytes}")
    check_shards(content, header)
    return header


def check_shards(content: Buffer, header: BlockHeader) -> None:
    """Compare the checksums of a file's shards with those in its header.

    Raises:
        BlockCorruptError: One is wrong.
    """
    at = header.nbytes
    for index, (size, expected) in enumerate(zip(header.shard_sizes, header.checksums, strict=True)):
        if checksum(content[at : at + size]) != expected:
            raise BlockCorruptError(f"the checksum of shard {index} is wrong")
        at += size


class HeaderCodec:
    """Headers of one namespace and geometry, made and recognised quickly.

    Args:
        namespace: The namespace.
        geometry: What its blocks are.

    Raises:
        ValueError: The geometry cannot be stored: no shards, too many, an empty one, or a fingerprint not of 16 bytes.
    """

    def __init__(self, namespace: str, geometry: BlockGeometry) -> None:
        sizes = geometry.shard_sizes
        count = len(sizes)
        needed = _FIXED.size + 16 * count + _SUM.size
        units = -(-needed // UNIT)
        if not sizes or min(sizes) <= 0 or units > MAX_UNITS:
            raise ValueError(f"a block cannot have {count} shards of {min(sizes, default=0)} bytes and more")
        if len(geometry.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"the fingerprint has {len(geometry.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        self.geometry = geometry
        self.nbytes = units * UNIT
        self.file_nbytes = self.nbytes + geometry.nbytes
        #: Where each shard begins in the file, and where the last one ends.
        self.offsets = _running_sums(self.nbytes, sizes)
        self._digest = namespace_digest(namespace)
        self._sums = struct.Struct(f"<{count}Q")
        self._sums_at = _FIXED.size + 8 * count
        self._key = struct.Struct(f"<B7x{MAX_KEY_BYTES}s")
        template = bytearray(self.nbytes)
        _FIXED.pack_into(
            template, 0, _MAGIC, VERSION, units, count, geometry.nbytes, geometry.fingerprint, self._digest, 0, b""
        )
        self._sums.pack_into(template, _FIXED.size, *sizes)
        self._template = template

    def encode(self, key: BlockKey, checksums: Iterable[int]) -> bytearray:
        """The header of a block whose shards have these checksums."""
        header = self._template.copy()
        self._key.pack_into(header, _KEY_AT, len(key), key)
        self._sums.pack_into(header, self._sums_at, *checksums)
        end = self.nbytes - 8
        _SUM.pack_into(header, end, checksum(memoryview(header)[:end]))
        return header

    def checksums(self, header: bytearray) -> tuple[int, ...]:
        """The shards' checksums that a header of this geometry holds; meaningless in any other."""
        return self._sums.unpack_from(header, self._sums_at)

    def is_sound(self, header: bytearray, key: BlockKey, first: int, shards: Sequence[Buffer]) -> bool:
        """Whether shards are as they were stored, and the header is theirs, a block's of this key and geometry."""
        stored = self.checksums(header)
        # One comparison of the whole header says that all its fields are as they should be, and that it is unchanged.
        return tuple(sums_of(shards)) == stored[first : first + len(shards)] and header == self.encode(key, stored)

    def refusal_of(self, header: bytearray, key: BlockKey) -> StoreError:
        """What is wrong with a block of the right length, of which as much was read as such a header is long."""
        try:
            nbytes = header_nbytes(header)
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        return self.refusal(bytes(header[:nbytes]), key, self.file_nbytes)

    def check(self, content: Buffer, key: BlockKey) -> StoreError | None:
        """What is wrong with a whole stored block, header and shards; None if it is sound."""
        if content.nbytes == self.file_nbytes:
            shards = [content[begin:end] for begin, end in zip(self.offsets, self.offsets[1:], strict=False)]
            if self.is_sound(bytearray(content[: self.nbytes]), key, 0, shards):
                return None
        try:
            nbytes = header_nbytes(bytes(content[:UNIT]))
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        return self.refusal(bytes(content[:nbytes]), key, content.nbytes)

    def refusal(self, header: bytes, key: BlockKey, file_nbytes: int) -> StoreError:
        """What is wrong with a block: its header, whole as ``header_nbytes`` says, or else its length or its shards."""
        try:
            found = decode(header)
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        if found.namespace_digest != self._digest:
            return BlockForeignError("the block belongs to another namespace")
        if found.key != key:
            return BlockForeignError(f"the block's key is {found.key.hex()}")
        if found.fingerprint != self.geometry.fingerprint:
            return BlockForeignError(f"the block's geometry has the fingerprint {found.fingerprint.hex()}")
        if found.shard_sizes != self.geometry.shard_sizes:
            return BlockForeignError(f"the block has {len(found.shard_sizes)} shards of other sizes")
        if file_nbytes != self.file_nbytes:
            return BlockCorruptError(f"the file has {file_nbytes} bytes, not {self.file_nbytes}")
        return BlockCorruptError("the checksum of a shard is wrong")


def sums_of(shards: Sequence[Buffer]) -> list[int]:
    """The checksum of each shard."""
    return [checksum(shard) for shard in shards]


def _running_sums(start: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = [start]
    for size in sizes:
        found.append(found[-1] + size)
    return tuple(found)
