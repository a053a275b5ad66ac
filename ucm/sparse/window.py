"""Which blocks of a request attention reads under a method of sinks and a window; both sides of the engine ask here.

What a token reads is a function of its position alone (and of the prompt's length, where prompts are dense). Positions
are taken in tiles of `TILE` tokens, counted from the request's start: the window of all tokens of a tile begins at the
same block. So an answer does not depend on the chunks in which a prompt was computed, on what was found in a cache, or
on the other requests of a step.

The scheduler's side gives back what the worker's side will not read. So that the two cannot come to disagree, both use
the same integers and the same function of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.sparse.pieces import QueryPieces

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ucm.sparse.attention import StepBatch

#: Tokens of a tile: as many queries as one thread block of an attention kernel takes at once.
TILE = 128


@dataclass(frozen=True, slots=True)
class SinksAndWindow:
    """The first tokens of a request, and the last ones before a token's tile.

    Whole blocks are read: at least the tokens asked for, and up to ``block_size - 1`` more on either side.

    Args:
        sink_tokens: Tokens from the start that are always read.
        window_tokens: Tokens before a token's tile that are always read.
        dense_prefill: Whether the tokens of the prompt read everything.
        tile: Tokens of a tile.
    """

    sink_tokens: int
    window_tokens: int
    dense_prefill: bool = False
    tile: int = TILE

    def sink_blocks(self, block_size: int) -> int:
        """The blocks that hold the sinks."""
        return -(-self.sink_tokens // block_size)

    def skipped(
        self, positions: NDArray[np.int64], num_prompt_tokens: NDArray[np.int64], block_size: int
    ) -> NDArray[np.int64]:
        """How many blocks behind the sinks tokens do not read.

        Args:
            positions: ``[n]``: of the tokens.
            num_prompt_tokens: ``[n]``: of their requests.
            block_size: Tokens per block.

        Returns:
            ``[n]``, never negative; it grows with the position.
        """
        first = (positions // self.tile * self.tile - self.window_tokens) // block_size
        skipped: NDArray[np.int64] = (first - self.sink_blocks(block_size)).clip(min=0)
        if self.dense_prefill:
            skipped[positions < num_prompt_tokens] = 0
        return skipped

    def skipped_by(self, position: int, num_prompt_tokens: int, block_size: int) -> int:
        """The same for one token; no later token reads what it skips."""
        if self.dense_prefill and position < num_prompt_tokens:
            return 0
        first = (position // self.tile * self.tile - self.window_tokens) // block_size
        return max(0, first - self.sink_blocks(block_size))

    def cut(self, batch: StepBatch, block_size: int) -> tuple[QueryPieces, NDArray[np.int64]]:
        """A step's rows, cut where what is read changes.

        Args:
            batch: The step.
            block_size: Tokens per block.

        Returns:
            The pieces, and of each the blocks behind the sinks that all of its tokens skip, int64.
        """
        whole = QueryPieces.of_rows(batch)
        first = self.skipped(whole.begins, batch.num_prompt_tokens, block_size)
        last = self.skipped(whole.ends - 1, batch.num_prompt_tokens, block_size)
        if (first == last).all():
            return whole, first
        cuts = []
        for begin, end, prompt in zip(
            whole.begins.tolist(), whole.ends.tolist(), batch.num_prompt_tokens.tolist(), strict=True
        ):
            tiles = {*range((begin // self.tile + 1) * self.tile, end, self.tile)}
            if self.dense_prefill and begin < prompt < end:
                tiles = {prompt, *(tile for tile in tiles if tile > prompt)}
            before, of_row = self.skipped_by(begin, prompt, block_size), []
            for tile in sorted(tiles):
                skipped = self.skipped_by(tile, prompt, block_size)
                if skipped != before:
                    of_row.append(tile)
                before = skipped
            cuts.append(of_row)
        pieces = whole.cut(cuts)
        return pieces, self.skipped(pieces.begins, batch.num_prompt_tokens[pieces.rows], block_size)

    def most_blocks(self, new_tokens: int, block_size: int) -> int:
        """The most blocks that a request holds after its first step, if it prefills in windows.

        Args:
            new_tokens: The most tokens that the steps in flight compute for it.
            block_size: Tokens per block.
        """
        # One more where the window does not begin with a block, and the last block that the prefix cache knows.
        tokens = self.window_tokens + self.tile - 1 + new_tokens
        return self.sink_blocks(block_size) + -(-tokens // block_size) + 2
