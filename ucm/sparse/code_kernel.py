"""Scoring blocks by the codes of their keys on a CPU; `ucm.sparse.compiled` says how it is compiled and run.

torch cannot count bits. Its ways round that take 5 to 10 times as long as this kernel, and numpy's 10 times. The kernel
reads codes where they lie, counts bits with the processor's own instruction, and writes one number per head and block.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.sparse.compiled import compile_kernel, for_engine, intrinsics

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ucm.sparse.compiled import Threads

    Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: What is done where there is no kernel.
SLOWLY = "codes of keys are scored"
#: Bits of a word of a code.
WORD = 64
#: Bits of each channel of a query.
QUERY_BITS = 4
#: The greatest level that these express: levels are the odd numbers from its negative to it.
TOP = (1 << QUERY_BITS) - 1
#: Of a weight below this power of two nothing is left in a sum with one of 1.
LEAST_POWER = -126.0
#: A power of two for a fraction of 1: to the fourth order, right to 6e-5.
SERIES = tuple(math.log(2) ** n / math.factorial(n) for n in range(5))


def kernel_for_engine(words: int) -> Kernel | None:
    """`cpu_kernel`, where `for_engine` allows it."""
    return for_engine(SLOWLY, lambda: cpu_kernel(words))


@functools.cache
def cpu_kernel(words: int) -> Kernel | None:
    """Compile the kernel for codes of so many words; takes half a second.

    Returns:
        ``kernel(codes, scales, means, query, planes, steps, block_ids)``; None where numba is missing. Its arguments
        are contiguous, on the CPU:

        - ``codes``: ``[num_kv_heads, num_blocks, words, block_size]``, int64
        - ``scales``: ``[num_kv_heads, num_blocks, block_size]``, bfloat16
        - ``means``: ``[num_kv_heads, num_blocks, head_size]``, bfloat16
        - ``query``: ``[num_kv_heads, rows, group, head_size]``, float32, scaled as attention scales it
        - ``planes``: ``[num_kv_heads, rows, group, QUERY_BITS, words]``, int64: the bits of the levels of the query
        - ``steps``: ``[num_kv_heads, rows, group]``, float32: half the difference of two levels
        - ``block_ids``: ``[rows, blocks]``, int64

        It returns ``[num_kv_heads, rows, group, blocks]``, float32: the logarithm of the sum of the weights that each
        block's estimates give.
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
    """The part of the work that is one thread's, as numba compiles it: all names within are its own or constants."""
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
