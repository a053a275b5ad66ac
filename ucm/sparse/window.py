"""The blocks that attention reads of a request with sinks and a window, for both sides of the engine.

What a token reads depends only on its position (and on the prompt's length, if prompts are dense). Positions
are grouped into tiles of `TILE` tokens, counted from the request's start: the window of all tokens in a tile begins at
the same block. So an answer does not depend on the chunks in which a prompt was computed, on cache hits, or
on the other requests of a step.

The scheduler side frees the blocks that the worker side will not read. To ensure that they agree, both use
the same function of the same integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.sparse.pieces import QueryPieces

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ucm.sparse.attention import StepBatch

#: The tokens of a tile: the number of queries that one thread block of an attention kernel handles at once.
TILE = 128


@dataclass(frozen=True, slots=True)
class SinksAndWindow:
    """The first tokens of a request, and the last ones before a token's tile.

    Full blocks are read: at least these tokens, and up to ``block_size - 1`` more on either side.

    Args:
        sink_tokens: Tokens from the start that are always read.
        window_tokens: Tokens before a token's tile that are always read.
        dense_prefill: Whether prompt tokens read everything.
        tile: The tokens of a tile.
    """

    sink_tokens: int
    window_tokens: int
    dense_prefill: bool = False
    tile: int = TILE

    def sink_blocks(self, block_size: int) -> int:
        """Return the number of blocks with sinks."""
        return -(-self.sink_tokens // block_size)

    def skipped(
        self, positions: NDArray[np.int64], num_prompt_tokens: NDArray[np.int64], block_size: int
    ) -> NDArray[np.int64]:
        """Return how many blocks after the sinks tokens do not read.

        Args:
            positions: ``[n]``: the tokens' positions.
            num_prompt_tokens: ``[n]``: the prompt lengths of their requests.
            block_size: Tokens per block.

        Returns:
            ``[n]``, never negative and never decreasing with the position.
        """
        first = (positions // self.tile * self.tile - self.window_tokens) // block_size
        skipped: NDArray[np.int64] = (first - self.sink_blocks(block_size)).clip(min=0)
        if self.dense_prefill:
            skipped[positions < num_prompt_tokens] = 0
        return skipped

    def skipped_by(self, position: int, num_prompt_tokens: int, block_size: int) -> int:
        """Do the same for one token; no later token reads the blocks that it skips."""
        if self.dense_prefill and position < num_prompt_tokens:
            return 0
        first = (position // self.tile * self.tile - self.window_tokens) // block_size
        return max(0, first - self.sink_blocks(block_size))

    def cut(self, batch: StepBatch, block_size: int) -> tuple[QueryPieces, NDArray[np.int64]]:
        """Cut a step's rows where the read blocks change.

        Args:
            batch: The step.
            block_size: Tokens per block.

        Returns:
            The pieces, and the number of blocks after the sinks that all tokens of each skip, int64.
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
        """Return the maximum blocks that a request holds after its first step, if it prefills in windows.

        Args:
            new_tokens: The maximum tokens that the steps in flight compute for it.
            block_size: Tokens per block.
        """
        # Plus one if the window starts within a block, and one for the last block that the prefix cache retains.
        tokens = self.window_tokens + self.tile - 1 + new_tokens
        return self.sink_blocks(block_size) + -(-tokens // block_size) + 2
