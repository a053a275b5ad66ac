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

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from ucm.background import call_later
from ucm.clock import SYSTEM
from ucm.compat import optional
from ucm.config.settings import StoreSettings
from ucm.errors import ConfigError, SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.base import not_asked
from ucm.sparse.blocks import DensePrompts, ReleasingMethod, SinksAndWindow
from ucm.sparse.esa.offload_store import OffloadStore
from ucm.sparse.esa.offloaded import OffloadedReleases, tell_loss
from ucm.sparse.esa.resident import NOT_ADMITTED, OffloadedContext, reading
from ucm.sparse.options import MethodOptions, refuse_asked, tokens
from ucm.sparse.outcomes import RESTRICTED, SHORT
from ucm.sparse.tables import ReadTables
from ucm.sparse.topk.codes import KeyCodes, ranked
from ucm.store.config import default_offload_directory
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.clock import Clock
    from ucm.sparse.attention import BlockCopies, CopyingView
    from ucm.sparse.base import Role
    from ucm.sparse.esa.offload_store import Fetch
    from ucm.sparse.esa.offloaded import OffloadedNews, Released


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


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a step whose only token chooses offloaded blocks.

    Attributes:
        row: Its index in the batch.
        token: The index of its token among the step's tokens.
        offloaded: Its request's offloaded context.
        choosing: The number of blocks from which it chooses.
    """

    row: int
    token: int
    offloaded: OffloadedContext
    choosing: int

    @property
    def freed(self) -> int:
        """The place after the last freed block; later ones are still in place."""
        return self.offloaded.first + self.offloaded.stored


class ESA(DensePrompts, ReleasingMethod[OffloadedReleases]):
    """Store-backed retrieval of essential blocks; see the module and `ESAOptions`.

    Attributes:
        counts: ``steps`` and ``rows`` with an offloaded context, ``blocks_read`` and ``blocks_stored`` of these rows in
            all layers, ``fetched`` into resident blocks, ``copied_out``, and ``requests_<outcome>``; see
            `ucm.sparse.outcomes`.
        select_seconds: The seconds that the worker's thread has spent on choosing, and on waiting for loads.
    """

    attention: CopyingView
    options_type = ESAOptions
    _options: ESAOptions

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any], *, clock: Clock = SYSTEM) -> None:
        super().__init__(vllm_config, role, options)
        self._clock = clock
        self._window = self._options.window(self.tile)
        self.select_seconds = 0.0
        #: The layers' KV caches, and the keys of any block of each.
        self._caches: dict[str, Tensor] = {}
        self._keys: dict[str, Tensor] = {}
        self._copies: BlockCopies
        self._losses = self._engine = ""
        self._store: OffloadStore | None = None
        self._offloaded: dict[str, OffloadedContext] = {}
        #: The tokens that each request has after the step, and the rows that choose.
        self._seq_lens: NDArray[np.int64]
        self._rows: list[_Row] = []
        #: The step's tables, with the metadata and the numbers of named blocks from which they were made.
        self._tables: tuple[Any, Sequence[int], ReadTables] | None = None

    # Scheduler side

    def scheduler_started(self, scheduler: Any) -> None:
        """Refuse an engine in which blocks cannot be freed."""
        self._blocks = OffloadedReleases(scheduler, self._window, self._budget)

    def limit_new_tokens(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Make a request that was preempted while generating recompute its answer token by token.

        Each of these tokens loads other blocks, and there is room only for those of one token.
        """
        last, prompt = num_computed_tokens + num_new_tokens - 1, int(request.num_prompt_tokens)
        if num_new_tokens <= 1 or last < prompt or self._blocks.reads_all(last, prompt):
            return num_new_tokens
        return max(1, prompt - num_computed_tokens)

    def asks_workers(self) -> tuple[str, str]:
        """Ask the workers whether they can report losses to a file, and tell them the name of this engine start."""
        return self._blocks.losses.path, self._blocks.engine

    def build_metadata(self, scheduler_output: Any) -> OffloadedNews | None:
        """Return the blocks that the workers must copy out, and the admissions that they may drop."""
        del scheduler_output
        return self._blocks.news()

    # Worker side

    def worker_started(self) -> None:
        """Refuse an unsupported engine, and a store that fails to open; a store that does not answer is accepted."""
        super().worker_started()
        if optional(self.vllm_config, "cache_config.block_size"):
            _ = self._budget  # refuse one that leaves no block
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
                self._name,
                config.stuck_seconds,
                ", ".join(config.roots) or config.pipeline,
            )

    def confirms(self, question: tuple[str, str]) -> str:
        """Return why this worker's losses would not reach the scheduler; empty if they do."""
        self._losses, self._engine = question
        if os.access(self._losses, os.W_OK):
            return ""
        return f"it cannot write to the scheduler's {self._losses}, where it reports lost blocks"

    def layer_seen(self, layer_name: str) -> None:
        """Refuse an unsupported layer; without a cache, it is seen again before the first request."""
        self.attention.require(layer_name, reads_keys=True)
        kv_cache = self.attention.bound_cache(layer_name)
        if kv_cache is not None:
            self._caches[layer_name] = kv_cache

    def layers_seen(self) -> None:
        """Refuse a backend with blocks of another size; find out how blocks are copied."""
        import torch  # noqa: PLC0415 - vLLM brings it

        for name, kv_cache in self._caches.items():
            size = self.attention.block_size(name, kv_cache)
            if size != self._size:
                raise SparseMethodError(
                    f"the attention backend splits vLLM's blocks of {self._size} tokens into blocks of {size}",
                    where=f"layer {name}",
                    fix=f"start vLLM with --block-size {size}",
                )
            any_block = torch.zeros(1, dtype=torch.int64, device=kv_cache[0].device)  # one tensor, or two
            self._keys[name] = self.attention.read_keys(name, kv_cache, any_block)
        self._copies = self.attention.block_copies(self._caches)

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """Copy out the blocks that a step frees, before the step writes any block."""
        del runner
        news: OffloadedNews | None = optional(scheduler_output, "ucm_sparse_meta")
        if self._store is not None:
            self._store.settle()
        if news is None:
            return
        if news.dropped:
            self._drop(news.dropped)
        for released in news.released:
            self._copy_out(released)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Record the rows with an offloaded context."""
        batch = self.attention.batch(runner, scheduler_output, input_batch)
        refuse_asked(batch.asked, self)
        self._outcomes.begin(batch.request_ids)
        self._tables, self._seq_lens = None, batch.seq_lens
        for row in np.flatnonzero(batch.admitted).tolist():
            self._forget_unreleased(batch.request_ids[row])
        known = [self._offloaded.get(request_id) for request_id in batch.request_ids]
        stored = np.array([0 if of is None else of.stored for of in known], np.int64)
        choosing = reading(batch, self._window, self._budget, stored, self._size)
        ends = batch.num_new_tokens.cumsum()
        self._rows = []
        for row in np.flatnonzero(choosing).tolist():
            offloaded = known[row] or OffloadedContext(NOT_ADMITTED, self._window.sink_blocks(self._size))
            self._offloaded[batch.request_ids[row]] = offloaded
            self._rows.append(_Row(row, int(ends[row]) - 1, offloaded, int(choosing[row])))
        if self._rows:
            self.counts["rows"] += len(self._rows)
            self._outcomes.count((batch.request_ids[of.row] for of in self._rows), RESTRICTED)

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Drop ended requests without freed blocks; for the others, the scheduler side sends the admission."""
        ended = list(request_ids)
        super().requests_finished(runner, ended)
        for request_id in ended:
            self._forget_unreleased(request_id)

    def _forget_unreleased(self, request_id: str) -> None:
        """Drop the state of a request if none of its blocks is freed."""
        if request_id in self._offloaded and self._offloaded[request_id].admission == NOT_ADMITTED:
            del self._offloaded[request_id]

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Load the needed blocks into the resident blocks, and make the layer read them."""
        if self._rows:
            began = perf_counter()
            attn_metadata = self._restrict(layer_name, query, kv_cache, attn_metadata)
            self.select_seconds += perf_counter() - began
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """Raise if no layer called the method in a step that it restricts."""
        del runner, scheduler_output, model_output
        rows, self._rows, tables, self._tables = self._rows, [], self._tables, None
        if rows and tables is None:
            raise not_asked(self._name)
        if rows:
            self._count_step()

    def figures(self) -> dict[str, float]:
        """See `SparseMethod.figures`; of the tokens between sinks and window, and of rows that read them by name."""
        size = self._size
        return {
            **self._outcomes.figures((RESTRICTED, SHORT)),
            "rows": self.counts["rows"],
            "read_tokens": self.counts["blocks_read"] * size,
            "held_tokens": self.counts["blocks_stored"] * size,
            "select_seconds": self.select_seconds,
            "fetched_blocks": self.counts["fetched"],
            "lost_blocks": self._store.counts["lost"] if self._store is not None else 0,
        }

    def summary(self) -> str:
        """What was done until now, in one line."""
        counts, stored = self.counts, self._store.counts if self._store else Counter[str]()
        return (
            f"{self._name} restricted {counts['rows']} rows in {counts['steps']} steps: {counts['blocks_read']} of "
            f"{counts['blocks_stored']} offloaded blocks read, {counts['fetched']} fetched, {stored['loaded']} of them "
            f"from the store; {stored['saved']} blocks saved, {stored['kept']} kept in host memory, "
            f"{stored['lost']} lost"
        )

    def _restrict(self, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """Load the needed blocks into resident ones, and return metadata that reads them."""
        import torch  # noqa: PLC0415 - vLLM brings it

        table = self.attention.block_table(attn_metadata)
        for row in self._rows:  # none of the blocks without codes is freed yet
            codes, first = self._codes(row.offloaded, layer_name), row.offloaded.first
            self._summarise(codes, layer_name, kv_cache, table[row.row, first + codes.size : first + row.choosing])
        # Ranked once, because all ranks must call the sum equally often, whatever one of them has lost.
        ranks = self._ranked(layer_name, query)
        chosen = self._best(ranks)
        while not self._bring(layer_name, chosen):  # something was lost: choose again from what is left
            chosen = self._best(ranks)
        places, blocks = [], []
        for row, of_row in zip(self._rows, chosen, strict=True):
            slots = row.offloaded.layers[layer_name].slots([place for place in of_row if place < row.freed])
            places += of_row
            blocks += [*(row.offloaded.resident[slot] for slot in slots), *[-1] * (len(of_row) - len(slots))]
            self.counts["blocks_read"] += len(of_row)
            self.counts["blocks_stored"] += row.choosing
        tables = self._tables_of(attn_metadata, [len(of_row) for of_row in chosen])
        at, held = torch.tensor([places, blocks], dtype=torch.int64).to(table.device)
        named = tables.naming(torch.where(held < 0, table[tables.cells[0], at], held))
        return self.attention.restricted(layer_name, attn_metadata, named, tables.seq_lens, tables.longest)

    def _tables_of(self, attn_metadata: Any, reads: Sequence[int]) -> ReadTables:
        """Return tables that name so many blocks of each row: the same for all layers, unless a layer has lost some."""
        if self._tables is None or self._tables[0] is not attn_metadata or self._tables[1] != reads:
            left_out, named = np.zeros((2, len(self._seq_lens)), np.int64)
            for row, count in zip(self._rows, reads, strict=True):
                left_out[row.row], named[row.row] = row.choosing - count, count
            lens, sinks = self._seq_lens - left_out * self._size, self._window.sink_blocks(self._size)
            table = self.attention.block_table(attn_metadata)
            made = ReadTables(table, np.arange(len(lens)), lens, left_out, sinks, self._size, named)
            self._tables = attn_metadata, reads, made
        return self._tables[2]

    def _summarise(self, codes: KeyCodes, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> None:
        """Append the codes of some blocks in the cache."""
        for some in block_ids.long().split(codes.at_once) if len(block_ids) else ():
            codes.append(self.attention.read_keys(layer_name, kv_cache, some))

    def _codes(self, offloaded: OffloadedContext, layer_name: str) -> KeyCodes:
        """Return the codes of an offloaded context in a layer."""
        if layer_name not in offloaded.codes:
            offloaded.codes[layer_name] = KeyCodes(1, self._keys[layer_name])
        return offloaded.codes[layer_name]

    def _ranked(self, layer_name: str, query: Tensor) -> list[Tensor]:
        """Return, for each row, the ranks of its blocks by the heads of all workers; see `ranked`."""
        import torch  # noqa: PLC0415 - vLLM brings it

        wanted = []
        for row in self._rows:
            places = torch.arange(row.choosing, device=query.device)[None]
            of_row = query[row.token : row.token + 1]
            wanted.append(row.offloaded.codes[layer_name].shares(of_row, places, None)[0])
        summed = self.attention.sum_over_ranks(torch.cat(wanted))
        return [ranked(of[None])[0] for of in summed.split([row.choosing for row in self._rows])]

    def _best(self, ranks: Sequence[Tensor]) -> list[list[int]]:
        """Return the best places of each row in ascending order; this waits for the device once."""
        import torch  # noqa: PLC0415 - vLLM brings it

        found = []
        for row, of_row in zip(self._rows, ranks, strict=True):
            lost = list(row.offloaded.lost)
            left = of_row.index_fill(0, of_row.new_tensor(lost), -1) if lost else of_row
            count = min(self._budget, row.choosing - len(lost))
            found.append(left.topk(count, sorted=False).indices + row.offloaded.first)
        places = iter(torch.cat(found).tolist())
        return [sorted(itertools.islice(places, len(of_row))) for of_row in found]

    def _bring(self, layer_name: str, chosen: Sequence[Sequence[int]]) -> bool:
        """Load the freed places that rows read into resident blocks; return False if a block turns out to be lost."""
        fetches = []
        for row, of_row in zip(self._rows, chosen, strict=True):
            released = [place for place in of_row if place < row.freed]
            offloaded, layer = row.offloaded, row.offloaded.layers[layer_name]
            missing = layer.missing(released)
            if missing:  # all loads begin before the first is waited for
                slots = layer.assign(missing, released, len(offloaded.resident))
                places = [(offloaded.admission, place) for place in missing]
                fetch = self._opened.fetch(self._index(layer_name), places)
                fetches.append((offloaded, fetch, [offloaded.resident[slot] for slot in slots]))
        arrived = [self._place(layer_name, *of) for of in fetches]
        return all(arrived)

    def _place(self, layer_name: str, offloaded: OffloadedContext, fetch: Fetch, blocks: Sequence[int]) -> bool:
        """Wait for a load, and copy it into resident blocks; return whether all blocks arrived."""
        lost = set(self._opened.wait(fetch))
        if lost:
            if not offloaded.lost:
                tell_loss(self._losses, offloaded.admission)
            places = [fetch.wanted[row][1] for row in lost]
            offloaded.lost |= {place - offloaded.first for place in places}
            offloaded.layers[layer_name].clear(places)
        rows = [row for row in range(len(fetch.wanted)) if row not in lost]
        if rows:
            data = fetch.rows[rows] if lost else fetch.rows
            self._copies.write(self._index(layer_name), [blocks[row] for row in rows], data)
        self.counts["fetched"] += len(rows)
        return not lost

    def _copy_out(self, released: Released) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        if self._store is None:
            config, rank = self._options.store.as_store_config(), int(self.vllm_config.parallel_config.rank)
            self._store = OffloadStore(config, self._copies, self._engine, rank, clock=self._clock)
        offloaded = self._offloaded.get(released.request_id)
        if offloaded is None or offloaded.admission not in {released.admission, NOT_ADMITTED}:
            offloaded = self._offloaded[released.request_id] = OffloadedContext(released.admission, released.first)
        offloaded.admission = released.admission
        if released.first != offloaded.first + offloaded.stored:
            raise RuntimeError(
                f"request {released.request_id}: block {released.first} does not follow the offloaded ones"
            )
        for name, cache in self._caches.items():
            codes = self._codes(offloaded, name)
            ids = torch.tensor(released.block_ids, dtype=torch.int64, device=cache[0].device)  # one tensor, or two
            self._summarise(codes, name, cache, ids[codes.size - offloaded.stored :])
        self._store.save(released.admission, released.first, self._copies.read(released.block_ids))
        offloaded.stored += len(released.block_ids)
        offloaded.resident += released.resident
        self.counts["copied_out"] += len(released.block_ids)

    def _drop(self, admissions: Sequence[int]) -> None:
        ended = set(admissions)
        for request_id in [r for r, offloaded in self._offloaded.items() if offloaded.admission in ended]:
            self._opened.drop(self._offloaded.pop(request_id).admission)

    @property
    def _budget(self) -> int:
        """The number of resident blocks of a request: the blocks between sinks and window that a token reads."""
        blocks = self._options.token_budget // self._size
        if blocks < 1:
            raise ConfigError(
                f"a budget of {self._options.token_budget} tokens leaves no block of {self._size} to bring back",
                where=f"ucm_sparse_config.{self._name}.token_budget",
                fix=f"set it to {self._size} or more, or start vLLM with a smaller --block-size",
            )
        return blocks

    @property
    def _size(self) -> int:
        """Tokens in a block; final once there is a cache."""
        return int(self.vllm_config.cache_config.block_size)

    def _index(self, layer_name: str) -> int:
        return self._copies.layer_names.index(layer_name)

    @property
    def _opened(self) -> OffloadStore:
        if self._store is None:
            raise RuntimeError("the store was used before a block was freed")
        return self._store
