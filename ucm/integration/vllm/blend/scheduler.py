"""The scheduler side of blending: the chunks of a request, the available ones, and the work of the workers.

The metadata for the workers travels with each step, pickled.

A blended request's blocks have unique hashes in vLLM's own prefix cache, which no other request hits. A block's hash
covers its tokens and the previous hash. From the first blended block on, the hashes are replaced by hashes with a
secret of the request, so other requests with the same tokens or the same prefix hit only exact blocks. vLLM computes
the hashes of later blocks, including generated tokens, from the last existing one. The request itself finds its blocks
again after a preemption.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.blend import PIECE, Chunk, ChunkMarksError, ChunkNames, blended_end, marked_chunks, separated_chunks
from ucm.compat import (
    adapter_of,
    block_hashes,
    cache_salt,
    has_media,
    is_pooled,
    is_streaming,
    prompt_embeds,
    skips_prefix_cache,
    transfer_params,
    wants_prompt_logprobs,
)
from ucm.integration.vllm import metrics as names
from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups
from ucm.integration.vllm.connector.metadata import BlockMoves
from ucm.integration.vllm.connector.staging import Query
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from ucm.config.settings import BlendSettings
    from ucm.integration.vllm.connector.prefix_cache import PrefixCacheScheduler
    from ucm.integration.vllm.connector.staging import Lookup, Stager
    from ucm.store.base import BlockKey
    from ucm.store.memory.slab import Row, SlabAddress

#: How long an idle step waits for a lookup.
IDLE_SECONDS = 0.05
#: What the stager takes for a KV-cache group: a chunk is looked up like a prefix, with a piece for each token.
PIECES = CacheGroups((CacheGroup(0, 1, None, {}, ()),))
#: The most chunks that are staged at the same time, so that the latency of a slow medium counts once for a prompt.
AT_ONCE = 32
#: The number of the pieces of chunks among those of KV-cache groups: in a worker's record of geometries, and of saves.
OF_PIECES = -1


@dataclass(slots=True)
class Blend:
    """One request's blended stretch, to be filled before the step's forward.

    Args:
        request_id: vLLM's request id.
        start: The number of tokens with exact KV, which is the start of the stretch.
        end: The end of the stretch.
        token_ids: The tokens from ``unwritten`` to the end.
        block_ids: The request's blocks, from its first token on.
        chunks: The reused chunks, in order; they may extend past both ends.
        places: The offsets of each chunk's pieces in the slab.
        unwritten: Exact KV exists up to here. From here to ``start`` the step's forward writes it, for another
            request, after the stretch is filled, so it is computed in advance. Equal to ``start`` if there is none.
        question: The tokens after the stretch that the step computes, if they select what is recomputed. The request
            has blocks for them.
    """

    request_id: str
    start: int
    end: int
    token_ids: list[int]
    block_ids: list[int]
    chunks: list[Chunk]
    places: list[list[int]]
    unwritten: int
    question: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlendPlan:
    """One step.

    Args:
        blends: Stretches to fill before the forward.
        slab: The address of the slab with staged chunks; sent with that of the slab with staged blocks.
        shares: The offset of each rank's part from a piece's offset.
    """

    blends: list[Blend] = field(default_factory=list)
    slab: SlabAddress | None = None
    shares: tuple[int, ...] = ()


class OwnNames:
    """The block hashes of one request.

    Args:
        request: vLLM's ``Request``.
        block_size: Tokens per block; vLLM may give a block several hashes, for parts of it.
    """

    def __init__(self, request: Any, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self._secret = os.urandom(32)
        self._exact: list[bytes] = []
        self._first = 0

    def give(self, tokens: int) -> None:
        """Replace the hashes of all blocks that end after this many tokens; already replaced ones stay the same.

        Args:
            tokens: The number of tokens with exact KV.
        """
        hashes = block_hashes(self._request)
        if not hashes:
            return
        first = tokens // self._named_tokens(len(hashes))
        if not self._exact:
            self._exact, self._first = list(hashes), len(hashes)
        for place in range(first, self._first):
            exact = bytes(hashes[place])
            hashes[place] = hashlib.sha512(self._secret + exact).digest()[: len(exact)]
        self._first = min(first, self._first)

    def take_back(self) -> None:
        """Restore the exact hashes: the request was not blended after all.

        Hashes that vLLM has computed since depend on the replaced ones; they are removed, and vLLM recomputes them.
        """
        if self._exact:
            self._request.block_hashes[:] = self._exact
            self._exact = []

    def _named_tokens(self, names: int) -> int:
        """Return the tokens per hash; if unclear the largest possible, so that no blended block keeps an exact hash."""
        number = self._request.num_tokens
        parts = (self._block_size // count for count in range(1, self._block_size + 1) if self._block_size % count == 0)
        return next((size for size in parts if number // size == names), max(1, number // names))


@dataclass(slots=True)
class BlendRequest:
    """The state of a request.

    Args:
        request: vLLM's request.
        chunks: Its usable chunks.
        keys: The keys of each chunk's pieces.
        names: Its block hashes in vLLM's own prefix cache.
        lookups: Those of its chunks in the store, until they are used; each finds its chunk as a whole or not at all.
        end: The end of the last reported stretch; 0 for none.
        computed: The start of that stretch.
        blended: Whether some of its KV is approximate; this never changes back.
        saved: Whether its first chunk needs no save any more.
        outcome: The last counted outcome; vLLM asks again in each step until it has room.
    """

    request: Any
    chunks: list[Chunk] = field(default_factory=list)
    keys: list[list[BlockKey]] = field(default_factory=list)
    names: OwnNames | None = None
    lookups: list[Lookup] = field(default_factory=list)
    end: int = 0
    computed: int = 0
    blended: bool = False
    saved: bool = False
    outcome: str = ""


class BlendScheduler:
    """Decides what to blend and which chunks to save; it never accesses KV and never waits for a medium.

    Args:
        settings: The settings of blending.
        block_size: Tokens of vLLM's blocks.
        stager: Stages chunks; nothing is blended before it has begun.
        exact: Decides on exact prefixes, and plans each step first.
    """

    def __init__(
        self,
        settings: BlendSettings,
        block_size: int,
        stager: Stager,
        exact: PrefixCacheScheduler,
    ) -> None:
        self._settings = settings
        self._ends = frozenset(settings.chunk_end_token_ids)
        self._block_size = block_size
        self._stager = stager
        self._exact = exact
        self.off = ""  #: why nothing is blended any more; empty if it is
        self._names = ChunkNames(b"")
        self._requests: dict[str, BlendRequest] = {}
        self._to_blend: dict[str, BlendRequest] = {}
        self._said: set[str] = set()

    def matched(self, request: Any, computed: int, exact: int) -> int | None:
        """Return the number of tokens in a blended stretch beyond the computed ones.

        Args:
            request: vLLM's request.
            computed: Tokens whose exact KV the engine's own cache has.
            exact: Further tokens whose exact KV the store has.

        Returns:
            The number; 0 if the request is not blended; None if the lookup is still running: vLLM asks again.
        """
        state = self._state(request)
        state.end = 0
        if not state.blended and state.names is not None:
            state.names.take_back()
        if not self._exact.loads or not any(chunk.end > computed + exact for chunk in state.chunks):
            return 0
        refusal = self.off or _cannot_load(request)
        if refusal:
            self._count(state, refusal)
        if refusal or not self._stager.has_begun:
            return 0
        if not state.lookups:
            state.lookups = [self._stager.submit(Query((keys,), 0, len(keys), len(keys))) for keys in state.keys]
        if not all(self._stager.poll(lookup) for lookup in state.lookups):
            return None
        stored = [chunk for chunk, lookup in zip(state.chunks, state.lookups, strict=True) if lookup.end]
        # vLLM computes at least one token, whose logits give the next one.
        limit = min(request.num_tokens - 1, request.num_prompt_tokens)
        end = blended_end(stored, computed, limit, self._block_size)
        if end - computed - exact < self._settings.min_tokens:
            self._let_go(state)
            self._count(state, "miss")
            return 0
        state.computed, state.end = computed, end
        if state.names is None:
            state.names = OwnNames(request, self._block_size)
        # vLLM assigns hashes to the blocks of a hit when it allocates them.
        state.names.give(computed)
        return end - computed

    def allocated(self, request: Any, tokens: int) -> bool:
        """Note that a request is admitted; return whether the reported tokens of its hit are a blended stretch."""
        state = self._state(request)
        if not state.end or not tokens:
            self._let_go(state)
            return False
        state.blended = True
        self._to_blend[request.request_id] = state
        self._count(state, "blended")
        return True

    def tiers(self, request: Any, num_tokens: int) -> Counter[str] | None:
        """Return from which tiers the first tokens of a request's blended stretch come, see `PrefixCacheScheduler`.

        Args:
            request: vLLM's request, after `allocated` and before the step is planned.
            num_tokens: How many of these tokens; those that are in no chunk come from no tier.

        Returns:
            The number of tokens by tier; None if no stretch is to be filled.
        """
        state = self._to_blend.get(request.request_id)
        if state is None:
            return None
        found = Counter[str]()
        for chunk, lookup in zip(state.chunks, state.lookups, strict=False):
            for piece, row in enumerate(_rows(lookup)):
                begin = chunk.start + piece * PIECE
                end = min(begin + PIECE, chunk.end, state.computed + num_tokens)
                found[row.tier] += max(0, end - max(begin, state.computed))
        return found

    def plan(self, scheduler_output: Any) -> BlendPlan:
        """Return the stretches of a step; `written` returns the blocks that it fills, and `saves` what to save."""
        for cause in self._stager.failures():
            self._exact.counters.failed("load", cause, 1)
        plan = BlendPlan(shares=self._stager.shares.get(0, ()))
        scheduled = scheduler_output.num_scheduled_tokens
        begun = [request_id for request_id in self._to_blend if request_id in scheduled]
        written = self._written_by_forward(scheduled) if begun else set()
        for request_id in begun:
            blended = self._to_blend.pop(request_id)
            plan.blends.append(self._blend(request_id, blended, written, scheduled[request_id]))
        if not scheduler_output.total_num_scheduled_tokens:
            lookups = [lookup for state in self._requests.values() for lookup in state.lookups]
            waiting = [lookup for lookup in lookups if not lookup.finished]
            if waiting and not self._to_blend:
                self._stager.wait(waiting, IDLE_SECONDS)
        return plan

    def saves(self, scheduler_output: Any) -> list[BlockMoves]:
        """Return the chunks at the start of prompts whose exact KV a step computes."""
        found = []
        for request_id, number in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and not state.saved:
                found += self._save(state, state.request.num_computed_tokens + number)
        return found

    def written(self, plan: BlendPlan) -> set[int]:
        """Return the blocks that a step fills before its forward."""
        return {block for blend in plan.blends for block in blend.block_ids[blend.start // self._block_size :]}

    def _written_by_forward(self, scheduled: Mapping[str, int]) -> set[int]:
        """Return the blocks that a step's forward writes, which other requests can hit in the same step."""
        found: set[int] = set()
        for request_id, number in scheduled.items():
            state = self._requests.get(request_id)
            if state is not None:
                computed = state.request.num_computed_tokens
                first, last = computed // self._block_size, -(-(computed + number) // self._block_size)
                found.update(self._exact.blocks_of(request_id)[first:last])
        return found

    def finished(self, request: Any) -> None:
        """Remove a request that has ended."""
        state = self._requests.pop(request.request_id, None)
        self._to_blend.pop(request.request_id, None)
        if state is not None:
            self._let_go(state)

    def start_anew(self) -> None:
        """The weights may have changed: stop finding and saving chunks of the current requests."""
        self._names = ChunkNames(os.urandom(32))
        for state in self._requests.values():
            self._let_go(state)
            # Already reported stretches are still filled: the workers know of the change and compute them.
            state.chunks, state.keys, state.saved = [], [], True

    def _state(self, request: Any) -> BlendRequest:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = self._requests[request.request_id] = BlendRequest(request)
            self._find_chunks(state)
        return state

    def _find_chunks(self, state: BlendRequest) -> None:
        request = state.request
        try:
            chunks = marked_chunks(transfer_params(request), request.num_prompt_tokens)
            prompt = list(request.all_token_ids[: request.num_prompt_tokens]) if chunks or self._ends else []
            if chunks is None and self._ends:
                chunks = separated_chunks(prompt, self._ends)
            reason = _has_no_chunks(request) if chunks else ""
            if reason:
                self._count(state, reason)
            elif chunks:
                chunks = [chunk for chunk in chunks if chunk.tokens >= self._settings.min_tokens]
                salt = cache_salt(request)
                state.keys = [self._names.pieces(prompt[chunk.start : chunk.end], salt) for chunk in chunks]
                state.chunks = chunks
        except ChunkMarksError as error:
            self._count(state, "marks")
            self._say(f"a request's chunks are not used: {error}")
        except ValueError as error:
            self._say(f"a request's chunks are not used: {error}")
        # Only the chunk at the start of a prompt is computed as it would be alone.
        state.saved = not state.chunks or state.chunks[0].start > 0

    def _blend(self, request_id: str, state: BlendRequest, written: AbstractSet[int], scheduled: int) -> Blend:
        lookups, start, end = state.lookups, state.computed, state.end
        asked = end + scheduled if self._settings.select == "question" else end
        state.lookups = []
        chunks, places = [], []
        for chunk, lookup in zip(state.chunks, lookups, strict=False):
            if lookup.end and chunk.end > start and chunk.start < end:
                chunks.append(chunk)
                places.append(self._stager.offsets(_rows(lookup)))
        for lookup in lookups:
            self._exact.hold(self._stager, lookup)
        blocks = self._exact.blocks_of(request_id)[: -(-asked // self._block_size)]
        exact = enumerate(blocks[: -(-start // self._block_size)])
        unwritten = next((place * self._block_size for place, block in exact if block in written), start)
        tokens, question = (list(state.request.all_token_ids[a:b]) for a, b in ((unwritten, end), (end, asked)))
        return Blend(request_id, start, end, tokens, blocks, chunks, places, unwritten, question)

    def _save(self, state: BlendRequest, computed: int) -> list[BlockMoves]:
        """Return the chunk at the start of a request, once its exact KV is computed."""
        chunk = state.chunks[0]
        if not state.blended and computed < chunk.end:
            return []
        state.saved = True
        if state.blended or self.off or not self._exact.vouches_for(state.request):
            return []
        name, keys = state.request.request_id, state.keys[0]
        blocks = self._exact.blocks_of(name)[: -(-chunk.end // self._block_size)]
        depths = [min(piece * PIECE, chunk.end) for piece in range(1, chunk.pieces + 1)]
        return [BlockMoves(name, OF_PIECES, keys, blocks, depths, step=self._exact.step)]

    def _let_go(self, state: BlendRequest) -> None:
        for lookup in state.lookups:
            self._stager.release(lookup)
        state.lookups = []

    def _count(self, state: BlendRequest, outcome: str) -> None:
        if outcome != state.outcome and not (state.blended and outcome == "miss"):
            state.outcome = outcome
            self._exact.counters.add(names.BLEND_REQUESTS, key=outcome)

    def _say(self, what: str) -> None:
        if what not in self._said and len(self._said) < 100:  # noqa: PLR2004 - clients write these texts
            self._said.add(what)
            get_logger(__name__).warning("[UCM.Blend] %s", what)


def _rows(lookup: Lookup) -> list[Row]:
    """Return the staged pieces of a chunk; nothing if it was not found."""
    of_chunk = lookup.rows.get(0, {})
    return [of_chunk[piece] for piece in range(lookup.end)]


def _has_no_chunks(request: Any) -> str:
    """Return why a request's chunks cannot be used: its KV depends on more than its tokens; empty if they can."""
    reasons = {
        "lora": adapter_of(request) is not None,
        "prompt_embeds": prompt_embeds(request)[0] is not None,
        "multimodal": has_media(request),
        "pooling": is_pooled(request),
        "streaming": is_streaming(request),
    }
    return next((reason for reason, there in reasons.items() if there), "")


def _cannot_load(request: Any) -> str:
    """Return why all of a request's tokens must be computed; empty if they need not be."""
    if skips_prefix_cache(request):
        return "skip_reading_prefix_cache"
    if wants_prompt_logprobs(request):
        return "prompt_logprobs"
    return ""
