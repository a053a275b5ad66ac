"""How much of a decode's attention a choice of blocks keeps, measured now and then while a method serves.

A measurement reads the keys of one row's whole context in one layer, as dense attention does. By default it is so rare
that it costs nothing, and shows an operator whether a budget fits the model and its prompts. To find a budget, an
operator has it measured more often (``sample_every``).

The share of attention that a selection keeps is the measure of Quest (Tang et al., ICML 2024, arXiv:2406.10774) and of
later work for how well blocks are chosen. It is not the quality of answers, which can only be tested with answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ucm.sparse.topk.selection import SelectionPlan

#: One in so many choices is measured by default. It is prime, so that the layers take turns.
EVERY = 4_099
#: The number of the first one: soon, so that a short trial has a figure, but not in the first step.
FIRST = 64
#: The share of attention of which is told in how much of the context it is.
HELD = 0.95
#: The elements of keys to read at once, so that a long context takes little memory.
AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Sample:
    """A row of a step in one layer, whose attention is still to run.

    Attributes:
        layer_name: The layer.
        request_id: The request.
        query: ``[1, num_heads, head_size]``.
        block_ids: ``[blocks]``, int64: the blocks of its context.
        tokens: The tokens of its context.
        read: ``[n]``, int32: the blocks that it reads; what follows their tokens is not read.
        read_tokens: The number of tokens in them.
    """

    layer_name: str
    request_id: str
    query: Tensor
    block_ids: Tensor
    tokens: int
    read: Tensor
    read_tokens: int


class AttentionSamples:
    """Takes samples, and adds up the shares of attention that were kept.

    Args:
        every: One in so many choices, each of a layer in a step, is measured.

    Attributes:
        taken: The number of samples.
    """

    def __init__(self, every: int) -> None:
        self.taken = 0
        self._every = every
        self._choices = 0
        self._running: Sample | None = None
        #: By layer the number of samples, and the sums of `kept_and_needed` on the device: nothing waits for them.
        self._sums: dict[str, tuple[int, Tensor]] = {}

    def due(self) -> bool:
        """Count a choice of a layer in a step; return whether one of its rows is to be measured."""
        self._running = None
        self._choices += 1
        return self._choices % self._every == FIRST % self._every

    def begin(self, layer_name: str, plan: SelectionPlan, query: Tensor, block_table: Tensor, table: Tensor) -> None:
        """Take one of a choice's rows as a sample.

        Args:
            layer_name: The layer.
            plan: The step's plan.
            query: ``[num_tokens, num_heads, head_size]``.
            block_table: ``[num_reqs or more, max_blocks]``, int32: the dense one.
            table: ``[pieces, blocks]``, int32: the blocks that are read.
        """
        row = self.taken % len(plan.rows)
        piece, token = int(plan.rows[row]), int(plan.tokens[row])
        of_request, blocks = int(plan.pieces.rows[piece]), int(plan.blocks[row])
        self._running = Sample(
            layer_name,
            plan.request_ids[row],
            query[token : token + 1].clone(),
            block_table[of_request, :blocks].long(),
            int(plan.pieces.ends[piece]),
            table[piece].clone(),
            int(plan.seq_lens[piece]),
        )

    def of(self, layer_name: str) -> Sample | None:
        """Return the sample to measure after a layer's attention, if there is one."""
        return self._running if self._running is not None and self._running.layer_name == layer_name else None

    def measure(self, sample: Sample, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Measure a sample, now that the step's keys are in the cache.

        Args:
            sample: From `of`.
            read_keys: Returns the keys of some blocks, ``[n, block_size, num_kv_heads, head_size]``.
        """
        self._running = None
        found = kept_and_needed(sample, read_keys)
        taken, sums = self._sums.get(sample.layer_name, (0, None))
        self._sums[sample.layer_name] = taken + 1, found if sums is None else sums + found
        self.taken += 1

    @property
    def kept(self) -> float:
        """The sum of the shares of attention that the samples kept; reading it waits for the device."""
        return sum(float(sums[0]) for _, sums in self._sums.values())

    def summary(self) -> str:
        """Return what the samples show, for a log line."""
        if not self.taken:
            return "no sample of the attention yet"
        kept, layer = min((float(sums[0]) / taken, name) for name, (taken, sums) in self._sums.items())
        needed = sum(float(sums[1]) for _, sums in self._sums.values())
        return (
            f"{self.kept / self.taken:.1%} of the attention kept in {self.taken} samples, {kept:.1%} in {layer}; "
            f"{HELD:.0%} of it is in {needed / self.taken:.1%} of the context"
        )


def kept_and_needed(sample: Sample, read_keys: Callable[[Tensor], Tensor]) -> Tensor:
    """Return which share of its attention a row gives to what it reads, and the least share of its blocks with `HELD`.

    Both are float64, and the attention is the mean over the heads. Other arguments: see `AttentionSamples.measure`.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    first = read_keys(sample.block_ids[:1])
    size = first.shape[1]
    parts = [
        products(sample.query, read_keys(some)[None])
        for some in sample.block_ids.split(max(1, AT_ONCE // first.numel()))
    ]
    masses = masses_of(torch.cat(parts, -1), size, sample.tokens)[0]
    columns = torch.arange(len(sample.read), device=sample.read.device) * size
    read = sample.read.masked_fill(columns >= sample.read_tokens, -1)
    kept = (masses * torch.isin(sample.block_ids, read)).sum().double()
    # The whole context has it, even if rounding makes the sum smaller.
    needed = ((masses.sort(descending=True).values.cumsum(0) < HELD).sum() + 1).clamp(max=len(masses)) / len(masses)
    return torch.stack((kept, needed.double()))


def products(query: Tensor, keys: Tensor) -> Tensor:
    """Return the scores of each row's tokens, ``[rows, num_kv_heads, group, tokens]``, float32.

    Args:
        query: ``[rows, num_heads, head_size]``.
        keys: ``[rows, blocks, block_size, num_kv_heads, head_size]``.
    """
    rows, _, _, heads, _ = keys.shape
    grouped = query.float().view(rows, heads, -1, query.shape[-1])
    return grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1) * query.shape[-1] ** -0.5


def masses_of(scores: Tensor, block_size: int, tokens: int) -> Tensor:
    """Return the share of their attention that the heads of each row give to each of its blocks, the mean over heads.

    Args:
        scores: The result of `products`, which is changed.
        block_size: The tokens of a block.
        tokens: How many of a row's tokens are read; the others are behind its end.

    Returns:
        ``[rows, blocks]``, float32; the sum of each row is 1.
    """
    scores[..., tokens:] = float("-inf")
    return scores.softmax(-1).unflatten(-1, (-1, block_size)).sum(-1).mean((1, 2))
