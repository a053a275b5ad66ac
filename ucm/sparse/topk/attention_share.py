"""A sparse method that restricts nothing and measures what restricting would lose: for ``ucm sparse probe``.

In some decode steps it reads the keys of the whole context in every layer, computes the true attention of the newest
token, and compares what `BlockTopK` and `ESA` would keep of it within a budget, by ``codes``. Beside these stand what
bounds them from above (``oracle``: the blocks with the most attention) and what they must beat (``mean``: blocks ranked
by their mean key; ``random``: the expectation for blocks chosen by chance).

The share of attention that a selection keeps is the measure of Quest (Tang et al., ICML 2024, arXiv:2406.10774) and of
later work for how well blocks are chosen. It is not the quality of answers, which can only be tested with answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from ucm.sparse.base import Role, SparseMethod, require_hooks
from ucm.sparse.options import MethodOptions, parse_options
from ucm.sparse.topk.codes import KeyCodes
from ucm.sparse.topk.representatives import WHOLE, Representatives, ranked
from ucm.sparse.topk.samples import block_masses
from ucm.sparse.topk.selection import BlockBudget

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

ORACLE, MEAN, RANDOM = "oracle", "mean", "random"
#: The shares of attention for which the smallest sufficient share of the context is reported.
TARGETS = (0.9, 0.95, 0.99)


class KeyMeans(Representatives):
    """The mean of each block's keys: the simplest representative."""

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        super().__init__(num_blocks, keys)
        #: ``[num_blocks, num_kv_heads, head_size]``
        self._kept = keys.new_zeros((num_blocks, *keys.shape[2:]))

    def _stored(self) -> tuple[Tensor, ...]:
        return (self._kept,)

    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        """Store the means of these keys."""
        self._kept[block_ids] = keys.mean(1)

    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        """Return the product of each query head with each block's mean key."""
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        means = self._kept[block_ids].float()
        grouped = query.float().unflatten(1, (means.shape[2], -1))
        return torch.einsum("rkgd,rbkd->krgb", grouped, means) * query.shape[-1] ** -0.5

    def _elements(self, num_heads: int, blocks: int) -> int:
        return int(num_heads + self._kept[0].numel()) * blocks


_REPRESENTATIVES: Mapping[str, type[Representatives]] = {"codes": KeyCodes, MEAN: KeyMeans}
#: In the order of the report: the best possible selector, the shipped ones, and those that these must beat.
COMPARED = (ORACLE, *_REPRESENTATIVES, RANDOM)


class MassProbeOptions(MethodOptions):
    """The options that `ucm sparse probe` sets.

    Attributes:
        budgets: Shares of the context's blocks that a decode step may read, each above 0 and at most 1; rounded up.
        every: Measure every so many decode steps.
        sink_tokens: As in `BlockTopKOptions`.
        recent_tokens: As in `BlockTopKOptions`.
    """

    budgets: list[float] = Field(default=[0.05, 0.1, 0.25, 0.5], description="shares above 0 and at most 1")
    every: int = Field(default=4, ge=1, description="a number of steps, 1 or more")
    sink_tokens: int = Field(default=4, ge=0, description="a number of tokens, 0 or more")
    recent_tokens: int = Field(default=64, ge=0, description="a number of tokens, 0 or more")

    @field_validator("budgets")
    @classmethod
    def _shares(cls, budgets: list[float]) -> list[float]:
        if not budgets or not all(0 < share <= 1 for share in budgets):
            raise ValueError("the budgets must be shares above 0 and at most 1")
        return sorted(set(budgets))


@dataclass(slots=True)
class LayerMasses:
    """Sums over the samples of one layer.

    Attributes:
        samples: The number of measured decodes.
        kept: The sum of the shares of attention that the selection keeps, by budget and selector.
        counted: The number of samples by budget: those whose context is large enough for a choice.
        needed: The sum of the smallest shares of the context's blocks that have the target's attention, by target.
        worst: The largest of these shares, by target.
    """

    samples: int = 0
    kept: dict[float, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    counted: dict[float, int] = field(default_factory=lambda: defaultdict(int))
    needed: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    worst: dict[float, float] = field(default_factory=lambda: defaultdict(float))

    def as_data(self) -> dict[str, Any]:
        """Return the means as plain data; the keys are this class's attributes."""
        return {
            "samples": self.samples,
            "kept": {
                str(share): {name: total / self.counted[share] for name, total in by_name.items()}
                for share, by_name in sorted(self.kept.items())
            },
            "counted": {str(share): count for share, count in sorted(self.counted.items())},
            "needed": {str(target): total / self.samples for target, total in self.needed.items()},
            "worst": {str(target): share for target, share in self.worst.items()},
        }


class MassProbe(SparseMethod):
    """Measures the attention that budgets of blocks would keep; reads everything.

    Attributes:
        layers: The measurements, by layer name.
        lengths: The shortest and the longest measured context, in tokens.

    Raises:
        ConfigError: An option is wrong.
        SparseMethodError: Its hooks are switched off, or the engine or a layer cannot be measured.
    """

    options_type = MassProbeOptions
    needed_hooks = ("ATTENTION", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        require_hooks(type(self).__name__, self.needed_hooks)
        self._options = parse_options(MassProbeOptions, type(self).__name__, options)
        self._steps = 0
        #: The step's measured rows: the row, the index of its query among the step's tokens, and its context length.
        self._rows: list[tuple[int, int, int]] = []
        self.layers: dict[str, LayerMasses] = defaultdict(LayerMasses)
        self.lengths: tuple[int, int] | None = None

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return True: everything is dense."""
        del options
        return True

    def worker_started(self) -> None:
        """Refuse an engine whose keys cannot be read."""
        self.attention.require_engine()

    def layer_seen(self, layer_name: str) -> None:
        """Refuse a layer whose keys cannot be read."""
        self.attention.require(layer_name, reads_keys=True)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Choose the decodes to measure in this step."""
        batch = self.attention.batch(runner, scheduler_output, input_batch)
        self._rows = []
        decodes = np.flatnonzero(batch.decodes).tolist()
        if decodes:
            self._steps += 1
            if self._steps % self._options.every == 0:
                places = (batch.num_new_tokens.cumsum() - 1).tolist()
                self._rows = [(row, places[row], int(batch.seq_lens[row])) for row in decodes]

    def attention_finished(
        self, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        """Measure the layer, now that the step's keys are in the cache."""
        del output
        if not self._rows:
            return
        table = self.attention.block_table(attn_metadata)
        size = self.attention.block_size(layer_name, kv_cache)
        for row, place, tokens in self._rows:
            block_ids = table[row, : -(-tokens // size)].long()
            keys = self.attention.read_keys(layer_name, kv_cache, block_ids)
            self._measure(self.layers[layer_name], query[place : place + 1], keys, tokens)
            shortest, longest = self.lengths or (tokens, tokens)
            self.lengths = min(shortest, tokens), max(longest, tokens)

    def report(self) -> dict[str, Any]:
        """Return the measurements of this worker's layers as plain data, for all heads, including other workers'.

        Returns:
            ``layers``, `LayerMasses` by layer name; ``lengths``, the shortest and the longest context or None.
        """
        return {
            "layers": {name: layer.as_data() for name, layer in self.layers.items()},
            "lengths": list(self.lengths) if self.lengths else None,
        }

    def _measure(self, layer: LayerMasses, query: Tensor, keys: Tensor, tokens: int) -> None:
        """Add one decode.

        Args:
            layer: The layer's sums.
            query: ``[1, num_heads, head_size]``.
            keys: ``[blocks, block_size, num_kv_heads, head_size]``: the whole context.
            tokens: The number of tokens in it.
        """
        blocks, size = keys.shape[:2]
        masses = self._over_ranks(block_masses(query, keys[None], tokens)[0].double() * WHOLE) / WHOLE
        masses /= self.attention.ranks
        layer.samples += 1
        ordered = masses.sort(descending=True).values.cumsum(0)
        for target in TARGETS:
            # The whole context suffices, even if rounding makes the sum smaller than the target.
            share = min(int((ordered < target).sum()) + 1, blocks) / blocks
            layer.needed[target] += share
            layer.worst[target] = max(layer.worst[target], share)
        for share, budget in self._budgets(size, blocks):
            layer.counted[share] += 1
            between = slice(budget.sinks, blocks - budget.recent)
            always = float(masses.sum() - masses[between].sum())
            for name, kept in self._kept(query, keys[between], masses[between], budget.chosen):
                layer.kept[share][name] += always + kept

    def _budgets(self, size: int, blocks: int) -> Iterator[tuple[float, BlockBudget]]:
        """Yield the budgets with which there are blocks to choose and blocks to leave out."""
        options = self._options
        for share in options.budgets:
            read = math.ceil(share * blocks) * size
            budget = BlockBudget.of_tokens(size, read, options.sink_tokens, options.recent_tokens)
            if 0 < budget.chosen < blocks - budget.sinks - budget.recent:
                yield share, budget

    def _kept(self, query: Tensor, keys: Tensor, masses: Tensor, chosen: int) -> Iterator[tuple[str, float]]:
        """Yield the share of the attention that each selector's choice among some blocks keeps.

        Args:
            query: ``[1, num_heads, head_size]``.
            keys: ``[blocks, block_size, num_kv_heads, head_size]``.
            masses: ``[blocks]``: the true shares of the attention.
            chosen: The number of blocks to choose.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        yield ORACLE, float(masses.topk(chosen).values.sum())
        places = torch.arange(len(keys), device=keys.device)
        for name, kind in _REPRESENTATIVES.items():
            made = kind(len(keys), keys[:1])
            made.update(places, lambda some: keys[some])
            best = ranked(self._over_ranks(made.shares(query, places[None], None))).topk(chosen, -1).indices[0]
            yield name, float(masses[best].sum())
        yield RANDOM, float(masses.sum()) * chosen / len(masses)

    def _over_ranks(self, shares: Tensor) -> Tensor:
        """Sum shares over the workers with a layer's other heads, because all make the same choice."""
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        return self.attention.sum_over_ranks(shares.to(torch.int64))
