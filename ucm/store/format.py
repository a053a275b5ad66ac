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

In format version 2, blocks are authenticated; see ``ucm.store.authentication``. It has three more fields::

       128    8*n  bytes of each layer slice
             8*n  XXH3-64 of each layer slice
            16*n  tag of each layer slice
               …  zeros
    end-32      8  fingerprint of the authentication key
    end-24     16  tag of everything before it
     end-8      8  XXH3-64 of everything before it

The checksums serve tools without the key, and memory that nobody else can write to.

Format versions 3 and 4 are compressed blocks of versions 1 and 2; see ``ucm.store.compression``. Their header is that
of the block without compression, and all of it is about that block. Only the version itself, which the header's
checksum and tag cover as if it were 1 or 2, says how the layer slices are stored.
"""

from __future__ import annotations

import hashlib
import hmac
import operator
import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from ucm.store.base import BlockCorruptError, BlockForeignError, BlockKey, StoreError
from ucm.store.compression import ELEMENTS, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, Buffer

#: The format versions of blocks without and with authentication.
VERSION, AUTHENTICATED_VERSION = 1, 2
#: What compression adds to a format version.
COMPRESSED = 2
#: The header's length is a multiple of this, so that layer slices are read and written at aligned offsets.
UNIT = 4096
#: The longest header, in units: room for 260,000 layer slices.
MAX_UNITS = 1024
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
FINGERPRINT_BYTES = 16

_MAGIC = b"\x89UCMKV\r\n"
_FIXED = struct.Struct("<8sHHIQ16s16sB7x64s")
_SUM = struct.Struct("<Q")
_VERSION = struct.Struct("<H")
_VERSION_AT, _KEY_AT = 8, 56
#: A tag's bytes, and those of the fingerprint of the authentication key and of the tag before the header's checksum.
_TAG_BYTES, _SIGNED_BYTES = 16, 24
_ALIGNMENT = 64
#: From this size on, numpy copies a layer slice and lets other threads run meanwhile; smaller ones are faster without.
LARGE_BYTES = 32 << 10
#: The most buffers that one system call accepts.
MOST_BUFFERS = 1024

#: What a header has to check a layer slice: its checksum or, if blocks are authenticated, its checksum and its tag.
Seal: TypeAlias = Any

#: The checksum of bytes; fast enough to be always on: more than 50 GB/s with AVX2.
checksum = xxhash.xxh3_64_intdigest


def checksum_of(pieces: Sequence[Buffer]) -> int:
    """Return the checksum of a layer slice."""
    if len(pieces) == 1:
        return checksum(pieces[0])
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The decoded header of a block's file."""

    key: BlockKey
    namespace_digest: bytes
    fingerprint: bytes
    slice_sizes: tuple[int, ...]
    checksums: tuple[int, ...]
    nbytes: int  #: length of the header; the first layer slice begins there
    tags: tuple[bytes, ...] = ()  #: the layer slices' tags, if the header's own tag was checked
    is_compressed: bool = False

    @property
    def file_nbytes(self) -> int:
        """The length that the file has without compression, in bytes."""
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
    if not VERSION <= version <= AUTHENTICATED_VERSION + COMPRESSED:
        raise BlockForeignError(
            f"the block has format version {version}, not one of {VERSION} to {AUTHENTICATED_VERSION + COMPRESSED}"
        )
    if not 1 <= units <= MAX_UNITS:
        raise BlockCorruptError(f"the header claims {units} units")
    return int(units) * UNIT


def decode(
    header: bytes | bytearray, authenticator: Authenticator | None = None, *, any_key: bool = False
) -> BlockHeader:
    """Decode a whole header, as long as ``header_nbytes`` says.

    Args:
        header: The header.
        authenticator: Checks the header's tag; None: authentic or not.
        any_key: Whether a block that is not authenticated, or by another key, is decoded without checking its tag; for
            tools.

    Raises:
        BlockCorruptError: The bytes are not a header, were changed, or are not authentic.
        BlockForeignError: The header has another format version.
    """
    nbytes = header_nbytes(header)
    if len(header) != nbytes:
        raise BlockCorruptError(f"the file ends after {len(header)} bytes, within its header of {nbytes}")
    header = bytearray(header)
    is_compressed = uncompress(header)
    end = nbytes - _SUM.size
    if _SUM.unpack_from(header, end)[0] != checksum(memoryview(header)[:end]):
        raise BlockCorruptError("the header's checksum is wrong")
    _, version, _, count, body, fingerprint, digest, key_nbytes, key = _FIXED.unpack_from(header)
    if version == AUTHENTICATED_VERSION:
        end -= _SIGNED_BYTES
    tags_at = _FIXED.size + 16 * count
    tags_end = tags_at + (_TAG_BYTES * count if version == AUTHENTICATED_VERSION else 0)
    if tags_end > end or not MIN_KEY_BYTES <= key_nbytes <= MAX_KEY_BYTES:
        raise BlockCorruptError("the header contradicts itself")
    table = struct.unpack_from(f"<{2 * count}Q", header, _FIXED.size)
    if sum(table[:count]) != body:
        raise BlockCorruptError("the header contradicts itself")
    tags: tuple[bytes, ...] = ()
    if authenticator is not None and _is_authentic(header, version, authenticator, any_key=any_key):
        tags = tuple(bytes(header[at : at + _TAG_BYTES]) for at in range(tags_at, tags_end, _TAG_BYTES))
    return BlockHeader(
        BlockKey(key[:key_nbytes]), digest, fingerprint, table[:count], table[count:], nbytes, tags, is_compressed
    )


def uncompress(header: bytearray) -> bool:
    """Make a header that of the block without compression, and return whether it was another one."""
    (version,) = _VERSION.unpack_from(header, _VERSION_AT)
    if not VERSION <= version - COMPRESSED <= AUTHENTICATED_VERSION:
        return False
    _VERSION.pack_into(header, _VERSION_AT, version - COMPRESSED)
    return True


def _is_authentic(
    header: bytes | bytearray, version: int, authenticator: Authenticator, *, any_key: bool = False
) -> bool:
    """Check a header's tag; return False if it has none, or one of another key, and ``any_key`` allows that.

    Raises:
        BlockCorruptError: The header is not authentic.
    """
    signed = len(header) - _SUM.size - _TAG_BYTES
    theirs = header[signed - len(authenticator.fingerprint) : signed]
    if version != AUTHENTICATED_VERSION or theirs != authenticator.fingerprint:
        if any_key:
            return False
        raise BlockCorruptError("the block is not authenticated, or by another key")
    if not hmac.compare_digest(
        header[signed : signed + _TAG_BYTES], authenticator.header_tag(memoryview(header)[:signed])
    ):
        raise BlockCorruptError("the header's authentication tag is wrong: somebody without the key changed the block")
    return True


def check_place(header: BlockHeader, key: BlockKey, namespace: str | None, geometry: BlockGeometry | None) -> None:
    """Check that a block is the expected one, of the expected namespace and geometry if these are given.

    Raises:
        BlockForeignError: It is another one.
    """
    if namespace is not None and header.namespace_digest != namespace_digest(namespace):
        raise BlockForeignError("the block belongs to another namespace")
    if header.key != key:
        raise BlockForeignError(f"the block's key is {header.key.hex()}")
    if geometry is not None and header.fingerprint != geometry.fingerprint:
        raise BlockForeignError(f"the block's geometry has the fingerprint {header.fingerprint.hex()}")
    if geometry is not None and header.slice_sizes != geometry.slice_sizes:
        raise BlockForeignError(f"the block has {len(header.slice_sizes)} layer slices of other sizes")


def verify(
    stored: Buffer,
    key: BlockKey,
    authenticator: Authenticator | None = None,
    *,
    namespace: str | None = None,
    geometry: BlockGeometry | None = None,
    any_key: bool = False,
) -> tuple[BlockHeader, Buffer]:
    """Check a whole stored block against its own header: every checksum, its key, and what else is expected.

    Args:
        stored: The block.
        key: The expected key.
        authenticator: Checks the tags as well.
        namespace: The expected namespace; None: any.
        geometry: The expected geometry; None: any.
        any_key: See ``decode``.

    Returns:
        The header, and the block without compression; one that has none is not copied.

    Raises:
        BlockCorruptError: Bytes were changed, are missing or are too many, or the block is not authentic.
        BlockForeignError: It is another block, or has another format version or geometry.
        BlockCompressedError: This process cannot decompress it.
    """
    begin = bytearray(stored[: header_nbytes(bytes(stored[:UNIT]))])
    header = decode(begin, authenticator, any_key=any_key)
    check_place(header, key, namespace, geometry)
    content, at = stored, header.nbytes
    if header.is_compressed:
        frames = unpack(stored[at:], header.file_nbytes - at)
        content = aligned_buffer(header.file_nbytes)
        uncompress(begin)
        content[:at] = begin
        pour(frames, [content[at:]])
    elif stored.nbytes != header.file_nbytes:
        has = f"{stored.nbytes} bytes, not" if stored.nbytes < header.file_nbytes else "more bytes than"
        raise BlockCorruptError(f"the file has {has} {header.file_nbytes}")
    for index, nbytes in enumerate(header.slice_sizes):
        layer_slice = content[at : at + nbytes]
        at += nbytes
        if checksum(layer_slice) != header.checksums[index]:
            raise BlockCorruptError(f"the checksum of layer slice {index} is wrong")
        if authenticator is None or not header.tags:
            continue
        if not hmac.compare_digest(authenticator.slice_tag([layer_slice]), header.tags[index]):
            raise BlockCorruptError(
                f"the authentication tag of layer slice {index} is wrong: somebody without the key changed it"
            )
    return header, content


class HeaderCodec:
    """Encodes and checks the headers of one namespace and geometry.

    Args:
        namespace: The namespace.
        geometry: The geometry of its blocks.
        authenticator: Authenticates the blocks; None: they have checksums alone.
        private: Whether the blocks lie in memory that nobody without the key can write to: then the layer slices'
            checksums are compared, and not their tags.

    Raises:
        ValueError: The geometry has no layer slices, too many, an empty one, a fingerprint of not 16 bytes, or elements
            of a size that no number has.
    """

    def __init__(
        self,
        namespace: str,
        geometry: BlockGeometry,
        authenticator: Authenticator | None = None,
        *,
        private: bool = False,
    ) -> None:
        sizes = geometry.slice_sizes
        count = len(sizes)
        signed = authenticator is not None
        signed_bytes = _SIGNED_BYTES if signed else 0
        needed = _FIXED.size + (16 + _TAG_BYTES * signed) * count + signed_bytes + _SUM.size
        units = -(-needed // UNIT)
        if not sizes or min(sizes) <= 0 or units > MAX_UNITS:
            raise ValueError(f"a block cannot have {count} layer slices of {min(sizes, default=0)} bytes and more")
        if len(geometry.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"the fingerprint has {len(geometry.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        if geometry.element_size not in ELEMENTS:
            raise ValueError(f"an element cannot have {geometry.element_size} bytes")
        self.geometry = geometry
        self.authenticator = authenticator
        self.nbytes = units * UNIT
        self.file_nbytes = self.nbytes + geometry.nbytes
        #: The offset of each layer slice in the file, and the end of the last one.
        self.offsets = tuple(accumulate(sizes, initial=self.nbytes))
        #: By the offset at which a layer slice ends, the index of the next one.
        self._index = {offset: index for index, offset in enumerate(self.offsets) if index}
        self._namespace = namespace
        self._private = private
        self._digest = namespace_digest(namespace)
        self._sums = struct.Struct(f"<{count}Q")
        self._sums_at = _FIXED.size + 8 * count
        self._tags = struct.Struct(f"{_TAG_BYTES}s" * count)
        self._tags_at = _FIXED.size + 16 * count
        self._key = struct.Struct(f"<B7x{MAX_KEY_BYTES}s")
        template = bytearray(self.nbytes)
        version = AUTHENTICATED_VERSION if signed else VERSION
        _FIXED.pack_into(
            template, 0, _MAGIC, version, units, count, geometry.nbytes, geometry.fingerprint, self._digest, 0, b""
        )
        self._sums.pack_into(template, _FIXED.size, *sizes)
        if authenticator is not None:
            at = self.nbytes - _SUM.size - _SIGNED_BYTES
            template[at : at + len(authenticator.fingerprint)] = authenticator.fingerprint
        self._template = template

    def in_private_memory(self) -> HeaderCodec:
        """Return a codec of the same blocks that compares checksums and not tags; see ``private``."""
        return HeaderCodec(self._namespace, self.geometry, self.authenticator, private=True)

    def end_of(self, first: int, nbytes: int) -> int | None:
        """Return the index after that of the last of some consecutive layer slices; None if they do not end there.

        Args:
            first: The index of the first one.
            nbytes: The bytes of all of them.
        """
        if not 0 <= first < len(self._index) or not nbytes:
            return None
        return self._index.get(self.offsets[first] + nbytes)

    def cut(self, first: int, memory: Sequence[Buffer]) -> list[Sequence[Buffer]]:
        """Return the pieces of each layer slice, given as in ``BlockTransfer``."""
        end = self._index[self.offsets[first] + nbytes_of(memory)]
        if end == first + 1:
            return [memory]
        found: list[Sequence[Buffer]] = []
        views, view = iter(memory), memoryview(b"")
        for left in self.geometry.slice_sizes[first:end]:
            pieces: list[Buffer] = []
            missing = left
            while missing:
                view = view or next(views).cast("B")
                pieces.append(view[:missing])
                view, missing = view[missing:], missing - len(pieces[-1])
            found.append(pieces)
        return found

    def seal(self, memory: Sequence[Buffer]) -> list[Seal]:
        """Return what a header needs to check each of a block's layer slices, given as in ``BlockTransfer``."""
        slices = self.cut(0, memory)
        if self.authenticator is None:
            return list(map(checksum_of, slices))
        return list(zip(map(checksum_of, slices), map(self.authenticator.slice_tag, slices), strict=True))

    def encode(self, key: BlockKey, seals: Iterable[Seal]) -> bytearray:
        """Return the header of a block with these layer slices, as ``seal`` describes each of them."""
        header = self._template.copy()
        self._key.pack_into(header, _KEY_AT, len(key), key)
        end = self.nbytes - _SUM.size
        if self.authenticator is None:
            self._sums.pack_into(header, self._sums_at, *seals)
        else:
            sums, tags = zip(*seals, strict=True)
            self._sums.pack_into(header, self._sums_at, *sums)
            self._tags.pack_into(header, self._tags_at, *tags)
            tag_at = end - _TAG_BYTES
            header[tag_at:end] = self.authenticator.header_tag(memoryview(header)[:tag_at])
        _SUM.pack_into(header, end, checksum(memoryview(header)[:end]))
        return header

    def seals(self, header: bytearray) -> tuple[Seal, ...]:
        """Return what a header of this geometry has of each layer slice; meaningless for any other header."""
        sums: tuple[int, ...] = self._sums.unpack_from(header, self._sums_at)
        if self.authenticator is None:
            return sums
        return tuple(zip(sums, self._tags.unpack_from(header, self._tags_at), strict=True))

    def pack(self, whole: Sequence[Buffer | bytearray]) -> list[Buffer]:
        """Return a whole block, given in pieces, compressed in pieces; as it is if that does not make it smaller."""
        content = joined(whole)
        pieces = pack(content[self.nbytes :], self.geometry.element_size)
        if sum(piece.nbytes for piece in pieces) >= self.geometry.nbytes:
            return [content]
        header = bytearray(content[: self.nbytes])
        (version,) = _VERSION.unpack_from(header, _VERSION_AT)
        _VERSION.pack_into(header, _VERSION_AT, version + COMPRESSED)
        return [memoryview(header), *pieces]

    def unpack(self, stored: Buffer, first: int, slices: Sequence[Buffer]) -> bytearray | None:
        """Decompress layer slices of a block into memory.

        Args:
            stored: The whole file, of any length and content.
            first: The index of the first layer slice.
            slices: The memory of consecutive layer slices, as in ``BlockTransfer``; undefined if they could not be
                decompressed.

        Returns:
            The header that the block has without compression, unchecked; None if the file is not a compressed block of
            this geometry.

        Raises:
            BlockCompressedError: This process cannot decompress it.
        """
        header = bytearray(stored[: self.nbytes])
        if not self.nbytes <= stored.nbytes < self.file_nbytes or not uncompress(header):
            return None
        packed = stored[self.nbytes :]
        begin = self.offsets[first] - self.nbytes
        try:
            pour(unpack(packed, self.geometry.nbytes, begin, begin + nbytes_of(slices)), slices)
        except BlockCorruptError:  # ``refusal`` says what it is
            return None
        return header

    def is_sound(self, header: bytearray, key: BlockKey, first: int, memory: Sequence[Buffer]) -> bool:
        """Return whether layer slices are those that were stored and the header has this key and geometry.

        Args:
            header: The header.
            key: The expected key.
            first: The index of the first layer slice.
            memory: Consecutive layer slices, as in ``BlockTransfer``.
        """
        slices = self.cut(first, memory)
        end = first + len(slices)
        # Comparing the whole header with a newly encoded one checks all of its fields at once.
        same = operator.eq if self.authenticator is None else hmac.compare_digest
        if not same(header, self.encode(key, self.seals(header))):
            return False
        if self.authenticator is None or self._private:
            return tuple(map(checksum_of, slices)) == self._sums.unpack_from(header, self._sums_at)[first:end]
        tags = b"".join(map(self.authenticator.slice_tag, slices))
        at = self._tags_at
        return hmac.compare_digest(tags, header[at + first * _TAG_BYTES : at + end * _TAG_BYTES])

    def refusal(self, header: bytes | bytearray, key: BlockKey, file_nbytes: int | None = None) -> StoreError:
        """Return what is wrong with a block: its header, or else its length, or else its layer slices.

        Args:
            header: The first ``nbytes`` bytes of the block, or all if there are fewer.
            key: The expected key.
            file_nbytes: The length of the file; None: it is right.
        """
        try:
            found = decode(header[: header_nbytes(header)], self.authenticator)
            check_place(found, key, self._namespace, self.geometry)
        except (BlockCorruptError, BlockForeignError) as error:
            return error
        if found.is_compressed:
            return BlockCorruptError("the compressed layer slices are damaged")
        if file_nbytes not in {None, self.file_nbytes}:
            return BlockCorruptError(f"the file has {file_nbytes} bytes, not {self.file_nbytes}")
        what = "checksum" if self.authenticator is None or self._private else "authentication tag"
        return BlockCorruptError(f"the {what} of a layer slice is wrong")


def aligned_buffer(nbytes: int) -> Buffer:
    """Return new memory of undefined content that begins at a multiple of 64 bytes.

    The kernel's copies into memory that begins elsewhere, as a ``bytearray`` does, take up to five times as long on
    some processors.

    Raises:
        StoreError: There is no memory.
    """
    try:
        memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    except MemoryError:
        raise StoreError(f"there is no memory for {nbytes} bytes") from None
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].data


def scatter(source: Buffer, target: Sequence[Buffer]) -> None:
    """Copy consecutive bytes into several buffers."""
    at = 0
    for view in target:
        nbytes = view.nbytes
        if nbytes < LARGE_BYTES:
            view.cast("B")[:] = source[at : at + nbytes]
        else:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(source, np.uint8, nbytes, at))
        at += nbytes


def pour(source: Iterable[Buffer], target: Sequence[Buffer]) -> None:
    """Copy pieces of consecutive bytes into several buffers, which are as long together."""
    views = iter(target)
    view = memoryview(b"")
    for piece in source:
        rest = piece
        while rest:
            if not view:
                view = next(views).cast("B")
            nbytes = min(len(rest), len(view))
            scatter(rest[:nbytes], [view[:nbytes]])
            rest, view = rest[nbytes:], view[nbytes:]


def nbytes_of(pieces: Iterable[Buffer | bytearray]) -> int:
    """Return the bytes of several buffers, which may be of any type and shape."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def joined(pieces: Sequence[Buffer | bytearray]) -> Buffer:
    """Return several buffers as one; a single one is not copied."""
    if len(pieces) == 1:
        return memoryview(pieces[0])
    content = aligned_buffer(nbytes_of(pieces))
    gather(pieces, content)
    return content


def gather(source: Sequence[Buffer | bytearray], target: Buffer) -> None:
    """Copy several buffers into consecutive bytes."""
    at = 0
    for buffer in source:
        view = memoryview(buffer)
        nbytes = view.nbytes
        if nbytes < LARGE_BYTES:
            target[at : at + nbytes] = view.cast("B")
        else:
            np.copyto(np.frombuffer(target, np.uint8, nbytes, at), np.frombuffer(view, np.uint8))
        at += nbytes


def beyond(buffers: Sequence[Buffer | bytearray], skip: int) -> list[Buffer]:
    """Return what is left of buffers after ``skip`` bytes, as many as one system call accepts."""
    at = 0
    while at < len(buffers) and skip >= (nbytes := memoryview(buffers[at]).nbytes):
        at, skip = at + 1, skip - nbytes
    rest = [memoryview(buffer) for buffer in buffers[at : at + MOST_BUFFERS]]
    if skip:
        rest[0] = rest[0].cast("B")[skip:]
    return rest


def known_codec(codec: HeaderCodec | None) -> HeaderCodec:
    """Return a store's codec.

    Raises:
        ValueError: It has none, because it was opened without a geometry.
    """
    if codec is None:
        raise ValueError("the store was opened without a geometry: it only looks up")
    return codec
