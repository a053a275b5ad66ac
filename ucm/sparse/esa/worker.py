"""The worker side of ESA: copy freed blocks to the store, choose among them, and load the chosen ones back."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.clock import SYSTEM
from ucm.errors import SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.esa.offload_store import OffloadStore
from ucm.sparse.esa.offloaded import tell_loss
from ucm.sparse.esa.resident import Listed, OffloadedContext, OffloadedTables, Reading, first_choosing, reading
from ucm.sparse.outcomes import RESTRICTED, SHORT, RequestOutcomes
from ucm.sparse.topk.codes import KeyCodes
from ucm.sparse.topk.ranking import ranked
from ucm.sparse.topk.selection import FreshBlocks, with_new_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ucm.clock import Clock
    from ucm.sparse.attention import BlockCopies, CopyingView, StepBatch
    from ucm.sparse.esa.method import ESAOptions
    from ucm.sparse.esa.offload_store import Fetch
    from ucm.sparse.esa.offloaded import OffloadedNews, Released
    from ucm.sparse.esa.resident import ResidentLayer
    from ucm.store.config import StoreConfig


class _Row:
    """A row of a step whose request has an offloaded context.

    Args:
        row: Its index in the batch.
        token: The index of its last token among the step's tokens.
        computed: The position of its first token.
        offloaded: Its request's offloaded context.
        listed: For each piece that reads listed blocks, the number of blocks after the sinks that contain these.
        choosing: The number of blocks from which its last token chooses; 0 if it does not choose.
        is_first: Whether that token is the first one that chooses.
    """

    def __init__(
        self,
        row: int,
        token: int,
        computed: int,
        offloaded: OffloadedContext,
        listed: dict[int, int],
        choosing: int,
        *,
        is_first: bool,
    ) -> None:
        self.row, self.token, self.computed = row, token, computed
        self.offloaded = offloaded
        self.listed = listed
        self.choosing = choosing
        self.is_first = is_first


class OffloadedReader:
    """The offloaded contexts of a worker's requests.

    Args:
        attention: The worker's layers.
        cache_config: vLLM's ``CacheConfig``, whose block size is final once there is a cache.
        config: The store's options.
        rank: The worker's rank.
        options: The method's options.
        tile: The number of tokens in a tile.
        clock: Time and threads of the store.

    Attributes:
        counts: ``steps`` and ``rows`` with an offloaded context, ``blocks_read`` and ``blocks_stored`` of these rows in
            all layers, ``fetched`` into resident blocks, ``copied_out``, and ``requests_<outcome>``; see
            `ucm.sparse.outcomes`.
        select_seconds: The seconds that the worker's thread has spent on choosing, and on waiting for loads.
    """

    def __init__(
        self,
        attention: CopyingView,
        cache_config: Any,
        config: StoreConfig,
        rank: int,
        options: ESAOptions,
        tile: int,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self.attention = attention
        self.counts: Counter[str] = Counter()
        self._outcomes = RequestOutcomes(self.counts, get_logger(__name__))
        self.select_seconds = 0.0
        self._cache_config = cache_config
        self._config = config
        self._rank = rank
        self._options = options
        self._window = options.window(tile)
        self._ahead = options.retrieval == "ahead"
        #: The KV cache of each layer, from its last step.
        self.caches: dict[str, Tensor] = {}
        self._copies: BlockCopies | None = None
        self._places: dict[str, int] = {}
        self._losses = ""
        #: The new keys of the layer whose attention is running.
        self._key: Tensor
        self._store: OffloadStore | None = None
        self._offloaded: dict[str, OffloadedContext] = {}
        self._reading: Reading | None = None
        self._rows: list[_Row] = []
        #: The step's tables, with the metadata and the listed pieces from which they were made.
        self._tables: tuple[Any, list[Listed], OffloadedTables] | None = None

    def step_arrived(self, news: OffloadedNews | None) -> None:
        """Copy out the blocks that a step frees, before the step writes any block."""
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
        """Determine what the step reads."""
        size, budget = self._size, self._options.token_budget // self._size
        self._outcomes.begin(batch.request_ids)
        self._tables = self._reading = None
        self._rows.clear()
        for request_id in (batch.request_ids[row] for row in np.flatnonzero(batch.admitted).tolist()):
            if request_id in self._offloaded and self._offloaded[request_id].admission is None:
                del self._offloaded[request_id]
        found = reading(batch, self._window, budget, size)
        rows = [] if not self._offloaded and not found.choosing else self._rows_of(batch, found)
        if rows or found.skipped.any():
            self._reading, self._rows = found, rows
            self.counts["steps"] += 1
            restricted = np.unique([*found.pieces.rows[found.skipped > 0], *(row.row for row in rows)]).astype(np.int64)
            self.counts["rows"] += len(restricted)
            self._outcomes.restrict(batch.request_ids[row] for row in restricted.tolist())
        if self._outcomes.tells:
            self._tell(batch, found)

    def _tell(self, batch: StepBatch, found: Reading) -> None:
        """Log of each request whether the step's last token of it reads all of its context."""
        size, budget = self._size, self._options.token_budget // self._size
        for row, (request_id, piece) in enumerate(zip(batch.request_ids, found.pieces.lasts.tolist(), strict=True)):
            context, between = int(batch.seq_lens[row]), found.choosing.get(piece, 0)
            what, left_out = f"dense: no more than {budget * size} tokens are between sinks and window", 0
            if between:
                what, left_out = f"restricted, with {budget * size} tokens between sinks and window", between - budget
            elif found.skipped[piece]:
                what, left_out = "restricted to sinks and window, because it is a prompt", int(found.skipped[piece])
            self._outcomes.tell(request_id, context, what, context - left_out * size)

    def _rows_of(self, batch: StepBatch, found: Reading) -> list[_Row]:
        """Return the rows that read listed blocks of an offloaded context."""
        rows = []
        lasts, ends = found.pieces.lasts, batch.num_new_tokens.cumsum()
        firsts = batch.seq_lens - 1 <= first_choosing(self._window, batch.num_prompt_tokens)
        for row, request_id in enumerate(batch.request_ids):
            choosing = found.choosing.get(int(lasts[row]), 0)
            offloaded = self._offloaded.get(request_id)
            if offloaded is None and choosing:
                offloaded = self._offloaded[request_id] = OffloadedContext(None, self._window.sink_blocks(self._size))
            if offloaded is None:
                continue
            # A piece that reads everything lists its freed blocks; it reads the others in place.
            pieces = np.flatnonzero(found.pieces.rows == row).tolist()
            listed = {piece: offloaded.stored for piece in pieces if offloaded.stored and not found.skipped[piece]}
            if choosing:
                listed[int(lasts[row])] = choosing
            if listed:
                computed = int(batch.num_computed_tokens[row])
                token = int(ends[row]) - 1
                rows.append(_Row(row, token, computed, offloaded, listed, choosing, is_first=bool(firsts[row])))
        return rows

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop ended requests without freed blocks; for the others, the scheduler side sends the admission."""
        ended = list(request_ids)
        self._outcomes.finish(ended)
        for request_id in ended:
            if request_id in self._offloaded and self._offloaded[request_id].admission is None:
                del self._offloaded[request_id]

    @property
    def restricts(self) -> bool:
        """Whether any row of the step leaves blocks out, or reads freed ones."""
        return self._reading is not None

    def look_ahead(self, layer_name: str, query: Tensor) -> None:
        """Start to load the blocks that a layer is expected to need in the next step."""
        if not self._ahead:
            return
        rows = [row for row in self._rows if row.choosing]
        for row, chosen in zip(rows, self._best(rows, self._ranked(layer_name, query, rows)), strict=True):
            offloaded, layer = row.offloaded, row.offloaded.layers[layer_name]
            missing = layer.missing([place for place in chosen if place < offloaded.first + offloaded.stored])
            fetch = None
            if missing:
                fetch = self._opened.fetch(
                    self._places[layer_name], [(_admitted(offloaded), place) for place in missing]
                )
            layer.ahead = chosen, fetch

    def finish(self) -> None:
        """Raise if no layer called the method in this step, because the step was then not restricted."""
        if self._reading is not None and self._tables is None:
            raise SparseMethodError(
                "ESA was not asked by any layer of this step: released blocks were read",
                where="the attention hooks of this worker",
                fix="unset UCM_DISABLE_ATTENTION_PATCH, and leave out full CUDA graphs",
            )
        self._tables = self._reading = None
        self._rows = []
        steps = self.counts["steps"]
        if steps and steps.bit_count() == 1 and self.counts["told"] < steps:  # at 1, 2, 4, …
            self.counts["told"] = steps
            get_logger(__name__).info("[UCM.Sparse] %s", self.summary())

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
            f"ESA restricted {counts['rows']} rows in {counts['steps']} steps: {counts['blocks_read']} of "
            f"{counts['blocks_stored']} offloaded blocks read, {counts['fetched']} fetched, {stored['loaded']} of them "
            f"from the store; {stored['saved']} blocks saved, {stored['kept']} kept in host memory, "
            f"{stored['lost']} lost"
        )

    def restrict(self, layer_name: str, query: Tensor, key: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """Load the needed blocks into resident ones, and return metadata that reads them."""
        self._key = key
        table = self.attention.block_table(attn_metadata)
        for row in self._rows:
            self._summarise_row(row, layer_name, table, kv_cache)
            if row.is_first:  # an earlier prompt of the same request id, in a session, left a load behind
                self._abandon(row.offloaded.layers[layer_name])
        fresh = [row for row in self._rows if row.choosing and row.offloaded.layers[layer_name].ahead is None]
        # Ranked once, because all ranks must call the sum equally often, whatever one of them has lost.
        ranks = {row.row: of for row, of in zip(fresh, self._ranked(layer_name, query, fresh), strict=True)}
        ahead = {row.row: of[0] for row in self._rows if (of := row.offloaded.layers[layer_name].ahead) is not None}
        while True:
            best = dict(zip(ranks, self._best(fresh, list(ranks.values())), strict=True))
            chosen = [
                best[row.row] if row.row in best else self._expected(row, ahead.get(row.row)) for row in self._rows
            ]
            if self._bring(layer_name, [self._released(row, of) for row, of in zip(self._rows, chosen, strict=True)]):
                break  # else something was lost: choose again from what is left
        return self._restricted(layer_name, kv_cache, attn_metadata, chosen)

    def _restricted(self, layer_name: str, kv_cache: Tensor, attn_metadata: Any, chosen: list[list[int]]) -> Any:
        listed, places, blocks = [], [], []
        for row, of_row in zip(self._rows, chosen, strict=True):
            offloaded = row.offloaded
            last = max(row.listed)
            for piece, extent in row.listed.items():
                named = of_row if row.choosing and piece == last else self._released(row, None)
                released = [place for place in named if place < offloaded.first + offloaded.stored]
                held = [offloaded.resident[slot] for slot in offloaded.layers[layer_name].slots(released)]
                listed.append(Listed(piece, extent, len(named)))
                places += named
                blocks += [*held, *[-1] * (len(named) - len(held))]
                self.counts["blocks_read"] += len(named)
                self.counts["blocks_stored"] += extent
        tables = self._tables_for(layer_name, kv_cache, attn_metadata, listed)
        table = tables.naming(places, blocks)
        return self.attention.restricted(
            layer_name, attn_metadata, table, tables.seq_lens, tables.max_seq_len, tables.split
        )

    def _tables_for(
        self, layer_name: str, kv_cache: Tensor, attn_metadata: Any, listed: list[Listed]
    ) -> OffloadedTables:
        """Return the step's tables: the same for all layers, unless a loss leaves a layer fewer blocks to read."""
        if self._tables is None or self._tables[0] is not attn_metadata or self._tables[1] != listed:
            if self._reading is None:
                raise RuntimeError(f"{layer_name} ran outside a step")
            self._require_size(layer_name, kv_cache)
            table, sinks = self.attention.block_table(attn_metadata), self._window.sink_blocks(self._size)
            self._tables = attn_metadata, listed, OffloadedTables(self._reading, listed, table, sinks, self._size)
        return self._tables[2]

    def _summarise_row(self, row: _Row, layer_name: str, table: Tensor, kv_cache: Tensor) -> None:
        """Compute the missing codes of the blocks from which a row chooses; none of these is freed yet."""
        offloaded = row.offloaded
        codes = self._codes(offloaded, layer_name, kv_cache)
        if codes.size >= row.choosing:
            return
        begin, end = offloaded.first + codes.size, offloaded.first + row.choosing
        ids = table[row.row, begin:end].long()
        known = min(max(row.computed // self._size, begin), end)
        self._summarise(codes, layer_name, kv_cache, ids[: known - begin])
        if known < end:
            start = row.token + 1 - self._new_tokens(row)
            fresh = FreshBlocks(0, known, end, row.computed, start)
            keys = self.attention.read_keys(layer_name, kv_cache, ids[known - begin :])
            codes.append(with_new_keys(keys, self._key, fresh))

    def _summarise(self, codes: KeyCodes, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> None:
        """Append the codes of some blocks in the cache."""
        for some in block_ids.split(codes.at_once) if len(block_ids) else ():
            codes.append(self.attention.read_keys(layer_name, kv_cache, some))

    def _codes(self, offloaded: OffloadedContext, layer_name: str, kv_cache: Tensor) -> KeyCodes:
        """Return the codes of an offloaded context in a layer."""
        codes = offloaded.codes.get(layer_name)
        if codes is None:
            import torch  # noqa: PLC0415 - vLLM brings it

            any_block = torch.zeros(1, dtype=torch.int64, device=kv_cache[0].device)  # one tensor, or two
            codes = KeyCodes(1, self.attention.read_keys(layer_name, kv_cache, any_block))
            offloaded.codes[layer_name] = codes
        return codes

    def _new_tokens(self, row: _Row) -> int:
        if self._reading is None:
            raise RuntimeError("asked outside a step")
        pieces = self._reading.pieces
        return int(pieces.ends[pieces.lasts[row.row]]) - row.computed

    def _ranked(self, layer_name: str, query: Tensor, rows: Sequence[_Row]) -> list[Tensor]:
        """Return, for each row that chooses, the ranks of its blocks by the heads of all workers; see `ranked`."""
        if not rows:
            return []
        import torch  # noqa: PLC0415 - vLLM brings it

        wanted = []
        for row in rows:
            places = torch.arange(row.choosing, device=query.device)[None]
            of_row = query[row.token : row.token + 1]
            wanted.append(row.offloaded.codes[layer_name].shares(of_row, places, None)[0])
        summed = self.attention.sum_over_ranks(torch.cat(wanted))
        return [ranked(of[None])[0] for of in summed.split([row.choosing for row in rows])]

    def _best(self, rows: Sequence[_Row], ranks: Sequence[Tensor]) -> list[list[int]]:
        """Return the best places of each row in ascending order; this waits for the device once."""
        if not rows:
            return []
        import torch  # noqa: PLC0415 - vLLM brings it

        budget, found = self._options.token_budget // self._size, []
        for row, of_row in zip(rows, ranks, strict=True):
            lost = [place for place in row.offloaded.lost if place < row.choosing]
            left = of_row.index_fill(0, of_row.new_tensor(lost), -1) if lost else of_row
            found.append(left.topk(min(budget, row.choosing - len(lost)), sorted=False).indices + row.offloaded.first)
        places = iter(torch.cat(found).tolist())
        return [sorted(itertools.islice(places, len(of_row))) for of_row in found]

    def _expected(self, row: _Row, ahead: Sequence[int] | None) -> list[int]:
        """Return the places that the previous step's query needed; the latest places replace lost ones."""
        offloaded = row.offloaded
        if ahead is None:
            return []
        known = {place for place in ahead if place - offloaded.first not in offloaded.lost}
        for place in range(offloaded.first + row.choosing - 1, offloaded.first - 1, -1):
            if len(known) == len(ahead):
                break
            if place - offloaded.first not in offloaded.lost:
                known.add(place)
        return sorted(known)

    def _released(self, row: _Row, chosen: Sequence[int] | None) -> list[int]:
        """Return the freed places that a row reads: all of them if the row, or one of its pieces, reads everything."""
        offloaded = row.offloaded
        if chosen is None or len(row.listed) > 1 or not row.choosing:
            return [
                place
                for place in range(offloaded.first, offloaded.first + offloaded.stored)
                if place - offloaded.first not in offloaded.lost
            ]
        return [place for place in chosen if place < offloaded.first + offloaded.stored]

    def _bring(self, layer_name: str, wanted: Sequence[Sequence[int]]) -> bool:
        """Load all freed places that rows read into resident blocks; return False if a block turns out to be lost."""
        sound = True
        for row, chosen in zip(self._rows, wanted, strict=True):
            layer = row.offloaded.layers[layer_name]
            ahead, layer.ahead = layer.ahead, None
            if ahead is not None and ahead[1] is not None:
                sound &= self._place(layer_name, row.offloaded, ahead[1], chosen)
        fetches: list[tuple[OffloadedContext, Fetch, Sequence[int]]] = []
        for row, chosen in zip(self._rows, wanted, strict=True):
            offloaded = row.offloaded
            missing = [
                p for p in offloaded.layers[layer_name].missing(chosen) if p - offloaded.first not in offloaded.lost
            ]
            if missing:
                fetches.append((offloaded, self._fetch(layer_name, offloaded, missing, chosen), chosen))
        for offloaded, fetch, chosen in fetches:
            sound &= self._place(layer_name, offloaded, fetch, chosen)
        return sound

    def _fetch(
        self, layer_name: str, offloaded: OffloadedContext, missing: Sequence[int], chosen: Sequence[int]
    ) -> Fetch:
        """Start to load missing places: into resident blocks if these are in host memory, else into a buffer."""
        index, places = self._places[layer_name], [(_admitted(offloaded), place) for place in missing]
        copies, resident = self._known_copies, offloaded.resident
        if not self._opened.loads_in_place or copies.memory(index, resident[0]) is None:
            return self._opened.fetch(index, places)
        slots = offloaded.layers[layer_name].assign(missing, chosen, len(resident))
        found = [copies.memory(index, resident[slot]) for slot in slots]
        return self._opened.fetch(index, places, [memory for memory in found if memory is not None])

    def _place(self, layer_name: str, offloaded: OffloadedContext, fetch: Fetch, chosen: Sequence[int]) -> bool:
        """Wait for a load, and copy a buffer into resident blocks; return whether all blocks arrived."""
        lost = set(self._opened.wait(fetch))
        if lost:
            if not offloaded.lost:
                tell_loss(self._losses, _admitted(offloaded))
            offloaded.lost |= {fetch.wanted[row][1] - offloaded.first for row in lost}
        layer = offloaded.layers[layer_name]
        if fetch.rows is None:
            layer.clear([fetch.wanted[row][1] for row in lost])
            self.counts["fetched"] += len(fetch.wanted) - len(lost)
            return not lost
        keep = set(chosen)
        rows = [row for row, (_, place) in enumerate(fetch.wanted) if row not in lost and place in keep]
        if rows:
            places = [fetch.wanted[row][1] for row in rows]
            slots = layer.assign(places, chosen, len(offloaded.resident))
            data = fetch.rows if len(rows) == len(fetch.wanted) else fetch.rows[rows]
            self._known_copies.write(self._places[layer_name], [offloaded.resident[slot] for slot in slots], data)
            self.counts["fetched"] += len(rows)
        return not lost

    def _copy_out(self, engine: str, released: Released) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        copies = self._known_copies
        if self._store is None:
            self._store = OffloadStore(self._config, copies, engine, self._rank, clock=self._clock)
        offloaded = self._offloaded.get(released.request_id)
        if offloaded is None or offloaded.admission not in {released.admission, None}:
            offloaded = self._offloaded[released.request_id] = OffloadedContext(released.admission, released.first)
        offloaded.admission = released.admission
        if released.first != offloaded.first + offloaded.stored:
            raise RuntimeError(
                f"request {released.request_id}: block {released.first} does not follow the offloaded ones"
            )
        for name in copies.layer_names:
            cache = self.caches[name]
            codes = self._codes(offloaded, name, cache)
            ids = torch.tensor(released.block_ids, dtype=torch.int64, device=cache[0].device)  # one tensor, or two
            self._summarise(codes, name, cache, ids[codes.size - offloaded.stored :])
        self._store.save(released.admission, released.first, copies.read(released.block_ids))
        offloaded.stored += len(released.block_ids)
        offloaded.resident += released.resident
        self.counts["copied_out"] += len(released.block_ids)

    def _drop(self, admissions: Sequence[int]) -> None:
        ended = set(admissions)
        for request_id in [r for r, offloaded in self._offloaded.items() if offloaded.admission in ended]:
            offloaded = self._offloaded.pop(request_id)
            for layer in offloaded.layers.values():
                self._abandon(layer)
            self._opened.drop(_admitted(offloaded))

    def _abandon(self, layer: ResidentLayer) -> None:
        """Discard a load that was started ahead."""
        ahead, layer.ahead = layer.ahead, None
        if ahead is not None and ahead[1] is not None:
            self._opened.abandon(ahead[1])

    @property
    def _size(self) -> int:
        """Tokens in a block."""
        return int(self._cache_config.block_size)

    def _require_size(self, layer_name: str, kv_cache: Tensor) -> None:
        size = self.attention.block_size(layer_name, kv_cache)
        if size != self._size:
            raise SparseMethodError(
                f"the attention backend splits vLLM's blocks of {self._size} tokens into blocks of {size}",
                where=f"layer {layer_name}",
                fix=f"start vLLM with --block-size {size}",
            )

    @property
    def _known_copies(self) -> BlockCopies:
        if self._copies is None:
            self._require_size(*next(iter(self.caches.items())))
            self._copies = self.attention.block_copies(self.caches)
            self._places = {name: place for place, name in enumerate(self._copies.layer_names)}
        return self._copies

    @property
    def _opened(self) -> OffloadStore:
        if self._store is None:
            raise RuntimeError("the store was used before a block was freed")
        return self._store


def _admitted(offloaded: OffloadedContext) -> int:
    """Return the admission of an offloaded context with freed blocks."""
    if offloaded.admission is None:
        raise RuntimeError("this request has no freed blocks")
    return offloaded.admission
