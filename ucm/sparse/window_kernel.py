"""ReRoPE's attention of single queries on a CPU as one kernel; `ucm.sparse.compiled` compiles and runs it.

The kernel reads keys and values from vLLM's blocks, a tile of tokens at a time, each once for all heads that share
them, and unpacks them to float32; keys before the window are rotated then. They share one running softmax with the keys
in the window. torch merges the parts of a long context, which threads share.

Each query reads its keys for itself. Chunks of prompts have many queries: `ucm.sparse.rerope` computes them with torch,
which was as fast as a kernel that shared tiles of rotated keys among queries.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucm.sparse.compiled import LANES, Lanes, compile_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import HeadLayout

    Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor]

#: The operation that is slow without the kernel, for the log.
SLOWLY = "attention beyond the window is computed"
#: Keys of a part: independent of the number of threads, so results are, too.
PART = 512
#: The maximum number of rows of scores in registers at once.
ROWS = 8
#: Less than any score, but finite, so that differences are finite, too.
LOWEST = -1e30


class _Plane(NamedTuple):
    """How a block's keys or values of a head are read as vectors: keys of a channel, values of a token.

    Attributes:
        step: The stride within a vector, in numbers.
        vectors: ``[numbers in a row / LANES]``, int64: the offset of each vector in a row, in bytes.
        rows: ``[rows]``, int64: the offset of each row from the first one, in bytes.
    """

    step: int
    vectors: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, places: NDArray[np.int64], number: int) -> _Plane | None:
        """Return the vectors of ``[rows, numbers]`` places of numbers of so many bytes; None if there are none."""
        if places.shape[1] % LANES or (places != places[:, :1] + places[:1] - places[0, 0]).any():
            return None
        row = places[0].reshape(-1, LANES)
        step = int(row[0, 1] - row[0, 0])
        if (row != row[:, :1] + step * np.arange(LANES)).any():
            return None
        return cls(step, number * row[:, 0], number * (places[:, 0] - places[0, 0]))


def parts_of(rows: NDArray[np.int64], positions: NDArray[np.int64], block_size: int) -> Tensor:
    """Divide the contexts of queries that see keys before their window.

    Args:
        rows: ``[n]``: the row of each query in the step.
        positions: ``[n]``: its position.
        block_size: Tokens per block.

    Returns:
        ``[parts, 5]``, int64: the query, its row and its position, the first block, and the block after the last.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    step, blocks = max(1, PART // block_size), positions // block_size + 1
    counts = -(-blocks // step)
    owners = np.arange(len(rows)).repeat(counts)
    begins = (np.arange(len(owners)) - (counts.cumsum() - counts)[owners]) * step
    ends = np.minimum(begins + step, blocks[owners])
    return torch.from_numpy(np.stack((owners, rows[owners], positions[owners], begins, ends), 1))


class Given(NamedTuple):
    """The arguments of a kernel: tensors, passed by address, and integers.

    Attributes:
        cache: See `window_kernel`, also for ``of_keys`` and ``window``.
        table: The block table, int64.
        parts: See `parts_of`.
        queries: ``[2, num_queries, num_heads, head_size]``, float32: scaled queries, plain and rotated.
        sums: ``[parts, num_heads, head_size]``, float32, output: each part's sums of values.
        softmax: ``[parts, num_heads, 2]``, float32, output: each part's maximum score and sum.
        table_apart: The stride of the table's rows in numbers.
    """

    cache: Any
    table: Any
    parts: Any
    of_keys: Any
    queries: Any
    sums: Any
    softmax: Any
    table_apart: Any
    num_parts: Any
    num_queries: Any
    window: Any


def by_tile(factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rearrange factors ``[positions, pairs]`` for vectors: ``[positions / LANES, pairs, 2, LANES]``, contiguous."""
    import torch  # noqa: PLC0415 - vLLM brings it

    return torch.stack([of.view(-1, LANES, of.shape[1]).transpose(1, 2) for of in factors], 2).contiguous()


@functools.cache
def window_kernel(layout: HeadLayout, pairs: int, *, neox: bool) -> Attend | None:
    """Compile the kernel for a kind of layer, which takes some seconds.

    Args:
        layout: The cache's layout.
        pairs: The number of rotated pairs per head.
        neox: Whether a pair has one number of each half (NeoX), or else two neighbours (GPT-J).

    Returns:
        ``attend(near, far, kv_cache, table, queries, of_keys, scale, window)``, or None if that is impossible. It
        returns the attention of some queries, ``[n, num_heads, head_size]``, float32; its arguments are:

        - ``near``: ``[n, num_heads, head_size]``, float32: the queries, as vLLM has rotated them
        - ``far``: the same as they see keys beyond their windows
        - ``kv_cache``: the layer's cache
        - ``table``: ``[num_reqs, max_blocks]``, int32: the step's block table
        - ``parts``: the parts of their contexts; see `parts_of`
        - ``of_keys``: the rotation factors of keys; see `by_tile`
        - ``scale``: the scale of the layer's scores
        - ``window``: the number of keys that a query sees at their true distances, including its own
    """
    shape, width = (layout.block_size, layout.head_size), 2 if layout.half else 4
    keys, values = (np.array(of, np.int64).reshape(shape) for of in (layout.keys, layout.values))
    of_keys, of_values = _Plane.of(keys.T, width), _Plane.of(values, width)
    if of_keys is None or of_values is None:
        return None
    about = layout, pairs, neox, (of_keys, of_values)
    run = compile_kernel(SLOWLY, lambda numba, own, count: _kernel(numba, own, count, *about))
    if run is None:
        return None
    import torch  # noqa: PLC0415 - vLLM brings it

    def attend(
        near: Tensor, far: Tensor, kv_cache: Tensor, table: Tensor,
        parts: Tensor, of_keys: Tensor, scale: float, window: int,
    ) -> Tensor:  # fmt: skip
        table, owners = table.long(), parts[:, 0]
        both = torch.stack((near, far)) * (scale / math.log(2))
        count, heads, head_size = near.shape
        sums = near.new_empty((len(parts), heads, head_size))
        softmax = near.new_empty((len(parts), heads, 2))
        numbers = table.stride(0), len(parts), count, window
        run(*Given(kv_cache, table, parts, of_keys, both, sums, softmax, *numbers))
        most, weights = softmax.unbind(-1)
        highest = most.new_full((count, heads), LOWEST)
        highest = highest.scatter_reduce(0, owners[:, None].expand_as(most), most, "amax")
        shares = (most - highest[owners]).exp2()[..., None]
        whole = most.new_zeros((count, heads, 1)).index_add(0, owners, shares * weights[..., None])
        return near.new_zeros(near.shape).index_add(0, owners, shares * sums) / whole

    return attend


def _kernel(  # noqa: C901, PLR0915 - functions that numba compiles cannot be handed to each other
    numba: Any, thread: Any, count: Any, layout: HeadLayout, pairs: int, neox: bool, planes: tuple[_Plane, _Plane]
) -> Callable[[Any], None]:
    """Return the function of one thread, for numba to compile: all names in it are local or constants.

    A row is one head of a query; the rows of heads that share keys are contiguous.
    """
    of = Lanes(half=layout.half)
    load, store, whole, number, put = of.load, of.store, of.whole, of.number, of.put
    splat, add, sub, mul, fma = of.splat, of.add, of.sub, of.mul, of.fma
    greater, greatest, total, exp2 = of.greater, of.greatest, of.total, of.exp2
    carray, count_given, heads = numba.carray, len(Given._fields), layout.num_kv_heads
    (key_step, key_vectors, key_channels), (value_step, value_vectors, value_tokens) = planes
    to_fixed_tuple: Any = importlib.import_module("numba.np.unsafe.ndarray").to_fixed_tuple
    size, head_size, group = layout.block_size, layout.head_size, layout.group
    width, vectors = 2 if layout.half else 4, 2 - layout.block_size // LANES % 2
    block_apart, head_apart = layout.block, layout.head
    lowest, nothing, full = np.float32(LOWEST), np.float32(0), np.float32(1)
    tile, vector, row_bytes, head_vectors = LANES * vectors, 4 * LANES, 4 * head_size, head_size // LANES
    tile_bytes, factor_bytes, values_at_once = vector * vectors, 2 * vector * pairs, 2 - head_vectors % 2
    rows = max(n for n in range(1, ROWS + 1) if group % n == 0)
    #: A tile's keys ``[head_size, tile]`` and values ``[tile, head_size]``, and scores ``[rows, tile]``, all float32.
    key_scratch, value_scratch, score_scratch = (
        of.stack(size=tile_bytes * head_size),
        of.stack(tile * row_bytes),
        of.stack(rows * tile_bytes),
    )
    read_key, read_value = of.reading(key_step), of.reading(value_step)
    compiled: Callable[[Any], Any] = numba.njit(fastmath=True)
    score = of.product(rows, row_bytes, tile_bytes, tile_bytes, vectors, fresh=True)
    weigh = of.product(rows, tile_bytes, row_bytes, row_bytes, values_at_once, fresh=False)

    @compiled
    def put_keys(given: Any, base: Any, first: Any, begin: Any, turned_pairs: Any, to: Any) -> None:
        """Write the keys of a tile from a vector of the block on; the first pairs of channels are rotated."""
        for n in range(vectors):
            source, own = base + key_vectors[first + n], to + vector * n
            factors = given.of_keys + (begin // LANES + n) * factor_bytes
            for pair in range(turned_pairs):
                one, other = (pair, pair + pairs) if neox else (2 * pair, 2 * pair + 1)
                x = read_key(source + key_channels[one])
                y = read_key(source + key_channels[other])
                re, im = load(factors + 2 * vector * pair), load(factors + 2 * vector * pair + vector)
                store(own + tile_bytes * one, sub(mul(x, re), mul(y, im)))
                store(own + tile_bytes * other, fma(y, re, mul(x, im)))
            for channel in range(2 * turned_pairs, head_size):
                store(own + tile_bytes * channel, read_key(source + key_channels[channel]))

    @compiled
    def put_values(base: Any, first: Any, count: Any, to: Any) -> None:
        """Write the values of so many of a tile's tokens, from a token of the block on."""
        for token in range(count):
            source = base + value_tokens[first + token]
            for n in range(head_vectors):
                store(to + row_bytes * token + vector * n, read_value(source + value_vectors[n]))

    @compiled
    def add_rows(
        queries: Any, keys: Any, values: Any, low: Any, high: Any, scores: Any, sums: Any, softmax: Any
    ) -> None:
        """Add the attention of some rows over the lanes ``low`` to ``high`` of a tile to their sums of values."""
        score(queries, keys, 0, head_size, scores)
        for row in range(rows):
            own, state = scores + tile_bytes * row, softmax + 8 * row
            for lane in range(low):
                put(own + 4 * lane, lowest)
            for lane in range(high, tile):
                put(own + 4 * lane, lowest)
            before = number(state)
            most_of = splat(before)
            for n in range(vectors):
                most_of = greater(most_of, load(own + vector * n))
            most = greatest(most_of)
            added = splat(nothing)
            for n in range(vectors):
                found = exp2(sub(load(own + vector * n), splat(most)))
                store(own + vector * n, found)
                added = add(added, found)
            kept = full
            if most > before:
                change = exp2(splat(before - most))
                kept = greatest(change)
                put(state, most)
                for n in range(head_vectors):
                    to = sums + row_bytes * row + vector * n
                    store(to, mul(load(to), change))
            put(state + 4, number(state + 4) * kept + total(added))
        for n in range(0, head_vectors, values_at_once):
            weigh(scores, values + vector * n, low, high, sums + vector * n)

    @compiled
    def attend_part(given: Any, part: Any, head: Any) -> None:
        """Compute a query's attention over a part of its context, for the heads that share keys."""
        at = given.parts + 40 * part
        own, last, first_block, last_block = whole(at), whole(at + 16), whole(at + 24), whole(at + 32)
        near = last - given.window + 1  # the first key at its true distance
        near_queries = given.queries + (own * heads + head) * group * row_bytes
        begin_row = (part * heads + head) * group
        own_sums, own_softmax = given.sums + begin_row * row_bytes, given.softmax + begin_row * 8
        for n in range(group * head_vectors):
            store(own_sums + vector * n, splat(nothing))
        for row in range(group):
            put(own_softmax + 8 * row, lowest)
            put(own_softmax + 8 * row + 4, nothing)
        keys, values, scores = key_scratch(), value_scratch(), score_scratch()
        table = given.table + 8 * given.table_apart * whole(at + 8)
        for place in range(first_block, last_block):
            base = given.cache + (whole(table + 8 * place) * block_apart + head * head_apart) * width
            for of_block in range(size // tile):
                begin = place * size + of_block * tile
                if begin > last:
                    break
                put_values(base, tile * of_block, min(tile, last + 1 - begin), values)
                for far in range(2):
                    low, high = (0, near - begin) if far else (near - begin, last + 1 - begin)
                    low, high = max(0, low), min(tile, high)
                    if low < high:
                        put_keys(given, base, vectors * of_block, begin, pairs * far, keys)
                        queries = near_queries + far * given.num_queries * heads * group * row_bytes
                        for row in range(0, group, rows):
                            to = own_sums + row_bytes * row
                            add_rows(
                                queries + row_bytes * row, keys, values, low, high, scores, to, own_softmax + 8 * row
                            )

    def body(address: Any) -> None:
        given = Given(*to_fixed_tuple(carray(address, count_given), count_given))
        parts = given.num_parts * heads
        for n in range(parts * thread() // count(), parts * (thread() + 1) // count()):
            attend_part(given, n // heads, n % heads)

    return body
