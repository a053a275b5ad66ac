"""On-device block top-k: a decode step reads the blocks that its query wants most, within a budget of tokens.

Source: Quest (Tang et al., ICML 2024, arXiv:2406.10774) for the bounds by which blocks are ranked, and for leaving the
first layers and prefill dense; UCM's GSAOnDevice, after which the method is also named, for choosing on the device, per
layer, one set of blocks for all heads of a request, so that it fits into any backend's block table.

The KV cache itself stays whole: what a step does not read, a later one may. Whatever a block holds has been put there
by vLLM (computed, found in the prefix cache, loaded by a connector), and its representative is made from what is in the
cache when a request first chooses among its blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ucm.errors import ConfigError, SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.needed_hooks import require_hooks
from ucm.sparse.options import MethodOptions, parse_options
from ucm.sparse.representatives import KeyBounds, shares
from ucm.sparse.selection import BlockBudget, Planner, RestrictedTables, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ucm.sparse.attention import StepBatch

#: The groups of rewritten modules whose hooks the worker's side hangs on.
NEEDED = ("ATTENTION", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")


class BlockTopKOptions(MethodOptions):
    """What an operator may set.

    Attributes:
        token_budget: Tokens that a decode step reads of each request in a layer, in whole blocks; a request with fewer
            is dense.
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        recent_tokens: Tokens before the newest that are always read; rounded up to whole blocks.
        dense_layers: Layers from the first on that read everything.
    """

    token_budget: int = Field(default=2048, ge=1, description="a number of tokens, 1 or more")
    sink_tokens: int = Field(default=4, ge=0, description="a number of tokens, 0 or more")
    recent_tokens: int = Field(default=64, ge=0, description="a number of tokens, 0 or more")
    dense_layers: int = Field(default=2, ge=0, description="a number of layers, 0 or more")


class BlockTopK(SparseMethod):
    """Restricts each decode to the blocks with the highest upper bounds of attention.

    All of it is on the worker's side. A step whose requests fit into their budgets costs a comparison of their lengths.

    Attributes:
        counts: ``steps`` and ``rows`` that were restricted, ``blocks_read`` and ``blocks_held`` of these rows in each
            restricted layer, ``representatives`` made, ``failures``, and ``requests_failed``.

    Raises:
        ConfigError: If an option is wrong.
        SparseMethodError: If its hooks are switched off.
    """

    options_type = BlockTopKOptions
    needed_hooks = NEEDED

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._name = type(self).__name__
        require_hooks(self._name, self.needed_hooks)
        self._options = parse_options(BlockTopKOptions, self._name, options)
        self._logger = get_logger()
        self._planner: Planner | None = None
        self._bounds: dict[str, KeyBounds] = {}
        self._batch: StepBatch | None = None
        self._plan: StepPlan | None = None
        self._tables: tuple[Any, RestrictedTables] | None = None
        self._asked = False  #: whether a layer of this step has asked
        self._dense: set[str] = set()
        self._causes: set[str] = set()
        self.counts: Counter[str] = Counter()

    def worker_started(self) -> None:
        """Refuses what cannot be served, and a budget that leaves nothing to choose."""
        self.attention.require_engine()
        model = getattr(self.vllm_config, "model_config", None)
        layers = getattr(getattr(model, "hf_text_config", None), "num_hidden_layers", None)
        if layers is not None and self._options.dense_layers >= layers:
            raise ConfigError(
                f"{self._options.dense_layers} dense layers leave none of the model's {layers} to restrict",
                where=f"ucm_sparse_config.{self._name}.dense_layers",
                fix=f"let it be {layers - 1} or fewer",
            )
        block_size = getattr(self.vllm_config.cache_config, "block_size", None)
        if block_size:
            self._budget(int(block_size))

    def layer_seen(self, layer_name: str) -> None:
        """Refuses a layer that cannot be served."""
        self.attention.require(layer_name, reads_keys=not self._is_dense(layer_name))

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Forgets them."""
        del runner
        for request_id in request_ids:
            self._dense.discard(request_id)
            if self._planner is not None:
                self._planner.forget(request_id)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Decides from the lengths which rows are sparse in this step."""
        self._batch = self.attention.batch(runner, scheduler_output, input_batch)
        self._tables, self._asked = None, False
        # Before the first layer that has a cache, nobody knows how it counts blocks.
        self._plan = None if self._planner is None else self._planner.plan(self._batch, self._dense)

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Restricts the step's sparse rows to the blocks that their queries want."""
        self._asked = True
        if self._planner is None and self._batch is not None:
            self.attention.require(layer_name)
            self._planner = Planner(self._budget(self.attention.block_size(layer_name, kv_cache)))
            self._plan = self._planner.plan(self._batch, self._dense)
        if self._plan is not None and not self._is_dense(layer_name):
            self.attention.require(layer_name, reads_keys=True)
            try:
                attn_metadata = self._restrict(self._plan, layer_name, query, kv_cache, attn_metadata)
            except SparseMethodError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, these rows can still be computed densely
                self._fail(self._plan, layer_name, error)
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """Counts the step; one that no layer has asked about was not restricted, and that must not go unnoticed."""
        del runner, scheduler_output, model_output
        plan, self._plan, self._batch = self._plan, None, None
        if plan is None:
            return
        if not self._asked:
            raise SparseMethodError(
                f"{self._name} was not asked by any layer of this step: its attention was dense",
                where="the attention hooks of this worker",
                fix="unset UCM_DISABLE_ATTENTION_PATCH, and leave out full CUDA graphs",
            )
        if self._tables is None:  # all of this worker's layers are among the dense ones: a first stage of a pipeline
            return
        self._tables = None
        self.counts["steps"] += 1
        self.counts["rows"] += len(plan.rows)
        if self.counts["steps"].bit_count() == 1:  # at 1, 2, 4, …: told often enough, never too often
            self._logger.info("[UCM.Sparse] %s", self.summary())

    def summary(self) -> str:
        """What was done until now, in one line."""
        counts = self.counts
        share = counts["blocks_read"] / max(1, counts["blocks_held"])
        return (
            f"{self._name} restricted {counts['rows']} decodes in {counts['steps']} steps: "
            f"{counts['blocks_read']} of {counts['blocks_held']} blocks read ({share:.1%}), "
            f"{counts['representatives']} representatives made, {counts['requests_failed']} requests dense after "
            f"{counts['failures']} failures"
        )

    def _restrict(self, plan: StepPlan, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Any:
        if self._tables is None or self._tables[0] is not attn_metadata:
            table = self.attention.block_table(attn_metadata)
            self._tables = attn_metadata, RestrictedTables(plan, table)
        tables = self._tables[1]
        bounds = self._bounds_of(layer_name, kv_cache, tables)
        if tables.missing is not None:
            bounds.update(tables.missing, lambda ids: self.attention.read_keys(layer_name, kv_cache, ids))
            self.counts["representatives"] += len(tables.missing)
        chosen = tables.choose(shares(bounds.scores(query[tables.tokens], tables.candidates), tables.hidden))
        found = self.attention.restricted(layer_name, attn_metadata, chosen, tables.seq_lens, tables.max_seq_len)
        self.counts["blocks_read"] += plan.budget.total * len(plan.rows)
        self.counts["blocks_held"] += int(plan.blocks.sum())
        return found

    def _bounds_of(self, layer_name: str, kv_cache: Tensor, tables: RestrictedTables) -> KeyBounds:
        """The layer's bounds; with room for all blocks of the cache, made at its first restricted step."""
        found = self._bounds.get(layer_name)
        if found is None:
            keys = self.attention.read_keys(layer_name, kv_cache, tables.candidates[0, :1])
            num_blocks = kv_cache.numel() // (2 * keys.numel())
            found = self._bounds[layer_name] = KeyBounds(num_blocks, keys)
        return found

    def _fail(self, plan: StepPlan, layer_name: str, error: Exception) -> None:
        """These requests are dense from here on, in this step's further layers too; the others go on."""
        self._dense.update(plan.request_ids)
        self._plan = None
        self.counts["failures"] += 1
        self.counts["requests_failed"] += len(plan.request_ids)
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._causes:
            self._causes.add(cause)
            self._logger.error(
                "[UCM.Sparse] %s failed in %s; %d requests are dense from here on: %s",
                *(self._name, layer_name, len(plan.request_ids), cause),
                exc_info=error,
            )

    def _budget(self, block_size: int) -> BlockBudget:
        options = self._options
        budget = BlockBudget.of_tokens(block_size, options.token_budget, options.sink_tokens, options.recent_tokens)
        if budget.chosen < 1:
            raise ConfigError(
                f"a budget of {options.token_budget} tokens leaves no block of {block_size} to choose: it is "
                f"{budget.total} blocks, and {budget.sinks + budget.recent} of sinks and recent tokens are always read",
                where=f"ucm_sparse_config.{self._name}.token_budget",
                fix=f"let it be {budget.least_tokens} or more, or start vLLM with a smaller --block-size",
            )
        return budget

    def _is_dense(self, layer_name: str) -> bool:
        number = re.search(r"\.(\d+)\.", layer_name)
        return number is not None and int(number[1]) < self._options.dense_layers


class GSAOnDevice(BlockTopK):
    """The same, by the name that it has in UCM, which its messages and its log lines then bear."""
