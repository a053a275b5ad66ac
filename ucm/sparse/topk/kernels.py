"""Triton kernels of block top-k: one makes codes of blocks, one scores blocks, one writes block tables.

They compute what `KeyCodes.put`, `KeyCodes.shares` and `RestrictedTables.choose` compute with torch: sums have another
order, and from given shares exactly the same is chosen. They do it without reading anything back to the host, and
without a launch per request or per block.

The plan of a step is one int32 tensor ``[4, rows]`` with a column for each row of the step, dense rows included:
the number of blocks that the row has, and that it reads (the same for a dense row); the index of its query among the
step's tokens; and the index of its first candidate among those of all rows.
"""

# Arguments of kernels have no types and are given by place; compile-time constants are upper case. An argument is
# documented once: ``_P`` is the next power of two of a constant.
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ucm.sparse.topk.codes import TOP
from ucm.sparse.topk.ranking import WHOLE

#: Arguments that change from step to step. Triton would compile a kernel again where one becomes 1 or divisible by 16.
CHANGING = ("rows", "sinks", "recent", "num_blocks", "candidates")
#: The channels of a query that are rotated at once.
SLICE = tl.constexpr(32)
#: The tokens whose codes one program makes: the least side of a matrix for the tensor cores.
TOKENS = tl.constexpr(16)
#: The candidates of a row that one program scores.
CHUNK = tl.constexpr(256)
#: The candidates that one step of the choice looks at.
SPAN = tl.constexpr(1024)
#: Shares are below ``2 ** (DIGITS * 8)``: `WHOLE` times the largest number of heads, 512, has 42 bits.
DIGITS = tl.constexpr(6)
BASE = tl.constexpr(256)
_WHOLE = tl.constexpr(float(WHOLE))
_TOP = tl.constexpr(float(TOP))
#: Adding and subtracting it rounds a small float32 to the nearest integer, halves to even, as torch does.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit(do_not_specialize=("num_blocks",))
def make_codes(
    keys, block_ids, codes, scales, means, turn, num_blocks, of_block, of_token, of_head, of_channel,
    SIZE: tl.constexpr, SIZE_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    WORDS: tl.constexpr, WORDS_P: tl.constexpr,
):  # fmt: skip
    """Write codes and their scales for some tokens of one KV head of one block, and the first of these its mean key.

    Args:
        keys: ``[num_blocks, block_size, num_kv_heads, head_size]``, of any floating dtype.
        block_ids: ``[blocks to make]``, int64.
        codes: See `score_codes`, also for ``turn`` and the constants; output, like ``scales`` and ``means``.
        of_block: The stride of a block of ``keys``; the others likewise of a token, a KV head and a channel.
    """
    block, kv_head = tl.load(block_ids + tl.program_id(0)), tl.program_id(1).to(tl.int64)
    everyone, tokens = tl.arange(0, SIZE_P), tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    bits = tl.arange(0, WORDS_P * 64)
    of_keys = keys + block * of_block + kv_head * of_head
    made = kv_head * num_blocks + block
    turned = tl.zeros((TOKENS, WORDS_P * 64), tl.float32)
    width: tl.constexpr = min(HEAD_P, SLICE)
    for first in tl.static_range(0, HEAD_P, width):
        part = first + tl.arange(0, width)
        whole = tl.load(
            of_keys + everyone[:, None] * of_token + part[None, :] * of_channel,
            mask=(everyone < SIZE)[:, None] & (part < HEAD)[None, :],
            other=0.0,
        ).to(tl.float32)
        mean = (tl.sum(whole, 0) / SIZE).to(means.dtype.element_ty)
        if tl.program_id(2) == 0:
            tl.store(means + made * HEAD + part, mean, mask=part < HEAD)
        there = (tokens < SIZE)[:, None] & (part < HEAD)[None, :]
        own = tl.load(of_keys + tokens[:, None] * of_token + part[None, :] * of_channel, mask=there, other=0.0)
        beyond = tl.where(there, own.to(tl.float32) - mean.to(tl.float32)[None, :], 0.0)
        rotation = tl.load(
            turn + part[:, None] * (WORDS * 64) + bits[None, :],
            mask=(part < HEAD)[:, None] & (bits < WORDS * 64)[None, :],
            other=0.0,
        )
        turned = tl.dot(beyond, rotation, turned, input_precision="ieee")
    scale = tl.sum(tl.abs(turned), 1) / (WORDS * 64)
    tl.store(scales + made * SIZE + tokens, scale.to(scales.dtype.element_ty), mask=tokens < SIZE)
    words, places = tl.arange(0, WORDS_P), tl.arange(0, 64)
    signs = tl.reshape((turned > 0).to(tl.int64), (TOKENS, WORDS_P, 64))
    code = tl.sum(signs << places[None, None, :].to(tl.int64), 2)
    tl.store(
        codes + (made * WORDS + words[None, :]) * SIZE + tokens[:, None],
        code,
        mask=(tokens < SIZE)[:, None] & (words < WORDS)[None, :],
    )


@triton.jit(do_not_specialize=CHANGING)
def score_codes(
    query, codes, scales, means, turn, block_table, plan, scores, shares, done,
    rows, sinks, recent, num_blocks, candidates,
    query_row, table_row, scale,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    WORDS: tl.constexpr, WORDS_P: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score a chunk of a row's candidates for the heads of a KV head; the last chunk adds up their shares.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, of any dtype; ``query_row`` is the stride of a token.
        codes: ``[num_kv_heads, num_blocks, words, block_size]``, int64; see `KeyCodes`.
        scales: ``[num_kv_heads, num_blocks, block_size]``, bfloat16.
        means: ``[num_kv_heads, num_blocks, head_size]``, bfloat16.
        turn: ``[head_size, 64 * words]``, float32.
        block_table: ``[rows or more, max_blocks]``, int32; ``table_row`` is the stride of a row.
        plan: See the module.
        scores: ``[num_heads, candidates]``, float32, scratch: the candidates of all rows, one row after the other.
        shares: ``[candidates]``, int64, output: added to what is there, which must be 0.
        done: ``[rows, num_kv_heads]``, int32, scratch: all 0 before and after.
        rows: The rows of the plan.
        sinks: The number of first blocks that are not candidates.
        recent: The number of last blocks that are not candidates.
        num_blocks: The blocks of the cache.
        candidates: The row stride of ``scores``.
        scale: The attention's scale.
        GROUP: The query heads of a KV head; ``GROUP_P`` is at least 16, the least side of a tensor core's matrix.
        HEAD: The head size.
        WORDS: The words of a code.
        SIZE: The tokens of a block.
        TILE: The blocks that are scored at once.
    """
    row, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks, total = tl.load(plan + row), tl.load(plan + rows + row)
    count = blocks - sinks - recent
    if (total < blocks) & (chunk * CHUNK < count):
        token, offset = tl.load(plan + 2 * rows + row), tl.load(plan + 3 * rows + row)
        channels, heads = tl.arange(0, HEAD_P), tl.arange(0, GROUP_P)
        inside = channels < HEAD
        bits = tl.arange(0, WORDS_P * 64)
        of_query = query + token.to(tl.int64) * query_row + kv_head * (GROUP * HEAD)
        turned = tl.zeros((GROUP_P, WORDS_P * 64), tl.float32)
        width: tl.constexpr = min(HEAD_P, SLICE)
        for first in tl.static_range(0, HEAD_P, width):  # the whole rotation would not fit into shared memory
            part = first + tl.arange(0, width)
            wanted = tl.load(
                of_query + heads[:, None] * HEAD + part[None, :],
                mask=(heads < GROUP)[:, None] & (part < HEAD)[None, :],
                other=0.0,
            ).to(tl.float32)
            rotation = tl.load(
                turn + part[:, None] * (WORDS * 64) + bits[None, :],
                mask=(part < HEAD)[:, None] & (bits < WORDS * 64)[None, :],
                other=0.0,
            )
            turned = tl.dot(wanted * scale, rotation, turned, input_precision="ieee")
        steps = tl.maximum(tl.max(tl.abs(turned), 1), 1e-20) / _TOP
        levels = (turned / steps[:, None] + _TOP) / 2
        levels = (levels + _ROUNDER) - _ROUNDER
        levels = tl.minimum(tl.maximum(levels, 0.0), _TOP) * 2 - _TOP
        levels = tl.where((bits < WORDS * 64)[None, :], levels, 0.0).to(tl.float16)
        words, shifts = tl.arange(0, WORDS_P), tl.arange(0, 64)
        of_head = kv_head.to(tl.int64) * num_blocks
        tokens = tl.arange(0, TILE * SIZE)
        for begin in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, count), TILE):
            places = begin + tl.arange(0, TILE)
            there = places < count
            ids = tl.load(block_table + row.to(tl.int64) * table_row + sinks + places, mask=there, other=0)
            spread = begin + tokens // SIZE
            its = tl.load(block_table + row.to(tl.int64) * table_row + sinks + spread, mask=spread < count, other=0).to(
                tl.int64
            )
            code = tl.load(
                codes + ((of_head + its)[:, None] * WORDS + words[None, :]) * SIZE + (tokens % SIZE)[:, None],
                mask=(spread < count)[:, None] & (words < WORDS)[None, :],
                other=0,
            )
            signs = tl.reshape(
                (code[:, :, None] >> shifts[None, None, :].to(tl.int64)) & 1, (TILE * SIZE, WORDS_P * 64)
            )
            signs = (signs * 2 - 1).to(tl.float16)
            # Exact: integers of at most 15 times the number of bits.
            products = tl.dot(levels, tl.trans(signs), out_dtype=tl.float32)
            factors = tl.load(scales + (of_head + its) * SIZE + tokens % SIZE, mask=spread < count, other=0.0)
            estimated = products * steps[:, None] * factors.to(tl.float32)[None, :]
            estimated = tl.reshape(estimated, (GROUP_P, TILE, SIZE))
            highest = tl.max(estimated, 2)
            summed = tl.log(tl.sum(tl.exp(estimated - highest[:, :, None]), 2)) + highest
            mean = tl.load(
                means + (of_head + ids.to(tl.int64))[:, None] * HEAD + channels[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            for one in tl.static_range(GROUP):
                own = tl.load(of_query + one * HEAD + channels, mask=inside, other=0.0).to(tl.float32) * scale
                of_mean = tl.sum(own[None, :] * mean, 1)
                summed += tl.where((heads == one)[:, None], of_mean[None, :], 0.0)
            at = scores + (kv_head * GROUP + heads).to(tl.int64)[:, None] * candidates + offset + places[None, :]
            tl.store(at, summed, mask=(heads < GROUP)[:, None] & there[None, :])
        _add_shares(scores, shares, done, row, kv_head, count, offset, candidates, GROUP)


@triton.jit
def _add_shares(scores, shares, done, row, kv_head, count, offset, candidates, GROUP: tl.constexpr):
    """Add the shares of a KV head's query heads, in the program that ends last of those of its row.

    Sums of integers are the same in any order; see `ranking.shares`.
    """
    tl.debug_barrier()  # all threads of this program have written their scores
    finished = tl.atomic_add(done + row * tl.num_programs(1) + kv_head, 1, sem="acq_rel")
    if finished == tl.cdiv(count, CHUNK) - 1:
        tl.store(done + row * tl.num_programs(1) + kv_head, 0)
        places = tl.arange(0, SPAN)
        for one in range(GROUP):
            of_head = scores + (kv_head * GROUP + one).to(tl.int64) * candidates + offset
            highest = tl.full((SPAN,), float("-inf"), tl.float32)
            for begin in range(0, count, SPAN):
                there = begin + places < count
                # Other programs wrote them: not from this processor's own cache.
                found = tl.load(of_head + begin + places, mask=there, other=float("-inf"), cache_modifier=".cg")
                highest = tl.maximum(highest, found)
            most = tl.max(highest, 0)
            summed = tl.zeros((SPAN,), tl.float32)
            for begin in range(0, count, SPAN):
                there = begin + places < count
                found = tl.load(of_head + begin + places, mask=there, other=float("-inf"), cache_modifier=".cg")
                summed += tl.exp(found - most)
            whole = tl.sum(summed, 0)
            for begin in range(0, count, SPAN):
                there = begin + places < count
                found = tl.load(of_head + begin + places, mask=there, other=float("-inf"), cache_modifier=".cg")
                share = tl.exp(found - most) / whole * _WHOLE
                share = tl.where(share >= 0, share, 0).to(tl.int64)  # NaN chooses nothing
                tl.atomic_add(shares + offset + begin + places, share, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=CHANGING)
def choose(block_table, plan, shares, table, rows, sinks, recent, source_row, table_row):
    """Write a row's restricted block table: sinks, the candidates with the largest shares in order, recent blocks.

    Of equal shares, that of the later block counts as larger. A dense row is copied. The shares are set to 0 for
    the next layer.

    Args:
        block_table: See `score_codes`, also for other arguments; ``source_row`` is the stride of a row.
        shares: ``[candidates]``, int64.
        table: ``[rows, max_blocks]``, int32, output; ``table_row`` is the stride of a row.
    """
    row = tl.program_id(0)
    blocks, total, offset = tl.load(plan + row), tl.load(plan + rows + row), tl.load(plan + 3 * rows + row)
    source, target = block_table + row.to(tl.int64) * source_row, table + row.to(tl.int64) * table_row
    places = tl.arange(0, SPAN)
    if total == blocks:
        for begin in range(0, blocks, SPAN):
            there = begin + places < blocks
            tl.store(target + begin + places, tl.load(source + begin + places, mask=there), mask=there)
    else:
        count, wanted = blocks - sinks - recent, total - sinks - recent
        # The least share that is chosen, digit by digit from the highest, and how many of that share are chosen.
        least, left = tl.cast(0, tl.int64), wanted
        digits = tl.arange(0, 2 * BASE)
        for digit in tl.static_range(DIGITS):
            shift = (DIGITS - 1 - digit) * 8
            counts = tl.zeros((2 * BASE,), tl.int32)
            for begin in range(0, count, SPAN):
                there = begin + places < count
                share = tl.load(shares + offset + begin + places, mask=there, other=0)
                same = there & ((share >> (shift + 8)) == (least >> (shift + 8)))
                # The second half of the digits counts what does not matter.
                counts += tl.histogram(tl.where(same, (share >> shift) % BASE, 2 * BASE - 1).to(tl.int32), 2 * BASE)
            counts = tl.where(digits < BASE, counts, 0)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            found = (above < left) & (above + counts >= left) & (digits < BASE)
            least += tl.sum(tl.where(found, digits, 0), 0).to(tl.int64) << shift
            left -= tl.sum(tl.where(found, above, 0), 0)
        equal = tl.cast(0, tl.int32)
        for begin in range(0, count, SPAN):
            there = begin + places < count
            share = tl.load(shares + offset + begin + places, mask=there, other=-1)
            equal += tl.sum((there & (share == least)).to(tl.int32), 0)
        for begin in range(0, sinks, SPAN):
            there = begin + places < sinks
            tl.store(target + begin + places, tl.load(source + begin + places, mask=there), mask=there)
        written, skipped = tl.cast(0, tl.int32), equal - left
        for begin in range(0, count, SPAN):
            there = begin + places < count
            share = tl.load(shares + offset + begin + places, mask=there, other=-1)
            ties = (there & (share == least)).to(tl.int32)
            order = tl.cumsum(ties, 0)  # of those of the least share, the first ones are left out
            chosen = there & ((share > least) | ((ties == 1) & (order > skipped)))
            column = sinks + written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            ids = tl.load(source + sinks + begin + places, mask=chosen)
            tl.store(target + column, ids, mask=chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
            skipped -= tl.sum(ties, 0)
            tl.store(shares + offset + begin + places, tl.zeros((SPAN,), tl.int64), mask=there)
        for begin in range(0, recent, SPAN):
            there = begin + places < recent
            ids = tl.load(source + blocks - recent + begin + places, mask=there)
            tl.store(target + total - recent + begin + places, ids, mask=there)
