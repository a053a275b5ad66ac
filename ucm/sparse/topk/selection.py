"""Which blocks of which rows a step reads: decided on the host from lengths, and on the device from scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucm.sparse.pieces import QueryPieces
from ucm.sparse.topk.representatives import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True, slots=True)
class FreshBlocks:
    """Blocks of a request that are completed by tokens of the step; whether these are in the cache yet, is not known.

    Attributes:
        piece: A piece of the request.
        begin: The position of the first block.
        end: The position behind the last one.
        written: Tokens of the request that are in the cache for certain.
        token: The place of the next one among the step's tokens.
    """

    piece: int
    begin: int
    end: int
    written: int
    token: int


def with_new_keys(keys: Tensor, new: Tensor, fresh: FreshBlocks) -> Tensor:
    """The keys of blocks that the step's tokens complete, whether or not these are in the cache yet.

    Args:
        keys: ``[blocks, block_size, num_kv_heads, head_size]``: what the cache holds.
        new: ``[num_tokens, num_kv_heads, head_size]``: the keys of the step's tokens.
        fresh: Which blocks these are.
    """
    flat = keys.flatten(0, 1).clone()
    first = fresh.begin * keys.shape[1]
    known = max(0, fresh.written - first)
    start = fresh.token + first + known - fresh.written
    flat[known:] = new[start : start + len(flat) - known].to(flat.dtype)
    return flat.view_as(keys)


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """Blocks of a request that are complete after a step and have no representatives yet.

    Attributes:
        request_id: The request.
        row: Its row in the step.
        begin: The position of the first block.
        end: The position behind the last one.
    """

    request_id: str
    row: int
    begin: int
    end: int


def completed_ids(completed: Sequence[CompletedBlocks], block_table: Tensor) -> Tensor:
    """The ids of completed blocks, ``[n]``, int64.

    Args:
        completed: At least one.
        block_table: ``[num_reqs or more, max_blocks]``, int32.
    """
    import torch  # noqa: PLC0415 - imported where vLLM has brought it

    return torch.cat([block_table[of.row, of.begin : of.end] for of in completed]).long()


@dataclass(frozen=True, eq=False)
class SelectionPlan:
    """The rows of a step that are read sparsely; all arrays are on the host.

    A row is a piece of one of the step's: each generated token is one, also where several are computed at once, as
    after a preemption.

    Attributes:
        budget: How much of each is read.
        pieces: All rows.
        request_ids: Of each sparse row.
        rows: ``[sparse]``, int64: their places among the pieces.
        tokens: ``[sparse]``, int64: the places of their queries among the step's tokens.
        blocks: ``[sparse]``, int64: blocks that each has.
        totals: ``[sparse]``, int64: blocks that each reads; of `budget`, unless its request has a budget of its own.
        seq_lens: ``[pieces]``, int32: tokens that each piece reads.
        dense_blocks: The most blocks that a dense piece has; 0 if there is none.
        missing: For each sparse row the first and the end of the positions of its blocks whose representatives are to
            be made in this step; ``[sparse, 2]``, int64.
        fresh: Of sparse rows whose missing blocks hold tokens of this very step.
    """

    budget: BlockBudget
    pieces: QueryPieces
    request_ids: tuple[str, ...]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    totals: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    dense_blocks: int
    missing: NDArray[np.int64]
    fresh: tuple[FreshBlocks, ...]

    @property
    def all_rows(self) -> bool:
        """Whether no piece is dense."""
        return len(self.rows) == len(self.seq_lens)


class SelectionPlanner:
    """Plans steps, and knows for each request up to which block its representatives are made.

    That is all there is to know: the blocks of a request are its own, or shared and complete, as long as it holds them,
    so what was made of them stays right. When it is admitted anew, or is set back, it starts again.

    Args:
        budget: What a decode reads.
        min_context: Tokens below which a request is dense, even where it has more than its budget.
    """

    def __init__(self, budget: BlockBudget, min_context: int = 0) -> None:
        self.budget = budget
        self._min_context = min_context
        self._own_totals: dict[str, int] = {}
        self._made: dict[str, int] = {}

    def give(self, request_id: str, budget: BlockBudget) -> None:
        """A request has a budget of its own, from now until it is forgotten.

        Args:
            request_id: The request.
            budget: It differs from `budget` in its total alone.
        """
        self._own_totals[request_id] = budget.total

    def plan(self, batch: StepBatch, excluded: set[str]) -> SelectionPlan | None:
        """The sparse rows of a step, if there are any.

        Args:
            batch: The step.
            excluded: Requests that stay dense.
        """
        budget = self.budget
        for row in np.flatnonzero(batch.admitted | ~batch.decodes):
            self._set_back(batch, int(row))
        totals = self._totals(batch)
        pieces = self._pieces(batch, totals)
        blocks, totals = -(-pieces.ends // budget.block_size), totals[pieces.rows]
        sparse = (pieces.begins + 1 == pieces.ends) & (pieces.begins >= batch.num_prompt_tokens[pieces.rows])
        sparse &= (blocks > totals) & (pieces.ends >= self._min_context)
        if excluded:
            sparse &= np.array([batch.request_ids[row] not in excluded for row in pieces.rows.tolist()])
        rows = np.flatnonzero(sparse)
        if not len(rows):
            return None
        lens = pieces.ends.copy()
        lens[rows] -= (blocks - totals)[rows] * budget.block_size
        counts = pieces.ends - pieces.begins
        request_ids = tuple(batch.request_ids[row] for row in pieces.rows[rows].tolist())
        missing = np.array(
            [self._missing(of, end) for of, end in zip(request_ids, blocks[rows].tolist(), strict=True)], np.int64
        )
        dense = blocks[~sparse]
        return SelectionPlan(
            budget=budget,
            pieces=pieces,
            request_ids=request_ids,
            rows=rows,
            tokens=(counts.cumsum() - counts)[rows],
            blocks=blocks[rows],
            totals=totals[rows],
            seq_lens=lens.astype(np.int32),
            dense_blocks=int(dense.max()) if len(dense) else 0,
            missing=missing,
            fresh=self._fresh(batch, pieces, rows, missing),
        )

    def completed(self, batch: StepBatch, excluded: set[str]) -> tuple[CompletedBlocks, ...]:
        """The blocks to choose from later that this step completes; from now on they have representatives.

        Those of prompts that fit into the budget are left for the step that first chooses among them, if ever one does.

        Args:
            batch: A step that is planned.
            excluded: Requests that stay dense.
        """
        budget, found = self.budget, []
        longest = np.maximum(batch.num_prompt_tokens, batch.seq_lens)
        for row in np.flatnonzero(longest > self._dense_tokens(self._totals(batch))).tolist():
            request_id = batch.request_ids[row]
            begin = max(self._made.get(request_id, 0), budget.sinks)
            end = int(batch.seq_lens[row]) // budget.block_size
            if begin < end and request_id not in excluded:
                found.append(CompletedBlocks(request_id, row, begin, end))
                self._made[request_id] = end
        return tuple(found)

    def _totals(self, batch: StepBatch) -> NDArray[np.int64]:
        """``[num_reqs]``: blocks that a decode of each request reads."""
        total = self.budget.total
        if not self._own_totals:
            return np.full(len(batch.request_ids), total, np.int64)
        return np.array([self._own_totals.get(request_id, total) for request_id in batch.request_ids], np.int64)

    def _dense_tokens(self, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[num_reqs]``: the most tokens with which a request is dense."""
        found: NDArray[np.int64] = np.maximum(totals * self.budget.block_size, self._min_context - 1)
        return found

    def _pieces(self, batch: StepBatch, totals: NDArray[np.int64]) -> QueryPieces:
        """The step's rows, with a piece for each generated token that may be sparse."""
        whole = QueryPieces.of_rows(batch)
        first = np.maximum(batch.num_prompt_tokens, self._dense_tokens(totals))
        if not ((batch.num_new_tokens > 1) & (whole.ends > first)).any():
            return whole
        bounds = zip(whole.begins.tolist(), whole.ends.tolist(), first.tolist(), strict=True)
        return whole.cut([range(max(begin + 1, first), end) for begin, end, first in bounds])

    def _fresh(
        self, batch: StepBatch, pieces: QueryPieces, rows: NDArray[np.int64], missing: NDArray[np.int64]
    ) -> tuple[FreshBlocks, ...]:
        """Of the missing blocks those that end with tokens of this step."""
        if pieces.whole:  # a decode chooses among blocks that were complete before it
            return ()
        found = []
        starts = batch.num_new_tokens.cumsum() - batch.num_new_tokens
        for piece, (begin, end) in zip(rows.tolist(), missing.tolist(), strict=True):
            row = int(pieces.rows[piece])
            written = int(batch.num_computed_tokens[row])
            first = max(begin, written // self.budget.block_size)
            if first < end:
                found.append(FreshBlocks(piece, first, end, written, int(starts[row])))
        return tuple(found)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.forget_made(request_id)
        self._own_totals.pop(request_id, None)

    def forget_made(self, request_id: str) -> None:
        """Of a request nothing is made."""
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
        end = max(begin, end)
        self._made[request_id] = end
        return begin, end


class RestrictedTables:
    """The block tables of a plan: what all layers share is made once.

    Args:
        plan: The plan.
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device.
    """

    def __init__(self, plan: SelectionPlan, block_table: Tensor) -> None:
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        budget, device = plan.budget, block_table.device
        self._rows = torch.from_numpy(plan.rows).to(device)
        most, total = int(plan.blocks.max()), int(plan.totals.max())
        chosen = plan.totals - budget.sinks - budget.recent
        #: Blocks that a row chooses, the most; and ``[sparse, 1]``, int64, those of each where they differ.
        self._most_chosen = int(chosen.max())
        self._chosen = None if (plan.totals == total).all() else torch.from_numpy(chosen).to(device)[:, None]
        if plan.pieces.whole:
            whole = block_table[: len(plan.seq_lens)]
        else:
            whole = block_table[torch.from_numpy(plan.pieces.rows).to(device)]
        #: ``[sparse, most]``: the whole rows of those that are sparse.
        mine = whole[:, :most] if plan.all_rows else whole[self._rows, :most]
        self._dense = None if plan.all_rows else whole[:, : max(plan.dense_blocks, total)]
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
        #: Those of them that are completed by tokens of this step: their ids, ``[n]``, int64, and what is known.
        self.fresh = [(whole[of.piece, of.begin : of.end].long(), of) for of in plan.fresh]
        #: How the step's queries are spread over the rows; None if each request is one.
        self.split = plan.pieces.split(device)

    def choose(self, scores: Tensor) -> Tensor:
        """The block table of a layer: sinks, the best of the candidates in the order of their positions, recent blocks.

        Args:
            scores: ``[sparse, candidates]``, int64: how much each is wanted, by the heads of all ranks.

        Returns:
            ``[pieces, blocks]``, int32; dense rows are whole. What is behind a row's length is a block of its own.
        """
        import torch  # noqa: PLC0415 - imported where vLLM has brought it

        scores = ranked(scores)
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -1)
        most, own = self._most_chosen, self._chosen
        best = scores.topk(most, -1, sorted=own is not None).indices
        if own is not None:  # what a row with fewer leaves of the best goes to its end
            places = torch.arange(most, device=best.device)
            best = best.masked_fill(places >= own, self.candidates.shape[1] - 1)
        chosen = self.candidates.gather(1, best.sort(-1).values).to(self._sinks.dtype)
        table = torch.cat((self._sinks, chosen, self._recent), 1)
        if own is not None:  # and recent blocks come right behind those that it reads; then anything follows
            columns = torch.arange(table.shape[1], device=table.device)
            left_out = (columns >= self._sinks.shape[1] + own) * (most - own)
            table = table.gather(1, (columns + left_out).clamp(max=table.shape[1] - 1))
        if self._dense is None:
            return table
        whole = self._dense.clone()
        whole[self._rows, : table.shape[1]] = table
        return whole
