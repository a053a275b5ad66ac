"""Which blocks of a request attention reads under a method of sinks and a window; both sides of the engine ask here.

The scheduler's side gives back what the worker's side will not read. So that the two cannot come to disagree, both use
the same integers and the same function of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SinksAndWindow:
    """The first tokens of a request, and the last ones before a step's first new token.

    Whole blocks are read: at least the tokens asked for, and up to ``block_size - 1`` more on either side.

    Args:
        sink_tokens: Tokens from the start that are always read.
        window_tokens: Tokens before the first new one that are always read.
        dense_prefill: Whether a step that begins within the prompt reads everything.
    """

    sink_tokens: int
    window_tokens: int
    dense_prefill: bool = False

    def sink_blocks(self, block_size: int) -> int:
        """The blocks that hold the sinks."""
        return -(-self.sink_tokens // block_size)

    def skipped(
        self, num_computed_tokens: NDArray[np.int64], num_prompt_tokens: NDArray[np.int64], block_size: int
    ) -> NDArray[np.int64]:
        """How many blocks behind the sinks a step does not read.

        Args:
            num_computed_tokens: ``[n]``: of each request, the tokens that it has before the step.
            num_prompt_tokens: ``[n]``.
            block_size: Tokens per block.

        Returns:
            ``[n]``, never negative; it grows with the computed tokens.
        """
        first = (num_computed_tokens - self.window_tokens) // block_size
        skipped: NDArray[np.int64] = (first - self.sink_blocks(block_size)).clip(min=0)
        if self.dense_prefill:
            skipped[num_computed_tokens < num_prompt_tokens] = 0
        return skipped

    def skipped_by(self, num_computed_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        """The same for one request."""
        if self.dense_prefill and num_computed_tokens < num_prompt_tokens:
            return 0
        first = (num_computed_tokens - self.window_tokens) // block_size
        return max(0, first - self.sink_blocks(block_size))

    def most_blocks(self, new_tokens: int, block_size: int) -> int:
        """The most blocks that a request holds after its first step, if it prefills in windows.

        Args:
            new_tokens: The most tokens that the steps in flight compute for it.
            block_size: Tokens per block.
        """
        # One more where the window does not begin with a block, and the last block that the prefix cache knows.
        return self.sink_blocks(block_size) + -(-(self.window_tokens + new_tokens) // block_size) + 2
