"""Codes of keys: one sign per channel of a randomly rotated key, from which products with queries are estimated.

Sources: signs of random projections as hash codes of vectors (Charikar, "Similarity Estimation Techniques from Rounding
Algorithms", STOC 2002), which UCM's GSAOnDevice uses; the scale with which signs are closest to a vector, the mean of
its absolute values (Rastegari et al., "XNOR-Net", ECCV 2016, arXiv:1603.05279); queries of four bits whose products
with codes are counts of differing bits (Gao, Long, "RaBitQ", SIGMOD 2024, arXiv:2405.12497).

RaBitQ has a larger scale, by about pi / 2, which makes the estimate of a product unbiased. A softmax over such
estimates prefers keys whose product is overestimated. With the scale used here an estimate is the expected product,
given the code, if a query has no preferred direction. On random keys, alone and in clusters, the best tenth of the
blocks kept as much attention or up to 8 points more of what an oracle keeps. Blocks with an estimated 90 % of the
attention held 62 to 90 %, depending on how peaked it was; with unbiased estimates, 38 to 90 %.

Keys of trained models have much in common: a bias, as in Qwen2, or a mean that is longer than the differences between
keys (Zhang et al., "SageAttention", arXiv:2410.02367). The signs of such keys are nearly all equal. So the mean of a
block's keys is stored separately, and a code encodes the difference of a key from it. Nothing is learned, and nothing
depends on other blocks.

Stored per physical block and KV head: for each token ``head_size`` bits, rounded up to 64, and a scale of two bytes;
for each block the mean key in bfloat16. This takes 3.9 % of a KV cache of two bytes per element for heads of 64
channels and 3.5 % for 128, plus ``1 / (2 * block_size)``.

On a CPU, a compiled kernel (`ucm.sparse.compiled`) scores the blocks, on a GPU a Triton kernel
(`ucm.sparse.topk.kernels`), which has been compiled for GPUs, but not run on one. torch cannot count bits; workarounds
in torch take 5 to 10 times as long, and in numpy 10 times. The kernels read the codes in place, the one for CPUs counts
bits with the processor's own instruction, and both write one number per head and block.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.logger import get_logger
from ucm.sparse.compiled import LANES, Lanes, compile_kernel, for_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: Triton's variable that interprets kernels, on any device.
INTERPRET = "TRITON_INTERPRET"
#: The key elements to read at once to compute codes: as many as fit into a processor's cache (measured on a CPU).
AT_ONCE = 1 << 19
#: The same on other devices: each reading takes 23 launches there, and up to 20 bytes per element (reasoned).
AT_ONCE_ON_DEVICE = 1 << 23
#: The elements to score at once, but at least one row. A request that is computed again after a preemption has a row
#: for each of its generated tokens, and what all these rows need at once would not fit into any device.
SCORED_AT_ONCE = 1 << 27
#: The bits of codes to unpack at once, without a compiled kernel.
UNPACKED_AT_ONCE = 1 << 26
#: Shares are integers in units of ``1 / WHOLE``, so their sums are the same in any order and over any ranks.
WHOLE = 1 << 33
#: The number of blocks of a request that `ranked` can distinguish; with `WHOLE` it leaves room for 512 heads.
PLACES = 1 << 20


class KeyCodes:
    """The codes of the keys of each block of a layer, by physical block, their scales, and the block's mean key.

    Args:
        num_blocks: The number of blocks of the layer's KV cache.
        keys: The keys of a block, ``[1, block_size, num_kv_heads, head_size]``, for their shape, dtype and device.

    Attributes:
        num_blocks: The number of blocks for which there is room.
        at_once: The number of blocks whose keys are best read at once.
        size: The number of blocks that `append` has added.
    """

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        self.num_blocks = num_blocks
        self.at_once = max(1, (AT_ONCE if keys.device.type == "cpu" else AT_ONCE_ON_DEVICE) // keys.numel())
        _, block_size, num_kv_heads, head_size = keys.shape
        self._turn = turn(head_size, keys.device)
        words = self._turn.shape[1] // WORD
        #: ``[num_kv_heads, num_blocks, words, block_size]``, int64; a word of all tokens of a block is contiguous.
        self._codes = keys.new_empty((num_kv_heads, num_blocks, words, block_size), dtype=torch.int64)
        #: ``[num_kv_heads, num_blocks, block_size]``: the factor of a product with a code's signs.
        self._scales = keys.new_empty((num_kv_heads, num_blocks, block_size), dtype=torch.bfloat16)
        #: ``[num_kv_heads, num_blocks, head_size]``
        self._means = keys.new_empty((num_kv_heads, num_blocks, head_size), dtype=torch.bfloat16)
        self.size = 0
        self._kernel = kernel_for(keys.device, block_size, head_size, words)

    @property
    def nbytes(self) -> int:
        """The bytes of the codes of all blocks."""
        return sum(int(of.nbytes) for of in self._stored())

    def _stored(self) -> tuple[Tensor, ...]:
        return self._codes, self._scales, self._means

    def update(self, block_ids: Tensor, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Compute the codes of some blocks from their keys.

        Args:
            block_ids: ``[n]``, int64; complete blocks.
            read_keys: Returns the keys of some of them, ``[n, block_size, num_kv_heads, head_size]``.
        """
        for some in block_ids.split(self.at_once):
            self.put(some, read_keys(some))

    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Compute the codes of some blocks from these keys, ``[n, block_size, num_kv_heads, head_size]``."""
        by_head = keys.permute(2, 0, 1, 3).float()
        means = by_head.mean(2).to(self._means.dtype)
        beyond = by_head - means.float()[:, :, None]
        # One product per head and block, so the result is bit-identical whatever other heads this rank has.
        turned = (beyond.flatten(0, 1) @ self._turn.expand(beyond.shape[0] * beyond.shape[1], -1, -1)).view(
            *beyond.shape[:3], -1
        )
        scales = turned.abs().mean(-1)
        # index_copy_ was measured to be ten times as fast as indexing on a CPU.
        self._codes.index_copy_(1, block_ids, packed(turned > 0).transpose(-1, -2).contiguous())
        self._scales.index_copy_(1, block_ids, scales.to(self._scales.dtype))
        self._means.index_copy_(1, block_ids, means)

    def append(self, keys: Tensor) -> None:
        """Add blocks behind those added before, with the next numbers and these keys; see `put`."""
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        end = self.size + len(keys)
        if end > self.num_blocks:  # with spare room, so that a growing context rarely copies them
            self.num_blocks = end + end // 4
            self._codes, self._scales, self._means = (
                torch.cat((of, of.new_empty((len(of), self.num_blocks - of.shape[1], *of.shape[2:]))), 1)
                for of in self._stored()
            )
        self.put(torch.arange(self.size, end, device=keys.device), keys)
        self.size = end

    def shares(self, query: Tensor, block_ids: Tensor, hidden: Tensor | None) -> Tensor:
        """Estimate the share of their attention that the heads of each row give to each of its blocks.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: the blocks of each row.
            hidden: ``[rows, blocks]``: entries that are padding; None if there are none.

        Returns:
            ``[rows, blocks]``, int64; see `shares_of`.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        heads, _, head_size = self._means.shape
        at_once = max(1, SCORED_AT_ONCE // ((heads * head_size + query.shape[1]) * block_ids.shape[1]))
        parts = [slice(begin, begin + at_once) for begin in range(0, len(query), at_once)]
        found = [
            shares_of(self.scores(query[rows], block_ids[rows]), None if hidden is None else hidden[rows])
            for rows in parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """Estimate how strongly each query head attends to each block.

        Args:
            query: ``[rows, num_heads, head_size]`` in any floating dtype.
            block_ids: ``[rows, blocks]``, int64: the blocks of each row.

        Returns:
            ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32: the logarithm of the sum of each block's
            estimated attention weights, so that a softmax over blocks gives their relative attention.
        """
        rows, _, head_size = query.shape
        heads = len(self._means)
        wanted = query.float().view(rows, heads, -1, head_size).transpose(0, 1).contiguous() * head_size**-0.5
        turned = (wanted.flatten(1, 2) @ self._turn.expand(heads, -1, -1)).view(*wanted.shape[:3], -1)
        if self._kernel is None:
            return self._unpacked(wanted, turned, block_ids)
        return self._kernel(self._codes, self._scales, self._means, wanted, turned, block_ids)

    def _unpacked(self, wanted: Tensor, turned: Tensor, block_ids: Tensor) -> Tensor:
        """Compute the kernel's result with torch operations, unpacking the codes of some blocks at a time."""
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        steps = turned.abs().amax(-1).clamp(min=LEAST) / TOP
        levels = ((turned / steps[..., None] + TOP) / 2).round().int().clamp(0, TOP) * 2 - TOP
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


def shares_of(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the estimated share of attention that all heads of a row together give to each block.

    It is the sum over heads of a softmax per head, so a head that attends to one block counts as much as a head that
    attends to all. A sum of the scores themselves would lose the former: with 32 heads, one of which attends to one
    block of 128, the ten best blocks contained that block in 57 % of trials with the softmax and in 23 % without, and
    no mixture of heads was worse with it (synthetic keys and queries).

    Args:
        scores: ``[num_kv_heads, rows, heads of a KV head, blocks]``, float32, with the attention's scale applied.
        hidden: ``[rows, blocks]``: entries that are padding; None if there are none.

    Returns:
        ``[rows, blocks]``, int64, in units of ``1 / WHOLE``; the shares of heads on other ranks can be added.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    if hidden is not None:
        scores = scores.masked_fill(hidden[None, :, None], float("-inf"))
    found = scores.softmax(-1) * WHOLE
    return found.where(found >= 0, 0).to(torch.int64).sum((0, 2))  # NaN chooses nothing


def ranked(shares: Tensor) -> Tensor:
    """Make the shares of a row distinct: of equal shares, that of the later block becomes larger.

    So the selection does not depend on other rows or on the device.

    Args:
        shares: ``[rows, blocks]``, int64, from `shares_of`, in the order of the blocks' positions.

    Returns:
        ``[rows, blocks]``, int64.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return shares * PLACES + torch.arange(shares.shape[-1], device=shares.device)


def kernel_for(device: Any, block_size: int, head_size: int, words: int) -> Kernel | None:
    """Return a kernel that scores codes on a device; None where torch's operations do."""
    interpreted = device.type == "cpu" and os.environ.get(INTERPRET) == "1"
    if interpreted or (device.type == "cuda" and _has_triton(device)):
        if block_size & (block_size - 1):
            return None
        from ucm.sparse.topk.kernels import scores  # noqa: PLC0415 - loads Triton

        return scores
    whole = block_size % LANES == 0 and head_size % LANES == 0  # vLLM's on a CPU are
    return for_engine(SLOWLY, lambda: cpu_kernel(words)) if device.type == "cpu" and whole else None


@functools.cache
def _has_triton(device: Any) -> bool:
    """Return whether Triton serves a GPU: its kernel needs more shared memory than NVIDIA's 7.x have."""
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    found = importlib.util.find_spec("triton") is not None
    if not found:
        get_logger(__name__).warning("[UCM.Sparse] %s slowly, without Triton", SLOWLY)
    return found


@functools.cache
def turn(head_size: int, device: Any = "cpu") -> Tensor:
    """Return a rotation that spreads each channel over all bits of a code: ``[head_size, bits]``, float32.

    All layers share it.

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
    return whole[:head_size].to(device)


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
#: The least greatest channel of a query, so that a query of zeros has levels.
LEAST = 1e-20


@functools.cache
def cpu_kernel(words: int) -> Kernel | None:
    """Compile the kernel for codes of this many words, which takes half a second.

    The sizes of blocks and heads are multiples of `LANES`.

    Returns:
        ``kernel(codes, scales, means, query, turned, block_ids)``, or None without numba. Its arguments are
        contiguous tensors on the CPU:

        - ``codes``: ``[num_kv_heads, num_blocks, words, block_size]``, int64
        - ``scales``: ``[num_kv_heads, num_blocks, block_size]``, bfloat16
        - ``means``: ``[num_kv_heads, num_blocks, head_size]``, bfloat16
        - ``query``: ``[num_kv_heads, rows, group, head_size]``, float32, with the attention's scale applied
        - ``turned``: ``[num_kv_heads, rows, group, 64 * words]``, float32: the query, rotated as the keys
        - ``block_ids``: ``[rows, blocks]``, int64

        It returns ``[num_kv_heads, rows, group, blocks]``, float32: the logarithm of the sum of each block's estimated
        attention weights.
    """
    run = compile_kernel(SLOWLY, lambda numba, own, count: _kernel(numba, own, count, words))
    if run is None:
        return None

    def kernel(
        codes: Tensor, scales: Tensor, means: Tensor, query: Tensor, turned: Tensor, block_ids: Tensor
    ) -> Tensor:
        heads, rows, group, head_size = query.shape
        blocks = block_ids.shape[1]
        found = query.new_empty((heads, rows, group, blocks))
        tensors = (codes, scales, means, query, turned, block_ids.contiguous(), found)
        run(*tensors, heads, codes.shape[1], codes.shape[3], head_size, rows, group, blocks)
        return found

    return kernel


def _kernel(numba: Any, thread: Any, count: Any, words: int) -> Any:  # noqa: C901 - functions that numba compiles
    """Return one thread's part of the work for numba to compile; it uses only its own names and constants."""
    of = Lanes(half=True)
    load, store, number, whole, put, read = of.load, of.store, of.number, of.whole, of.put, of.reading(1)
    splat, add, sub, mul, fma = of.splat, of.add, of.sub, of.mul, of.fma
    greater, greatest, total, exp2, apart = of.greater, of.greatest, of.total, of.exp2, of.bits_apart(words, QUERY_BITS)
    carray = numba.carray
    num_planes, bits, levels, query_bytes = QUERY_BITS, words * WORD, np.float32(TOP), 8 * QUERY_BITS * words
    top, nothing, half, tiny = np.float32(TOP * words * WORD), np.float32(0), np.float32(0.5), np.float32(LEAST)
    lowest, log2e = np.finfo(np.float32).min, np.float32(1 / math.log(2))

    @numba.njit(fastmath=True)  # type: ignore[untyped-decorator] # numba has no types here
    def prepare(turned: Any, planes: Any) -> Any:
        """Round a query to levels, write their bits, and return half the distance of two levels."""
        largest = tiny
        for bit in range(bits):
            largest = max(largest, abs(number(turned + 4 * bit)))
        step = largest / levels
        planes[:] = 0
        for bit in range(bits):
            level = np.int64(np.rint((number(turned + 4 * bit) / step + levels) * half))
            for plane in range(num_planes):
                planes[plane, bit // 64] |= (level >> plane & 1) << (bit % 64)
        return step

    def score(given: Any) -> None:
        a = carray(given, 14)
        heads, num_blocks, size, head_size, rows, group, blocks = a[7], a[8], a[9], a[10], a[11], a[12], a[13]
        estimates, steps = np.empty(size, np.float32), np.empty(group, np.float32)
        planes = np.empty((group, num_planes, words), np.int64)
        to, planes_at = estimates.ctypes.data, planes.ctypes.data
        parts, prepared = heads * rows * blocks, np.int64(-1)
        for part in range(parts * thread() // count(), parts * (thread() + 1) // count()):
            first = part // blocks * group  # the first query of this head and row
            if first != prepared:
                for one in range(group):
                    steps[one] = prepare(a[4] + 4 * bits * (first + one), planes[one])
                prepared = first
            block = part // (rows * blocks) * num_blocks + whole(a[5] + 8 * (part % (rows * blocks)))
            codes, scales, means = 8 * words * size * block, 2 * size * block, 2 * head_size * block
            codes, scales, means = a[0] + codes, a[1] + scales, a[2] + means
            for one in range(group):
                query, step, plane_at = first + one, splat(steps[one] * log2e), planes_at + query_bytes * one
                most_of = splat(lowest)
                for token in range(0, size, LANES):
                    # A bit of plane n that differs takes 2 ** (n + 1) from the greatest product of levels and signs.
                    differ = apart(codes + 8 * token, 8 * size, plane_at)
                    product = mul(sub(splat(top), add(differ, differ)), read(scales + 2 * token))
                    estimate = mul(product, step)
                    store(to + 4 * token, estimate)
                    most_of = greater(most_of, estimate)
                most = greatest(most_of)
                weights, of_mean = splat(nothing), splat(nothing)
                for token in range(0, size, LANES):
                    weights = add(weights, exp2(sub(load(to + 4 * token), splat(most))))
                wanted = a[3] + 4 * head_size * query
                for channel in range(0, head_size, LANES):
                    of_mean = fma(load(wanted + 4 * channel), read(means + 2 * channel), of_mean)
                put(
                    a[6] + 4 * (query * blocks + part % blocks),
                    total(of_mean) + (most + np.log2(total(weights))) / log2e,
                )

    return score
