"""A deployment whose model vLLM does not have to describe, for tests of the commands that start no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ucm.api import RequestHasher
from ucm.commands.store import prompt
from ucm.integration.vllm.connector.kv_cache import CacheGroup
from ucm.integration.vllm.weightless import EngineFacts, StoredGroup
from ucm.store.base import BlockGeometry, BlockKey

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAMESPACE = "llama-0123"
GEOMETRY = BlockGeometry((4096, 4096, 10), b"of a test model!")
SIZE = 16
TOKENS = list(range(5 * SIZE + 3))


def facts(*windows: int | None) -> EngineFacts:
    """Return facts with one KV-cache group per window; None is full attention."""
    groups = [CacheGroup(index, SIZE, window, {}, ()) for index, window in enumerate(windows or (None,))]
    stored = tuple(
        StoredGroup(group, f"{NAMESPACE}/g{group.index}", GEOMETRY, (f"{NAMESPACE}/g{group.index}",))
        for group in groups
    )
    return EngineFacts(NAMESPACE, "cpu", stored, RequestHasher(b"seed"))


def keys(count: int) -> list[BlockKey]:
    hashes = RequestHasher(b"seed").generate_block_hashes(TOKENS, SIZE)
    return [BlockKey(one) for one in hashes[:count]]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace vLLM's description of the model; record the arguments."""
    about: dict[str, Any] = {"facts": facts()}

    def describe_engine(
        model: Path, extra_config: Mapping[str, Any], engine_args: Mapping[str, Any] | None = None
    ) -> EngineFacts:
        about["asked"] = model, extra_config, engine_args
        found: EngineFacts = about["facts"]
        return found

    monkeypatch.setattr(prompt, "describe_engine", describe_engine)
    return about
