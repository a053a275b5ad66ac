"""The kernel of ReRoPE on a CPU: as two whole matrices of scores have it, wherever a cache has its numbers."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("numba", reason="numba comes with vLLM for the CPU")

import numpy as np
import torch

from tests.ucm.sparse.steps import step
from ucm.logger import get_logger
from ucm.rotary import Rotary, turned
from ucm.sparse import compiled
from ucm.sparse.attention import HeadLayout
from ucm.sparse.rerope import BeyondWindow
from ucm.sparse.window_kernel import by_tile, window_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ucm.sparse.window_kernel import Attend

    Places = Callable[[int, int], NDArray[np.int64]]

KV_HEADS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def by_token(size: int, head: int) -> NDArray[np.int64]:
    """``[size, head]``: one token after the other."""
    return np.arange(size * head).reshape(size, head)


def by_channel(size: int, head: int) -> NDArray[np.int64]:
    """As AVX-512 wants keys."""
    return np.arange(size * head).reshape(head, size).T


def key_tiles(size: int, head: int) -> NDArray[np.int64]:
    """As AMX wants keys: 16 tokens by pairs of channels."""
    numbers = np.arange(size * head).reshape(size // 16, head // 2, 16, 2)
    return numbers.transpose(0, 2, 1, 3).reshape(size, head)


def value_tiles(size: int, head: int) -> NDArray[np.int64]:
    """As AMX wants values: 16 channels by pairs of tokens."""
    numbers = np.arange(size * head).reshape(head // 16, size // 2, 16, 2)
    return numbers.transpose(1, 3, 0, 2).reshape(size, head)


@dataclass(frozen=True)
class Kind:
    """A layer, and where its cache has its numbers."""

    dtype: torch.dtype = torch.bfloat16
    size: int = 32
    head: int = 64
    group: int = 3
    pairs: int = 32
    neox: bool = True
    keys: Places = by_channel
    values: Places = by_token
    planes: bool = False

    @property
    def layout(self) -> HeadLayout:
        many = self.size * self.head
        between = many if self.planes else 2 * many
        behind = BLOCKS * KV_HEADS * many if self.planes else many
        return HeadLayout(
            self.dtype == torch.bfloat16,
            *(self.size, KV_HEADS, self.head, self.group, KV_HEADS * between, between),
            tuple(self.keys(self.size, self.head).ravel().tolist()),
            tuple((self.values(self.size, self.head) + behind).ravel().tolist()),
            0.3,
        )

    def kernel(self) -> Attend | None:
        return window_kernel(self.layout, self.pairs, neox=self.neox)


BLOCKS = 64


class Case:
    """Rows of computed and new tokens, with random numbers in a cache whose other numbers are not any."""

    def __init__(self, kind: Kind, rows: list[tuple[int, int]], window: int, leak: float = math.inf) -> None:
        source = torch.Generator().manual_seed(len(rows) + window)
        self.kind, self.rows, self.window, self.leak = kind, rows, window, leak
        lengths = [sum(row) for row in rows]
        blocks = [-(-length // kind.size) for length in lengths]
        layout = kind.layout
        self.cache = torch.full((BLOCKS * KV_HEADS * 2 * kind.size * kind.head,), math.nan, dtype=kind.dtype)
        free = torch.randperm(BLOCKS, generator=source).tolist()
        # A part of a wider table, as vLLM gives it.
        self.table = torch.full((len(rows), max(blocks) + 3), BLOCKS + 7, dtype=torch.int32)[:, : max(blocks)]
        self.kept = []
        of_key, of_value = (np.array(of).reshape(kind.size, kind.head) for of in (layout.keys, layout.values))
        for row, length in enumerate(lengths):
            own = torch.tensor([free.pop() for _ in range(blocks[row])])
            self.table[row, : len(own)] = own
            key, value = (torch.randn((length, KV_HEADS, kind.head), generator=source).to(kind.dtype) for _ in range(2))
            places = np.arange(length)
            first = own.numpy()[places // kind.size] * layout.block
            for head in range(KV_HEADS):
                for numbers, of in ((key, of_key), (value, of_value)):
                    at = (first + head * layout.head)[:, None] + of[places % kind.size]
                    self.cache[torch.from_numpy(at)] = numbers[:, head]
            self.kept.append((key, value))
        heads = KV_HEADS * kind.group
        new = sum(count for _, count in rows)
        self.query = torch.randn((new, heads, kind.head), generator=source).to(kind.dtype)
        longest = -(-max(lengths) // kind.size) * kind.size
        frequencies = 10_000.0 ** (-torch.arange(kind.pairs) / kind.pairs)
        angles = torch.arange(longest)[:, None] * frequencies
        self.rotary = Rotary(torch.cat((angles.cos(), angles.sin()), -1).to(kind.dtype), kind.neox, frequencies)
        self.step = BeyondWindow(
            step(*[(f"{n}", computed, count, computed + count) for n, (computed, count) in enumerate(rows)]), window
        )
        positions = torch.from_numpy(self.step.positions)
        everywhere = torch.arange(longest)
        self.of_keys = self.rotary.factors(everywhere, everywhere.float() / leak)
        self.of_queries = self.rotary.factors(positions, self.far_from(positions))
        self.growth = (1 + positions / 1000)[:, None, None]
        self.parts = self.step.parts(kind.size)

    def far_from(self, positions: torch.Tensor) -> torch.Tensor:
        """Where queries see far keys from."""
        return self.window + (positions.float() - self.window) / self.leak

    def run(self) -> torch.Tensor:
        kernel = self.kind.kernel()
        assert kernel is not None
        output = torch.full(self.query.shape, 7.0, dtype=self.kind.dtype)
        places = torch.from_numpy(self.step.places)
        near = self.query[places].float() * self.growth
        far = turned(near, self.of_queries, neox=self.kind.neox)
        of_keys = by_tile(self.of_keys)
        output[places] = kernel(near, far, self.cache, self.table, self.parts, of_keys, 0.3, self.window).to(output)
        return output

    def wanted(self) -> torch.Tensor:
        """In double precision; 7 where a token has no key before its window."""
        found = []
        counts = [count for _, count in self.rows]
        for (computed, count), (key, value), query in zip(self.rows, self.kept, self.query.split(counts), strict=True):
            own, other = torch.arange(computed, computed + count), torch.arange(computed + count)
            neox = self.kind.neox
            far_key = turned(key.float(), (self.of_keys[0][other], self.of_keys[1][other]), neox=neox)
            far_query = turned(query.float(), self.rotary.factors(own, self.far_from(own)), neox=neox)
            near, far = (
                torch.einsum("qhd,khd->hqk", of.double(), by.double().repeat_interleave(self.kind.group, 1))
                for of, by in ((query, key), (far_query, far_key))
            )
            distance = own[:, None] - other
            scores = torch.where(distance < self.window, near, far) * 0.3 * (1 + own / 1000)[:, None]
            weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
            output = torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(self.kind.group, 1))
            output[own < self.window] = 7.0
            found.append(output)
        return torch.cat(found)

    def check(self) -> None:
        exact = TOLERANCE[self.kind.dtype]
        torch.testing.assert_close(self.run().double(), self.wanted(), rtol=exact, atol=exact)


ROWS = [(300, 1), (90, 41), (0, 20), (150, 1), (120, 4)]


@pytest.mark.parametrize(
    "kind",
    [
        Kind(),
        Kind(torch.float32, size=16, head=80, group=1, pairs=20, neox=False),
        Kind(size=128, head=128, group=4, pairs=64, planes=True),
        Kind(torch.float32, size=48, head=64, group=7, pairs=16),
        Kind(size=16, head=256, group=16, pairs=128, neox=False),
        Kind(size=32, head=96, group=11, pairs=48, keys=key_tiles, values=value_tiles),
        Kind(size=64, head=64, group=2, pairs=32, neox=False, keys=key_tiles, values=value_tiles),
        Kind(torch.float32, keys=by_token, values=by_channel),
    ],
)
def test_every_kind_of_layer(kind: Kind) -> None:
    Case(kind, ROWS, 100).check()


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 123, 299, 300])
def test_every_window(window: int) -> None:
    Case(Kind(), ROWS, window, leak=math.inf if window % 2 else 3.5).check()


@pytest.mark.parametrize("rows", [[(40, 1)], [(41, 1), (40, 1), (39, 1)], [(1500, 1), (40, 17)], [(0, 57)]])
def test_contexts_that_begin_and_end_anywhere(rows: list[tuple[int, int]]) -> None:
    Case(Kind(), rows, 40).check()


def test_a_request_s_numbers_do_not_depend_on_others_or_on_threads() -> None:
    case = Case(Kind(), [(1500, 1), (30, 20)], 40)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(case.run())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(of, found[0]) for of in found)
    alone = Case(Kind(), [(1500, 1)], 40)
    alone.cache, alone.table, alone.query = case.cache, case.table[:1], case.query[:1]
    assert torch.equal(alone.run()[0], found[0][0])


@pytest.mark.parametrize(
    "kind",
    [
        Kind(size=24),
        Kind(head=40, pairs=20),
        Kind(keys=lambda size, head: np.random.default_rng(0).permutation(size * head).reshape(size, head)),
    ],
)
def test_what_vectors_cannot_be_read_of_has_no_kernel(kind: Kind) -> None:
    assert kind.kernel() is None


def test_without_numba_there_is_no_kernel_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(get_logger(), "propagate", True)
    assert compiled.compile_kernel("this is done", lambda *_: lambda _: None) is None
    assert "this is done slowly, without numba" in caplog.text
