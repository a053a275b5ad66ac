"""On-device block top-k: a decode step reads the blocks that its query needs most, within a budget of tokens.

Source: Quest (Tang et al., ICML 2024, arXiv:2406.10774) for leaving the first layers and prefill dense; UCM's
GSAOnDevice, after which the method is also named, for choosing on the device, per layer, one set of blocks for all
heads of a request, so that it fits into any backend's block table, and for codes of keys.

The KV cache itself stays complete: a later step may read what an earlier one skipped. vLLM fills the blocks
(by computation, prefix-cache hits or a connector's loads). A block's representative is made from the
cache in the first step before which the block is full. No token chooses among blocks that its own step completes: the
scheduler's side limits the tokens of an answer in a step.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from ucm.compat import optional
from ucm.config.settings import format_size
from ucm.errors import ConfigError, SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.attention import KEY
from ucm.sparse.base import Role, not_asked, refuse
from ucm.sparse.blocks import NEEDED, DensePrompts
from ucm.sparse.options import MethodOptions, RequestOptions, parse_asked, parse_options, plain_options, tokens
from ucm.sparse.outcomes import FAILED, OUT_OF_MEMORY, OUTCOMES, RESTRICTED
from ucm.sparse.topk.codes import KeyCodes
from ucm.sparse.topk.samples import EVERY, AttentionSamples
from ucm.sparse.topk.selection import (
    WORTHWHILE,
    BlockBudget,
    MissingBlocks,
    RestrictedTables,
    SelectionPlan,
    SelectionPlanner,
    dense_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ucm.sparse.attention import StepBatch


class BlockTopKOptions(MethodOptions):
    """The options of the method.

    Attributes:
        token_budget: Tokens that a decode step reads of each request in a layer, in full blocks; a request with fewer
            is dense. A request may have its own budget and share (`ucm.sparse.options`).
        budget_share: The share of its context that a decode step reads of a request if that is more than
            `token_budget`, rounded down to blocks; None for `token_budget` at any length.
        min_context: Tokens below which a request is dense, even if it has more than its budget; None for `WORTHWHILE`
            more than the budget.
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        recent_tokens: Tokens before the newest that are always read; rounded up to whole blocks.
        dense_layers: The number of first layers that read everything.
        sample_every: One in so many choices, each of a layer in a step, is measured; see `ucm.sparse.topk.samples`.
    """

    token_budget: int = tokens(2048, at_least=1)
    budget_share: float | None = Field(default=None, gt=0, lt=1, description="a share of the context, between 0 and 1")
    min_context: int | None = tokens(None, at_least=0)
    sink_tokens: int = tokens(4, at_least=0)
    recent_tokens: int = tokens(64, at_least=0)
    dense_layers: int = Field(default=2, ge=0, description="a number of layers, 0 or more")
    sample_every: int = Field(default=EVERY, ge=1, description="a number of choices, 1 or more")


class BlockTopK(DensePrompts):
    """Restricts each decode to the blocks to which its query attends most, according to their representatives.

    The worker side selects blocks. A step whose requests fit into their budgets costs a comparison of their
    lengths.

    Attributes:
        counts: ``steps`` and ``rows`` that were restricted, ``blocks_read`` and ``blocks_held`` of these rows in each
            restricted layer, ``representatives`` made, ``failures``, and ``requests_<outcome>``; see
            `ucm.sparse.outcomes`.
        select_seconds: The seconds that the worker's thread has spent on selection.
    """

    options_type: ClassVar[type[BlockTopKOptions]] = BlockTopKOptions
    _options: BlockTopKOptions
    needed_hooks: ClassVar[tuple[str, ...]] = NEEDED  # the scheduler's keep generated blocks from prompt hits
    serves_latent = True
    serves_drafts = True
    serves_hybrids = True

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._logger = get_logger(__name__)
        self._latent = bool(optional(vllm_config, "model_config.use_mla", False))
        #: The layers that steps restrict.
        self._restricted: dict[str, None] = {}
        self._planner: SelectionPlanner | None = None
        self._representatives: dict[str, KeyCodes] = {}
        self._batch: StepBatch | None = None
        self._plan: SelectionPlan | None = None
        self._tables: tuple[Any, RestrictedTables] | None = None
        self._missing: MissingBlocks | None = None
        #: A layer's metadata, and the ids of the missing blocks.
        self._missing_ids: tuple[Any, Tensor] | None = None
        self._asked = False  #: whether a layer of this step has called the method
        self._dense: set[str] = set()  #: the requests that stay dense
        self._steered: set[str] = set()  #: the requests with their own settings
        self._causes: set[str] = set()
        self._samples = AttentionSamples(self._options.sample_every)
        self.select_seconds = 0.0

    def limit_new_tokens(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Make a step compute so few tokens of an answer that none chooses among blocks that the step completes.

        They are few with drafts anyway, and limited when a preempted request computes its answer again. With latent
        attention only a step's decodes can be restricted, so there it is one. Tokens that are always dense have no
        limit.
        """
        if num_new_tokens <= 1:
            return num_new_tokens
        least = WORTHWHILE if self._options.min_context is None else self._options.min_context
        dense = max(int(request.num_prompt_tokens), least - 1)
        most = 1 if self._latent else self._recent_tokens + 1
        return min(num_new_tokens, max(most, dense - num_computed_tokens))

    @property
    def _recent_tokens(self) -> int:
        """The tokens before the newest that are always read; a step computes at most one more of an answer.

        vLLM pads the first step of some requests to all drafts after it was limited. With recurrent layers it ends a
        step where a block ends, or computes nothing.
        """
        config, found = self.vllm_config, self._options.recent_tokens
        if optional(config, "model_config.is_hybrid", False):
            found = max(found, int(optional(config, "cache_config.block_size") or 1) - 1)
        return max(found, int(optional(config, "speculative_config.num_speculative_tokens") or 0))

    def worker_started(self) -> None:
        """Refuse an unsupported engine, and a budget that leaves no block to choose."""
        super().worker_started()
        self._require_restricted_layers()
        block_size = optional(self.vllm_config, "cache_config.block_size")
        if block_size:
            self._log_shortest(self._budget(int(block_size)))

    def _log_shortest(self, budget: BlockBudget) -> None:
        """Log from which length on requests are restricted; warn if this engine serves none of this length."""
        tokens = np.array([budget.total * budget.block_size], np.int64)
        least = int(dense_tokens(tokens, self._options.min_context)[0]) + 1
        longest: int | None = optional(self.vllm_config, "model_config.max_model_len")
        if longest is None or least <= longest:
            self._logger.info("[UCM.Sparse] %s restricts requests from %d tokens on (min_context)", self._name, least)
            return
        self._logger.warning(
            "[UCM.Sparse] %s restricts requests from %d tokens on, but max_model_len is %d: every request is dense. "
            "To restrict shorter ones, set ucm_sparse_config.%s.min_context lower (0: all beyond token_budget)",
            self._name,
            least,
            longest,
            self._name,
        )

    @classmethod
    def advice(cls, options: Mapping[str, Any]) -> list[str]:
        """Return advice about the length from which on requests are restricted."""
        found = parse_options(cls.options_type, cls.__name__, options)
        if found.min_context is not None:
            return []
        least = f"{found.token_budget + WORTHWHILE:,} tokens (token_budget + {WORTHWHILE:,})"
        return [f"min_context is not set: requests with fewer than about {least} stay dense"]

    def _require_restricted_layers(self) -> None:
        """Check the number of dense layers."""
        dense = self._options.dense_layers
        layers: int | None = optional(self.vllm_config, "model_config.hf_text_config.num_hidden_layers")
        if layers is not None and dense >= layers:
            raise ConfigError(
                f"{dense} dense layers leave none of the model's {layers} to restrict",
                where=f"ucm_sparse_config.{self._name}.dense_layers",
                fix=f"set it to {layers - 1} or fewer",
            )

    def layer_seen(self, layer_name: str) -> None:
        """Refuse an unsupported layer; one that reads only a window anyway stays as it is."""
        if not self.attention.has_window(layer_name):
            restricted = not self._is_dense(layer_name)
            self.attention.require(layer_name, reads_keys=restricted)
            if restricted:
                self._restricted[layer_name] = None

    def bytes_beside_block(self, workers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the bytes of a block's representatives in all restricted layers; refuse a model that has none."""
        self._require_restricted_layers()
        found = [sum(starmap(self._bytes_in_layer, layers.items())) for layers in workers]
        # With an external launcher, an engine sees the layers of its own worker alone, which may be a pipeline's stage.
        sees_all = len(workers) >= optional(self.vllm_config, "parallel_config.pipeline_parallel_size", 1)
        nothing = sees_all and any(workers) and not any(found)
        refuse(
            {"nothing would be restricted: the layers that are not dense have sliding windows or states": nothing},
            f"ucm_sparse_config.{self._name}.dense_layers",
            "set it to a smaller number, or run this model without a sparse method",
        )
        return found

    def _bytes_in_layer(self, name: str, spec: Any) -> int:
        """Return the bytes of a block's representatives in a layer, of which vLLM's ``KVCacheSpec`` is given."""
        import torch  # noqa: PLC0415 - vLLM brings it

        has_keys = optional(spec, "num_kv_heads") is not None  # recurrent layers have states
        if not has_keys or optional(spec, "sliding_window") is not None or self._is_dense(name):
            return 0
        shape = 1, spec.block_size, spec.num_kv_heads, spec.head_size
        return KeyCodes(1, torch.empty(shape, dtype=spec.dtype, device="meta")).nbytes

    def layers_seen(self) -> None:
        """Allocate the representatives of all blocks in all restricted layers, so that no step runs out of memory.

        Raises:
            SparseMethodError: If they do not fit beside the KV cache.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        allocated = block_size = 0
        for name in self._restricted:
            kv_cache = self.attention.bound_cache(name)
            if kv_cache is None:
                raise RuntimeError(f"layer {name} has no KV cache before the first request")
            any_block = torch.zeros(1, dtype=torch.int64, device=kv_cache[0].device)  # one tensor, or two
            keys = self.attention.read_keys(name, kv_cache, any_block)
            block_size = keys.shape[1]
            try:
                self._representatives[name] = KeyCodes(self.attention.num_blocks(name, kv_cache), keys)
                allocated += self._representatives[name].nbytes
            except RuntimeError as error:  # torch's, and its OutOfMemoryError
                raise SparseMethodError(
                    f"the summaries of blocks do not fit beside the KV cache: after {format_size(allocated)} of them, "
                    f"{error}",
                    where=f"layer {name}, one of {len(self._restricted)} restricted layers",
                    fix="leave more memory free (--gpu-memory-utilization, or a lower --num-gpu-blocks-override if it "
                    "is set), or restrict fewer layers (dense_layers)",
                ) from error
        if block_size:
            self._planner = SelectionPlanner(self._budget(block_size), self._options.min_context)
            self._logger.info("[UCM.Sparse] %s: summaries of blocks take %s", self._name, format_size(allocated))

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop the state of ended requests."""
        ended = list(request_ids)
        super().requests_finished(runner, ended)
        for request_id in ended:
            self._dense.discard(request_id)
            self._steered.discard(request_id)
            if self._planner is not None:
                self._planner.forget(request_id)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Decide by the lengths which rows are sparse in this step."""
        self._begin(self.attention.batch(runner, scheduler_output, input_batch))

    def _begin(self, batch: StepBatch) -> None:
        self._batch = batch
        self._outcomes.begin(batch.request_ids)
        self._tables, self._missing_ids, self._asked = None, None, False
        self._plan = self._missing = None
        if self._planner is not None:  # a stage of a pipeline may have no restricted layer
            self._take_plan(self._planner, batch)

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Restrict the step's sparse rows to the blocks that their queries need."""
        began = perf_counter()
        self._asked = True
        if layer_name not in self._restricted or (self._missing is None and self._plan is None):
            return query, key, value, attn_metadata
        if self._missing is not None:
            with self._dense_on_failure(layer_name, self._missing.request_ids):
                self._make_missing(self._missing, layer_name, kv_cache, attn_metadata)
        if self._plan is not None:
            with self._dense_on_failure(layer_name, self._plan.request_ids):
                attn_metadata = self._restrict(self._plan, layer_name, query, kv_cache, attn_metadata)
        self.select_seconds += perf_counter() - began
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """Count the step; raise if no layer called the method, because the step was then not restricted."""
        del runner, scheduler_output, model_output
        self._finish()

    def _finish(self) -> None:
        plan, self._plan, batch, self._batch = self._plan, None, self._batch, None
        self._missing = self._missing_ids = None
        if batch is not None and not self._asked:
            raise not_asked(self._name)
        if plan is None:
            return
        self._tables = None
        self.counts["rows"] += len(plan.rows)
        self._outcomes.count(plan.request_ids, RESTRICTED)
        self._count_step()

    def figures(self) -> dict[str, float]:
        """See `SparseMethod.figures`."""
        size = self._planner.budget.block_size if self._planner is not None else 0
        return {
            **self._outcomes.figures(OUTCOMES),
            "rows": self.counts["rows"],
            "read_tokens": self.counts["blocks_read"] * size,
            "held_tokens": self.counts["blocks_held"] * size,
            "select_seconds": self.select_seconds,
            "attention_samples": self._samples.taken,
            "attention_kept": self._samples.kept,
        }

    def summary(self) -> str:
        """Return the counters so far, in one line."""
        counts = self.counts
        share = counts["blocks_read"] / max(1, counts["blocks_held"])
        return (
            f"{self._name} restricted {counts['rows']} decodes in {counts['steps']} steps: "
            f"{counts['blocks_read']} of {counts['blocks_held']} blocks read ({share:.1%}), "
            f"{counts['representatives']} representatives made, "
            f"{counts['requests_failed'] + counts['requests_out_of_memory']} requests dense after "
            f"{counts['failures']} failures, {counts['requests_opted_out']} because they asked for it, "
            f"{counts['requests_refused']} whose options could not be honoured; {self._samples.summary()}"
        )

    def _restrict(
        self, plan: SelectionPlan, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> Any:
        query = self.attention.scored(layer_name, query, attn_metadata)
        chosen, lens = self._choose(plan, layer_name, query, attn_metadata)
        if self._samples.due():
            table = self.attention.block_table(attn_metadata)
            keys = partial(self.attention.read_keys, layer_name, kv_cache)
            self._samples.measure(layer_name, plan, query, table, chosen, keys)
        self.counts["blocks_read"] += int(plan.totals.sum())
        self.counts["blocks_held"] += int(plan.blocks.sum())
        longest = int(plan.seq_lens.max())
        split = None if self._tables is None else self._tables[1].split
        return self.attention.restricted(layer_name, attn_metadata, chosen, lens, longest, split)

    def _choose(self, plan: SelectionPlan, layer_name: str, query: Tensor, attn_metadata: Any) -> tuple[Tensor, Tensor]:
        """Return the block table and the lengths that a layer reads, by queries as they are scored."""
        if self._tables is None or self._tables[0] is not attn_metadata:
            self._tables = attn_metadata, RestrictedTables(plan, self.attention.block_table(attn_metadata))
        tables = self._tables[1]
        made = self._representatives[layer_name]
        shares = made.shares(query[tables.tokens], tables.candidates, tables.hidden)
        return tables.choose(self.attention.sum_over_ranks(shares)), tables.seq_lens

    def _take_plan(self, planner: SelectionPlanner, batch: StepBatch) -> None:
        for request_id, asked in batch.asked.items():
            self._steer(planner, request_id, asked)
        self._plan = planner.plan(batch, self._dense)
        self._missing = planner.missing(batch, self._dense)

    def _steer(self, planner: SelectionPlanner, request_id: str, asked: object) -> None:
        """Apply a request's settings, or make it dense; in some releases they arrive again when it is resumed."""
        if request_id in self._steered:
            return
        self._steered.add(request_id)
        try:
            options = parse_asked(asked)
            if options is not None and options != RequestOptions():
                planner.give(request_id, self._budget(planner.budget.block_size, options))
        except ConfigError as error:
            self._leave_dense(request_id, error)
            self._dense.add(request_id)
        else:
            if options is None:
                self._leave_dense(request_id)
                self._dense.add(request_id)

    def _make_missing(self, missing: MissingBlocks, layer_name: str, kv_cache: Tensor, attn_metadata: Any) -> None:
        """Make the representatives of blocks from the cache."""
        if self._missing_ids is None or self._missing_ids[0] is not attn_metadata:
            self._missing_ids = attn_metadata, missing.ids(self.attention.block_table(attn_metadata))
        block_ids, made = self._missing_ids[1], self._representatives[layer_name]
        made.update(block_ids, lambda ids: self.attention.read_keys(layer_name, kv_cache, ids))
        self.counts["representatives"] += len(block_ids)

    @contextmanager
    def _dense_on_failure(self, layer_name: str, request_ids: Sequence[str]) -> Iterator[None]:
        """After any failure, compute these requests densely; impossible on only one of several ranks."""
        try:
            yield
        except SparseMethodError:
            raise
        except Exception as error:
            if self.attention.ranks > 1:
                raise
            self._fail(request_ids, layer_name, error)

    def _fail(self, request_ids: Sequence[str], layer_name: str, error: Exception) -> None:
        """Make these requests dense from now on, including this step's further layers; others stay sparse."""
        self._dense.update(request_ids)
        if self._planner is not None and self._missing is not None:
            for request_id in self._missing.request_ids:  # a later step makes what this one does not in further layers
                self._planner.forget_made(request_id)
        self._plan = self._missing = None
        self.counts["failures"] += 1
        no_memory = type(error).__name__ == "OutOfMemoryError"
        self._outcomes.count(request_ids, OUT_OF_MEMORY if no_memory else FAILED)
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._causes:
            self._causes.add(cause)
            self._logger.error(
                "[UCM.Sparse] %s failed in %s; %d requests are dense from here on: %s",
                *(self._name, layer_name, len(request_ids), cause),
                exc_info=error,
            )

    def _budget(self, block_size: int, asked: RequestOptions | None = None) -> BlockBudget:
        """Return the budget of a decode, optionally with what its request asks for.

        A request that names its tokens reads these, whatever the method's share of the context is.
        """
        options = self._options
        token_budget, share = None, options.budget_share
        if asked is not None:
            token_budget = asked.token_budget
            share = asked.budget_share or (share if token_budget is None else None)
        tokens = token_budget or options.token_budget
        always = options.sink_tokens, self._recent_tokens
        budget = BlockBudget.of_tokens(block_size, tokens, *always, share or 0.0)
        if budget.chosen < 1:
            fix = f"set it to {budget.least_tokens} or more"
            raise ConfigError(
                f"a budget of {tokens} tokens leaves no block of {block_size} to choose: it is "
                f"{budget.total} blocks, and {budget.sinks + budget.recent} of sinks and recent tokens are always read",
                where=f"ucm_sparse_config.{self._name}.token_budget" if token_budget is None else f"extra_args.{KEY}",
                fix=fix if token_budget else f"{fix}, or start vLLM with a smaller --block-size",
            )
        return budget

    def _is_dense(self, layer_name: str) -> bool:
        number = re.search(r"\.(\d+)\.", layer_name)
        return number is not None and int(number[1]) < self._options.dense_layers


class GSAOnDevice(BlockTopK):
    """`BlockTopK` under its name in UCM, which messages and log lines use."""

    @classmethod
    def identity(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the identity of `BlockTopK` with the same options."""
        return {**BlockTopK.identity({}), "options": plain_options(cls.options_type, cls.__name__, options)}
