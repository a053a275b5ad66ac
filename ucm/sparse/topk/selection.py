"""Choose the blocks that a step reads: how many, on the host by lengths; which ones, on the device by scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucm.errors import SparseMethodError
from ucm.sparse.blocks import QueryPieces
from ucm.sparse.tables import ReadTables
from ucm.sparse.topk.codes import ranked

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import StepBatch

#: The tokens that a step must leave out to be worthwhile. Choosing has a cost of its own in each layer: on two cores,
#: with a single request and 8 KV heads of 128 channels, up to that of attention over this many tokens.
WORTHWHILE = 6_144


@dataclass(frozen=True)
class BlockBudget:
    """The number of blocks of a request that a decode step reads.

    Attributes:
        block_size: The tokens of a block.
        sinks: The number of first blocks, which are always read.
        recent: The number of last blocks, which are always read; the last one may be incomplete.
        total: The number of all blocks that are read.
        share: The share of a request's blocks that is read if that is more; 0 for `total` at any length.
    """

    block_size: int
    sinks: int
    recent: int
    total: int
    share: float = 0.0

    @classmethod
    def of_tokens(
        cls, block_size: int, token_budget: int, sink_tokens: int, recent_tokens: int, share: float = 0.0
    ) -> BlockBudget:
        """Convert tokens to whole blocks; sinks and recent tokens are rounded up, the budget down."""
        recent = -(-recent_tokens // block_size) + 1
        return cls(block_size, -(-sink_tokens // block_size), recent, token_budget // block_size, share)

    @property
    def chosen(self) -> int:
        """The number of blocks to choose between the sinks and the recent blocks."""
        return self.total - self.sinks - self.recent

    @property
    def least_tokens(self) -> int:
        """The smallest budget in tokens that leaves a block to choose."""
        return (self.sinks + self.recent + 1) * self.block_size


@dataclass(frozen=True, eq=False)
class MissingBlocks:
    """Blocks that were complete before a step and have no representatives yet.

    Attributes:
        request_ids: The requests with such blocks.
        rows: ``[n]``, int64: their rows in the step.
        begins: ``[n]``, int64: the position of the first block of each.
        ends: ``[n]``, int64: the position after its last.
    """

    request_ids: list[str]
    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def ids(self, block_table: Tensor) -> Tensor:
        """Return the ids of the blocks, ``[blocks]``, int64, in one operation on the device.

        Args:
            block_table: ``[num_reqs or more, max_blocks]``, int32.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        counts = self.ends - self.begins
        places = np.arange(counts.sum()) + np.repeat(self.begins - (counts.cumsum() - counts), counts)
        both = torch.from_numpy(np.stack((self.rows.repeat(counts), places))).to(block_table.device, non_blocking=True)
        return block_table[both[0], both[1]].long()


@dataclass(frozen=True, eq=False)
class SelectionPlan:
    """The rows of a step that read only some of their blocks (sparse rows); all arrays are on the host.

    Each row is a piece of one of the step's rows: every generated token is a piece of its own, even if a step computes
    several at once, as after a preemption.

    Attributes:
        budget: What each row reads.
        pieces: All rows, sparse and dense.
        request_ids: The request of each sparse row.
        rows: ``[sparse]``, int64: the indices of the sparse rows among the pieces.
        tokens: ``[sparse]``, int64: the indices of their queries among the step's tokens.
        blocks: ``[sparse]``, int64: the number of blocks that each row has.
        totals: ``[sparse]``, int64: the number of blocks that each row reads.
        seq_lens: ``[pieces]``, int32: the number of tokens that each piece reads.
    """

    budget: BlockBudget
    pieces: QueryPieces
    request_ids: tuple[str, ...]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    totals: NDArray[np.int64]
    seq_lens: NDArray[np.int32]


def dense_tokens(tokens: NDArray[np.int64], min_context: int | None) -> NDArray[np.int64]:
    """Return the largest number of tokens with which requests are dense, by their budgets in tokens."""
    least = tokens + WORTHWHILE if min_context is None else min_context
    found: NDArray[np.int64] = np.maximum(tokens, least - 1)
    return found


class SelectionPlanner:
    """Plans steps, and tracks for each request up to which block its representatives are computed.

    As long as a request holds its blocks, they are its own, or shared and complete, so their representatives stay
    valid.

    Args:
        budget: What a decode reads.
        min_context: Requests with fewer tokens are dense, even if they exceed their budget; None for those with fewer
            than `WORTHWHILE` beyond their own budget.
    """

    def __init__(self, budget: BlockBudget, min_context: int | None = 0) -> None:
        self.budget = budget
        self._min_context = min_context
        self._own: dict[str, BlockBudget] = {}
        self._made: dict[str, int] = {}

    def give(self, request_id: str, budget: BlockBudget) -> None:
        """Give a request a budget of its own, until it is forgotten.

        Args:
            request_id: The request.
            budget: Its budget; sinks and recent blocks are the planner's.
        """
        self._own[request_id] = budget

    def plan(self, batch: StepBatch, excluded: AbstractSet[str]) -> SelectionPlan | None:
        """Return the sparse rows of a step, or None if all rows are dense.

        Args:
            batch: The step.
            excluded: Requests that stay dense.
        """
        budget = self.budget
        totals = self._totals(batch)
        dense_tokens = self._dense_tokens(totals)
        pieces = self._pieces(batch, dense_tokens)
        blocks = -(-pieces.ends // budget.block_size)
        totals = self._longer(batch, pieces, blocks, totals[pieces.rows])
        sparse = (pieces.begins + 1 == pieces.ends) & (pieces.begins >= batch.num_prompt_tokens[pieces.rows])
        sparse &= (blocks > totals) & (pieces.ends > dense_tokens[pieces.rows])
        if excluded:
            sparse &= np.array([batch.request_ids[row] not in excluded for row in pieces.rows.tolist()])
        rows = np.flatnonzero(sparse)
        if not len(rows):
            return None
        lens = pieces.ends.copy()
        lens[rows] -= (blocks - totals)[rows] * budget.block_size
        counts = pieces.ends - pieces.begins
        request_ids = tuple(batch.request_ids[row] for row in pieces.rows[rows].tolist())
        known = batch.num_computed_tokens[pieces.rows] // budget.block_size
        if (blocks - budget.recent > known)[rows].any():
            raise SparseMethodError(
                "a step computes more tokens of an answer than the last of them may choose blocks without",
                where="the hook limit_new_tokens of the scheduler",
                fix="build the overlay anew, and install it in every environment of the engine",
            )
        return SelectionPlan(
            budget=budget,
            pieces=pieces,
            request_ids=request_ids,
            rows=rows,
            tokens=(counts.cumsum() - counts)[rows],
            blocks=blocks[rows],
            totals=totals[rows],
            seq_lens=lens.astype(np.int32),
        )

    def missing(self, batch: StepBatch, excluded: AbstractSet[str]) -> MissingBlocks | None:
        """Return the blocks whose representatives this step makes, and record that they have them.

        Those of a prompt that fits into the budget are left to the step that outgrows it. A request starts anew with
        blocks that a step writes again, for instance because drafts were rejected, and with all when it is admitted.

        Args:
            batch: The step.
            excluded: Requests that stay dense.
        """
        budget = self.budget
        ends = batch.num_computed_tokens // budget.block_size
        made = np.array([self._made.get(request_id, 0) for request_id in batch.request_ids], np.int64)
        made = np.where(batch.admitted, 0, np.minimum(made, ends))
        begins = np.maximum(made, budget.sinks)
        longest = np.maximum(batch.num_prompt_tokens, batch.seq_lens)
        wanted = (longest > self._dense_tokens(self._totals(batch))) & (begins < ends)
        wanted &= np.array([request_id not in excluded for request_id in batch.request_ids], np.bool_)
        self._made.update(zip(batch.request_ids, np.where(wanted, ends, made).tolist(), strict=True))
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return None
        return MissingBlocks([batch.request_ids[row] for row in rows.tolist()], rows, begins[rows], ends[rows])

    def most_dense(self, request_id: str) -> int:
        """Return the largest context, in tokens, with which a request is dense."""
        return int(self._dense_tokens(np.array([self._of(request_id).total]))[0])

    def _totals(self, batch: StepBatch) -> NDArray[np.int64]:
        """Return the number of blocks that a decode of each request reads, ``[num_reqs]``."""
        return np.array([self._of(request_id).total for request_id in batch.request_ids], np.int64)

    def _longer(
        self, batch: StepBatch, pieces: QueryPieces, blocks: NDArray[np.int64], totals: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the blocks that each piece reads, with the shares of longer contexts: it depends on positions only."""
        shares = np.array([self._of(request_id).share for request_id in batch.request_ids])
        # 0.29 x 100 is a little less than 29.
        found: NDArray[np.int64] = np.maximum(totals, (blocks * shares[pieces.rows] + 1e-9).astype(np.int64))
        return found

    def _of(self, request_id: str) -> BlockBudget:
        return self._own.get(request_id, self.budget)

    def _dense_tokens(self, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the largest number of tokens with which each request is dense, ``[num_reqs]``."""
        return dense_tokens(totals * self.budget.block_size, self._min_context)

    def _pieces(self, batch: StepBatch, dense_tokens: NDArray[np.int64]) -> QueryPieces:
        """Cut the step's rows so that each generated token that may be sparse is a piece of its own."""
        whole = QueryPieces.of_rows(batch)
        first = np.maximum(batch.num_prompt_tokens, dense_tokens)
        if not ((batch.num_new_tokens > 1) & (whole.ends > first)).any():
            return whole
        bounds = zip(whole.begins.tolist(), whole.ends.tolist(), first.tolist(), strict=True)
        return whole.cut([range(max(begin + 1, first), end) for begin, end, first in bounds])

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        self.forget_made(request_id)
        self._own.pop(request_id, None)

    def forget_made(self, request_id: str) -> None:
        """Forget the representatives of a request."""
        self._made.pop(request_id, None)


class RestrictedTables(ReadTables):
    """The block tables of a plan; see `ReadTables`.

    Args:
        plan: The plan.
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device.
    """

    def __init__(self, plan: SelectionPlan, block_table: Tensor) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        budget, device, of_table = plan.budget, block_table.device, plan.pieces.rows
        left_out, named = np.zeros((2, len(of_table)), np.int64)
        left_out[plan.rows] = plan.blocks - plan.totals
        named[plan.rows] = chosen = plan.totals - budget.sinks - budget.recent
        super().__init__(block_table, of_table, plan.seq_lens, left_out, budget.sinks, budget.block_size, named)
        #: The largest number of blocks that a row chooses; and each row's, ``[sparse, 1]``, int64, if they differ.
        self._most_chosen = int(chosen.max())
        self._chosen = None if (chosen == chosen[0]).all() else torch.from_numpy(chosen).to(device)[:, None]
        sparse = np.zeros_like(named)
        sparse[plan.rows] = np.arange(len(chosen))
        #: Which of ``[sparse, most]`` chosen blocks the cells are.
        self._taken = torch.from_numpy(sparse).to(device)[self.cells[0]], self.cells[1] - budget.sinks
        mine = torch.from_numpy(of_table[plan.rows]).to(device)
        last = int(plan.blocks.max()) - budget.recent
        #: ``[sparse, candidates]``, int64: the blocks to choose from; shorter rows end with padding, see `hidden`.
        self.candidates = block_table[mine, budget.sinks : last].long()
        #: ``[sparse, candidates]``: whether an entry is padding behind the end of a shorter row; None if none is.
        self.hidden = None
        if (plan.blocks != plan.blocks[0]).any():
            ends = torch.from_numpy(plan.blocks - budget.recent - budget.sinks).to(device)
            self.hidden = torch.arange(self.candidates.shape[1], device=device) >= ends[:, None]
        #: ``[sparse]``, int64: the queries of these rows among the step's tokens.
        self.tokens = torch.from_numpy(plan.tokens).to(device)
        #: The number of queries of each row; None if each request is one row.
        self.split = plan.pieces.split(device)

    def choose(self, scores: Tensor) -> Tensor:
        """Return what a layer reads: sinks, the best candidates in the order of their positions, recent blocks.

        Args:
            scores: ``[sparse, candidates]``, int64: the score of each candidate, summed over the heads of all ranks.

        Returns:
            The block table, ``[pieces, blocks]``, int32: dense rows are complete, and entries beyond a row's length are
            valid block ids.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        order = ranked(scores)
        if self.hidden is not None:
            order = order.masked_fill(self.hidden, -1)
        best = order.topk(self._most_chosen, -1, sorted=self._chosen is not None).indices
        if self._chosen is not None:  # the surplus entries of a row that chooses fewer blocks come last
            places = torch.arange(self._most_chosen, device=best.device)
            best = best.masked_fill(places >= self._chosen, self.candidates.shape[1] - 1)
        return self.naming(self.candidates.gather(1, best.sort(-1).values)[self._taken])
