"""ReRoPE: contexts beyond the length that a model was trained with, without training it further.

Source: Jianlin Su, "Rectified Rotary Position Embeddings" (2023, kexue.fm/archives/9708, github.com/bojone/rerope). A
query sees the keys of a window at their true distances, and all keys before it at the window's own distance (ReRoPE),
or at distances that grow more slowly from there on (Leaky ReRoPE). So no distance is one that training has never shown.

The cache stays vLLM's, with the keys that it has rotated. Within the window these are right. Those before it are turned
to the other angle when they are read (`ucm.rotary`), and attention over the two parts is put together
(`ucm.sparse.attention`). A token within the first window has no second part, and vLLM computes it.

Each token's output depends on its position and the tokens before it alone: not on chunks, on what was found in a cache,
or on the other requests of a step.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from ucm.logger import get_logger
from ucm.rotary import turned
from ucm.sparse.attention import Merged
from ucm.sparse.base import not_asked
from ucm.sparse.blocks import QueryPieces
from ucm.sparse.compiled import for_engine
from ucm.sparse.options import MOST_TOKENS, MethodOptions, parse_options, refuse_asked, tokens
from ucm.sparse.outcomes import CountingMethod
from ucm.sparse.window_kernel import SLOWLY, by_tile, parts_of, window_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.rotary import Rotary
    from ucm.sparse.attention import HeadLayout, PartsView, StepBatch
    from ucm.sparse.base import Role
    from ucm.sparse.window_kernel import Attend

#: The most queries of a request in a step for which a kernel, where there is one, reads keys for each query. For so
#: many torch, which rotates keys once for all queries, takes about as long.
FEW = 4
#: The number of queries per row, and of keys read, where the dense attention's result is not used.
UNWANTED = 64

#: The number of keys rotated at once, which bounds the memory and, on a CPU, fits into its cache.
TURNED_AT_ONCE = 4096
#: The scheduler's hooks check that the method also runs in every worker.
NEEDED = ("ATTENTION", "SCHEDULER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")


class Run(NamedTuple):
    """Consecutive far keys of a piece.

    Attributes:
        row: The request's row in the step.
        tokens: The piece's queries, among the tokens of `BeyondWindow`.
        begin: The position of the first key, which is the start of a block.
        end: The position after the last key.
        causal: Whether each query sees the keys up to one window before it, and the last one sees all; else all see
            all of them.
    """

    row: int
    tokens: slice
    begin: int
    end: int
    causal: bool


class BeyondWindow:
    """The tokens of a step that read keys before their window, in the step's order.

    Args:
        batch: The step.
        window: The number of tokens that a query sees at their true distances, including itself.
        pieces: Such tokens of each request; None for all of them.
    """

    def __init__(self, batch: StepBatch, window: int, pieces: QueryPieces | None = None) -> None:
        self._batch, self._window = batch, window
        if pieces is None:
            rows = np.flatnonzero(batch.seq_lens > window)
            begins = np.maximum(batch.num_computed_tokens, window)[rows]
            pieces = QueryPieces(rows, begins, batch.seq_lens[rows])
        self.pieces = pieces
        self._lengths = pieces.ends - pieces.begins
        self._placed: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """The number of these tokens."""
        return int(self._lengths.sum())

    @cached_property
    def divided(self) -> tuple[BeyondWindow, BeyondWindow]:
        """Return the tokens of requests with `FEW` or less of them, and the others."""
        few, all_of = self._lengths <= FEW, (self.pieces.rows, self.pieces.begins, self.pieces.ends)
        kept, others = (QueryPieces(*(of[mask] for of in all_of)) for mask in (few, ~few))
        return BeyondWindow(self._batch, self._window, kept), BeyondWindow(self._batch, self._window, others)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """``[num_tokens]``: the positions in the requests."""
        return np.concatenate([np.arange(*of) for of in zip(self.pieces.begins, self.pieces.ends, strict=True)])

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """``[num_tokens]``: the indices among the step's tokens."""
        batch = self._batch
        starts = np.cumsum(batch.num_new_tokens) - batch.num_new_tokens - batch.num_computed_tokens
        return self.positions + starts[self.pieces.rows].repeat(self._lengths)

    def parts(self, block_size: int) -> Tensor:
        """Return the tokens in the form that a CPU kernel takes."""
        return parts_of(self.pieces.rows.repeat(self._lengths), self.positions, block_size)

    def on(self, device: Any) -> tuple[Tensor, Tensor]:
        """Return `places` and `positions` on the attention's device."""
        if self._placed is None:
            import torch  # noqa: PLC0415 - vLLM brings it

            places, positions = (
                torch.from_numpy(of).to(device, non_blocking=True) for of in (self.places, self.positions)
            )
            self._placed = places, positions
        return self._placed

    def spared(self) -> tuple[QueryPieces, NDArray[np.int64]]:
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

    def runs(self, block_size: int) -> list[Run]:
        """Return the far keys: those that all queries of a piece see, `TURNED_AT_ONCE` in a run, then the others."""
        window, found, before = self._window, list[Run](), 0
        step = max(1, TURNED_AT_ONCE // block_size) * block_size
        pieces = (of.tolist() for of in (self.pieces.rows, self.pieces.begins, self.pieces.ends))
        for row, begin, end in zip(*pieces, strict=True):
            tokens, seen_by_all = slice(before, before + end - begin), (begin - window) // block_size * block_size
            for first in range(0, seen_by_all, step):
                found.append(Run(row, tokens, first, min(first + step, seen_by_all), causal=False))
            found.append(Run(row, tokens, seen_by_all, end - window, causal=True))
            before = tokens.stop
        return found


class ReRoPEOptions(MethodOptions):
    """What an operator may set.

    Attributes:
        window: Tokens that a query sees at their true distances, itself among them.
        training_length: Tokens that the model was trained with. If it is given, scores of later queries grow with the
            logarithm of their position, which keeps attention as sharp as it was (log-n scaling).
    """

    window: int = Field(
        ge=1, le=MOST_TOKENS, description="a number of tokens, 1 or more; a quarter of the trained length is usual"
    )
    training_length: int | None = tokens(None, at_least=2)

    def tokens_per_distance(self) -> float:
        """Return the number of tokens before the window per unit of distance."""
        return math.inf

    @model_validator(mode="after")
    def _is_trained(self) -> ReRoPEOptions:
        if self.training_length is not None and self.window > self.training_length:
            raise ValueError(
                f"a window of {self.window} tokens spans distances beyond the training length of {self.training_length}"
            )
        return self


class LeakyReRoPEOptions(ReRoPEOptions):
    """What an operator may set.

    Attributes:
        leak: Tokens before the window by which the distance grows by one.
    """

    leak: float = Field(gt=1, description="a number above 1: tokens before the window to one more of distance")

    def tokens_per_distance(self) -> float:
        """See `ReRoPEOptions`."""
        return self.leak


class ReRoPE(CountingMethod):
    """Merges attention over a window and over the keys before it; see the module.

    Attributes:
        counts: ``steps`` with tokens beyond the window, these ``tokens``, those of them that were ``compiled``, the
            ``rows`` that they were of, and ``keys_turned`` in a layer.
    """

    attention: PartsView
    options_type: ClassVar[type[ReRoPEOptions]] = ReRoPEOptions
    _options: ReRoPEOptions
    needed_hooks = NEEDED
    serves_drafts = True

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._leak = self._options.tokens_per_distance()
        self._step: BeyondWindow | None = None
        self._asked = False
        #: Of each metadata object of the step, old or new, the dense one (so that its id stays its own) and the new.
        self._replaced: dict[int, tuple[Any, Any]] = {}
        #: What turns the keys of each rotary embedding, for torch.
        self._turning: dict[Rotary, tuple[Tensor, Tensor]] = {}
        #: The same for the kernels, and of the step what turns its queries, too.
        self._tiles: dict[Rotary, Tensor] = {}
        self._turned: dict[Rotary, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        #: By layer; none where torch computes what lies beyond the window.
        self._kernels: dict[str, tuple[Attend, HeadLayout] | None] = {}

    @classmethod
    def advice(cls, options: Mapping[str, Any]) -> list[str]:
        """Return advice about the rotary table and the range of distances."""
        found = parse_options(cls.options_type, cls.__name__, options)
        leak = found.tokens_per_distance()
        grows = "" if leak == math.inf else f", growing by one for every {leak:g} tokens before the window"
        longest = "'{\"max_position_embeddings\": N}'"
        return [
            f"contexts of N tokens: vllm serve MODEL --max-model-len N --hf-overrides {longest}",
            f"distances reach {found.window}{grows}: the model must have been trained with more",
            "all requests are served alike: none can ask to be dense (ucm_sparse: false)",
        ]

    def layer_seen(self, layer_name: str) -> None:
        """Refuse a layer that cannot be served; compile its kernel as soon as its cache is there, for no request."""
        self.attention.require_parts(layer_name)
        rotary, kv_cache = self.attention.rotary(layer_name), self.attention.bound_cache(layer_name)
        layout = None if kv_cache is None else self.attention.head_layout(layer_name, kv_cache)
        if layout is not None and layer_name not in self._kernels:
            began, pairs = time.perf_counter(), rotary.frequencies.numel()
            kernel = for_engine(SLOWLY, lambda: window_kernel(layout, pairs, neox=rotary.neox))
            self._kernels[layer_name] = None if kernel is None else (kernel, layout)
            if (seconds := time.perf_counter() - began) > 0.1:  # noqa: PLR2004 - layers of one kind share a kernel
                get_logger(__name__).info("[UCM.Sparse] %s: a kernel was compiled in %.1f s", self._name, seconds)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Find the step's tokens that read keys before their window."""
        batch = self.attention.batch(runner, scheduler_output, input_batch)
        refuse_asked(batch.asked, self)
        self._replaced.clear()
        self._turned.clear()
        self._asked = False
        step = BeyondWindow(batch, self._options.window)
        self._step = step if len(step) else None

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Reduce vLLM's attention of these tokens, whose result is not used, to a few keys."""
        del kv_cache
        if self._step is not None:
            found = self._replaced.get(id(attn_metadata))
            if found is None:
                found = attn_metadata, self._spared(self._step, layer_name, attn_metadata)
                self._replaced[id(attn_metadata)] = self._replaced[id(found[1])] = found
            attn_metadata = found[1]
        return query, key, value, attn_metadata

    def attention_finished(
        self, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        """Write the attention of these tokens, now that the step's own keys are in the cache."""
        if self._step is None:
            return
        self._asked = True
        dense, _ = self._replaced[id(attn_metadata)]
        table, by_head = self.attention.block_table(dense), output.view(output.shape[0], *query.shape[1:])
        compiled, rest = self._kernels.get(layer_name), self._step
        if compiled is not None:
            few, rest = self._step.divided
            if len(few):
                places, _ = few.on(query.device)
                found = self._compiled(few, layer_name, query[places].float(), kv_cache, table, *compiled)
                by_head[places] = found.to(output.dtype)
        if len(rest):
            places, _ = rest.on(query.device)
            by_head[places] = self._attention(rest, layer_name, query[places], kv_cache, table).to(output.dtype)

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """Count the step; one whose layers did not ask was dense, and that must not go unnoticed."""
        del runner, scheduler_output, model_output
        step, self._step = self._step, None
        self._replaced.clear()
        if step is None:
            return
        if not self._asked:
            raise not_asked(self._name)
        self.counts["rows"] += len(step.pieces.rows)
        self.counts["tokens"] += len(step)
        self.counts["compiled"] += len(step.divided[0]) if all(self._kernels.values() or [None]) else 0
        self.counts["keys_turned"] += int((step.pieces.ends - self._options.window).sum())
        self._count_step()

    def figures(self) -> dict[str, float]:
        """See `SparseMethod.figures`; all layers do the same."""
        counts = self.counts
        return {
            "rerope_rows": counts["rows"],
            "rerope_tokens.compiled": counts["compiled"],
            "rerope_tokens.torch": counts["tokens"] - counts["compiled"],
            "rerope_turned_keys": counts["keys_turned"],
        }

    def summary(self) -> str:
        """Return the counters so far, in one line."""
        counts = self.counts
        return (
            f"{self._name} put the attention of {counts['tokens']} tokens together, {counts['compiled']} of them by a "
            f"compiled kernel, in {counts['rows']} rows of {counts['steps']} steps, from a window of "
            f"{self._options.window} tokens and {counts['keys_turned']} keys turned in each layer"
        )

    def _spared(self, step: BeyondWindow, layer_name: str, attn_metadata: Any) -> Any:
        """Return metadata in which these tokens read only a few keys, and the others the same as before."""
        import torch  # noqa: PLC0415 - vLLM brings it

        pieces, lens = step.spared()
        table = self.attention.block_table(attn_metadata)
        rows = torch.from_numpy(pieces.rows).to(table.device, non_blocking=True)
        seq_lens = torch.from_numpy(lens.astype(np.int32)).to(table.device, non_blocking=True)
        return self.attention.restricted(
            layer_name, attn_metadata, table[rows], seq_lens, int(lens.max()), pieces.split(table.device)
        )

    def _attention(self, step: BeyondWindow, layer_name: str, query: Tensor, kv_cache: Tensor, table: Tensor) -> Tensor:
        """``[num_tokens, num_heads, head_size]``, float32: of some tokens beyond their windows."""
        _, positions = step.on(query.device)
        grown = self._grown(positions)
        if grown is not None:
            query = (query * grown[:, None, None]).to(query.dtype)
        size = self.attention.block_size(layer_name, kv_cache)
        whole = self._near(step, layer_name, query, kv_cache, table, size)
        rotary = self.attention.rotary(layer_name)
        query = turned(query, rotary.factors(positions, self._far_from(positions)), neox=rotary.neox)
        if rotary not in self._turning:
            self._turning[rotary] = self._factors_of_keys(rotary, size)
        of_keys = self._turning[rotary]
        for run in step.runs(size):
            blocks = slice(run.begin // size, -(-run.end // size))
            keys, values = self.attention.read(layer_name, kv_cache, table[run.row, blocks].long())
            of_run = slice(run.begin, blocks.stop * size)
            factors = of_keys[0][of_run], of_keys[1][of_run]
            keys = turned(keys.flatten(0, 1), factors, neox=rotary.neox).unflatten(0, keys.shape[:2])
            count = run.end - run.begin
            part = self.attention.attend(layer_name, query[run.tokens], keys, values, count, causal=run.causal)
            whole.add(run.tokens, *part)
        return whole.output

    def _near(
        self, step: BeyondWindow, layer_name: str, query: Tensor, kv_cache: Tensor, table: Tensor, size: int
    ) -> Merged:
        """Compute each request's attention over the windows of its tokens."""
        import torch  # noqa: PLC0415 - vLLM brings it

        window, found, before = self._options.window, [], 0
        pieces = (of.tolist() for of in (step.pieces.rows, step.pieces.begins, step.pieces.ends))
        for row, begin, end in zip(*pieces, strict=True):
            first = (begin - window + 1) // size
            keys, values = self.attention.read(layer_name, kv_cache, table[row, first : -(-end // size)].long())
            own, count = query[before : before + end - begin], end - first * size
            found.append(self.attention.attend(layer_name, own, keys, values, count, causal=True, window=window))
            before += end - begin
        outputs, sums = zip(*found, strict=True)
        return Merged(torch.cat(outputs), torch.cat(sums))

    def _compiled(
        self,
        step: BeyondWindow,
        layer_name: str,
        query: Tensor,
        kv_cache: Tensor,
        table: Tensor,
        kernel: Attend,
        layout: HeadLayout,
    ) -> Tensor:
        """Return what `_attention` does, by a kernel; what it needs beside the layer is the same in all layers."""
        rotary, (_, positions) = self.attention.rotary(layer_name), step.on(query.device)
        if rotary not in self._turned:
            turning = rotary.factors(positions, self._far_from(positions))
            self._turned[rotary] = step.parts(layout.block_size), turning
        if rotary not in self._tiles:
            self._tiles[rotary] = by_tile(self._factors_of_keys(rotary, layout.block_size))
        parts, turning = self._turned[rotary]
        grown = self._grown(positions)
        near = query if grown is None else query * grown[:, None, None]
        far, of_keys = turned(near, turning, neox=rotary.neox), self._tiles[rotary]
        return kernel(near, far, kv_cache, table, parts, of_keys, layout.scale, self._options.window)

    def _grown(self, positions: Tensor) -> Tensor | None:
        """``[n]``, float32: log-n scaling of queries; None without it."""
        if self._options.training_length is None:
            return None
        return ((positions + 1).float().log() / math.log(self._options.training_length)).clamp(min=1.0)

    def _far_from(self, positions: Tensor) -> Tensor:
        """``[n]``, float32: where queries see far keys from; the last one is a window away, the others leak closer."""
        window = self._options.window
        return window + (positions.float() - window) / self._leak

    def _factors_of_keys(self, rotary: Rotary, block_size: int) -> tuple[Tensor, Tensor]:
        """Return the rotation factors of keys at all positions, up to the end of the last block."""
        import torch  # noqa: PLC0415 - vLLM brings it

        length = rotary.table.shape[0]
        positions = torch.arange(-(-length // block_size) * block_size, device=rotary.table.device)
        positions = positions.clamp(max=length - 1)
        return rotary.factors(positions, positions.float() / self._leak)


class LeakyReRoPE(ReRoPE):
    """ReRoPE with distances that keep growing before the window, by one per `LeakyReRoPEOptions.leak` tokens."""

    options_type = LeakyReRoPEOptions
