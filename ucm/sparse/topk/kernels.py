"""The Triton kernel of block top-k: it scores blocks on a GPU, as `ucm.sparse.topk.codes` scores them with torch.

It reads codes in place, where torch's operations unpack them, to 32 times their size. All else is torch's on every
device.
"""

# Arguments of kernels have no types and are given by place; compile-time constants are upper case. An argument is
# documented once: ``_P`` is the next power of two of a constant.
# ruff: noqa: ANN001, ANN201, D417, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ucm.sparse.topk.codes import TOP

if TYPE_CHECKING:
    from torch import Tensor

#: The blocks of a row that one program scores.
CHUNK = tl.constexpr(256)
_TOP = tl.constexpr(float(TOP))
#: Adding and subtracting it rounds a small float32 to the nearest integer, halves to even, as torch does.
_ROUNDER = tl.constexpr(12582912.0)


def constants(group: int, head: int, words: int, size: int) -> dict[str, int]:
    """Return the compile-time constants of `score_codes`, and Triton's options."""
    tile = {"SIZE": size, "TILE": max(1, 128 // size), "num_warps": 8}
    sizes = {"GROUP": group, "HEAD": head, "WORDS": words, **tile}
    least = 16  # the least side of a tensor core's matrix
    padded = {"GROUP_P": max(least, triton.next_power_of_2(group)), "HEAD_P": max(least, triton.next_power_of_2(head))}
    return {**sizes, **padded, "WORDS_P": triton.next_power_of_2(words)}


def scores(codes: Tensor, scales: Tensor, means: Tensor, query: Tensor, turned: Tensor, block_ids: Tensor) -> Tensor:
    """Score blocks on a GPU, see `ucm.sparse.topk.codes.cpu_kernel`; the size of a block is a power of two."""
    heads, num_blocks, words, size = codes.shape
    _, rows, group, head = query.shape
    blocks = block_ids.shape[1]
    found = query.new_empty((heads, rows, group, blocks))
    score_codes[rows, heads, -(-blocks // CHUNK.value)](
        *(codes, scales, means, query, turned, block_ids.contiguous(), found, num_blocks, blocks),
        **constants(group, head, words, size),
    )
    return found


@triton.jit(do_not_specialize=("num_blocks", "blocks"))
def score_codes(
    codes, scales, means, query, turned, block_ids, found, num_blocks, blocks,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    WORDS: tl.constexpr, WORDS_P: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score a chunk of a row's blocks for the heads of a KV head; see `scores`, also for ``found``.

    Args:
        num_blocks: The blocks of the cache; ``blocks`` likewise of a row.
        GROUP: The query heads of a KV head.
        HEAD: The head size.
        WORDS: The words of a code.
        SIZE: The tokens of a block.
        TILE: The blocks that are scored at once.
    """
    row, kv_head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels, heads, bits = tl.arange(0, HEAD_P), tl.arange(0, GROUP_P), tl.arange(0, WORDS_P * 64)
    inside, first = channels < HEAD, (kv_head * tl.num_programs(0) + row) * GROUP
    rotated = tl.load(
        turned + (first + heads)[:, None] * (WORDS * 64) + bits[None, :],
        mask=(heads < GROUP)[:, None] & (bits < WORDS * 64)[None, :],
        other=0.0,
    )
    steps = tl.maximum(tl.max(tl.abs(rotated), 1), 1e-20) / _TOP
    levels = (rotated / steps[:, None] + _TOP) / 2
    levels = (levels + _ROUNDER) - _ROUNDER
    levels = tl.minimum(tl.maximum(levels, 0.0), _TOP) * 2 - _TOP
    levels = tl.where((bits < WORDS * 64)[None, :], levels, 0.0).to(tl.float16)
    words, shifts, tokens = tl.arange(0, WORDS_P), tl.arange(0, 64), tl.arange(0, TILE * SIZE)
    of_head, of_row = kv_head * num_blocks, block_ids + row * blocks
    for begin in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, blocks), TILE):
        places, spread = begin + tl.arange(0, TILE), begin + tokens // SIZE
        there = places < blocks
        ids = tl.load(of_row + places, mask=there, other=0)
        its = tl.load(of_row + spread, mask=spread < blocks, other=0)
        code = tl.load(
            codes + ((of_head + its)[:, None] * WORDS + words[None, :]) * SIZE + (tokens % SIZE)[:, None],
            mask=(spread < blocks)[:, None] & (words < WORDS)[None, :],
            other=0,
        )
        signs = tl.reshape((code[:, :, None] >> shifts[None, None, :].to(tl.int64)) & 1, (TILE * SIZE, WORDS_P * 64))
        signs = (signs * 2 - 1).to(tl.float16)
        # Exact: integers of at most 15 times the number of bits.
        products = tl.dot(levels, tl.trans(signs), out_dtype=tl.float32)
        factors = tl.load(scales + (of_head + its) * SIZE + tokens % SIZE, mask=spread < blocks, other=0.0)
        estimated = products * steps[:, None] * factors.to(tl.float32)[None, :]
        estimated = tl.reshape(estimated, (GROUP_P, TILE, SIZE))
        highest = tl.max(estimated, 2)
        summed = tl.log(tl.sum(tl.exp(estimated - highest[:, :, None]), 2)) + highest
        mean = tl.load(
            means + (of_head + ids)[:, None] * HEAD + channels[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        for one in tl.static_range(GROUP):
            own = tl.load(query + (first + one) * HEAD + channels, mask=inside, other=0.0)
            of_mean = tl.sum(own[None, :] * mean, 1)
            summed += tl.where((heads == one)[:, None], of_mean[None, :], 0.0)
        at = found + (first + heads)[:, None] * blocks + places[None, :]
        tl.store(at, summed, mask=(heads < GROUP)[:, None] & there[None, :])
