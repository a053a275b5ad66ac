"""Codes of keys: one sign per channel of a randomly rotated key, from which products with queries are estimated.

Sources: signs of random projections as hash codes of vectors (Charikar, "Similarity Estimation Techniques from Rounding
Algorithms", STOC 2002), which UCM's GSAOnDevice uses; the scale that makes the estimate unbiased, and queries of four
bits whose products with codes are counts of differing bits (Gao, Long, "RaBitQ", SIGMOD 2024, arXiv:2405.12497).

Keys of trained models have much in common: a bias, as in Qwen2, or a mean that is longer than the differences between
keys (Zhang et al., "SageAttention", arXiv:2410.02367). The signs of such keys are nearly all equal. So the mean of a
block's keys is stored separately, and a code encodes the difference of a key from it. Nothing is learned, and nothing
depends on other blocks.

Stored per physical block and KV head: for each token ``head_size`` bits, rounded up to 64, and a scale of two bytes;
for each block the mean key in bfloat16. This takes 3.9 % of a KV cache of two bytes per element for heads of 64
channels and 3.5 % for 128, plus ``1 / (2 * block_size)``.

On a CPU, a compiled kernel (`ucm.sparse.compiled`) scores the blocks. torch cannot count bits; workarounds in torch
take 5 to 10 times as long, and in numpy 10 times. The kernel reads the codes in place, counts bits with the processor's
own instruction, and writes one number per head and block.
"""

from __future__ import annotations

import functools
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.sparse.compiled import compile_kernel, for_engine, intrinsics
from ucm.sparse.topk.representatives import FEW, Representatives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ucm.sparse.compiled import Threads

    Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: The bits of codes to unpack at once, without a compiled kernel.
UNPACKED_AT_ONCE = 1 << 26


class KeyCodes(Representatives):
    """The codes of the keys of each block, their scales, and the block's mean key."""

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        super().__init__(num_blocks, keys)
        _, block_size, num_kv_heads, head_size = keys.shape
        self._turn = turn(head_size).to(keys.device)
        words = self._turn.shape[1] // WORD
        #: ``[num_kv_heads, num_blocks, words, block_size]``, int64; a word of all tokens of a block is contiguous.
        self._codes = keys.new_zeros((num_kv_heads, num_blocks, words, block_size), dtype=torch.int64)
        #: ``[num_kv_heads, num_blocks, block_size]``: the factor of a product with a code's signs.
        self._scales = keys.new_zeros((num_kv_heads, num_blocks, block_size), dtype=torch.bfloat16)
        #: ``[num_kv_heads, num_blocks, head_size]``
        self._means = keys.new_zeros((num_kv_heads, num_blocks, head_size), dtype=torch.bfloat16)
        self._kernel = kernel_for_engine(words) if keys.device.type == "cpu" else None

    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Compute the codes of some blocks from these keys."""
        by_head = keys.permute(2, 0, 1, 3).float()
        means = by_head.mean(2).to(self._means.dtype)
        beyond = by_head - means.float()[:, :, None]
        # One product per head and block, so the result is bit-identical whatever other heads this rank has.
        turned = (beyond.flatten(0, 1) @ self._turn.expand(beyond.shape[0] * beyond.shape[1], -1, -1)).view(
            *beyond.shape[:3], -1
        )
        # With this scale the estimated product of a key with itself is exact, and estimates are unbiased.
        scales = beyond.square().sum(-1) / turned.abs().sum(-1).clamp(min=1e-20)
        # index_copy_ was measured to be ten times as fast as indexing on a CPU.
        self._codes.index_copy_(1, block_ids, packed(turned > 0).transpose(-1, -2).contiguous())
        self._scales.index_copy_(1, block_ids, scales.to(self._scales.dtype))
        self._means.index_copy_(1, block_ids, means)

    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """Return the logarithm of the sum of each block's estimated attention weights."""
        rows, _, head_size = query.shape
        heads = len(self._means)
        wanted = query.float().view(rows, heads, -1, head_size).transpose(0, 1).contiguous() * head_size**-0.5
        turned = wanted.flatten(1, 2) @ self._turn.expand(heads, -1, -1)
        steps = turned.abs().amax(-1).clamp(min=1e-20) / TOP
        levels = ((turned / steps[..., None] + TOP) / 2).round().int().clamp(0, TOP).view(*wanted.shape[:3], -1)
        steps = steps.view(wanted.shape[:3])
        if self._kernel is None:
            return self._unpacked(wanted, levels * 2 - TOP, steps, block_ids)
        planes = packed((levels[..., None, :] >> _range(QUERY_BITS, levels)[:, None]) % 2 > 0)
        return self._kernel(self._codes, self._scales, self._means, wanted, planes, steps, block_ids)

    def _unpacked(self, wanted: Tensor, levels: Tensor, steps: Tensor, block_ids: Tensor) -> Tensor:
        """Compute the kernel's result with torch operations, unpacking the codes of some blocks at a time."""
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        heads, _, words, size = self._codes.shape
        some = block_ids.split(max(1, UNPACKED_AT_ONCE // (heads * words * WORD * size * len(block_ids))), 1)
        found = []
        for ids in some:
            codes = self._codes[:, ids].transpose(-1, -2).clone(memory_format=torch.contiguous_format)
            signs = ((codes.view(torch.uint8)[..., None] >> _range(8, levels)) % 2 * 2).flatten(-2).float() - 1
            products = levels.float() @ signs.flatten(2, 3).transpose(-1, -2)
            estimated = products * steps[..., None] * self._scales[:, ids].float().flatten(2)[:, :, None]
            of_means = wanted @ self._means[:, ids].float().transpose(-1, -2)
            found.append(estimated.unflatten(-1, (-1, size)).logsumexp(-1) + of_means)
        return torch.cat(found, -1)

    def _elements(self, num_heads: int, blocks: int) -> int:
        heads, _, head_size = self._means.shape
        return int(max(heads * head_size, num_heads * FEW)) * blocks


def turn(head_size: int) -> Tensor:
    """Return a rotation that spreads each channel over all bits of a code: ``[head_size, bits]``, float32.

    It applies a fixed random change of signs and a Hadamard matrix, twice. The entries are exact and the same on every
    machine, so all ranks of an engine compute the same codes.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    bits = -(-head_size // WORD) * WORD
    order = 1 << (bits - 1).bit_length()
    hadamard = torch.ones(1, 1)
    while len(hadamard) < order:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    source = random.Random(order)  # noqa: S311 - no secret
    first, second = (torch.tensor([source.choice((-1.0, 1.0)) for _ in range(order)]) for _ in range(2))
    whole = (first[:, None] * hadamard * second) @ hadamard / order
    return whole[:head_size]


def packed(signs: Tensor) -> Tensor:
    """Pack bits into words: ``[..., bits]``, bool, to ``[..., bits / 64]``, int64."""
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    # A matrix product is a hundred times as fast as a sum over eight bits; its numbers are below 256, so exact.
    weights = torch.zeros((WORD, WORD // 8), device=signs.device)
    places = _range(WORD, signs)
    weights[places, places // 8] = 2.0 ** (places % 8)
    return (signs.unflatten(-1, (-1, WORD)).float() @ weights).to(torch.uint8).flatten(-2).view(torch.int64)


def _range(count: int, like: Tensor) -> Tensor:
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return torch.arange(count, device=like.device)


#: What is slow without a kernel, for the log.
SLOWLY = "codes of keys are scored"
#: The bits of a word of a code.
WORD = 64
#: The bits of each channel of a query.
QUERY_BITS = 4
#: The largest level that these bits express; levels are the odd numbers from its negative to it.
TOP = (1 << QUERY_BITS) - 1
#: A weight below this power of two vanishes in a float32 sum with 1.
LEAST_POWER = -126.0
#: The Taylor series of ``2 ** x`` for ``x`` from 0 to 1, to the fourth order; its error is at most 6e-5.
SERIES = tuple(math.log(2) ** n / math.factorial(n) for n in range(5))


def kernel_for_engine(words: int) -> Kernel | None:
    """Return `cpu_kernel` if `for_engine` allows it, else None."""
    return for_engine(SLOWLY, lambda: cpu_kernel(words))


@functools.cache
def cpu_kernel(words: int) -> Kernel | None:
    """Compile the kernel for codes of this many words, which takes half a second.

    Returns:
        ``kernel(codes, scales, means, query, planes, steps, block_ids)``, or None without numba. Its arguments are
        contiguous tensors on the CPU:

        - ``codes``: ``[num_kv_heads, num_blocks, words, block_size]``, int64
        - ``scales``: ``[num_kv_heads, num_blocks, block_size]``, bfloat16
        - ``means``: ``[num_kv_heads, num_blocks, head_size]``, bfloat16
        - ``query``: ``[num_kv_heads, rows, group, head_size]``, float32, with the attention's scale applied
        - ``planes``: ``[num_kv_heads, rows, group, QUERY_BITS, words]``, int64: the bits of the query's levels
        - ``steps``: ``[num_kv_heads, rows, group]``, float32: half the distance of two levels
        - ``block_ids``: ``[rows, blocks]``, int64

        It returns ``[num_kv_heads, rows, group, blocks]``, float32: the logarithm of the sum of each block's estimated
        attention weights.
    """
    run = compile_kernel(SLOWLY, lambda numba, threads: _kernel(numba, words, threads))
    if run is None:
        return None

    def kernel(
        codes: Tensor, scales: Tensor, means: Tensor, query: Tensor, planes: Tensor, steps: Tensor, block_ids: Tensor
    ) -> Tensor:
        heads, rows, group, head_size = query.shape
        blocks = block_ids.shape[1]
        found = query.new_empty((heads, rows, group, blocks))
        tensors = (codes, scales, means, query, planes, steps, block_ids.contiguous(), found)
        run(*tensors, heads, codes.shape[1], codes.shape[3], head_size, rows, group, blocks)
        return found

    return kernel


def _kernel(numba: Any, words: int, threads: Threads) -> Any:
    """Return one thread's part of the work for numba to compile; it uses only its own names and constants."""
    of = intrinsics(numba)
    ones, as_float, at, thread, count = of.ones, of.as_float, of.at, threads.own, threads.count
    carray, num_planes, top = numba.carray, QUERY_BITS, np.float32(TOP * words * WORD)
    lowest, least, log2e = np.finfo(np.float32).min, np.float32(LEAST_POWER), np.float32(1 / math.log(2))
    c0, c1, c2, c3, c4 = map(np.float32, SERIES)

    def score(given: Any) -> None:
        a = carray(given, 15)
        heads, num_blocks, size, head_size, rows, group, blocks = a[8], a[9], a[10], a[11], a[12], a[13], a[14]
        codes = carray(at(a[0]), (heads, num_blocks, words, size), np.int64)
        scales = carray(at(a[1]), (heads, num_blocks, size), np.int16)
        means = carray(at(a[2]), (heads, num_blocks, head_size), np.int16)
        query = carray(at(a[3]), (heads, rows, group, head_size), np.float32)
        planes = carray(at(a[4]), (heads, rows, group, num_planes, words), np.int64)
        steps = carray(at(a[5]), (heads, rows, group), np.float32)
        block_ids = carray(at(a[6]), (rows, blocks), np.int64)
        found = carray(at(a[7]), (heads, rows, group, blocks), np.float32)
        estimates = np.empty(size, np.float32)
        parts = heads * rows * blocks
        for part in range(parts * thread() // count(), parts * (thread() + 1) // count()):
            head, row, place = part // (rows * blocks), part // blocks % rows, part % blocks
            block = block_ids[row, place]
            for one in range(group):
                step = steps[head, row, one] * log2e
                most = lowest
                for token in range(size):
                    apart = np.int64(0)
                    for word in range(words):
                        code = codes[head, block, word, token]
                        for plane in range(num_planes):
                            apart += ones(code ^ planes[head, row, one, plane, word]) << plane
                    # A bfloat16 is the upper half of a float32.
                    scale = as_float(np.int64(scales[head, block, token]) << 16)
                    estimate = (top - np.float32(2 * apart)) * scale * step
                    estimates[token] = estimate
                    most = max(most, estimate)
                total = np.float32(0)
                for token in range(size):
                    power = max(estimates[token] - most, least)
                    whole = np.floor(power)
                    rest = power - whole
                    fraction = c0 + rest * (c1 + rest * (c2 + rest * (c3 + rest * c4)))
                    total += fraction * as_float((np.int64(whole) + 127) << 23)
                of_mean = np.float32(0)
                for channel in range(head_size):
                    mean = as_float(np.int64(means[head, block, channel]) << 16)
                    of_mean += query[head, row, one, channel] * mean
                found[head, row, one, place] = of_mean + (most + np.log2(total)) / log2e

    return score
