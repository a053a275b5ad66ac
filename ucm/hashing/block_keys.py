"""Compute the keys of a request's blocks for the connectors: vLLM's own hashes where suitable, ours otherwise."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ucm.background import enter_background
from ucm.hashing.request_content import ContentReader, Digest, NotCacheableError, RequestContent, digest_of
from ucm.hashing.request_hasher import (
    DIGEST_BYTES,
    HashPlan,
    RequestHasher,
    RequestHashes,
    has_hashes,
    plan_hashes,
    verified_block_size,
)
from ucm.integration.vllm.compat import adapter_of, is_streaming, token_ids
from ucm.logger import get_logger

logger = get_logger(__name__)

#: Multimodal inputs that are hashed at once, beside the scheduler, and how much the threads give way to it.
_THREADS = 2
_NICE = 5


@dataclass(slots=True)
class _Known:
    """The state of one request."""

    request: weakref.ref[Any]  # clients may choose ids and reuse them
    content: RequestContent | None  # None: not cacheable
    hashes: dict[int, RequestHashes] = field(default_factory=dict)  # our hashes, by block size


@dataclass(slots=True)
class _Hashing:
    """A request whose multimodal inputs are being hashed."""

    request: weakref.ref[Any]
    digests: list[Future[Digest]]

    @property
    def done(self) -> bool:
        return all(digest.done() for digest in self.digests)


class BlockKeys:
    """Computes block keys for an engine's requests, in the scheduler process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        seed: The seed of our own hashes: what is known of the model's identity at the start.
        trust_media_names: Whether the names of multimodal inputs are trusted in place of their data.
    """

    def __init__(self, vllm_config: Any, seed: bytes, *, trust_media_names: bool = False) -> None:
        self.refused: Counter[str] = Counter()  #: requests that are not cacheable, by reason
        self._plan = plan_hashes(vllm_config)
        self._hasher = RequestHasher(seed)
        self._reader = ContentReader(vllm_config, trust_media_names=trust_media_names)
        self._known: dict[str, _Known] = {}
        self._hashing: dict[str, _Hashing] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "ucm-media", lambda: enter_background(_NICE))
        #: vLLM's hashes per block, by block size and whether a request has a salt; 0: our hashes are used.
        self._strides: dict[tuple[int, bool], int] = {}
        if self._plan.uses_vllm:
            logger.info(
                "[UCM.Hasher] vLLM's own %s block hashes are the keys: %s", self._plan.algorithm, self._plan.reason
            )
        else:
            logger.info("[UCM.Hasher] UCM's own hashes are the keys: %s", self._plan.reason)

    @property
    def seed(self) -> bytes:
        """The seed of UCM's own hashes."""
        return self._hasher.seed

    def is_ready(self, request: Any) -> bool:
        """Return whether `of` answers without waiting; if not, hash the request's multimodal inputs in the background.

        A caller that does not wait gets the same keys from `of`, which waits itself.
        """
        known = self._known.get(request.request_id)
        if (known is not None and known.request() is request) or is_streaming(request):
            return True  # a streaming session is not cached, and its inputs are replaced as it goes
        hashing = self._hashing.get(request.request_id)
        if hashing is None or hashing.request() is not request:
            inputs = self._reader.data_of(request)
            if not inputs:
                return True
            digests = [self._pool.submit(digest_of, data) for data in inputs]
            hashing = self._hashing[request.request_id] = _Hashing(weakref.ref(request), digests)
        return hashing.done

    def wait(self, seconds: float) -> None:
        """Wait until inputs of a request are hashed, or return at once if no inputs are being hashed."""
        if self._hashing and not any(hashing.done for hashing in self._hashing.values()):
            wait([d for h in self._hashing.values() for d in h.digests if not d.done()], seconds, FIRST_COMPLETED)

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
        if self._plan.uses_vllm and known.content.is_text:
            stride = self._stride(request, block_size, known.content)
            if stride:
                keys: list[bytes] = request.block_hashes[(first + 1) * stride - 1 :: stride]
                return keys
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
        """Return whether the engine has replaced the request's LoRA adapter in place since."""
        lora_request = adapter_of(request)
        return lora_request is not None and self._reader.adapters.is_invalidated(lora_request)

    def adapter_replaced(self, number: int) -> None:
        """Note that the engine has replaced the weights of a LoRA adapter.

        Args:
            number: The adapter's ``lora_int_id``.
        """
        self._reader.adapters.replaced(number)

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._known.pop(request_id, None)
        hashing = self._hashing.pop(request_id, None)
        for digest in [] if hashing is None else hashing.digests:
            digest.cancel()

    def close(self) -> None:
        """Hash no more inputs; those under way are finished by threads that nobody waits for but the interpreter."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_anew(self) -> None:
        """Use new, random keys from now on, so that this engine never finds earlier blocks again."""
        self._plan = HashPlan("", b"", "the prefix cache was reset")
        self._hasher = RequestHasher(self._hasher.seed + os.urandom(DIGEST_BYTES))
        for known in self._known.values():
            known.hashes.clear()  # the content stays as it is: hashing an image again would hold up the scheduler
        logger.warning(
            "[UCM.Hasher] the prefix cache was reset: this engine no longer finds blocks that were stored before, and "
            "blocks that it stores from now on are not found by other engines or after a restart"
        )

    def _look_at(self, request: Any) -> _Known:
        hashing = self._hashing.pop(request.request_id, None)
        digests = None
        if hashing is not None and hashing.request() is request:
            digests = [digest.result() for digest in hashing.digests]
        try:
            known = _Known(weakref.ref(request), self._reader.read(request, digests))
        except NotCacheableError as error:
            self._refuse(str(error))
            known = _Known(weakref.ref(request), None)
        if not is_streaming(request):  # the tokens and inputs of a streaming session are replaced
            self._known[request.request_id] = known
        return known

    def _stride(self, request: Any, block_size: int, content: RequestContent) -> int:
        case = (block_size, content.salt is not None)
        if case not in self._strides:
            if not has_hashes(request):
                return 0
            size = verified_block_size(request, self._plan, block_size)
            self._strides[case] = block_size // size if size else 0
            if not size:
                logger.warning(
                    "[UCM.Hasher] vLLM's block hashes cover more than a request's tokens and salt, or their block size "
                    "does not divide %d tokens; UCM's own hashes are used for these blocks",
                    block_size,
                )
        return self._strides[case] if has_hashes(request) else 0

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
