"""The file format of a block: a header, then the layer slices back to back.

The header is a multiple of 4096 bytes, all integers little endian::

    offset  bytes  what
         0      8  magic
         8      2  format version
        10      2  length of the header in units of 4096 bytes
        12      4  number of layer slices, n
        16      8  bytes of all layer slices
        24     16  fingerprint of the geometry
        40     16  BLAKE2b digest of the namespace
        56      1  length of the key, then 7 bytes of zeros
        64     64  key, padded with zeros
       128    8*n  bytes of each layer slice
             8*n  XXH3-64 of each layer slice
               …  zeros
     end-8      8  XXH3-64 of everything before it

A layer slice's checksum protects its bytes and the header's checksum protects the rest. The namespace, key and
fingerprint detect an intact block in the wrong place.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ucm.store.base import BlockKey
from ucm.store.errors import BlockCorruptError, BlockForeignError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.base import BlockGeometry, Buffer
    from ucm.store.errors import StoreError

VERSION = 1
#: The header's length is a multiple of this, so that layer slices are read and written at aligned offsets.
UNIT = 4096
#: The longest header, in units: room for 260,000 layer slices.
MAX_UNITS = 1024
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
FINGERPRINT_BYTES = 16

_MAGIC = b"\x89UCMKV\r\n"
_FIXED = struct.Struct("<8sHHIQ16s16sB7x64s")
_SUM = struct.Struct("<Q")
_KEY_AT = 56
_ALIGNMENT = 64

#: The checksum of a layer slice; fast enough to be always on: more than 50 GB/s with AVX2.
checksum = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The decoded header of a block's file."""

    key: BlockKey
    namespace_digest: bytes
    fingerprint: bytes
    slice_sizes: tuple[int, ...]
    checksums: tuple[int, ...]
    nbytes: int  #: length of the header; the first layer slice begins there

    @property
    def file_nbytes(self) -> int:
        """The length that the file must have, in bytes."""
        return self.nbytes + sum(self.slice_sizes)


def namespace_digest(namespace: str) -> bytes:
    """Return the digest that identifies a namespace in a header."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


def header_nbytes(first_unit: bytes | bytearray) -> int:
    """Return the length of a header in bytes.

    Args:
        first_unit: The file's first 4096 bytes.

    Raises:
        BlockCorruptError: The bytes are not a header.
        BlockForeignError: The header has another format version.
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
    """Decode a whole header, as long as ``header_nbytes`` says.

    Raises:
        BlockCorruptError: The bytes are not a header, or were changed.
        BlockForeignError: The header has another format version.
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
    """Check that a whole file matches its header and belongs to this key.

    Raises:
        BlockCorruptError: Bytes were changed, are missing or are too many.
        BlockForeignError: The file is another block's, or has another format version.
    """
    header = decode(bytes(content[: header_nbytes(bytes(content[:UNIT]))]))
    if header.key != key:
        raise BlockForeignError(f"the block's key is {header.key.hex()}")
    if len(content) != header.file_nbytes:
        raise BlockCorruptError(f"the file has {len(content)} bytes, not {header.file_nbytes}")
    check_slices(content, header)
    return header


def check_slices(content: Buffer, header: BlockHeader) -> None:
    """Compare the checksums of a file's layer slices with those in its header.

    Raises:
        BlockCorruptError: A checksum is wrong.
    """
    at = header.nbytes
    for index, (size, expected) in enumerate(zip(header.slice_sizes, header.checksums, strict=True)):
        if checksum(content[at : at + size]) != expected:
            raise BlockCorruptError(f"the checksum of layer slice {index} is wrong")
        at += size


class HeaderCodec:
    """Encodes and checks the headers of one namespace and geometry.

    Args:
        namespace: The namespace.
        geometry: The geometry of its blocks.

    Raises:
        ValueError: The geometry has no layer slices, too many, an empty one, or a fingerprint of not 16 bytes.
    """

    def __init__(self, namespace: str, geometry: BlockGeometry) -> None:
        sizes = geometry.slice_sizes
        count = len(sizes)
        needed = _FIXED.size + 16 * count + _SUM.size
        units = -(-needed // UNIT)
        if not sizes or min(sizes) <= 0 or units > MAX_UNITS:
            raise ValueError(f"a block cannot have {count} layer slices of {min(sizes, default=0)} bytes and more")
        if len(geometry.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"the fingerprint has {len(geometry.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        self.geometry = geometry
        self.nbytes = units * UNIT
        self.file_nbytes = self.nbytes + geometry.nbytes
        #: The offset of each layer slice in the file, and the end of the last one.
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
        """Return the header of a block with these layer slice checksums."""
        header = self._template.copy()
        self._key.pack_into(header, _KEY_AT, len(key), key)
        self._sums.pack_into(header, self._sums_at, *checksums)
        end = self.nbytes - 8
        _SUM.pack_into(header, end, checksum(memoryview(header)[:end]))
        return header

    def checksums(self, header: bytearray) -> tuple[int, ...]:
        """Return the layer slice checksums in a header of this geometry; meaningless for any other header."""
        return self._sums.unpack_from(header, self._sums_at)

    def is_sound(self, header: bytearray, key: BlockKey, first: int, slices: Sequence[Buffer]) -> bool:
        """Return whether layer slices have their stored checksums and the header has this key and geometry."""
        stored = self.checksums(header)
        # Comparing the whole header with a newly encoded one checks all of its fields at once.
        return tuple(sums_of(slices)) == stored[first : first + len(slices)] and header == self.encode(key, stored)

    def refusal_of(self, header: bytearray, key: BlockKey) -> StoreError:
        """Return the reason to refuse a block of the right length, from its first ``nbytes`` bytes."""
        try:
            nbytes = header_nbytes(header)
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        return self.refusal(bytes(header[:nbytes]), key, self.file_nbytes)

    def check(self, content: Buffer, key: BlockKey) -> StoreError | None:
        """Return what is wrong with a whole stored block, header and layer slices; None if it is sound."""
        if content.nbytes == self.file_nbytes:
            slices = [content[begin:end] for begin, end in zip(self.offsets, self.offsets[1:], strict=False)]
            if self.is_sound(bytearray(content[: self.nbytes]), key, 0, slices):
                return None
        try:
            nbytes = header_nbytes(bytes(content[:UNIT]))
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        return self.refusal(bytes(content[:nbytes]), key, content.nbytes)

    def refusal(self, header: bytes, key: BlockKey, file_nbytes: int) -> StoreError:
        """Return what is wrong with a block: its header, or else its length, or else its layer slices.

        Args:
            header: The whole header, as long as ``header_nbytes`` says.
            key: The expected key.
            file_nbytes: The length of the file.
        """
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
        if found.slice_sizes != self.geometry.slice_sizes:
            return BlockForeignError(f"the block has {len(found.slice_sizes)} layer slices of other sizes")
        if file_nbytes != self.file_nbytes:
            return BlockCorruptError(f"the file has {file_nbytes} bytes, not {self.file_nbytes}")
        return BlockCorruptError("the checksum of a layer slice is wrong")


def aligned_buffer(nbytes: int) -> Buffer:
    """Return new memory of undefined content that begins at a multiple of 64 bytes.

    The kernel's copies into memory that begins elsewhere, as a ``bytearray`` does, take up to five times as long on
    some processors.
    """
    memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].data


def sums_of(slices: Sequence[Buffer]) -> list[int]:
    """Return the checksum of each layer slice."""
    return list(map(checksum, slices))


def _running_sums(start: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = [start]
    for size in sizes:
        found.append(found[-1] + size)
    return tuple(found)
