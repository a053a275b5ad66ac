"""How much of a decode's attention a choice of blocks keeps, measured now and then while a method serves.

A measurement reads the keys of one row's whole context in one layer, as dense attention does. It is so rare that it
costs nothing, and shows an operator whether a budget fits the model and its prompts. `ucm sparse probe` measures all
layers before a method is switched on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ucm.sparse.topk.selection import SelectionPlan

#: One in so many choices, each of a layer in a step, is measured. It is prime, so that the layers take turns.
EVERY = 4_099
#: The number of the first one: soon, so that a short trial has a figure, but not in the first step.
FIRST = 64
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
        read_tokens: int32, without dimensions, on the device: the number of tokens in them.
    """

    layer_name: str
    request_id: str
    query: Tensor
    block_ids: Tensor
    tokens: int
    read: Tensor
    read_tokens: Tensor


class AttentionSamples:
    """Takes samples, and adds up the shares of attention that were kept.

    Attributes:
        taken: The number of samples.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._choices = 0
        self._running: Sample | None = None
        self._kept: Tensor | None = None  # on the device, so that nothing waits for it

    def due(self) -> bool:
        """Count a choice of a layer in a step; return whether one of its rows is to be measured."""
        self._running = None
        self._choices += 1
        return self._choices % EVERY == FIRST

    def begin(
        self, layer_name: str, plan: SelectionPlan, query: Tensor, block_table: Tensor, table: Tensor, lens: Tensor
    ) -> None:
        """Take one of a choice's rows as a sample.

        Args:
            layer_name: The layer.
            plan: The step's plan.
            query: ``[num_tokens, num_heads, head_size]``.
            block_table: ``[num_reqs or more, max_blocks]``, int32: the dense one.
            table: ``[pieces, blocks]``, int32: the blocks that are read.
            lens: ``[pieces]``, int32: the number of tokens in them.
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
            lens[piece].clone(),
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
        kept = kept_share(sample, read_keys)
        self._kept = kept if self._kept is None else self._kept + kept
        self.taken += 1

    @property
    def kept(self) -> float:
        """The sum of the shares of attention that the samples kept; reading it waits for the device."""
        return 0.0 if self._kept is None else float(self._kept)

    def summary(self) -> str:
        """Return what the samples show, for a log line."""
        if not self.taken:
            return "no sample of the attention yet"
        return f"{self.kept / self.taken:.1%} of the attention kept in {self.taken} samples"


def kept_share(sample: Sample, read_keys: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the share of its attention that a row gives to what it reads: float64, without dimensions.

    It is the mean over the heads. Other arguments: see `AttentionSamples.measure`.
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
    return (masses * torch.isin(sample.block_ids, read)).sum().double()


def block_masses(query: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """Return the share of their attention that the heads of each row give to each of its blocks, the mean over heads.

    Args:
        query: ``[rows, num_heads, head_size]``.
        keys: ``[rows, blocks, block_size, num_kv_heads, head_size]``.
        tokens: How many of a row's tokens are read; the others are behind its end.

    Returns:
        ``[rows, blocks]``, float32; the sum of each row is 1.
    """
    return masses_of(products(query, keys), keys.shape[2], tokens)


def products(query: Tensor, keys: Tensor) -> Tensor:
    """Return the scores of each row's tokens, ``[rows, num_kv_heads, group, tokens]``, float32; see `block_masses`."""
    rows, _, _, heads, _ = keys.shape
    grouped = query.float().view(rows, heads, -1, query.shape[-1])
    return grouped @ keys.float().flatten(1, 2).permute(0, 2, 3, 1) * query.shape[-1] ** -0.5


def masses_of(scores: Tensor, block_size: int, tokens: int) -> Tensor:
    """Return `block_masses` from `products`, which are changed."""
    scores[..., tokens:] = float("-inf")
    return scores.softmax(-1).unflatten(-1, (-1, block_size)).sum(-1).mean((1, 2))
