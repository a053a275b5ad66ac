"""ReRoPE's attention on a CPU as one kernel; `ucm.sparse.compiled` compiles and runs it.

The kernel reads keys and values from vLLM's blocks, each once for all heads that share them. Keys before the
window are rotated in registers, a tile of tokens at a time, and scored; they share one running softmax with the keys
in the window. Only the parts of a long context, which threads share, have to be merged.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucm.sparse.compiled import LANES, Lanes, address_as_pointer, compile_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import HeadLayout, StepBatch
    from ucm.sparse.blocks import QueryPieces
    from ucm.sparse.compiled import Run, Threads

#: The operation that is slow without the kernel, for the log.
SLOWLY = "attention beyond the window is computed"
#: Queries of one request that share tiles of keys.
TOGETHER = 16
#: Keys of a part, for each of a smaller group's queries: independent of the number of threads, so results are, too.
PART = 512
#: The maximum number of queries in one call, which bounds its memory.
AT_ONCE = 1024
#: The maximum number of rows of scores in registers at once.
ROWS = 8
#: Less than any score, but finite, so that differences are finite, too.
LOWEST = -1e30


@dataclass(frozen=True)
class Shape:
    """The parameters for which a kernel is compiled.

    Attributes:
        layout: The cache's layout.
        turned: The number of rotated pairs per head.
        neox: Whether a pair has one number of each half (NeoX), or else two neighbours (GPT-J).
    """

    layout: HeadLayout
    turned: int
    neox: bool


@dataclass(frozen=True)
class _Tiles:
    """How a block is read as vectors; offsets are in bytes, steps in numbers.

    Attributes:
        vectors: The number of key vectors in a tile: as many as have a constant stride, up to two.
        key_behind: The offsets of these vectors from the first one.
        key_step: The stride from a token's number to the next token's, in numbers.
        key_vectors: ``[block_size / LANES]``: the offset of the first of 16 tokens.
        key_channels: ``[head_size]``: the offset of a channel relative to that.
        value_step: The stride from a channel's number to the next one's, in numbers.
        value_tokens: ``[block_size]``: the offset of a token's first number.
        value_vectors: ``[head_size / LANES]``: the offset of 16 channels relative to that.
        value_pair: The stride between two such vectors; None if it is not constant.
    """

    vectors: int
    key_behind: tuple[int, ...]
    key_step: int
    key_vectors: NDArray[np.int64]
    key_channels: NDArray[np.int64]
    value_step: int
    value_tokens: NDArray[np.int64]
    value_vectors: NDArray[np.int64]
    value_pair: int | None

    @classmethod
    def of(cls, layout: HeadLayout) -> _Tiles | None:
        """Return the tiles of a layout; None if its numbers cannot be read as vectors."""
        size = 2 if layout.half else 4
        if layout.block_size % LANES or layout.head_size % LANES:
            return None
        shape = layout.block_size, layout.head_size
        keys, values = (np.array(of, np.int64).reshape(shape) for of in (layout.keys, layout.values))
        if any((of != of[:, :1] + of[:1] - of[0, 0]).any() for of in (keys, values)):
            return None
        tokens, channels = keys[:, 0].reshape(-1, LANES), values[0].reshape(-1, LANES)
        key_step, value_step = int(tokens[0, 1] - tokens[0, 0]), int(channels[0, 1] - channels[0, 0])
        lanes = np.arange(LANES)
        if (tokens != tokens[:, :1] + key_step * lanes).any() or (
            channels != channels[:, :1] + value_step * lanes
        ).any():
            return None
        firsts = channels[:, 0] - channels[0, 0]
        apart, key_apart = (
            set((of[1::2] - of[::2]).tolist()) if len(of) % 2 == 0 else set() for of in (firsts, tokens[:, 0])
        )
        behind = (0, key_apart.pop() * size) if len(key_apart) == 1 else (0,)
        return cls(
            len(behind),
            behind,
            key_step,
            tokens[:, 0] * size,
            (keys[0] - keys[0, 0]) * size,
            value_step,
            values[:, 0] * size,
            firsts * size,
            apart.pop() * size if len(apart) == 1 else None,
        )


class Queries:
    """Queries that see keys before their window, in groups that share tiles of keys; planned once per step.

    Args:
        pieces: Such tokens of each request.
        batch: The step.

    Attributes:
        positions: ``[n]``, int64: the positions of all queries.
    """

    def __init__(self, pieces: QueryPieces, batch: StepBatch) -> None:
        starts = np.cumsum(batch.num_new_tokens) - batch.num_new_tokens - batch.num_computed_tokens
        of_pieces = list(zip(*(of.tolist() for of in (pieces.rows, pieces.begins, pieces.ends)), strict=True))
        self.positions = np.concatenate([np.arange(begin, end) for _, begin, end in of_pieces])
        self._groups = [
            (row, int(starts[row]) + first, first, min(TOGETHER, end - first))
            for row, begin, end in of_pieces
            for first in range(begin, end, TOGETHER)
        ]
        self._made: dict[int, list[Batch]] = {}

    def batches(self, block_size: int) -> list[Batch]:
        """Return the batches, one per call of the kernel."""
        if block_size not in self._made:
            cuts, tokens = [0], 0
            for number, group in enumerate(self._groups):
                tokens += group[3]
                if tokens > AT_ONCE:
                    cuts.append(number)
                    tokens = group[3]
            cuts.append(len(self._groups))
            first, made = 0, []
            for begin, end in pairwise(cuts):
                made.append(Batch.of(self._groups[begin:end], first, block_size))
                first += made[-1].count
            self._made[block_size] = made
        return self._made[block_size]


@dataclass(frozen=True, eq=False)
class Batch:
    """Groups of queries of one call; all tensors are int64.

    Attributes:
        first: The index of the first query among all of `Queries`.
        count: The number of queries.
        groups: ``[groups + 1, 5]``: the row in the step, the first query's index among the step's tokens, its position,
            its index in this call, and the first part; the last line has the end indices.
        parts: ``[parts, 4]``: the group, the first block, the block after the last, and the queries of earlier parts.
        kept: The number of queries of all parts.
    """

    first: int
    count: int
    groups: Tensor
    parts: Tensor
    kept: int

    @classmethod
    def of(cls, given: Sequence[tuple[int, int, int, int]], first: int, block_size: int) -> Batch:
        """Make a batch of groups, given as row, index, position and number of queries."""
        import torch  # noqa: PLC0415 - vLLM brings it

        groups: list[tuple[int, ...]] = []
        parts: list[tuple[int, ...]] = []
        count = kept = 0
        for number, (row, place, position, queries) in enumerate(given):
            groups.append((row, place, position, count, len(parts)))
            blocks = -(-(position + queries) // block_size)
            step = blocks if queries == TOGETHER else max(1, PART * queries // block_size)
            for begin in range(0, blocks, step):
                parts.append((number, begin, min(begin + step, blocks), kept))
                kept += queries
            count += queries
        groups.append((0, 0, 0, count, len(parts)))
        return cls(first, count, torch.tensor(groups), torch.tensor(parts), kept)


class Given(NamedTuple):
    """The arguments of a kernel: tensors, passed by address, and integers.

    Attributes:
        query: See `WindowKernel.attend`, also for ``output``, ``cache`` and ``table``.
        groups: See `Batch`, also for ``parts``.
        of_keys: See `Turning`, also for ``of_queries``.
        growth: ``[num_queries]``, float32: the factors of scores.
        queries: ``[2, num_queries, num_heads, head_size]``, float32, output: scaled queries, plain and rotated.
        sums: ``[kept, num_heads, head_size]``, float32, output: each part's sums of values.
        softmax: ``[kept, num_heads, 2]``, float32, output: each part's maximum score and sum.
        key_vectors: See `_Tiles`, also for ``key_channels``, ``value_tokens`` and ``value_vectors``.
        key_rows: ``[head_size]``, int64: the offsets of channels in a tile of rotated keys.
        query_apart: The stride of tokens in numbers, like ``output_apart``; ``table_apart`` is the stride of rows.
        num_groups: The number of groups; ``num_parts`` and ``num_queries`` likewise.
        heads: The number of KV heads.
        block: See `HeadLayout`, also for ``head``.
        window: The number of keys that a query sees at their true distances.
    """

    query: Any
    output: Any
    cache: Any
    table: Any
    groups: Any
    parts: Any
    of_keys: Any
    of_queries: Any
    growth: Any
    queries: Any
    sums: Any
    softmax: Any
    key_vectors: Any
    key_channels: Any
    key_rows: Any
    value_tokens: Any
    value_vectors: Any
    query_apart: Any
    output_apart: Any
    table_apart: Any
    num_groups: Any
    num_parts: Any
    num_queries: Any
    heads: Any
    block: Any
    head: Any
    window: Any


@dataclass(frozen=True, eq=False)
class Turning:
    """The rotation factors of queries and keys; all tensors are float32 and contiguous.

    Attributes:
        of_keys: ``[positions / LANES, pairs, 2, LANES]``: real and imaginary parts for each position; see `by_tile`.
        of_queries: ``[n, 2, pairs]``: the same for the queries beyond their windows.
        growth: ``[n]``: the factors of each query's scores, besides their scale.
    """

    of_keys: Tensor
    of_queries: Tensor
    growth: Tensor


def by_tile(factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rearrange factors ``[positions, pairs]`` for vectors; the number of positions is a multiple of `LANES`."""
    import torch  # noqa: PLC0415 - vLLM brings it

    return torch.stack([of.view(-1, LANES, of.shape[1]).transpose(1, 2) for of in factors], 2).contiguous()


class WindowKernel:
    """A kernel for a kind of layer.

    Args:
        shape: The layer's parameters.
        tiles: The reading of its blocks.
        run: The compiled function.
    """

    def __init__(self, shape: Shape, tiles: _Tiles, run: Run) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        self._shape, self._run = shape, run
        bytes_of_keys = np.arange(shape.layout.head_size, dtype=np.int64) * (4 * LANES * tiles.vectors)
        places = tiles.key_vectors, tiles.key_channels, bytes_of_keys, tiles.value_tokens, tiles.value_vectors
        self._places: Sequence[Tensor] = [torch.from_numpy(np.ascontiguousarray(of)) for of in places]

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        table: Tensor,
        output: Tensor,
        batches: Sequence[Batch],
        turning: Turning,
        scale: float,
        window: int,
    ) -> None:
        """Write the attention of the queries of some batches.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, of the cache's dtype, as vLLM has rotated it.
            kv_cache: The layer's cache, of the layout that the kernel was compiled for.
            table: ``[num_reqs, max_blocks]``, int32: the step's block table.
            output: Like ``query``; the rows of other tokens are not written.
            batches: The queries and the blocks that they read.
            turning: The rotation factors of all queries of all batches.
            scale: The scale of the layer's scores.
            window: The number of keys that a query sees at their true distances, including its own.
        """
        layout = self._shape.layout
        table = table.int()
        row = layout.num_kv_heads * layout.group
        for batch in batches:
            queries = query.new_empty((2, batch.count, row, layout.head_size), dtype=turning.growth.dtype)
            sums = queries.new_empty((batch.kept, row, layout.head_size))
            softmax = queries.new_empty((batch.kept, row, 2))
            own = slice(batch.first, batch.first + batch.count)
            key_vectors, key_channels, key_rows, value_tokens, value_vectors = self._places
            self._run(
                *Given(
                    query, output, kv_cache, table, batch.groups, batch.parts, turning.of_keys,
                    turning.of_queries[own], turning.growth[own] * scale, queries, sums, softmax,
                    key_vectors, key_channels, key_rows, value_tokens, value_vectors,
                    query.stride(0), output.stride(0), table.stride(0), len(batch.groups) - 1, len(batch.parts),
                    batch.count, layout.num_kv_heads, layout.block, layout.head, window,
                )
            )  # fmt: skip


@functools.cache
def window_kernel(shape: Shape) -> WindowKernel | None:
    """Compile the kernel for a kind of layer, which takes some seconds; return None if that is impossible."""
    tiles = _Tiles.of(shape.layout)
    if tiles is None:
        return None
    run = compile_kernel(SLOWLY, lambda numba, threads: _kernel(numba, shape, tiles, threads))
    return None if run is None else WindowKernel(shape, tiles, run)


def _kernel(  # noqa: C901, PLR0915 - functions that numba compiles cannot be handed to each other
    numba: Any, shape: Shape, tiles: _Tiles, threads: Threads
) -> Callable[[Any], None]:
    """Return the function of one thread, for numba to compile: all names in it are local or constants.

    A row is one head of a query; the rows of heads that share keys, and of a group's queries, are contiguous.
    """
    of = Lanes(half=shape.layout.half)
    load, store, whole, number, stored, keep, put = (
        *(of.load, of.store, of.whole, of.number),
        *(of.stored, of.keep, of.put),
    )
    splat, add, sub, mul, fma = of.splat, of.add, of.sub, of.mul, of.fma
    greater, greatest, total, exp2, within = of.greater, of.greatest, of.total, of.exp2, of.within
    carray, thread, count, wait = numba.carray, threads.own, threads.count, threads.wait
    at, count_given = address_as_pointer(numba), len(Given._fields)
    to_fixed_tuple: Any = importlib.import_module("numba.np.unsafe.ndarray").to_fixed_tuple
    layout, pairs = shape.layout, shape.turned
    size, head_size, group = layout.block_size, layout.head_size, layout.group
    neox, width, vectors = shape.neox, 2 if shape.layout.half else 4, tiles.vectors
    lowest, nothing, full, log2e = np.float32(LOWEST), np.float32(0), np.float32(1), np.float32(1 / math.log(2))
    tile, vector, row_bytes = LANES * vectors, 4 * LANES, 4 * head_size
    tile_bytes, factor_bytes = vector * vectors, 2 * vector * pairs
    head_vectors = head_size // LANES
    read_keys, scratch = of.reading(tiles.key_step), of.stack((head_size + ROWS) * tile_bytes)
    narrow = max(n for n in range(1, ROWS + 1) if group % n == 0)
    wide = group * (ROWS // group) if narrow == group else narrow
    behind = tuple(vector * n for n in range(vectors))
    of_values = (0,) if tiles.value_pair is None else (0, tiles.value_pair)
    values_at_once = len(of_values)
    compiled: Callable[[Any], Any] = numba.njit(fastmath=True)
    # A single query's scores: keys are used once, so they are not written anywhere.
    score_plain = of.product(narrow, row_bytes, tile_bytes, tiles.key_behind, tiles.key_step)
    score_turned = of.turned_product(
        narrow, row_bytes, tile_bytes, tiles.key_behind, tiles.key_step, apart=pairs if neox else 1
    )

    @compiled
    def turn(base: Any, places: Any, channels: Any, factors: Any, keys: Any) -> None:
        """Write a tile of rotated keys, by channel."""
        for n in range(vectors):
            begin, own, to = base + whole(places + 8 * n), factors + n * factor_bytes, keys + n * vector
            for pair in range(pairs):
                first, second = (pair, pair + pairs) if neox else (2 * pair, 2 * pair + 1)
                x, y = read_keys(begin + whole(channels + 8 * first)), read_keys(begin + whole(channels + 8 * second))
                real, imaginary = load(own + 2 * vector * pair), load(own + 2 * vector * pair + vector)
                store(to + tile_bytes * first, sub(mul(x, real), mul(y, imaginary)))
                store(to + tile_bytes * second, fma(x, imaginary, mul(y, real)))
            for channel in range(2 * pairs, head_size):
                store(to + tile_bytes * channel, read_keys(begin + whole(channels + 8 * channel)))

    @compiled
    def plain(base: Any, places: Any, channels: Any, keys: Any) -> None:
        """Write a tile of plain keys, by channel."""
        for n in range(vectors):
            begin, to = base + whole(places + 8 * n), keys + n * vector
            for channel in range(head_size):
                store(to + tile_bytes * channel, read_keys(begin + whole(channels + 8 * channel)))

    def rows_at_once(rows: int) -> Any:  # noqa: C901 - as above
        score = of.product(rows, row_bytes, tile_bytes, behind, None)
        weigh = of.product(rows, tile_bytes, row_bytes, of_values, tiles.value_step)

        @compiled
        def add_values(  # noqa: PLR0913, PLR0917 - addresses
            first: Any, scores: Any, low0: Any, moves: Any, high0: Any,
            base: Any, values_at: Any, values_behind: Any, sums: Any, softmax: Any,
        ) -> None:  # fmt: skip
            """Compute the softmax of some rows' scores of a tile, and their sums of values.

            A row's query sees lanes from ``low0`` up to ``high0`` (excluded), both shifted by the query's index.
            """
            begin, end = tile, 0
            for row in range(rows):
                query = (first + row) // group
                low, high = max(0, low0 + moves * query), min(tile, high0 + query)
                begin, end = min(begin, low), max(end, high)
                cut = low > 0 or high < tile
                own, state = scores + tile_bytes * row, softmax + 8 * row
                before = number(state)
                most_of = splat(before)
                for n in range(vectors):
                    found = load(own + vector * n)
                    if cut:
                        found = within(found, low - LANES * n, high - LANES * n, lowest)
                    most_of = greater(most_of, found)
                most = greatest(most_of)
                added = splat(nothing)
                for n in range(vectors):
                    found = exp2(sub(load(own + vector * n), splat(most)))
                    if cut:
                        found = within(found, low - LANES * n, high - LANES * n, nothing)
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
            if begin < end:
                for n in range(0, head_vectors, values_at_once):
                    values = base + whole(values_behind + 8 * n)
                    weigh(scores, values, values_at, begin, end, sums + vector * n, 0)

        return score, add_values

    (score_narrow, add_narrow), (score_wide, add_wide) = rows_at_once(narrow), rows_at_once(wide)

    @compiled
    def attend_all(  # noqa: PLR0913, PLR0917 - addresses
        rows: Any, queries: Any, keys: Any, keys_at: Any, low0: Any, moves: Any, high0: Any,
        base: Any, values_at: Any, values_behind: Any, sums: Any, softmax: Any,
    ) -> None:  # fmt: skip
        """Process all rows of a group that see any key of the tile."""
        row, scores = 0, keys + head_size * tile_bytes
        while row < rows:
            step = wide if rows - row >= wide else narrow
            if high0 + (row + step - 1) // group > 0 and low0 + moves * (row // group) < tile:
                own = queries + row_bytes * row, sums + row_bytes * row, softmax + 8 * row
                if step == wide:
                    score_wide(own[0], keys, keys_at, 0, head_size, scores, 1)
                    add_wide(row, scores, low0, moves, high0, base, values_at, values_behind, own[1], own[2])
                else:
                    score_narrow(own[0], keys, keys_at, 0, head_size, scores, 1)
                    add_narrow(row, scores, low0, moves, high0, base, values_at, values_behind, own[1], own[2])
            row += step

    @compiled
    def put_queries(given: Any, group_of: Any, begin: Any, end: Any) -> None:
        """Write queries ``begin`` to ``end``, scaled, and their rotated copies after all plain ones."""
        heads, queries = given.heads, given.queries
        far = given.num_queries * heads * group * row_bytes
        for number_of in range(given.num_groups):
            place, first, last = group_of[number_of, 1], group_of[number_of, 3], group_of[number_of + 1, 3]
            for own in range(max(first, begin), min(last, end)):
                scale = number(given.growth + 4 * own) * log2e
                real = given.of_queries + 8 * pairs * own
                for head in range(heads * group):
                    source = given.query + ((place + own - first) * given.query_apart + head * head_size) * width
                    row = (first * heads + head // group * (last - first) + own - first) * group + head % group
                    to = queries + row_bytes * row
                    for channel in range(head_size):
                        of_channel = stored(source + width * channel) * scale
                        put(to + 4 * channel, of_channel)
                        put(to + far + 4 * channel, of_channel)
                    for pair in range(pairs):
                        one, other = (pair, pair + pairs) if neox else (2 * pair, 2 * pair + 1)
                        x, y = number(to + 4 * one), number(to + 4 * other)
                        re, im = number(real + 4 * pair), number(real + 4 * (pairs + pair))
                        put(to + far + 4 * one, x * re - y * im)
                        put(to + far + 4 * other, y * re + x * im)

    @compiled
    def attend_part(given: Any, group_of: Any, part_of: Any, part: Any, head: Any) -> None:
        """Compute a group's attention over a part of its context, for the heads that share keys."""
        heads, window, width_of_table = given.heads, given.window, given.table_apart
        number_of, first_block, last_block, kept = part_of[part]
        row_of_step, _, position, first, _ = group_of[number_of]
        own = group_of[number_of + 1, 3] - first
        rows, last = own * group, position + own - 1
        near = position - window + 1  # the first key at its true distance from the first query
        near_queries = given.queries + (first * heads + head * own) * group * row_bytes
        far_queries = near_queries + given.num_queries * heads * group * row_bytes
        begin_row = (kept * heads + head * own) * group
        own_sums, own_softmax = given.sums + begin_row * row_bytes, given.softmax + begin_row * 8
        for n in range(rows * head_vectors):
            store(own_sums + vector * n, splat(nothing))
        for row in range(rows):
            put(own_softmax + 8 * row, lowest)
            put(own_softmax + 8 * row + 4, nothing)
        keys, channels = scratch(), given.key_channels
        scores = keys + head_size * tile_bytes
        of_table = carray(at(given.table), ((row_of_step + 1) * width_of_table,), np.int32)
        for place in range(first_block, last_block):
            block = np.int64(of_table[row_of_step * width_of_table + place])
            base = given.cache + (block * given.block + head * given.head) * width
            for of_block in range(size // tile):
                begin = place * size + of_block * tile
                if begin > last:
                    break
                own_places = given.key_vectors + 8 * vectors * of_block
                of_tile = base + whole(own_places)
                own_values = given.value_tokens + 8 * tile * of_block
                factors = given.of_keys + begin // LANES * factor_bytes
                if begin < near + own - 1 and rows == narrow:
                    score_turned(far_queries, of_tile, channels, factors, factor_bytes, pairs, scores)
                    score_plain(far_queries, of_tile, channels, 2 * pairs, head_size, scores, 0)
                    add_narrow(
                        0, scores, 0, 0, near - begin,
                        base, own_values, given.value_vectors, own_sums, own_softmax,
                    )  # fmt: skip
                elif begin < near + own - 1:
                    turn(base, own_places, channels, factors, keys)
                    attend_all(
                        rows, far_queries, keys, given.key_rows, 0, 0, near - begin,
                        base, own_values, given.value_vectors, own_sums, own_softmax,
                    )  # fmt: skip
                if begin + tile > near and rows == narrow:
                    score_plain(near_queries, of_tile, channels, 0, head_size, scores, 1)
                    add_narrow(
                        0, scores, near - begin, 1, position + 1 - begin,
                        base, own_values, given.value_vectors, own_sums, own_softmax,
                    )  # fmt: skip
                elif begin + tile > near:
                    plain(base, own_places, channels, keys)
                    attend_all(
                        rows, near_queries, keys, given.key_rows, near - begin, 1, position + 1 - begin,
                        base, own_values, given.value_vectors, own_sums, own_softmax,
                    )  # fmt: skip

    @compiled
    def put_together(given: Any, group_of: Any, part_of: Any, begin: Any, end: Any) -> None:
        """Merge the parts of queries ``begin`` to ``end``."""
        sums, softmax, heads = given.sums, given.softmax, given.heads
        for number_of in range(given.num_groups):
            place, first, last = group_of[number_of, 1], group_of[number_of, 3], group_of[number_of + 1, 3]
            first_part, last_part = group_of[number_of, 4], group_of[number_of + 1, 4]
            for own in range(max(first, begin), min(last, end)):
                for head in range(heads * group):
                    behind_part = head // group * (last - first) + own - first
                    most = lowest
                    for part in range(first_part, last_part):
                        row = (part_of[part, 3] * heads + behind_part) * group + head % group
                        most = max(most, number(softmax + 8 * row))
                    whole_sum = nothing
                    for part in range(first_part, last_part):
                        row = (part_of[part, 3] * heads + behind_part) * group + head % group
                        weight = greatest(exp2(splat(number(softmax + 8 * row) - most)))
                        put(softmax + 8 * row, weight)
                        whole_sum += weight * number(softmax + 8 * row + 4)
                    to = given.output + ((place + own - first) * given.output_apart + head * head_size) * width
                    for n in range(head_vectors):
                        found = splat(nothing)
                        for part in range(first_part, last_part):
                            row = (part_of[part, 3] * heads + behind_part) * group + head % group
                            weight_of = splat(number(softmax + 8 * row))
                            found = fma(load(sums + row_bytes * row + vector * n), weight_of, found)
                        keep(to + width * LANES * n, mul(found, splat(full / whole_sum)))

    def body(address: Any) -> None:
        given = Given(*to_fixed_tuple(carray(address, count_given), count_given))
        parts, queries, heads = given.num_parts, given.num_queries, given.heads
        group_of = carray(at(given.groups), (given.num_groups + 1, 5), np.int64)
        part_of = carray(at(given.parts), (parts, 4), np.int64)
        begin, end = queries * thread() // count(), queries * (thread() + 1) // count()
        put_queries(given, group_of, begin, end)
        wait()
        for n in range(parts * heads * thread() // count(), parts * heads * (thread() + 1) // count()):
            attend_part(given, group_of, part_of, n // heads, n % heads)
        wait()
        put_together(given, group_of, part_of, begin, end)

    return body
