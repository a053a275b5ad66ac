"""Plan, on the host, which tokens of a step read keys before their window, and which keys.

A piece is the set of such tokens of one request. Its far keys are read and rotated in runs of full blocks; runs of
several requests form a group, which is read at once. The plan is the same for all layers, so it is made once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.sparse.partial_attention import Span
from ucm.sparse.pieces import QueryPieces
from ucm.sparse.window_kernel import Queries

if TYPE_CHECKING:
    from torch import Tensor

    from ucm.sparse.attention import StepBatch

#: The number of queries per row, and of keys read, where the dense attention's result is not used.
UNWANTED = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive far keys of a piece, and the queries that see any of them.

    Attributes:
        row: The request's row in the step.
        begin: The position of the first key, which is the start of a block.
        end: The position after the last key.
        causal: Queries that each see the keys up to one window before them: their first and last index among the tokens
            of `BeyondWindow`, and the number of keys that the last one sees.
        whole: Queries that see all of the keys, likewise as indices.
    """

    row: int
    begin: int
    end: int
    causal: tuple[int, int, int]
    whole: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Part:
    """Queries that read runs of a group in one call.

    Attributes:
        causal: See `Run`.
        spans: The parts of the group's blocks that they read.
        tokens: Their indices among the tokens of `BeyondWindow`: ``[n]``, int64, or a slice.
    """

    causal: bool
    spans: list[Span]
    tokens: Tensor | slice


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that are read and rotated at once.

    Attributes:
        rows: ``[num_blocks]``, int64: each block's row in the block table.
        columns: ``[num_blocks]``, int64: each block's column in the block table.
        positions: ``[num_blocks * block_size]``, int64, or a slice: the keys' positions, continued past a run's end.
        parts: The queries that read them.
    """

    rows: Tensor
    columns: Tensor
    positions: Tensor | slice
    parts: list[Part]

    @classmethod
    def of(cls, runs: list[Run], block_size: int, device: Any) -> Group:
        """Make a group of runs, each of a different request."""
        counts = [-(-(run.end - run.begin) // block_size) for run in runs]
        rows = np.repeat([run.row for run in runs], counts)
        columns = np.concatenate(
            [run.begin // block_size + np.arange(count) for run, count in zip(runs, counts, strict=True)]
        )
        positions: Tensor | slice
        if len(runs) == 1:
            positions = slice(runs[0].begin, runs[0].begin + counts[0] * block_size)
        else:
            positions = _on((columns[:, None] * block_size + np.arange(block_size)).ravel(), device)
        firsts = np.cumsum([0, *counts])[:-1].tolist()
        parts = []
        for causal in (True, False):
            read = [(*(run.causal if causal else run.whole), first) for run, first in zip(runs, firsts, strict=True)]
            read = [of for of in read if of[0] < of[1]]
            if read:
                spans = [Span(end - begin, first, keys) for begin, end, keys, first in read]
                tokens = np.concatenate([np.arange(begin, end) for begin, end, _, _ in read])
                parts.append(Part(causal, spans, slice(*read[0][:2]) if len(read) == 1 else _on(tokens, device)))
        return cls(_on(rows, device), _on(columns, device), positions, parts)

    def block_ids(self, table: Tensor) -> Tensor:
        """Return the blocks to read, ``[num_blocks]``, int64, by the step's block table."""
        return table[self.rows, self.columns].long()


class BeyondWindow:
    """The tokens of a step that read keys before their window, in the step's order.

    Args:
        batch: The step.
        window: The number of tokens that a query sees at their true distances, including itself.
    """

    def __init__(self, batch: StepBatch, window: int) -> None:
        self._batch, self._window = batch, window
        rows = np.flatnonzero(batch.seq_lens > window)
        begins = np.maximum(batch.num_computed_tokens, window)[rows]
        self.pieces = QueryPieces(rows, begins, batch.seq_lens[rows])
        self._placed: _Placed | None = None
        self._groups: dict[tuple[int, int], list[Group]] = {}

    def __len__(self) -> int:
        """The number of these tokens."""
        return int((self.pieces.ends - self.pieces.begins).sum())

    @cached_property
    def queries(self) -> Queries:
        """Return the tokens in the form that a CPU kernel takes."""
        return Queries(self.pieces, self._batch)

    @cached_property
    def windows(self) -> list[Span]:
        """Return each piece's queries with all keys from its request's first block up to its last query."""
        ends = zip(self.pieces.begins.tolist(), self.pieces.ends.tolist(), strict=True)
        return [Span(end - begin, 0, end) for begin, end in ends]

    def on(self, device: Any) -> _Placed:
        """Return the tensors on the attention's device."""
        if self._placed is None:
            pieces, batch = self.pieces, self._batch
            starts = np.cumsum(batch.num_new_tokens) - batch.num_new_tokens - batch.num_computed_tokens
            positions = [np.arange(*of) for of in zip(pieces.begins, pieces.ends, strict=True)]
            places = [of + starts[row] for of, row in zip(positions, pieces.rows, strict=True)]
            self._placed = _Placed(
                *(_on(of, device) for of in (np.concatenate(places), np.concatenate(positions), pieces.rows))
            )
        return self._placed

    def spared(self) -> tuple[QueryPieces, np.ndarray[Any, np.dtype[np.int64]]]:
        """Cut the step's rows such that a back end does almost no work for these tokens.

        Returns:
            The rows, and how many keys each reads, int64: all keys if its tokens are within their window.
        """
        window = self._window
        whole = QueryPieces.of_rows(self._batch)
        cuts = [
            [*((window,) if begin < window < end else ()), *range(max(begin, window) + UNWANTED, end, UNWANTED)]
            for begin, end in zip(whole.begins.tolist(), whole.ends.tolist(), strict=True)
        ]
        pieces = whole.cut(cuts)
        return pieces, np.where(pieces.begins < window, pieces.ends, pieces.ends - pieces.begins)

    def groups(self, block_size: int, at_once: int, device: Any) -> list[Group]:
        """Return the far keys, in groups.

        Args:
            block_size: Tokens in a block.
            at_once: The maximum number of keys in a group; a group has at least one block.
            device: The attention's device.
        """
        key = block_size, at_once
        if key not in self._groups:
            self._groups[key] = [Group.of(runs, block_size, device) for runs in self._packed(block_size, at_once)]
        return self._groups[key]

    def _packed(self, block_size: int, at_once: int) -> list[list[Run]]:
        packed: list[list[Run]] = []
        room = 0
        for run in self._runs(block_size, at_once):
            needed = -(-(run.end - run.begin) // block_size) * block_size
            # A part must not contain a token twice, so each run of a group is of a different request.
            if not packed or needed > room or packed[-1][-1].row == run.row:
                packed.append([])
                room = at_once
            packed[-1].append(run)
            room -= needed
        return packed

    def _runs(self, block_size: int, at_once: int) -> list[Run]:
        window, found, before = self._window, [], 0
        step = max(1, at_once // block_size) * block_size
        pieces = (of.tolist() for of in (self.pieces.rows, self.pieces.begins, self.pieces.ends))
        for row, begin, end in zip(*pieces, strict=True):
            at = before - begin  # converts a position to an index
            for first in range(0, end - window, step):
                last = min(first + step, end - window)
                # From here on, queries see all keys of the run; in the request's last run, only the last query does.
                sees_all = end if last == end - window else max(begin, last - 1 + window)
                sees_some = max(begin, first + window)
                some = (sees_some + at, sees_all + at, sees_all - window - first)
                found.append(Run(row, first, last, some, (sees_all + at, end + at, last - first)))
            before += end - begin
        return found


@dataclass(frozen=True, eq=False)
class _Placed:
    """Tensors on the attention's device, all int64.

    Attributes:
        places: ``[num_tokens]``: the tokens' indices in the step.
        positions: ``[num_tokens]``: their positions in the requests.
        rows: ``[pieces]``: each piece's row in the step.
    """

    places: Tensor
    positions: Tensor
    rows: Tensor


def _on(values: np.ndarray[Any, Any], device: Any) -> Tensor:
    import torch  # noqa: PLC0415 - vLLM brings it

    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device, non_blocking=True)
