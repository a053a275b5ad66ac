"""Which blocks of which rows a step reads: decided on the host from lengths, and on the device from scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import StepBatch


@dataclass(frozen=True)
class BlockBudget:
    """How many blocks of a request a decode step reads.

    Attributes:
        block_size: Tokens in a block.
        sinks: Blocks from the request's start that are always read.
        recent: Blocks up to the newest token's, which may be incomplete, that are always read.
        total: All blocks that are read.
    """

    block_size: int
    sinks: int
    recent: int
    total: int

    @classmethod
    def of_tokens(cls, block_size: int, token_budget: int, sink_tokens: int, recent_tokens: int) -> BlockBudget:
        """Whole blocks: sinks and recent tokens are rounded up, the budget down."""
        recent = -(-recent_tokens // block_size) + 1
        return cls(block_size, -(-sink_tokens // block_size), recent, token_budget // block_size)

    @property
    def chosen(self) -> int:
        """Blocks between the sinks and the recent ones that are read."""
        return self.total - self.sinks - self.recent

    @property
    def least_tokens(self) -> int:
        """The least budget in tokens that leaves a block to choose."""
        return (self.sinks + self.recent + 1) * self.block_size


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows of a step that are read sparsely; all arrays are on the host.

    Attributes:
        budget: How much of each is read.
        request_ids: Of each sparse row.
        rows: ``[sparse]``, int64: their places in the batch.
        tokens: ``[sparse]``, int64: the places of their queries among the step's tokens.
        blocks: ``[sparse]``, int64: blocks that each has.
        seq_lens: ``[num_reqs]``, int32: tokens that each row of the batch reads.
        dense_blocks: The most blocks that a dense row has; 0 if there is none.
        missing: For each sparse row the first and the end of the positions of its blocks whose representatives are to
            be made in this step; ``[sparse, 2]``, int64.
    """

    budget: BlockBudget
    request_ids: tuple[str, ...]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    dense_blocks: int
    missing: NDArray[np.int64]

    @property
    def all_rows(self) -> bool:
        """Whether no row of the batch is dense."""
        return len(self.rows) == len(self.seq_lens)


class Planner:
    """Plans steps, and knows for each request up to which block its representatives are made.

    That is all there is to know: the blocks of a request are its own, or shared and complete, as long as it holds them,
    so what was made of them stays right. When it is admitted anew, or is set back, it starts again.

    Args:
        budget: What a decode reads.
    """

    def __init__(self, budget: BlockBudget) -> None:
        self.budget = budget
        self._made: dict[str, int] = {}

    def plan(self, batch: StepBatch, excluded: set[str]) -> StepPlan | None:
        """The sparse rows of a step, if there are any.

        Args:
            batch: The step.
            excluded: Requests that stay dense.
        """
        budget = self.budget
        for row in np.flatnonzero(batch.admitted | ~batch.decodes):
            self._set_back(batch, int(row))
        blocks = -(-batch.seq_lens // budget.block_size)
        sparse = batch.decodes & (blocks > budget.total)
        if excluded:
            sparse &= np.array([request_id not in excluded for request_id in batch.request_ids])
        rows = np.flatnonzero(sparse)
        if not len(rows):
            return None
        lens = batch.seq_lens.copy()
        lens[rows] -= (blocks[rows] - budget.total) * budget.block_size
        starts = np.cumsum(batch.num_new_tokens) - batch.num_new_tokens
        missing = np.array([self._missing(batch.request_ids[row], int(blocks[row])) for row in rows.tolist()], np.int64)
        dense = blocks[~sparse]
        return StepPlan(
            budget=budget,
            request_ids=tuple(batch.request_ids[row] for row in rows.tolist()),
            rows=rows,
            tokens=starts[rows],
            blocks=blocks[rows],
            seq_lens=lens.astype(np.int32),
            dense_blocks=int(dense.max()) if len(dense) else 0,
            missing=missing,
        )

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._made.pop(request_id, None)

    def _set_back(self, batch: StepBatch, row: int) -> None:
        """What a row holds from here on is written in this step or later, or came with an admission."""
        request_id = batch.request_ids[row]
        whole = 0 if batch.admitted[row] else int(batch.num_computed_tokens[row]) // self.budget.block_size
        if self._made.get(request_id, 0) > whole:
            self._made[request_id] = whole

    def _missing(self, request_id: str, blocks: int) -> tuple[int, int]:
        """The blocks to choose from that have no representatives yet; from now on they have."""
        end = blocks - self.budget.recent
        begin = max(self._made.get(request_id, 0), self.budget.sinks)
        self._made[request_id] = end
        return begin, end


class RestrictedTables:
    """The block tables of a plan: what all layers share is made once.

    Args:
        plan: The plan.
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device.
    """

    def __init__(self, plan: StepPlan, block_table: Tensor) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        budget, device = plan.budget, block_table.device
        self._plan = plan
        self._rows = torch.from_numpy(plan.rows).to(device)
        most = int(plan.blocks.max())
        whole = block_table[: len(plan.seq_lens)]
        #: ``[sparse, most]``: the whole rows of those that are sparse.
        mine = whole[:, :most] if plan.all_rows else whole[self._rows, :most]
        self._dense = None if plan.all_rows else whole[:, : max(plan.dense_blocks, budget.total)]
        self._sinks = mine[:, : budget.sinks]
        ends = torch.from_numpy(plan.blocks).to(device)
        newest = ends[:, None] + torch.arange(-budget.recent, 0, device=device)
        self._recent = mine.gather(1, newest)
        #: ``[sparse, candidates]``, int64: the blocks to choose from; the last ones of shorter rows are `hidden`.
        self.candidates = mine[:, budget.sinks : most - budget.recent].long()
        last = ends - budget.recent - budget.sinks
        #: ``[sparse, candidates]``: those that stand behind the end of a shorter row; None if there are none.
        self.hidden = None
        if len(set(plan.blocks.tolist())) > 1:
            self.hidden = torch.arange(self.candidates.shape[1], device=device) >= last[:, None]
        self.tokens = torch.from_numpy(plan.tokens).to(device)
        self.seq_lens = torch.from_numpy(plan.seq_lens).to(device)
        self.max_seq_len = int(plan.seq_lens.max())
        ranges = [mine[row, begin:end] for row, (begin, end) in enumerate(plan.missing.tolist()) if end > begin]
        #: ``[n]``, int64: blocks whose representatives are to be made; None if there are none.
        self.missing = torch.cat(ranges).long() if ranges else None

    def choose(self, scores: Tensor) -> Tensor:
        """The block table of a layer: sinks, the best of the candidates in the order of their positions, recent blocks.

        Args:
            scores: ``[sparse, candidates]``: how much each is wanted.

        Returns:
            ``[num_reqs, blocks]``, int32; dense rows are whole.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        best = scores.topk(self._plan.budget.chosen, -1, sorted=False).indices.sort(-1).values
        chosen = self.candidates.gather(1, best).to(self._sinks.dtype)
        table = torch.cat((self._sinks, chosen, self._recent), 1)
        if self._dense is None:
            return table
        whole = self._dense.clone()
        whole[self._rows, : table.shape[1]] = table
        return whole
