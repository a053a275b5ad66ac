"""Compute the keys of a request's blocks for the connectors."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.background import Later, enter_background
from ucm.clock import SYSTEM
from ucm.compat import adapter_of, is_streaming, optional, token_ids
from ucm.hashing.request_content import (
    ContentReader,
    Digest,
    NotCacheableError,
    RequestContent,
    digest_of,
    name_of_encoding,
)
from ucm.hashing.request_hasher import DIGEST_BYTES, RequestHasher, RequestHashes
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock, Queue, Thread
    from ucm.hashing.name_ledger import Naming

logger = get_logger(__name__)

#: Multimodal inputs that are hashed at once, beside the scheduler, and how much the threads give way to it.
_THREADS = 2
_NICE = 5


@dataclass(slots=True)
class _Known:
    """The state of one request."""

    request: weakref.ref[Any]  # clients may choose ids and reuse them
    content: RequestContent | None  # None: not cacheable
    names: list[Naming]  # by which vLLM finds parts of it
    checked: int = 0  # the ambiguous names that were counted when its names were last checked
    hashes: dict[int, RequestHashes] = field(default_factory=dict)  # our hashes, by block size


@dataclass(slots=True)
class _Hashing:
    """A request whose multimodal inputs are being hashed."""

    request: weakref.ref[Any]
    digests: list[Later[Digest]]
    is_dropped: bool = False  # nobody will ask for the digests

    @property
    def done(self) -> bool:
        return all(digest.done() for digest in self.digests)


class BlockKeys:
    """Computes block keys for an engine's requests, in the scheduler process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        seed: The seed of our own hashes: what is known of the model's identity at the start.
        trust_media_names: Whether the names of multimodal inputs are trusted in place of their data.
        clock: Time and threads.
    """

    def __init__(
        self, vllm_config: Any, seed: bytes, *, trust_media_names: bool = False, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self.refused: Counter[str] = Counter()  #: requests that are not cacheable, by reason
        self._hasher = RequestHasher(seed)
        self._reader = ContentReader(vllm_config, trust_media_names=trust_media_names, clock=clock)
        #: Whether vLLM hashes blocks at all; if not, no first block ever gets a name.
        self._finds_prefixes = bool(optional(vllm_config, "cache_config.enable_prefix_caching", True))
        self._known: dict[str, _Known] = {}
        self._unnamed: dict[str, _Known] = {}  # of unknown content, and vLLM has hashed no block of them yet
        self._hashing: dict[str, _Hashing] = {}
        self._threads: list[Thread] = []
        self._queue: Queue[tuple[_Hashing, Later[Digest]] | None] = clock.queue()
        self._one_is_hashed = clock.event()
        self._closed = False

    @property
    def seed(self) -> bytes:
        """The seed of UCM's own hashes."""
        return self._hasher.seed

    def is_ready(self, request: Any) -> bool:
        """Return whether `of` answers without waiting; if not, hash the request's multimodal inputs in the background.

        A caller that does not wait gets the same keys from `of`, which waits itself.
        """
        known = self._known.get(request.request_id)
        if (known is not None and known.request() is request) or is_streaming(request) or self._closed:
            return True  # a streaming session is not cached, and its inputs are replaced as it goes
        hashing = self._hashing.get(request.request_id)
        if hashing is None or hashing.request() is not request:
            inputs = self._reader.data_of(request)
            if not inputs:
                return True
            digests = [Later(partial(digest_of, data), clock=self._clock) for data in inputs]
            hashing = self._hashing[request.request_id] = _Hashing(weakref.ref(request), digests)
            for digest in digests:
                self._queue.put((hashing, digest))
            while len(self._threads) < _THREADS and not self._queue.empty():
                self._threads.append(self._clock.thread(self._hash, "ucm-media"))
                self._threads[-1].start()
        return hashing.done

    def wait(self, seconds: float) -> None:
        """Wait until inputs of a request are hashed, or return at once if no inputs are being hashed."""
        self._one_is_hashed.clear()
        if self._hashing and not any(hashing.done for hashing in self._hashing.values()):
            self._one_is_hashed.wait(seconds)

    def of(self, request: Any, block_size: int, first: int = 0) -> list[bytes] | None:
        """Return the keys of a request's full blocks, as far as its tokens are known now.

        Args:
            request: vLLM's ``Request``.
            block_size: Tokens per block of the KV-cache group.
            first: The index of the first block.

        Returns:
            One key for each full block from ``first`` on; None if the request must not be cached.
        """
        known = self._known.get(request.request_id)
        if known is None or known.request() is not request:
            known = self._look_at(request)
        if known.content is None:
            return None
        return self._hashed(request, known, block_size, first)

    def may_change(self, request: Any) -> bool:
        """Return whether the engine may read files that shape the KV later than we do: those of a LoRA adapter."""
        return adapter_of(request) is not None

    def is_same(self, request: Any) -> bool:
        """Return whether the files that the engine has read are still those that the keys were computed from."""
        known = self._known.get(request.request_id)
        if known is None or known.content is None:
            return False
        if self._reader.is_same(request, known.content):
            return True
        self._refuse("the files of a LoRA adapter changed while the engine loaded it")
        return False

    def is_invalidated(self, request: Any) -> bool:
        """Return whether vLLM may have found content of another request under a name of this one since.

        For instance the engine has replaced its LoRA adapter in place. What the current step shows counts once
        `next_step` was called.
        """
        lora_request = adapter_of(request)
        if lora_request is not None and self._reader.adapters.is_invalidated(lora_request):
            return True
        known = self._known.get(request.request_id)
        if known is not None and known.request() is request and known.checked != self._reader.changes:
            names = [*known.names, *self._reader.first_block(request)]
            if any(naming.ledger.is_ambiguous(naming.name) for naming in names):
                return True
            known.checked = self._reader.changes
        return False

    def note(self, request: Any) -> None:
        """Note that nobody knows what the names of a request's inputs stand for now; it is not cached."""
        unread = NotCacheableError("a streaming session's inputs are not read")
        with suppress(NotCacheableError):
            self._reader.read(request, [unread] * len(self._reader.data_of(request)))

    def prefix_cache_emptied(self) -> None:
        """Note that vLLM has emptied its own prefix cache; requests that run on fill it again, under their names."""
        self._note_first_blocks()
        self._reader.prefix_cache_emptied()
        running = [(known, request) for known in self._known.values() if (request := known.request()) is not None]
        for known, _ in running:
            for naming in known.names:
                naming.holds()
        self._reader.adapters.still_run([adapter for _, request in running if (adapter := adapter_of(request))])

    def next_step(self, freed_encodings: Sequence[str] = ()) -> None:
        """Note what a step shows of vLLM's caches: blocks that have got names, and encodings of media that it drops.

        Requests that run on may encode theirs again.
        """
        self._note_first_blocks()
        if not freed_encodings:
            return
        freed, encodings = {name_of_encoding(key) for key in freed_encodings}, self._reader.encodings
        for name in freed:
            encodings.forget(name)
        for known in self._known.values():
            for naming in known.names:
                if naming.ledger is encodings and naming.name in freed:
                    naming.holds()

    def adapter_replaced(self, number: int) -> None:
        """Note that the engine has replaced the weights of a LoRA adapter."""
        self._reader.adapters.replaced(number)

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._note_first_blocks()
        self._unnamed.pop(request_id, None)
        self._known.pop(request_id, None)
        hashing = self._hashing.pop(request_id, None)
        if hashing is not None:
            hashing.is_dropped = True

    def close(self) -> None:
        """Hash no more inputs in the background; nobody waits for those that are being hashed."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)

    def start_anew(self) -> None:
        """Use new, random keys from now on, so that this engine never finds earlier blocks again."""
        self._hasher = RequestHasher(self._hasher.seed + os.urandom(DIGEST_BYTES))
        for known in self._known.values():
            known.hashes.clear()  # the content stays as it is: hashing an image again would hold up the scheduler
        logger.warning(
            "[UCM.Hasher] the prefix cache was reset: this engine no longer finds blocks that were stored before, and "
            "blocks that it stores from now on are not found by other engines or after a restart"
        )

    def _hash(self) -> None:
        """Hash inputs, in a background thread."""
        enter_background(_NICE)
        while (job := self._queue.get()) is not None:
            hashing, digest = job
            if not (hashing.is_dropped or self._closed):
                digest.run()
                self._one_is_hashed.set()

    def _note_first_blocks(self) -> None:
        """Note that first blocks of requests of unknown content, whose prompts did not fill one, stand for that."""
        for request_id, known in list(self._unnamed.items()):
            names = [] if (request := known.request()) is None else self._reader.first_block(request)
            if names or request is None:
                del self._unnamed[request_id]
                known.names += names
                for naming in names:
                    naming.holds()

    def _look_at(self, request: Any) -> _Known:
        self._note_first_blocks()
        hashing = self._hashing.pop(request.request_id, None)
        digests = None
        if hashing is not None and hashing.request() is request and not self._closed:
            digests = [digest.result() for digest in hashing.digests]
        names: list[Naming] = []
        content = None
        try:
            content = self._reader.read(request, digests, names)
        except NotCacheableError as error:
            self._refuse(str(error))
        known = _Known(weakref.ref(request), content, names, checked=self._reader.changes)
        if not is_streaming(request):  # the tokens and inputs of a streaming session are replaced
            self._known[request.request_id] = known
            has_names = self._finds_prefixes and optional(request, "block_hashes") is not None  # not up to 0.10.0
            if content is None and has_names and not self._reader.first_block(request):
                self._unnamed[request.request_id] = known
        return known

    def _hashed(self, request: Any, known: _Known, block_size: int, first: int) -> list[bytes] | None:
        tokens = token_ids(request)
        hashes = known.hashes.get(block_size)
        if hashes is None or len(hashes.keys) * block_size > len(tokens):
            hashes = known.hashes[block_size] = self._hasher.start(block_size, known.content)
        try:
            return hashes.extend(tokens)[first:]
        except ValueError as error:
            self._refuse(str(error))
            known.content = None
            return None

    def _refuse(self, reason: str) -> None:
        if not self.refused[reason]:
            logger.warning("[UCM.Hasher] requests are computed without the store: %s", reason)
        self.refused[reason] += 1
