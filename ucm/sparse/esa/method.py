"""Essential sparse attention: offload most of a context to a store, and load back the blocks that a query needs.

Source: UCM's ESA (ModelEngine, unified-cache-management): representatives of the context's blocks stay with the model,
the blocks go to a store, and the few that are essential to a query are retrieved. Xiao et al., "InfLLM: Training-Free
Long-Context Extrapolation for LLMs with an Efficient Context Memory" (NeurIPS 2024, arXiv:2402.04617): sinks, a local
window, and a context memory looked up chunk by chunk in prefill and token by token in decode. Blocks are ranked by
codes of their keys, as `BlockTopK` ranks them (`ucm.sparse.topk.codes`).

Prompts are dense: a request holds all blocks of its prompt until its first generated token. The scheduler side
(`ucm.sparse.esa.offloaded`) then frees its blocks between sinks and window and notifies the workers, which copy them
out before the rest of the step. From then on a request holds its sinks, its window, the tokens of the steps in flight
and a bounded number of resident blocks, whatever its length. Each worker also keeps the codes of the offloaded keys
(their size: `ucm.sparse.topk.codes`), and up to a quarter more to grow into, in device memory that vLLM does not count.

A request whose blocks between sinks and window fit into the budget stays dense, at no cost.

Blocks that a worker cannot load back (its store has failed twice) cannot be chosen in that step, and the
scheduler is notified: it has the request recomputed from its prompt. From then on freed blocks stay in host memory,
so nothing more is lost.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from ucm.background import call_later
from ucm.clock import SYSTEM
from ucm.compat import optional
from ucm.config.settings import StoreSettings
from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.sparse.base import require_hooks
from ucm.sparse.blocks import ReleasingMethod, SinksAndWindow, keep_apart
from ucm.sparse.esa.offloaded import OffloadedReleases, out_of_reach
from ucm.sparse.esa.worker import OffloadedReader
from ucm.sparse.options import MethodOptions, parse_options, refuse_asked, tokens
from ucm.store.config import default_offload_directory
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ucm.clock import Clock
    from ucm.sparse.attention import CopyingView
    from ucm.sparse.base import Role
    from ucm.sparse.esa.offloaded import OffloadedNews

NAME = "ESA"


def default_store() -> StoreSettings:
    """Return shared memory in its own directory, so that it and the prefix cache do not evict each other's blocks."""
    return StoreSettings(pipeline="Dram", dram_directory=default_offload_directory())


class ESAOptions(MethodOptions):
    """The options of the method.

    Attributes:
        token_budget: Tokens between the sinks and the window that a step reads of a request in a layer, in full
            blocks: what a request holds in vLLM's memory besides sinks, window and the tokens of the steps in flight.
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        window_tokens: Tokens before the newest that are always read.
        store: The store of the offloaded context, like the connector's ``store`` section; default: the Dram tier.
    """

    beside_kv = frozenset({"store"})
    token_budget: int = tokens(2048, at_least=1)
    sink_tokens: int = tokens(4, at_least=0)
    window_tokens: int = tokens(1024, at_least=1)
    store: StoreSettings = Field(default_factory=default_store, description="a `store` section, as the connector's")

    @field_validator("store", mode="before")
    @classmethod
    def _section(cls, value: object) -> object:
        return StoreSettings.model_validate(value) if isinstance(value, dict) else value

    def window(self, tile: int) -> SinksAndWindow:
        """Return the sinks and the window that generated tokens read."""
        return SinksAndWindow(self.sink_tokens, self.window_tokens, dense_prefill=True, tile=tile)


class ESA(ReleasingMethod[OffloadedReleases]):
    """Store-backed retrieval of essential blocks; see the module and `ESAOptions`.

    Attributes:
        at_once: Whether blocks are freed even before an offloaded context is longer than the budget.

    Raises:
        ConfigError: If an option is wrong.
    """

    attention: CopyingView
    options_type = ESAOptions
    at_once = False

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any], *, clock: Clock = SYSTEM) -> None:
        super().__init__(vllm_config, role, options)
        self._clock = clock
        self._options = parse_options(ESAOptions, NAME, options)
        self._reader: OffloadedReader | None = None
        #: Requests that are recomputed in this step.
        self._anew: set[str] = set()

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return True."""
        del options
        return True

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return the prompt's tokens, which are always dense."""
        del options
        return num_prompt_tokens

    # Scheduler side

    def scheduler_started(self, scheduler: Any) -> None:
        """Refuse an engine in which blocks cannot be freed."""
        require_hooks(NAME, self.needed_hooks)
        block_size = int(self.vllm_config.cache_config.block_size)
        self.releases = OffloadedReleases(
            scheduler, self._options.window(self.tile), self._budget(block_size), at_once=self.at_once
        )

    def limit_new_tokens(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Make a request that was preempted while generating recompute its answer token by token.

        Each of these tokens loads other blocks, and there is room only for those of one token.
        """
        last, prompt = num_computed_tokens + num_new_tokens - 1, int(request.num_prompt_tokens)
        if num_new_tokens <= 1 or last < prompt or self._blocks.reads_all(last, prompt):
            return num_new_tokens
        return max(1, prompt - num_computed_tokens)

    def before_allocation(self, request: Any) -> bool:
        """Keep generated blocks from being hit by prompts, and free blocks."""
        keep_apart(request, request.num_prompt_tokens, self.vllm_config.cache_config)
        return super().before_allocation(request)

    def tell_lost(self, request: Any) -> None:
        """Log once per step; vLLM asks again as it preempts others."""
        if request.request_id not in self._anew:
            self._anew.add(request.request_id)
            get_logger(__name__).warning(
                "[UCM.Sparse] request %s is computed again: blocks of it were lost, or a failed load set it back "
                "to where they are released (token %d)",
                request.request_id,
                request.num_computed_tokens,
            )

    def asks_workers(self) -> str:
        """Ask the workers whether they can report losses."""
        return self._blocks.losses

    def build_metadata(self, scheduler_output: Any) -> OffloadedNews | None:
        """Return the blocks that the workers must copy out, and the admissions that they may drop."""
        del scheduler_output
        self._anew.clear()
        return self._blocks.news()

    # Worker side

    def worker_started(self) -> None:
        """Refuse an unsupported engine, and a store that fails to open; a store that does not answer is accepted."""
        require_hooks(NAME, self.needed_hooks)
        self.attention.require_engine()
        block_size = optional(self.vllm_config, "cache_config.block_size")
        if block_size:
            self._budget(int(block_size))
        config = self._options.store.as_store_config()
        trial = call_later(
            lambda: open_store(config, "offloaded/trial", None, clock=self._clock).close(),
            "ucm-open",
            clock=self._clock,
        )
        if trial.wait(config.stuck_seconds):
            trial.result()  # or what is wrong with it
        else:
            get_logger(__name__).warning(
                "[UCM.Sparse] the store of %s has not answered for %.1f s (%s): until it does, released blocks "
                "stay in host memory",
                NAME,
                config.stuck_seconds,
                ", ".join(config.roots) or config.pipeline,
            )
        self._reader = OffloadedReader(
            self.attention,
            self.vllm_config.cache_config,
            config,
            int(self.vllm_config.parallel_config.rank),
            self._options,
            self.tile,
            clock=self._clock,
        )

    def confirms(self, question: str) -> str:
        """Return why this worker's losses would not reach the scheduler; empty if they do."""
        return out_of_reach(question)

    def layer_seen(self, layer_name: str) -> None:
        """Refuse an unsupported layer."""
        self.attention.require(layer_name, reads_keys=True)

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """Copy out the blocks that this step frees, before the rest of the step."""
        del runner
        self.reader.step_arrived(optional(scheduler_output, "ucm_sparse_meta"))

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop the state of ended requests."""
        del runner
        self.reader.forget(request_ids)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Record the rows with an offloaded context."""
        batch = self.attention.batch(runner, scheduler_output, input_batch)
        refuse_asked(batch.asked, self)
        self.reader.begin(batch)

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Load the needed blocks into the resident blocks, and make the layer read them."""
        reader = self.reader
        reader.caches[layer_name] = kv_cache
        if reader.restricts:
            began = perf_counter()
            attn_metadata = reader.restrict(layer_name, query, kv_cache, attn_metadata)
            reader.select_seconds += perf_counter() - began
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """Finish the step."""
        del runner, scheduler_output, model_output
        if self.reader.restricts:
            self.reader.finish()

    def figures(self) -> dict[str, float]:
        """See `OffloadedReader.figures`."""
        return {} if self._reader is None else self._reader.figures()

    @property
    def reader(self) -> OffloadedReader:
        """The worker's state."""
        if self._reader is None:
            raise RuntimeError("a worker's method was asked before it was started")
        return self._reader

    def _budget(self, block_size: int) -> int:
        """Return the number of resident blocks of a request."""
        blocks = self._options.token_budget // block_size
        if blocks < 1:
            raise ConfigError(
                f"a budget of {self._options.token_budget} tokens leaves no block of {block_size} to bring back",
                where=f"ucm_sparse_config.{NAME}.token_budget",
                fix=f"set it to {block_size} or more, or start vLLM with a smaller --block-size",
            )
        return blocks
