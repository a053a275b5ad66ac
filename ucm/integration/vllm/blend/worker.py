"""The worker side of blending: fills a stretch from chunks, and computes the other tokens by vLLM's own forward pass.

It runs within a step, before the step's forward pass and in the same order on all ranks. The runs of a request are the
rows of one forward pass. Each row reads up to its own last token, and all of a layer's KV is written before its
attention, so the result is that of a chunked prefill over the same cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.blend import PIECE, Chunk, Run, gaps_and_edges, highest, passes, reused_spans, runs_of
from ucm.clock import SYSTEM
from ucm.integration.vllm import metrics as names
from ucm.integration.vllm.connector.transfer import GroupTransfer, SaveTask
from ucm.logger import get_logger
from ucm.rotary import differs, tolerance
from ucm.store.base import BlockKey, BlockTransfer
from ucm.store.memory.slab import SlabReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ucm.clock import Clock
    from ucm.config.settings import BlendSettings
    from ucm.integration.vllm.blend.caches import LayerCaches, Rows
    from ucm.integration.vllm.blend.scheduler import Blend, BlendPlan
    from ucm.integration.vllm.metrics import ConnectorCounters
    from ucm.store.base import KVStore
    from ucm.store.memory.slab import SlabAddress

#: After this many chunks whose KV is not what the model computes, the model is refused.
MOST_GATE_FAILURES = 3
#: Shares of attention are summed over ranks as integers, with this many steps for each unit.
_STEPS = 1 << 20


@dataclass(frozen=True, eq=False)
class _Stretch:
    """What a forward pass over tokens of a blend needs.

    Attributes:
        blend: The blend.
        blocks: Its blocks in the caches; see `LayerCaches.blocks`.
        tokens: ``[n]``, int32: its token ids, from ``blend.unwritten`` to the end of the question.
        attn_metadata: The step's metadata, by layer.
    """

    blend: Blend
    blocks: Tensor
    tokens: Tensor
    attn_metadata: Mapping[str, Any]


class BlendWorker:
    """Blends on one rank.

    Args:
        caches: The rank's KV caches.
        model: vLLM's model.
        settings: The settings of ``blend``.
        counters: The counters of the rank.
        most_tokens: The most tokens of a forward pass, for which vLLM profiled memory.
        rank: The rank in the tensor-parallel group.
        name: The model's name, for the log.
        clock: Time and threads.
    """

    def __init__(
        self,
        caches: LayerCaches,
        model: Any,
        settings: BlendSettings,
        counters: ConnectorCounters,
        *,
        most_tokens: int,
        rank: int = 0,
        name: str = "",
        clock: Clock = SYSTEM,
    ) -> None:
        self._caches = caches
        self._model = model
        self._settings = settings
        self._counters = counters
        self._most_tokens = most_tokens
        self._rank = rank
        self._name = name
        self._slab = SlabReader(clock=clock)
        self._failures = 0
        self._unseen = False

    @property
    def refused(self) -> bool:
        """Whether the model failed the gate too often."""
        return self._failures >= MOST_GATE_FAILURES

    def attach(self, address: SlabAddress) -> None:
        """Open the slab of staged chunks."""
        if not self._slab.attached:
            self._slab.attach(address, self._rank, {})

    def blend(self, plan: BlendPlan, attn_metadata: Any, *, usable: bool = True) -> None:
        """Fill all stretches of a step.

        Args:
            plan: The step's plan.
            attn_metadata: The step's metadata, by layer.
            usable: Whether chunks may be used; False if the weights have changed since they were promised.

        Raises:
            TypeError: If the metadata is not given by layer.
        """
        for blend in plan.blends:
            if not isinstance(attn_metadata, dict):
                raise TypeError(f"the attention metadata of the step is a {type(attn_metadata).__name__}")
            self._fill(blend, plan.shares, attn_metadata, usable=usable and not self.refused)

    def saved_chunk(self) -> None:
        """Count a chunk that is handed to the store."""
        if self._rank == 0:
            self._counters.add(names.BLEND_SAVED_CHUNKS)

    def close(self) -> None:
        """Detach from the slab."""
        self._slab.close()

    # Filling

    def _fill(self, blend: Blend, shares: tuple[int, ...], attn_metadata: Mapping[str, Any], *, usable: bool) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        blocks = self._caches.blocks(blend.block_ids)
        # The dtype that the runners use: a compiled model does not check it, and would read other tokens.
        tokens = torch.tensor(blend.token_ids + blend.question, dtype=torch.int32).to(self._caches.device)
        stretch = _Stretch(blend, blocks, tokens, attn_metadata)
        if blend.unwritten < blend.start:
            self._compute(stretch, [Run(blend.unwritten, blend.start)])
        loaded = self._load(blend, shares, blocks, usable=usable)
        chunks = list(loaded)
        edge_tokens = self._settings.edge_tokens if self._settings.select != "none" else 0
        chosen = gaps_and_edges(chunks, blend.start, blend.end, edge_tokens)
        self._compute(stretch, runs_of(chosen, blend.start))
        if self._settings.select == "question":
            more = self._asked_about(stretch, chunks, chosen)
            # Gaps and edges after the first of them have read it as it was.
            first = more.index(True) if True in more else len(more)
            chosen = [one or other for one, other in zip(chosen, more, strict=True)]
            self._compute(stretch, runs_of(chosen[first:], blend.start + first))
        computed = sum(chosen)
        wrong = self._wrong(blend, loaded, chosen, blocks)
        if wrong:
            # Everything computed behind the first of them has read its KV.
            begin = max(blend.start, wrong[0].start)
            self._compute(stretch, [Run(begin, blend.end)])
            computed = sum(chosen[: begin - blend.start]) + blend.end - begin
        if self._rank == 0:
            self._counters.add(names.BLEND_REUSED_TOKENS, blend.end - blend.start - computed)
            self._counters.add(names.BLEND_COMPUTED_TOKENS, computed)

    def _load(
        self, blend: Blend, shares: tuple[int, ...], blocks: Tensor, *, usable: bool
    ) -> dict[Chunk, tuple[Tensor, Tensor]]:
        """Write chunks to the caches; if one rank cannot use a chunk, no rank does.

        Returns:
            The chunks that all ranks could use, each with its keys and values as written to the first layer.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        caches = self._caches
        found: list[Tensor | None] = [
            self._copy(chunk, places, shares) if usable else None
            for chunk, places in zip(blend.chunks, blend.places, strict=True)
        ]
        missing = torch.tensor([pieces is None for pieces in found], dtype=torch.int64).to(caches.device)
        lost = caches.sum_over_ranks(missing).tolist() if found else []
        loaded = {}
        for chunk, pieces, failed in zip(blend.chunks, found, lost, strict=True):
            if failed or pieces is None:
                continue
            begin, end = max(chunk.start, blend.start), min(chunk.end, blend.end)
            positions = torch.arange(begin, end, device=caches.device)
            slots = caches.slots(blocks, positions)
            for layer in range(len(caches.names)):
                # [pieces, 2, PIECE, …] → [2, tokens, …]
                free = pieces[:, layer].transpose(0, 1).flatten(1, 2)[:, begin - chunk.start : end - chunk.start]
                written = caches.write(layer, positions, slots, free.to(caches.device))
                if layer == 0:
                    loaded[chunk] = written
        return loaded

    def _copy(self, chunk: Chunk, places: Sequence[int], shares: tuple[int, ...]) -> Tensor | None:
        """Copy a chunk's pieces from the slab, ``[pieces, layers, …]`` in host memory; None if they cannot be read."""
        import torch  # noqa: PLC0415 - vLLM brings it

        caches = self._caches
        layers = len(caches.names)
        if not self._slab.attached or len(places) != chunk.pieces:
            return None
        room = torch.empty((chunk.pieces, layers, *caches.piece_shape), dtype=caches.dtype)
        share = shares[self._rank]
        bytes_of = [[memoryview(part.view(torch.uint8).numpy()).cast("B") for part in piece] for piece in room]
        # The keys only tell the pieces apart.
        transfers = [
            BlockTransfer(BlockKey(number.to_bytes(16, "big")), parts) for number, parts in enumerate(bytes_of)
        ]
        task = self._slab.load(transfers, [place + share for place in places], [""] * len(places))
        return None if task.wait().failed else room

    def _compute(self, stretch: _Stretch, runs: Sequence[Run]) -> None:
        """Run the model over some tokens of a blend."""
        for batch in passes(runs, self._most_tokens):
            rows = self._caches.rows(batch, stretch.blocks)
            with self._caches.context(rows, stretch.attn_metadata):
                self._run(stretch, rows)

    def _run(self, stretch: _Stretch, rows: Rows) -> None:
        of_rows = stretch.tokens[rows.positions - stretch.blend.unwritten]
        self._model(input_ids=of_rows, positions=rows.positions)

    # Checks

    def _asked_about(self, stretch: _Stretch, chunks: Sequence[Chunk], computed: Sequence[bool]) -> list[bool]:
        """Select the reused tokens to which the tokens after the stretch pay most attention.

        Those are run over the cache as it is; the step's own forward pass computes them again.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        blend, caches = stretch.blend, self._caches
        spans = reused_spans([chunk for chunk in chunks if chunk.start], blend.start, blend.end)
        if not spans or not blend.question or not self._settings.ratio:
            return [False] * len(computed)
        row = Run(blend.end, blend.end + len(blend.question))
        # The last chunk may go on after the stretch; its tokens do not ask.
        asking = max(0, min(chunks[-1].end - blend.end, len(blend.question) - 1))
        rows = caches.rows([row], stretch.blocks)
        with (
            caches.context(rows, stretch.attn_metadata, by_modules=True),
            caches.attention(stretch.blocks, blend.end, asking) as paid,
        ):
            self._run(stretch, rows)
        whole = (torch.nan_to_num(paid[blend.start :], nan=-1.0).clamp(-1.0, 1.0) * _STEPS).to(torch.int64)
        added = caches.sum_over_ranks(whole).tolist()
        if min(added) < 0:
            if not self._unseen:
                self._unseen = True
                get_logger(__name__).warning(
                    "[UCM.Blend] select: question computes no more than edges: %s does not call its layers as modules. "
                    "Start vLLM with --enforce-eager, or set select: edges",
                    self._name or "the model",
                )
            return [False] * len(computed)
        scores = [-1 if done else score for done, score in zip(computed, added, strict=True)]
        return highest(scores, blend.start, spans, self._settings.ratio)

    def _wrong(
        self, blend: Blend, loaded: Mapping[Chunk, tuple[Tensor, Tensor]], chosen: Sequence[bool], blocks: Tensor
    ) -> list[Chunk]:
        """Return the chunks whose KV in the first layer is not what the model has computed there.

        That KV depends only on the token and its position, so it must be the same whatever precedes the chunk.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        caches, allowed = self._caches, tolerance(self._caches.dtype)
        worst = []
        for chunk, written in loaded.items():
            begin, end = max(chunk.start, blend.start), min(chunk.end, blend.end)
            places = [place for place in range(begin, end) if chosen[place - blend.start]]
            positions = torch.tensor(places, dtype=torch.int64, device=caches.device)
            off = [
                differs(was[positions - begin], now).max()
                for was, now in zip(written, caches.read(0, blocks, positions), strict=True)
            ]
            worst.append(torch.stack(off).max())
        if not worst:
            return []
        outside = (torch.stack(worst) > allowed).to(torch.int64)
        failed = caches.sum_over_ranks(outside).tolist()
        wrong = [chunk for chunk, ranks in zip(loaded, failed, strict=True) if ranks]
        if wrong:
            self._note_failures(len(wrong), float(torch.stack(worst).max()), allowed)
        return wrong

    def _note_failures(self, chunks: int, worst: float, allowed: float) -> None:
        before = self.refused
        self._failures += chunks
        if self._rank == 0:
            self._counters.add(names.BLEND_GATE_FAILURES, chunks)
        get_logger(__name__).warning(
            "[UCM.Blend] the stored KV of %d chunks is not what %s computes in its first layer (off by %.3g, "
            "allowed %.3g): these chunks are computed",
            chunks,
            self._name or "the model",
            worst,
            allowed,
        )
        if self.refused and not before:
            get_logger(__name__).error(
                "[UCM.Blend] %s is refused: in its first layer, the stored KV of %d chunks was not what the model "
                "computes; no request is blended any more. Use UCMConnector for this model, and report this message",
                self._name or "the model",
                self._failures,
            )


class ChunkSaves(GroupTransfer):
    """Saves the chunks that a step has computed, without their positions, a piece in each row.

    Args:
        caches: The rank's KV caches.
        blending: The rank's worker, which may refuse the model.
        store: The store of pieces.
        room: Bytes that may wait to be written.
        clock: Time and threads.
    """

    def __init__(
        self, caches: LayerCaches, blending: BlendWorker, store: KVStore, room: int, *, clock: Clock = SYSTEM
    ) -> None:
        super().__init__(caches.geometry, caches.names, store, room, clock=clock)
        self._caches, self._blending = caches, blending

    def _copy(self, task: SaveTask) -> None:
        """Copy all layers of a chunk, which is of use as a whole only."""
        import torch  # noqa: PLC0415 - vLLM brings it

        if self._blending.refused or len(task.rows) < len(task.moves.keys):
            task.drop()
            return
        caches = self._caches
        moves = task.moves
        blocks, positions = caches.blocks(moves.block_ids), torch.arange(moves.depths[-1], device=caches.device)
        shape = (len(caches.names), *caches.piece_shape)
        pieces = [torch.frombuffer(row, dtype=caches.dtype).view(shape).zero_() for row in task.rows]
        for layer in range(len(caches.names)):
            for plane, found in enumerate(caches.read_free(layer, blocks, positions)):
                for piece, part in zip(pieces, found.cpu().split(PIECE), strict=True):
                    piece[layer, plane, : len(part)] = part
        self._blending.saved_chunk()
