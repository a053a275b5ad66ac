"""Compress stored blocks without loss.

Most bytes of a key or a value are as good as random, but those with its sign and exponent take few values. So what
follows a block's header is cut into *frames* of 256 KiB, and each frame into *planes*: the first bytes of all
elements, then the second bytes and so on, as Blosc's shuffle does. Each plane is compressed by Zstandard, or kept as
it is if that saves next to nothing. Almost all that is saved is entropy coding: there are hardly any repetitions to
find, and looking for few of them takes half the time of level 1 and leaves slightly fewer bytes.

A compressed block begins with its header, of which only the format version differs. All integers are little endian::

    bytes  what
        …  header
        4  bytes of an element, the number of planes of each frame
      4*n  stored bytes of each plane, frame by frame; as many as the plane has: it is not compressed
        …  the planes back to back

Whoever reads it checks the header and the checksums, or tags, of what was decompressed. Nothing in it is trusted
before: the reader says how long the block must be, and a plane of another length is refused before it is decompressed.
"""

from __future__ import annotations

import struct
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ucm.errors import ConfigError, install_extra
from ucm.store.base import BlockCompressedError, BlockCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store.base import Buffer

#: The option of tiers that can compress.
Compression: TypeAlias = Literal["none", "lossless"]
#: The bytes of a frame; every frame but the last one has so many.
FRAME = 256 << 10
#: The sizes of elements that are cut into planes.
ELEMENTS = (1, 2, 4, 8)

_ELEMENT = struct.Struct("<I")
_LEVEL = 1
#: Zstandard looks for repetitions of at least so many bytes, in a table of 2 to the power of so many places.
_MIN_MATCH, _HASH_LOG = 7, 6
#: A plane that does not lose one byte in so many is kept as it is, which makes it faster to read.
_WORTH = 64
_EXTRA = "compression"


def check_installed(where: str) -> None:
    """Check that Zstandard is installed.

    Args:
        where: The setting that needs it.

    Raises:
        ConfigError: It is not.
    """
    try:
        _zstandard()
    except BlockCompressedError as error:
        raise ConfigError(f"compression needs zstandard: {error.__cause__}", where=where, fix=error.fix) from error


def pack(body: Buffer, element_size: int) -> list[Buffer]:
    """Compress the layer slices of a block.

    Args:
        body: All of them, back to back.
        element_size: The bytes of an element, one of ``ELEMENTS``; 1 if they are not known.

    Returns:
        What a compressed block has after its header, in pieces, some of which are in a copy of ``body``.
    """
    taken = np.frombuffer(body, np.uint8)
    element = element_size if len(taken) % element_size == 0 else 1
    compress = _zstandard().compress
    planes: list[Buffer] = []
    for begin in range(0, len(taken), FRAME):
        for plane in np.ascontiguousarray(taken[begin : begin + FRAME].reshape(-1, element).T):
            small = compress(plane)
            planes.append(memoryview(small) if len(small) < len(plane) - len(plane) // _WORTH else plane.data)
    sizes = np.array([plane.nbytes for plane in planes], "<u4")
    return [memoryview(_ELEMENT.pack(element) + sizes.tobytes()), *planes]


def unpack(packed: Buffer, nbytes: int, begin: int = 0, end: int | None = None) -> Iterator[Buffer]:
    """Decompress layer slices of a block, one frame after the other, as the result is iterated over.

    Args:
        packed: What a compressed block has after its header.
        nbytes: The bytes that all layer slices must have.
        begin: The offset of the first byte wanted, in the layer slices.
        end: The offset behind the last one; None: all.

    Returns:
        The wanted bytes, in pieces of at most ``FRAME``.

    Raises:
        BlockCorruptError: The bytes are not a compressed block of this length; so may the iterator.
        BlockCompressedError: Zstandard is not installed; only the iterator.
    """
    element = _ELEMENT.unpack_from(packed)[0] if packed.nbytes >= _ELEMENT.size else 0
    if element not in ELEMENTS or not nbytes or nbytes % element:
        raise _damaged(f"it claims elements of {element} bytes, of {nbytes} in all")
    table = _ELEMENT.size + 4 * element * -(-nbytes // FRAME)
    if packed.nbytes < table:
        raise _damaged("it ends within its table")
    sizes = np.frombuffer(packed[_ELEMENT.size : table], "<u4").astype(np.int64)
    ends = table + np.cumsum(sizes)
    if packed.nbytes != int(ends[-1]):
        raise _damaged("its planes have another length than its table says")

    def frame(number: int) -> Buffer:
        at, planes = number * FRAME, []
        length = min(FRAME, nbytes - at) // element
        for plane in range(number * element, (number + 1) * element):
            size, last = int(sizes[plane]), int(ends[plane])
            if size > length:
                raise _damaged("a plane is longer than it can be")
            planes.append(_plane(packed[last - size : last], length))
        return _joined(planes)[max(0, begin - at) : stop - at]

    stop = nbytes if end is None else end
    return map(frame, range(begin // FRAME, -(-stop // FRAME)))


def _plane(stored: Buffer, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a plane of a frame."""
    if stored.nbytes == length:
        return np.frombuffer(stored, np.uint8)
    zstandard = _zstandard()
    try:
        # The length is in front of the compressed bytes, and decides how much memory is allocated for them.
        if zstandard.length(stored) != length:
            raise _damaged("a plane has another length than its frame says")
        return np.frombuffer(zstandard.decompress(stored), np.uint8)
    except zstandard.error as error:
        raise _damaged(f"a plane cannot be decompressed: {error}") from None


def _joined(planes: list[np.ndarray[Any, np.dtype[np.uint8]]]) -> Buffer:
    """Return the elements whose first, second, … bytes are given."""
    if len(planes) == 1:
        return planes[0].data
    # Arithmetic on whole elements is several times as fast as copying every second or fourth byte.
    elements = planes[-1].astype(f"<u{len(planes)}")
    for plane in reversed(planes[:-1]):
        elements <<= 8
        elements |= plane
    return elements.data.cast("B")


def _damaged(what: str) -> BlockCorruptError:
    return BlockCorruptError(f"the compressed block is damaged: {what}")


class _Zstandard(threading.local):
    """Each thread's compressor and decompressor, neither of which two threads can use at once."""

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415 - only where blocks are compressed

        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, source_size=FRAME, min_match=_MIN_MATCH, hash_log=_HASH_LOG, write_content_size=True
        )
        self.error: type[Exception] = zstandard.ZstdError
        self.length: Callable[[Any], int] = zstandard.frame_content_size
        self.compress: Callable[[Any], bytes] = zstandard.ZstdCompressor(compression_params=parameters).compress
        self._decompressor = zstandard.ZstdDecompressor()

    def decompress(self, stored: Buffer) -> bytes:
        """Return the bytes of a plane; the caller has checked their number."""
        found: bytes = self._decompressor.decompress(stored, allow_extra_data=False)
        return found


@cache
def _zstandard() -> _Zstandard:
    try:
        return _Zstandard()
    except ImportError as error:
        raise BlockCompressedError(
            f"the block is compressed, and this engine cannot decompress it: {error}",
            fix=f"install it: {install_extra(_EXTRA)}",
        ) from error
