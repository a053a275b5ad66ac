"""A digest depends on its block's prefix, and on nothing else."""

from __future__ import annotations

import hashlib
import math
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ucm.hashing.stand_ins import ConstantList
from ucm.hashing.request_hasher import RequestHasher, frame

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=8
)

ROOT = Path(__file__).parents[3]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SIZES = st.integers(1, 9)
HASHER = RequestHasher(b"engine")


def tagged(value: Any) -> Any:
    """The value with its types, because 1 == True == 1.0 in Python, and 0.0 == -0.0."""
    if isinstance(value, list):
        return ["list", *map(tagged, value)]
    if isinstance(value, dict):
        return {key: tagged(item) for key, item in value.items()}
    return (type(value).__name__, math.copysign(1, value) if isinstance(value, float) else 0, value)


@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    assert (frame(one) == frame(other)) == (tagged(one) == tagged(other))


@given(st.lists(st.binary()), st.lists(st.binary()))
def test_the_cuts_between_items_count(one: list[bytes], other: list[bytes]) -> None:
    assert (frame(one) == frame(other)) == (one == other)


def test_no_encoding_is_the_beginning_of_another() -> None:
    values = [None, True, 1, 12, "1", "12", b"1", [1], [1, 2], {}, {"a": 1}]
    codes = [frame(value) for value in values]
    assert [a for a in codes for b in codes if a != b and b.startswith(a)] == []


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert frame({"a": 1, "b": 2}) == frame({"b": 2, "a": 1})


def test_what_has_no_encoding() -> None:
    with pytest.raises(TypeError, match="object has no encoding"):
        frame([1, object()])


@dataclass
class Extra:
    """The content of a request's blocks besides tokens, by its first token."""

    pieces: dict[int, bytes]
    root: bytes = b""
    salt: str | None = None

    @property
    def first_block_token(self) -> int | None:
        return min(self.pieces, default=None)

    def between(self, start: int, end: int) -> bytes:
        found = [(at, piece) for at, piece in sorted(self.pieces.items()) if start <= at < end]
        return repr(found).encode() if found else b""


EXTRAS = st.builds(Extra, st.dictionaries(st.integers(0, 40), st.binary(min_size=1), max_size=3), st.binary(max_size=3))


@given(TOKENS, SIZES, EXTRAS)
def test_one_digest_for_each_whole_block(tokens: list[int], size: int, extra: Extra) -> None:
    keys = HASHER.generate_block_hashes(tokens, size, extra)
    assert [len(key) for key in keys] == [32] * (len(tokens) // size)
    assert len(set(keys)) == len(keys)


@given(TOKENS, SIZES, EXTRAS, st.data())
def test_a_digest_is_of_its_prefix_and_of_nothing_else(
    one: list[int], size: int, extra: Extra, data: st.DataObject
) -> None:
    other = one[: data.draw(st.integers(0, len(one)))] + data.draw(TOKENS)
    changed = data.draw(st.just(extra) | EXTRAS)
    ours = HASHER.generate_block_hashes(one, size, extra)
    theirs = HASHER.generate_block_hashes(other, size, changed)
    for block, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        end = (block + 1) * size
        pieces = [{at: piece for at, piece in e.pieces.items() if at < end} for e in (extra, changed)]
        same = one[:end] == other[:end] and pieces[0] == pieces[1] and extra.root == changed.root
        assert (a == b) == same
    assert [a for i, a in enumerate(ours) for j, b in enumerate(theirs) if i != j and a == b] == []


@given(TOKENS, st.data())
def test_growing_comes_to_the_same_as_at_once(tokens: list[int], data: st.DataObject) -> None:
    size, extra = data.draw(SIZES), data.draw(EXTRAS)
    grown = HASHER.start(size, extra)
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens))))):
        assert len(grown.extend(tokens[:end])) == end // size
    assert grown.extend(tokens) == HASHER.generate_block_hashes(tokens, size, extra)


@given(TOKENS, SIZES)
def test_any_kind_of_sequence_will_do(tokens: list[int], size: int) -> None:
    wanted = HASHER.generate_block_hashes(tokens, size)
    assert HASHER.generate_block_hashes(ConstantList(tokens), size) == wanted  # type: ignore[arg-type]
    assert HASHER.generate_block_hashes(tuple(tokens), size) == wanted
    for dtype in (np.int64, np.uint32, ">u4"):
        assert HASHER.generate_block_hashes(np.array(tokens, dtype=dtype), size) == wanted


@pytest.mark.parametrize("tokens", [[1, -1], [2**32], [1.5], ["1"], np.array([-1]), np.array([2**32]), np.array([1.0])])
def test_what_is_no_token_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="integer"):
        HASHER.generate_block_hashes(tokens, 1)


def test_a_block_has_tokens() -> None:
    with pytest.raises(ValueError, match="a block of 0 tokens"):
        HASHER.generate_block_hashes([1], 0)


def test_engines_of_different_seeds_and_block_sizes_share_nothing() -> None:
    tokens = list(range(64))
    kinds = [(seed, size) for seed in (b"", b"a", b"b") for size in (4, 8, 16)]
    keys = [key for seed, size in kinds for key in RequestHasher(seed).generate_block_hashes(tokens, size)]
    assert len(set(keys)) == len(keys)


#: Fixed digests, which name blocks on disk: they change only with a new FORMAT.
GOLDEN = {
    "plain": "f500000000fb9a71e62bddd8fd42504d99319c0b5f6461fe44c2ed2e7f1e5906",
    "salted": "3ff86895331834bbb9c939200229d1a27983695a9a54f55c908601f3a6724638",
    "extra": "8d000000005745a4a48c82600506c685ce588a2c9d374d88dfccf0419eb149a5",
}
SCRIPT = """
from tests.ucm.hashing.test_request_hasher import Extra
from ucm.hashing.request_hasher import RequestHasher
hasher = RequestHasher(bytes(range(32)))
tokens = [7 * i % 50_000 for i in range(40)]
for name, extra in {"plain": None, "salted": Extra({}, b"salt", "salt"), "extra": Extra({17: b"image"})}.items():
    print(name, hasher.generate_block_hashes(tokens, 16, extra)[1].hex())
"""


def test_a_digest_by_hand() -> None:
    tokens = [7 * i % 50_000 for i in range(32)]
    begin = b"l4:s20:ucm.request-hasher/2b32:" + bytes(range(32)) + b"i2:16b0:"
    digest = hashlib.sha256(begin + struct.pack("<32I", *tokens)).hexdigest()
    assert digest[:2] + "00000000" + digest[10:] == GOLDEN["plain"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_digests_stay_what_they_are(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(line.split() for line in done.stdout.splitlines()) == GOLDEN
