"""Essential sparse attention: the middle of a context lies in a store, and the blocks that a query wants come back.

Source: UCM's ESA (ModelEngine, unified-cache-management): representatives of the context's blocks stay with the model,
the blocks go to a store, and the few that are essential to a query are retrieved. Xiao et al., "InfLLM: Training-Free
Long-Context Extrapolation for LLMs with an Efficient Context Memory" (NeurIPS 2024, arXiv:2402.04617): sinks, a local
window, and a context memory looked up chunk by chunk in prefill and token by token in decode. Tang et al., "Quest"
(ICML 2024, arXiv:2406.10774): channel-wise bounds of a block's keys as its representative.

The scheduler's side (`ucm.sparse.middle_release`) gives a request's blocks between sinks and window back to vLLM's pool
and tells the workers, who copy them out before anything else of the step is done. From then on a request holds its
sinks, its window, the tokens of the steps under way and a bounded number of resident blocks, whatever its length;
beside them each worker keeps the bounds of the keys: ``1 / block_size`` of what the KV of the middle would take, and up
to a quarter more to grow into, in the device's memory and not counted by vLLM.

A request whose middle fits into the budget is left as it is: it is dense, and costs nothing.

What a worker cannot bring back (its store has failed twice) is left out of what can be chosen in that step, and the
scheduler is told: it has the request computed anew from its prompt. From then on released blocks stay in host memory,
so nothing more is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.sparse.base import INVALID_SLOT, Role
from ucm.sparse.esa_options import ESAOptions
from ucm.sparse.esa_worker import MiddleReader
from ucm.sparse.middle_release import MiddleReleases
from ucm.sparse.needed_hooks import require_hooks
from ucm.sparse.options import parse_options
from ucm.sparse.releasing import LOST, ReleasingMethod, require_own_connector
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ucm.sparse.block_copies import CopyingView
    from ucm.sparse.middle import MiddleNews

NAME = "ESA"


class ESA(ReleasingMethod[MiddleReleases]):
    """Store-backed retrieval of essential blocks; see the module and `ESAOptions`.

    Attributes:
        at_once: Whether blocks are released before a middle is longer than the budget.

    Raises:
        ConfigError: If an option is wrong.
    """

    attention: CopyingView
    options_type = ESAOptions
    at_once = False

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._options = parse_options(ESAOptions, NAME, options)
        self._reader: MiddleReader | None = None
        #: Requests that are computed anew in this step.
        self._anew: set[str] = set()

    # The scheduler's side

    def scheduler_started(self, scheduler: Any) -> None:
        """Refuse what blocks cannot be released beside."""
        require_hooks(NAME, self.needed_hooks)
        require_own_connector(scheduler.connector, NAME)
        block_size = int(self.vllm_config.cache_config.block_size)
        self.releases = MiddleReleases(
            scheduler, self._options.window(), self._budget(block_size), at_once=self.at_once
        )

    def num_slots(self, request: Any, num_new_tokens: int, num_external_computed_tokens: int) -> int:
        """Release blocks, and leave the allocation to vLLM."""
        del num_new_tokens, num_external_computed_tokens
        if self._blocks.release(request):
            return INVALID_SLOT
        if request.request_id not in self._anew:  # asked for again as others are preempted for it
            self._anew.add(request.request_id)
            get_logger().warning(
                "[UCM.Sparse] request %s is computed anew: blocks of it are lost, or it was taken back to where they "
                "are released (token %d)",
                request.request_id,
                request.num_computed_tokens,
            )
        return LOST

    def build_metadata(self, scheduler_output: Any) -> MiddleNews | None:
        """What the workers have to copy out, and what they may forget."""
        del scheduler_output
        self._anew.clear()
        return self._blocks.news()

    # The worker's side

    def worker_started(self) -> None:
        """Refuse an engine that cannot be served, and a store that cannot be opened."""
        require_hooks(NAME, self.needed_hooks)
        self.attention.require_engine()
        block_size = getattr(self.vllm_config.cache_config, "block_size", None)
        if block_size:
            self._budget(int(block_size))
        config = self._options.store.as_store_config()
        open_store(config, "middle/trial", None).close()
        self._reader = MiddleReader(
            self.attention,
            self.vllm_config.cache_config,
            config,
            int(self.vllm_config.parallel_config.rank),
            ahead=self._options.retrieval == "ahead",
        )

    def layer_seen(self, layer_name: str) -> None:
        """Refuse a layer that cannot be served."""
        self.attention.require(layer_name, reads_keys=True)

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """Copy out what is released with this step, before anything of it is done."""
        del runner
        self.reader.step_arrived(getattr(scheduler_output, "ucm_sparse_metadata", None))

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Note the rows with a middle."""
        if self.reader.has_middles:
            self.reader.begin(self.attention.batch(runner, scheduler_output, input_batch))

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Bring what is wanted into the resident blocks, and have the layer read them."""
        reader = self.reader
        reader.caches[layer_name] = kv_cache
        if reader.restricts:
            attn_metadata = reader.restrict(layer_name, query, key, kv_cache, attn_metadata)
        return query, key, value, attn_metadata

    def attention_finished(
        self, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        """Begin to bring what the next step is expected to want."""
        del kv_cache, attn_metadata, output
        if self.reader.restricts:
            self.reader.look_ahead(layer_name, query)

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """The step is over."""
        del runner, scheduler_output, model_output
        if self.reader.restricts:
            self.reader.finish()

    @property
    def reader(self) -> MiddleReader:
        """The worker's state."""
        if self._reader is None:
            raise RuntimeError("a worker's method was asked before it was started")
        return self._reader

    def _budget(self, block_size: int) -> int:
        """The resident blocks of a request."""
        blocks = self._options.token_budget // block_size
        if blocks < 1:
            raise ConfigError(
                f"a budget of {self._options.token_budget} tokens leaves no block of {block_size} to bring back",
                where=f"ucm_sparse_config.{NAME}.token_budget",
                fix=f"let it be {block_size} or more, or start vLLM with a smaller --block-size",
            )
        return blocks
