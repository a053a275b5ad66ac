"""What a worker does for `ucm.sparse.esa`: copying the middle out, choosing of it, bringing it back."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.esa_tables import MiddleRow, MiddleTables
from ucm.sparse.losses import tell_loss
from ucm.sparse.middle_store import MiddleStore
from ucm.sparse.resident import Middle, MiddleBounds, ResidentLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.block_copies import BlockCopies, CopyingView
    from ucm.sparse.middle import MiddleNews, Released
    from ucm.sparse.middle_store import Fetch
    from ucm.store.config import StoreConfig


class MiddleReader:
    """The middles of the requests that one worker runs.

    Args:
        attention: The worker's layers.
        cache_config: vLLM's ``CacheConfig``, whose block size is final once there is a cache.
        config: The store's options.
        rank: The worker's.
        ahead: Whether a step reads what the query of the step before wanted.

    Attributes:
        counts: ``steps`` and ``rows`` with a middle, ``blocks_read`` and ``blocks_stored`` of these rows in all layers,
            ``fetched`` into resident blocks, ``copied_out``.
    """

    def __init__(
        self, attention: CopyingView, cache_config: Any, config: StoreConfig, rank: int, *, ahead: bool
    ) -> None:
        self.attention = attention
        self.counts: Counter[str] = Counter()
        self._cache_config = cache_config
        self._config = config
        self._rank = rank
        self._ahead = ahead
        #: Of each layer, as its attention has last seen it.
        self.caches: dict[str, Tensor] = {}
        self._copies: BlockCopies | None = None
        self._places: dict[str, int] = {}
        self._losses = ""
        #: The new keys of the layer whose attention is running.
        self._key: Tensor
        self._store: MiddleStore | None = None
        self._middles: dict[str, Middle] = {}
        self._batch: StepBatch | None = None
        self._rows: list[tuple[int, slice, Middle]] = []
        #: The metadata that the step's tables were made from, with the counts of read blocks that they are for.
        self._tables: tuple[Any, list[int], MiddleTables] | None = None

    def step_arrived(self, news: MiddleNews | None) -> None:
        """Copy out what is released with a step, before anything of it is done."""
        if self._store is not None:
            self._store.settle()
        if news is None:
            return
        self._losses = news.losses
        if news.dropped:
            self._drop(news.dropped)
        for released in news.released:
            self._copy_out(news.engine, released)

    def begin(self, batch: StepBatch) -> None:
        """Note the rows with a middle."""
        self._tables, self._batch = None, batch
        self._rows.clear()
        ends = batch.num_new_tokens.cumsum()
        for row, request_id in enumerate(batch.request_ids):
            middle = self._middles.get(request_id)
            if middle is not None:
                end = int(ends[row])
                self._rows.append((row, slice(end - int(batch.num_new_tokens[row]), end), middle))
        if self._rows:
            self.counts["steps"] += 1
            self.counts["rows"] += len(self._rows)

    @property
    def restricts(self) -> bool:
        """Whether any row of the step has a middle."""
        return bool(self._rows)

    def look_ahead(self, layer_name: str, query: Tensor) -> None:
        """Begin to bring what a layer is expected to want in the next step."""
        if not self._ahead:
            return
        for _, tokens, middle in self._rows:
            layer = middle.layers[layer_name]
            chosen = self._choose(layer_name, query[tokens], self._key[tokens], middle)
            missing = layer.missing(chosen)
            fetch = None
            if missing:
                fetch = self._opened.fetch(self._places[layer_name], [(middle.admission, place) for place in missing])
            layer.ahead = chosen, fetch

    def finish(self) -> None:
        """The step is over; one that no layer has asked about was not restricted, and that must not go unnoticed."""
        if self._rows and self._tables is None:
            raise SparseMethodError(
                "ESA was not asked by any layer of this step: released blocks were read",
                where="the attention hooks of this worker",
                fix="unset UCM_DISABLE_ATTENTION_PATCH, and leave out full CUDA graphs",
            )
        self._tables = self._batch = None
        self._rows.clear()
        steps = self.counts["steps"]
        if steps and steps.bit_count() == 1 and self.counts["told"] < steps:  # at 1, 2, 4, …
            self.counts["told"] = steps
            get_logger().info("[UCM.Sparse] %s", self.summary())

    def summary(self) -> str:
        """What was done until now, in one line."""
        counts, stored = self.counts, self._store.counts if self._store else Counter[str]()
        return (
            f"ESA restricted {counts['rows']} rows in {counts['steps']} steps: {counts['blocks_read']} of "
            f"{counts['blocks_stored']} middle blocks read, {counts['fetched']} fetched, {stored['loaded']} of them "
            f"from the store; {stored['saved']} blocks saved, {stored['kept']} kept in host memory, "
            f"{stored['lost']} lost"
        )

    def restrict(self, layer_name: str, query: Tensor, key: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """Bring what is wanted into the resident blocks, and have the layer read them."""
        self._key = key
        wanted = [self._wanted(layer_name, query[tokens], key[tokens], middle) for _, tokens, middle in self._rows]
        while not self._bring(layer_name, wanted):
            # Something was lost: choose again from what is left.
            wanted = [self._choose(layer_name, query[tokens], key[tokens], middle) for _, tokens, middle in self._rows]
        tables = self._tables_for(layer_name, kv_cache, attn_metadata, [len(chosen) for chosen in wanted])
        resident = []
        for (_, _, middle), chosen in zip(self._rows, wanted, strict=True):
            resident.append([middle.resident[slot] for slot in middle.layers[layer_name].slots(chosen)])
            self.counts["blocks_read"] += len(chosen)
            self.counts["blocks_stored"] += middle.stored
        table = tables.with_resident(resident)
        return self.attention.restricted(layer_name, attn_metadata, table, tables.seq_lens, tables.max_seq_len)

    def _tables_for(self, layer_name: str, kv_cache: Tensor, attn_metadata: Any, reads: list[int]) -> MiddleTables:
        """The step's tables: one set for all layers, unless a loss leaves a layer less to read."""
        if self._tables is None or self._tables[0] is not attn_metadata or self._tables[1] != reads:
            if self._batch is None:
                raise RuntimeError(f"{layer_name} ran outside a step")
            rows = [
                MiddleRow(row, middle.stored, read) for (row, _, middle), read in zip(self._rows, reads, strict=True)
            ]
            size = self.attention.block_size(layer_name, kv_cache)
            table = self.attention.block_table(attn_metadata)
            tables = MiddleTables(self._batch, rows, table, self._rows[0][2].first, size)
            self._tables = attn_metadata, reads, tables
        return self._tables[2]

    def _wanted(self, layer_name: str, query: Tensor, key: Tensor, middle: Middle) -> list[int]:
        """The places that a row reads in this step, in order."""
        layer = middle.layers[layer_name]
        if layer.ahead is None:
            return self._choose(layer_name, query, key, middle)
        chosen = [place for place in layer.ahead[0] if place - middle.first not in middle.lost]
        # What has been released since then is the latest: it fills up what is free.
        known = set(chosen)
        place = middle.first + middle.stored
        while len(chosen) < middle.reads:
            place -= 1
            if place not in known and place - middle.first not in middle.lost:
                chosen.append(place)
        return sorted(chosen)

    def _choose(self, layer_name: str, query: Tensor, key: Tensor, middle: Middle) -> list[int]:
        """The places that a query wants, in order."""
        reads = middle.reads
        if reads == middle.stored - len(middle.lost):
            found = [place for place in range(middle.stored) if place not in middle.lost]
        else:
            found = middle.bounds[layer_name].choose(query, key, sorted(middle.lost), reads)
        return [middle.first + place for place in found]

    def _bring(self, layer_name: str, wanted: Sequence[Sequence[int]]) -> bool:
        """Have all chosen places of all rows in resident blocks; whether nothing was found to be lost."""
        sound = True
        for (_, _, middle), chosen in zip(self._rows, wanted, strict=True):
            layer = middle.layers[layer_name]
            ahead, layer.ahead = layer.ahead, None
            if ahead is not None and ahead[1] is not None:
                sound &= self._place(layer_name, middle, ahead[1], chosen)
        fetches: list[tuple[Middle, Fetch, Sequence[int]]] = []
        for (_, _, middle), chosen in zip(self._rows, wanted, strict=True):
            missing = [p for p in middle.layers[layer_name].missing(chosen) if p - middle.first not in middle.lost]
            if missing:
                places = [(middle.admission, place) for place in missing]
                fetches.append((middle, self._opened.fetch(self._places[layer_name], places), chosen))
        for middle, fetch, chosen in fetches:
            sound &= self._place(layer_name, middle, fetch, chosen)
        return sound

    def _place(self, layer_name: str, middle: Middle, fetch: Fetch, chosen: Sequence[int]) -> bool:
        """Wait for blocks and write them into resident ones; whether all came."""
        lost = set(self._opened.wait(fetch))
        if lost:
            if not middle.lost:
                tell_loss(self._losses, middle.admission)
            middle.lost |= {fetch.wanted[row][1] - middle.first for row in lost}
        keep = set(chosen)
        rows = [row for row, (_, place) in enumerate(fetch.wanted) if row not in lost and place in keep]
        if rows:
            layer = middle.layers[layer_name]
            places = [fetch.wanted[row][1] for row in rows]
            slots = layer.assign(places, chosen, len(middle.resident))
            data = fetch.rows if len(rows) == len(fetch.wanted) else fetch.rows[rows]
            self._known_copies.write(self._places[layer_name], [middle.resident[slot] for slot in slots], data)
            self.counts["fetched"] += len(rows)
        return not lost

    def _copy_out(self, engine: str, released: Released) -> None:
        copies = self._known_copies
        if self._store is None:
            self._store = MiddleStore(self._config, copies, engine, self._rank)
        middle = self._middles.get(released.request_id)
        if middle is None or middle.admission != released.admission:
            middle = Middle(released.admission, released.first)
            for name in copies.layer_names:
                middle.bounds[name], middle.layers[name] = MiddleBounds(), ResidentLayer()
            self._middles[released.request_id] = middle
        if released.first != middle.first + middle.stored:
            raise RuntimeError(f"request {released.request_id}: block {released.first} does not follow on the middle")
        for name in copies.layer_names:
            cache = self.caches[name]
            middle.bounds[name].append(
                released.block_ids,
                partial(self.attention.read_keys, name, cache),
                cache.device,
            )
        self._store.save(released.admission, released.first, copies.read(released.block_ids))
        middle.stored += len(released.block_ids)
        middle.resident += released.resident
        self.counts["copied_out"] += len(released.block_ids)

    def _drop(self, admissions: Sequence[int]) -> None:
        ended = set(admissions)
        for request_id in [r for r, middle in self._middles.items() if middle.admission in ended]:
            middle = self._middles.pop(request_id)
            for layer in middle.layers.values():
                if layer.ahead is not None and layer.ahead[1] is not None:
                    self._opened.abandon(layer.ahead[1])
            self._opened.drop(middle.admission)

    @property
    def has_middles(self) -> bool:
        """Whether any request has one."""
        return bool(self._middles)

    @property
    def _known_copies(self) -> BlockCopies:
        if self._copies is None:
            name, cache = next(iter(self.caches.items()))
            size, configured = self.attention.block_size(name, cache), int(self._cache_config.block_size)
            if size != configured:
                raise SparseMethodError(
                    f"the attention backend splits vLLM's blocks of {configured} tokens into blocks of {size}",
                    where=f"layer {name}",
                    fix=f"start vLLM with --block-size {size}",
                )
            self._copies = self.attention.block_copies(self.caches)
            self._places = {name: place for place, name in enumerate(self._copies.layer_names)}
        return self._copies

    @property
    def _opened(self) -> MiddleStore:
        if self._store is None:
            raise RuntimeError("the store was asked for before anything was released")
        return self._store
