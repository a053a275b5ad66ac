"""What the tests of the tiers on servers share: the blocks, the limits, and what every server is tried with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from ucm.store.factory import tier_options
from ucm.store.format import HeaderCodec
from ucm.store.health import Breaker
from ucm.store.tier import TierPlace
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import EVEN, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from ucm.clock import Clock
    from ucm.store.base import BlockKey, KVStore, StoreError
    from ucm.store.config import StoreConfig
    from ucm.store.remote.tiers import Client, RemoteTier

KEYS = [key(number) for number in range(12)]
ALL = {block: content(block, EVEN) for block in KEYS}
NAMESPACE = "model/rank-0"
#: A deadline that is to expire, a limit that suffices on a busy machine, and a limit never reached, in seconds.
SHORT, LONG, NEVER = 0.5, 60.0, 3600.0


class Freezing(Protocol):
    """What a test can freeze: a server, or the line to it."""

    def freeze(self) -> None:
        """Let no answer come any more."""

    def thaw(self) -> None:
        """Go on."""


def causes(store: KVStore, keys: Sequence[BlockKey] = KEYS) -> set[str]:
    return {error.cause for error in fetch(store, keys, EVEN)[1].values()}


def eventually(condition: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Wait until a condition is met; a failure shows what is told then."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def recover(store: KVStore) -> None:
    """Save and load until both succeed."""
    eventually(lambda: not save(store, KEYS, EVEN).failed and fetch(store, KEYS, EVEN)[0] == ALL, store.stats)


def open_over(
    tier: type[RemoteTier], client: Client, config: StoreConfig, namespace: str = NAMESPACE, *, clock: Clock
) -> KVStore:
    """Open a store above one tier with a client of the test's own, as ``open_store`` does with that of the process."""
    codec = HeaderCodec(namespace, EVEN, None)
    place = TierPlace(config.pipeline, namespace, EVEN, codec, config, None, clock)
    options: Any = tier_options(tier, place)
    return TieredStore([tier(options, place, client)], codec, config, clock=clock)


def assert_one_deadline(
    server: Freezing,
    tier: str,
    opened: Callable[[str], KVStore],
    monkeypatch: pytest.MonkeyPatch,
    *,
    connected: bool = False,
) -> None:
    """Check that two stores ask a frozen server once in all, whatever they want.

    Args:
        server: A server with `KEYS`, or the line to it.
        tier: Its tier's name in the statistics.
        opened: Opens a store above it, by its namespace, whose rest after a failure does not end.
        monkeypatch: Counts failures.
        connected: Whether the server freezes only after it has answered.
    """
    failed, failures = Breaker.failed, []

    def counted(self: Breaker, error: StoreError) -> None:
        failures.append(error.cause)
        failed(self, error)

    with opened(NAMESPACE) as one, opened("model/rank-1") as two:
        if connected:
            assert one.lookup_on_prefix(KEYS) == len(KEYS)
        monkeypatch.setattr(Breaker, "failed", counted)
        server.freeze()
        for _ in range(10):
            for store in (one, two):
                assert store.lookup_on_prefix([key(99)]) == 0
                assert set(fetch(store, KEYS, EVEN)[1]) == set(KEYS)
                assert set(save(store, [key(99)], EVEN).failed) == {key(99)}
        assert failures == ["timeout"], "the server was asked once"
        assert one.stats()[tier].resting == two.stats()[tier].resting == 1
        server.thaw()
