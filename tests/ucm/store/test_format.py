"""The file format of a block: reading accepts exactly what writing produces."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.store.base import BlockCorruptError, BlockForeignError, BlockGeometry, BlockKey
from ucm.store.format import (
    MAX_UNITS,
    UNIT,
    HeaderCodec,
    aligned_buffer,
    checksum,
    decode,
    header_nbytes,
    verify,
)
from ucm.testing.blocks import EVEN, MANY, ODD, Memory, content, key

NAMESPACE = "some/name.space-1"
KEY = key(1)
geometries = st.builds(
    BlockGeometry,
    st.lists(st.integers(1, 1 << 40), min_size=1, max_size=600).map(tuple),
    st.binary(min_size=16, max_size=16),
)
keys = st.binary(min_size=16, max_size=64).map(BlockKey)


def file_of(geometry: BlockGeometry = ODD, block: BlockKey = KEY, namespace: str = NAMESPACE) -> bytearray:
    data = content(block, geometry)
    codec = HeaderCodec(namespace, geometry)
    return codec.encode(block, codec.seal(Memory(block, geometry, data).slices)) + bytearray(data)


@settings(deadline=None)
@given(geometry=geometries, block=keys, data=st.data())
def test_a_header_is_read_as_it_was_made(geometry: BlockGeometry, block: BlockKey, data: st.DataObject) -> None:
    count = len(geometry.slice_sizes)
    sums = data.draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=count, max_size=count))
    codec = HeaderCodec(NAMESPACE, geometry)
    header = codec.encode(block, sums)
    assert len(header) % UNIT == 0
    assert len(header) == codec.nbytes == header_nbytes(header)
    found = decode(header)
    assert (found.key, found.fingerprint, found.slice_sizes) == (block, geometry.fingerprint, geometry.slice_sizes)
    assert found.checksums == tuple(sums) == codec.seals(header)
    assert found.file_nbytes == codec.file_nbytes == codec.offsets[-1]


def test_the_layout_on_disk_is_as_documented() -> None:
    """Existing files must stay readable: this test changes only together with the format's version."""
    file = bytes(file_of(BlockGeometry((3, 5), b"0123456789abcdef"), BlockKey(b"k" * 16), "n"))
    assert len(file) == 4096 + 8
    assert file[:8] == b"\x89UCMKV\r\n"
    assert file[8:24] == bytes([1, 0, 1, 0, 2, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0])
    assert file[24:40] == b"0123456789abcdef"
    assert file[40:56].hex() == "4ee3fdf7a7a38af04951408152eaad1f"
    assert file[56:128] == bytes([16]) + bytes(7) + b"k" * 16 + bytes(48)
    assert file[128:144] == bytes([3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    assert file[160:4088] == bytes(4088 - 160)


@pytest.mark.parametrize("geometry", [ODD, EVEN, MANY])
def test_a_file_is_verified_by_its_own_header(geometry: BlockGeometry) -> None:
    file = file_of(geometry)
    assert verify(memoryview(file), KEY)[0].slice_sizes == geometry.slice_sizes
    with pytest.raises(BlockForeignError, match=re.escape(KEY.hex())):
        verify(memoryview(file), key(2))


def test_every_changed_byte_of_the_header_is_noticed() -> None:
    file = file_of()
    for index in range(header_nbytes(file)):
        for change in (0x01, 0x80, 0xFF):
            file[index] ^= change
            with pytest.raises((BlockCorruptError, BlockForeignError)):
                verify(memoryview(file), KEY)
            file[index] ^= change
    verify(memoryview(file), KEY)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_changed_byte_of_the_slices_is_noticed(data: st.DataObject) -> None:
    file = file_of()
    index = data.draw(st.integers(header_nbytes(file), len(file) - 1))
    file[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BlockCorruptError, match="layer slice"):
        verify(memoryview(file), KEY)


@settings(deadline=None)
@given(nbytes=st.integers(0, 4096 + ODD.nbytes - 1))
def test_a_file_cut_short_is_noticed(nbytes: int) -> None:
    with pytest.raises(BlockCorruptError):
        verify(memoryview(file_of()[:nbytes]), KEY)


def test_a_file_that_goes_on_is_noticed() -> None:
    with pytest.raises(BlockCorruptError, match="more bytes than"):
        verify(memoryview(file_of() + b"x"), KEY)


@settings(deadline=None)
@given(junk=st.binary(max_size=3 * UNIT))
def test_junk_is_no_block(junk: bytes) -> None:
    with pytest.raises(BlockCorruptError):
        verify(memoryview(junk), KEY)


@settings(deadline=None)
@given(data=st.data())
def test_lengths_are_not_believed(data: st.DataObject) -> None:
    """Even if the header's checksum is right."""
    codec = HeaderCodec(NAMESPACE, ODD)
    header = codec.encode(KEY, [0] * len(ODD.slice_sizes))
    at, nbytes = data.draw(st.sampled_from([(10, 2), (12, 4), (16, 8), (56, 1), (128, 8)]))
    old = bytes(header[at : at + nbytes])
    new = data.draw(st.binary(min_size=nbytes, max_size=nbytes).filter(lambda value: value != old))
    header[at : at + nbytes] = new
    resealed = seal(header)
    try:
        found = decode(resealed)
    except BlockCorruptError:
        return
    # The only remaining case is another key length, with which the key does not match.
    assert at == 56
    assert found.key != KEY


def seal(header: bytearray) -> bytearray:
    """Update the checksum of a changed header."""
    header[-8:] = checksum(memoryview(header)[:-8]).to_bytes(8, "little")
    return header


def test_what_is_wrong_is_said() -> None:
    codec = HeaderCodec(NAMESPACE, ODD)
    nbytes = codec.file_nbytes
    others = {
        "another namespace": file_of(namespace="other"),
        "key is": file_of(block=key(2)),
        "fingerprint": file_of(BlockGeometry(ODD.slice_sizes, bytes(16))),
        "other sizes": file_of(BlockGeometry((1, 2), ODD.fingerprint)),
    }
    for words, file in others.items():
        refusal = codec.refusal(bytes(file[: header_nbytes(file)]), KEY, nbytes)
        assert isinstance(refusal, BlockForeignError)
        assert words in str(refusal)
    mine = bytes(file_of()[: codec.nbytes])
    for refusal in (codec.refusal(mine, KEY, nbytes), codec.refusal(mine, KEY, nbytes - 1)):
        assert isinstance(refusal, BlockCorruptError)
    newer = bytearray(mine)
    newer[8] = 5
    assert "version 5" in str(codec.refusal(bytes(newer), KEY, nbytes))


@pytest.mark.parametrize(
    "geometry",
    [
        BlockGeometry((), bytes(16)),
        BlockGeometry((1, 0), bytes(16)),
        BlockGeometry((1, -1), bytes(16)),
        BlockGeometry((1,), b"short"),
        BlockGeometry((1,) * (MAX_UNITS * UNIT // 16), bytes(16)),
    ],
)
def test_a_geometry_that_cannot_be_stored_is_refused(geometry: BlockGeometry) -> None:
    with pytest.raises(ValueError, match=r"layer slices|fingerprint"):
        HeaderCodec(NAMESPACE, geometry)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20])
def test_new_memory_is_aligned_writable_bytes(nbytes: int) -> None:
    found = [aligned_buffer(nbytes) for _ in range(8)]
    for view in found:
        assert (view.nbytes, view.format, view.readonly, view.contiguous) == (nbytes, "B", False, True)
        assert not nbytes or np.frombuffer(view, np.uint8).ctypes.data % 64 == 0
        view[:] = bytes(nbytes)
