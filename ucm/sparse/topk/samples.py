"""How much of a decode's attention a choice of blocks keeps, measured now and then while a method serves.

A measurement reads the keys of one row's whole context in one layer, as dense attention does. By default it is so rare
that it costs nothing, and shows an operator whether a budget fits the model and its prompts. To find a budget, an
operator has it measured more often (``sample_every``).

The share of attention that a selection keeps is the measure of Quest (Tang et al., ICML 2024, arXiv:2406.10774) and of
later work for how well blocks are chosen. It is not the quality of answers, which can only be tested with answers.
"""

from __future__ import annotations

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
        #: By layer the number of samples, and the sums of `kept_and_needed` on the device: nothing waits for them.
        self._sums: dict[str, tuple[int, Tensor]] = {}

    def due(self) -> bool:
        """Count a choice of a layer in a step; return whether one of its rows is to be measured."""
        self._choices += 1
        return self._choices % self._every == FIRST % self._every

    def measure(
        self,
        layer_name: str,
        plan: SelectionPlan,
        query: Tensor,
        block_table: Tensor,
        table: Tensor,
        read_keys: Callable[[Tensor], Tensor],
    ) -> None:
        """Measure one of a choice's rows; they take turns.

        Args:
            layer_name: The layer.
            plan: The step's plan.
            query: ``[num_tokens, num_heads, head_size]``.
            block_table: ``[num_reqs or more, max_blocks]``, int32: the dense one.
            table: ``[pieces, blocks]``, int32: the blocks that are read.
            read_keys: Returns the keys of some blocks, ``[n, block_size, num_kv_heads, head_size]``.
        """
        row = self.taken % len(plan.rows)
        piece, token = int(plan.rows[row]), int(plan.tokens[row])
        of_step = int(plan.pieces.rows[piece])
        held = block_table[of_step, : int(plan.blocks[row])].long()
        # What follows the blocks that it reads is in the table only because other rows are longer.
        read = table[piece, : int(plan.totals[row])]
        before = int(plan.pieces.begins[plan.pieces.rows.searchsorted(of_step)])
        found = kept_and_needed(query[token : token + 1], held, before, read, read_keys)
        taken, sums = self._sums.get(layer_name, (0, None))
        self._sums[layer_name] = taken + 1, found if sums is None else sums + found
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


def kept_and_needed(
    query: Tensor, held: Tensor, tokens: int, read: Tensor, read_keys: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return which share of its attention a row gives to what it reads, and the least share of its blocks with `HELD`.

    Both are float64, and the attention is the mean over the heads. The step's own tokens are left out: their keys may
    not be in the cache yet.

    Args:
        query: ``[1, num_heads, head_size]``.
        held: ``[blocks]``, int64: the blocks of the row's context.
        tokens: The tokens of its context before the step.
        read: ``[n]``, int32: the blocks that it reads.
        read_keys: See `AttentionSamples.measure`.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    first = read_keys(held[:1])
    _, block_size, heads, head_size = first.shape
    grouped, scores = query.float().view(heads, -1, head_size), []
    for some in held.split(max(1, AT_ONCE // first.numel())):
        keys = read_keys(some).float().flatten(0, 1).permute(1, 2, 0)
        scores.append(grouped @ keys * head_size**-0.5)
    weights = torch.cat(scores, -1)
    weights[..., tokens:] = float("-inf")
    masses = weights.softmax(-1).unflatten(-1, (-1, block_size)).sum(-1).mean((0, 1))
    kept = (masses * torch.isin(held, read)).sum().double()
    # The whole context has it, even if rounding makes the sum smaller.
    needed = ((masses.sort(descending=True).values.cumsum(0) < HELD).sum() + 1).clamp(max=len(masses)) / len(masses)
    return torch.stack((kept, needed.double()))
