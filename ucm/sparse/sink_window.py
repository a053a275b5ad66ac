"""Attention sinks and a window, with the blocks between them freed.

Source: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024,
arXiv:2309.17453), StreamingLLM: a model goes on well if it keeps the KV of the first few tokens (the sinks, which
attention gives much weight whatever they say) and of the latest ones. What lies between is lost: this is not a method
for finding something in a long context.

Other than in the paper, a token keeps its position (vLLM has rotated the keys before they are cached), so contexts are
bounded by the model's greatest length; and whole blocks are kept, so a step reads up to a block more on either side.

The scheduler's side releases blocks (`ucm.sparse.blocks`); the worker's side hands the backend a block table
without them, and the sequence length that goes with it. Both take the same integers through `ucm.sparse.blocks`, so no
row can come to read what is released: there is nothing in a step that could fail for one request alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from ucm.compat import optional
from ucm.errors import ConfigError
from ucm.sparse.attention import KEY, asked_of
from ucm.sparse.base import not_asked
from ucm.sparse.blocks import TILE, ReleasedBlocks, ReleasingMethod, SinksAndWindow, keep_apart
from ucm.sparse.options import MethodOptions, parse_asked, parse_options, refuse_asked, tokens
from ucm.sparse.outcomes import OPTED_OUT, REFUSED, RESTRICTED, SHORT
from ucm.sparse.tables import ReadTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.base import Role


class SinkWindowOptions(MethodOptions):
    """What an operator may set.

    Attributes:
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        window_tokens: Tokens before a token's tile that are always read.
        prefill: ``window``: prompts are computed in the same way, so the memory of a request stays flat from its
            second step on. ``dense``: prompts are computed with all of their tokens, and what is between is released
            with the first generated token.
    """

    sink_tokens: int = tokens(4, at_least=0)
    window_tokens: int = tokens(4096, at_least=1)
    prefill: Literal["window", "dense"] = Field(default="window", description="`window` or `dense`")

    def window(self, tile: int = TILE) -> SinksAndWindow:
        """The same for the two sides to count with."""
        return SinksAndWindow(self.sink_tokens, self.window_tokens, self.prefill == "dense", tile)


class SinkWindow(ReleasingMethod[ReleasedBlocks]):
    """Sinks and a window; see the module and `SinkWindowOptions`.

    Attributes:
        counts: ``steps`` in which blocks were left out, ``rows`` of these, ``blocks_skipped`` and ``blocks_held`` of
            these rows, the ones that are skipped among them, and ``requests_<outcome>``; see `ucm.sparse.outcomes`.
    """

    options_type = SinkWindowOptions
    _options: SinkWindowOptions
    serves_drafts = True

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self.window = self._options.window(self.tile)
        self._dense: set[str] = set()  #: on the worker's side: requests that read everything
        self._batch: StepBatch
        self._skips = False
        self._rows_before = 0
        self._block_size = 0
        #: Of each metadata object of the step, the object (so that its id stays its own) and what replaces it.
        self._replaced: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return whether ``prefill`` is ``dense``."""
        return parse_options(SinkWindowOptions, cls.__name__, options).prefill == "dense"

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """What a token reads depends on where the prompt ends if that is dense."""
        return (
            num_prompt_tokens if cls.prompts_are_dense(options) else super().lasting_tokens(options, num_prompt_tokens)
        )

    # Scheduler side

    def scheduler_started(self, scheduler: Any) -> None:
        """Refuse an engine in which blocks cannot be freed."""
        self._blocks = ReleasedBlocks(scheduler, self.window)

    def before_allocation(self, request: Any) -> bool:
        """Keep generated blocks from being hit by dense prompts, and free blocks."""
        if self.window.dense_prefill:
            keep_apart(request, request.num_prompt_tokens, self.vllm_config.cache_config)
            asked = asked_of(optional(request, "sampling_params"))
            if asked is not None and _asks_dense(asked)[0]:
                return True
        return super().before_allocation(request)

    def build_metadata(self, scheduler_output: Any) -> None:
        """Count the step; the workers derive the skipped blocks from their batch."""
        del scheduler_output
        self._blocks.step_planned()

    # Worker side

    def layer_seen(self, layer_name: str) -> None:
        """Refuse an unsupported layer."""
        self.attention.require(layer_name)

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop the state of ended requests."""
        ended = list(request_ids)
        super().requests_finished(runner, ended)
        self._dense.difference_update(ended)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Record the step's batch, and whether any blocks are skipped in it."""
        self._replaced.clear()
        self._batch = self._with_dense_requests(self.attention.batch(runner, scheduler_output, input_batch))
        self._outcomes.begin(self._batch.request_ids)
        beyond = self._batch.seq_lens - 1 - (self.window.sink_tokens + self.window.window_tokens)
        self._skips = bool((beyond > 0).any())
        self._rows_before = self.counts["rows"]

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Replace the metadata by one without the blocks that are skipped."""
        if self._skips:
            found = self._replaced.get(id(attn_metadata))
            if found is None:
                found = attn_metadata, self._compacted(layer_name, kv_cache, attn_metadata)
                self._replaced[id(attn_metadata)] = found
            attn_metadata = found[1]
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """The step is over; what was to be skipped was."""
        del runner, scheduler_output, model_output
        if self.counts["rows"] > self._rows_before:
            self._count_step()
        unasked = self._skips and not self._replaced
        self._replaced.clear()
        self._skips = False
        if unasked:
            raise not_asked(type(self).__name__)

    def figures(self) -> dict[str, float]:
        """See `SparseMethod.figures`; all layers read the same, so tokens are those of one."""
        counts = self.counts
        return {
            **self._outcomes.figures((RESTRICTED, SHORT, OPTED_OUT, REFUSED)),
            "rows": counts["rows"],
            "read_tokens": (counts["blocks_held"] - counts["blocks_skipped"]) * self._block_size,
            "held_tokens": counts["blocks_held"] * self._block_size,
        }

    def summary(self) -> str:
        """Return the counters so far, in one line."""
        counts = self.counts
        return (
            f"{type(self).__name__} left out {counts['blocks_skipped']} of {counts['blocks_held']} blocks in "
            f"{counts['rows']} rows of {counts['steps']} steps"
        )

    def _with_dense_requests(self, batch: StepBatch) -> StepBatch:
        """Return a step in which the prompts of dense requests never end, so that they read everything."""
        if not self.window.dense_prefill:  # what a prompt's KV is depends on the method: no request can be dense
            refuse_asked(batch.asked, self)
            return batch
        for request_id, asked in batch.asked.items():
            if request_id in self._dense:  # a resumed request, which comes whole again in some releases
                continue
            dense, error = _asks_dense(asked)
            if dense:
                self._dense.add(request_id)
                self._leave_dense(request_id, error)
        if not self._dense:
            return batch
        dense_rows = np.array([of in self._dense for of in batch.request_ids], np.bool_)
        return replace(batch, num_prompt_tokens=np.where(dense_rows, np.iinfo(np.int64).max, batch.num_prompt_tokens))

    def _compacted(self, layer_name: str, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """The metadata with the sinks' blocks and, right behind them, those of the window and of the new tokens."""
        batch, size = self._batch, self.attention.block_size(layer_name, kv_cache)
        self._block_size = size
        pieces, skipped = self.window.cut(batch, size)
        if not skipped.any():
            return attn_metadata
        of_rows = skipped[pieces.lasts]
        self._outcomes.count((batch.request_ids[row] for row in np.flatnonzero(of_rows).tolist()), RESTRICTED)
        self.counts["rows"] += int((of_rows > 0).sum())
        self.counts["blocks_skipped"] += int(of_rows.sum())
        self.counts["blocks_held"] += int((-(-batch.seq_lens[of_rows > 0] // size)).sum())
        table, lens = self.attention.block_table(attn_metadata), pieces.ends - skipped * size
        tables = ReadTables(table, pieces.rows, lens, skipped, self.window.sink_blocks(size), size)
        split = pieces.split(table.device)
        return self.attention.restricted(layer_name, attn_metadata, tables.base, tables.seq_lens, tables.longest, split)


def _asks_dense(asked: object) -> tuple[bool, ConfigError | None]:
    """Return whether a request reads everything, by its own settings or because these are invalid, and the error.

    Both sides call it, because the worker side must not read blocks that the scheduler side frees.
    """
    try:
        options = parse_asked(asked)
    except ConfigError as error:
        return True, error
    named = [] if options is None else [name for name, value in options if value is not None]
    if not named:
        return options is None, None
    return True, ConfigError(
        f"SinkWindow has no {named[0]}",
        where=f"extra_args.{KEY}.{named[0]}",
        fix="leave it out: the window is the same for all requests",
    )
