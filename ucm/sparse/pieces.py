"""Rows of a step, cut into pieces whose queries read the same blocks.

Attention back ends take rows of any number of queries, which are at the end of the tokens that the row reads. A piece
is such a row, with its own block table and length, so a back end only needs other metadata for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.sparse.attention import QuerySplit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucm.sparse.attention import StepBatch


@dataclass(frozen=True, eq=False)
class QueryPieces:
    """Pieces in the order of the step's tokens; all arrays are on the host.

    Attributes:
        rows: ``[pieces]``, int64: the row of the step that contains it.
        begins: ``[pieces]``, int64: the position of its first token.
        ends: ``[pieces]``, int64: the position after its last token.
    """

    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of_rows(cls, batch: StepBatch) -> QueryPieces:
        """Return each row as one piece."""
        return cls(np.arange(len(batch.request_ids)), batch.num_computed_tokens, batch.seq_lens)

    def cut(self, cuts: Sequence[Sequence[int]]) -> QueryPieces:
        """Cut pieces into smaller ones.

        Args:
            cuts: The positions in each piece at which new pieces begin, in order.
        """
        counts = np.array([1 + len(of_piece) for of_piece in cuts], np.int64)
        firsts = zip(self.begins.tolist(), cuts, strict=True)
        begins = [position for first, of_piece in firsts for position in (first, *of_piece)]
        lasts = zip(cuts, self.ends.tolist(), strict=True)
        ends = [position for of_piece, last in lasts for position in (*of_piece, last)]
        return QueryPieces(self.rows.repeat(counts), np.array(begins, np.int64), np.array(ends, np.int64))

    @property
    def whole(self) -> bool:
        """Whether each row is one piece."""
        return not len(self.rows) or int(self.rows[-1]) + 1 == len(self.rows)

    @property
    def lasts(self) -> NDArray[np.int64]:
        """``[num_reqs]``, int64: the last piece of each row."""
        return np.flatnonzero(np.diff(self.rows, append=-1))

    def split(self, device: Any) -> QuerySplit | None:
        """Return the pieces in the form for a back end; None if each is a whole row."""
        if self.whole:
            return None
        import torch  # noqa: PLC0415 - vLLM brings it

        lengths = self.ends - self.begins
        starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        return QuerySplit(torch.from_numpy(starts).to(device), int(lengths.max()))
