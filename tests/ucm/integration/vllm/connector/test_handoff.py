"""A prefill engine says what it has saved, and a decode engine waits for it, until its deadline at the latest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, request
from tests.ucm.integration.vllm.connector.simulation.truth import STATE
from ucm.integration.vllm.connector import staging
from ucm.integration.vllm.connector.metadata import SAVED, comes_from_afar, is_handed_on, saved_tokens
from ucm.logger import get_logger

if TYPE_CHECKING:
    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.request import Request

SECONDS = 2.0


def handed(tokens: list[int], saved: object, name: str = "handed", **more: Any) -> Request:
    return request(tokens, name, kv_transfer_params={SAVED: saved, **more})


def publish(scene: Scene, tokens: int, group: int = 0) -> None:
    chain = scene.keys.chain(TOKENS, SIZE)[: tokens // SIZE]
    scene.stores[group][0].keys.update(chain)


def advance_to(scene: Scene, seconds: float) -> None:
    scene.clock.run_until_idle()
    scene.clock.advance(seconds - scene.clock.monotonic())


@pytest.mark.parametrize("params", [None, [], "text", {}, {SAVED: "8"}, {SAVED: -8}, {SAVED: True}, {SAVED: 8.0}])
def test_what_is_no_number_of_tokens_is_as_good_as_none(clock: SimulatedClock, params: object) -> None:
    new = request(TOKENS, kv_transfer_params=params)
    assert saved_tokens(new) == 0
    assert not is_handed_on(new)
    assert not comes_from_afar(new)
    assert Scene(clock).matched(new) == 0


def test_a_handed_over_request_waits_until_all_of_it_is_in_the_store(clock: SimulatedClock) -> None:
    scene = Scene(clock, seconds=SECONDS)
    new = handed(TOKENS, 16)
    begun = clock.monotonic()
    for saved in (0, 4, 12):
        publish(scene, saved)
        clock.run_until_idle()
        assert scene.side.matched_tokens(new, 0) is None
        clock.advance(staging.AGAIN_SECONDS)
    publish(scene, 16)
    assert scene.matched(new) == 16
    assert clock.monotonic() - begun < SECONDS
    assert scene.counted.failures == []
    assert scene.counted.calls == [(18, 16)]


@pytest.mark.parametrize(("saved", "loaded", "lost"), [(0, 0, 4), (12, 12, 1)])
def test_what_never_comes_is_computed_after_the_deadline(
    clock: SimulatedClock,
    saved: int,
    loaded: int,
    lost: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    scene = Scene(clock, seconds=SECONDS)
    publish(scene, saved)
    new, begun = handed(TOKENS, 16), clock.monotonic()
    assert scene.side.matched_tokens(new, 0) is None
    advance_to(scene, begun + SECONDS - 0.001)
    assert scene.side.matched_tokens(new, 0) is None
    clock.run_until_idle()
    clock.advance(0.001)
    assert scene.side.matched_tokens(new, 0) == loaded
    assert scene.counted.failures == ["load.awaited"] * lost
    assert f"16 tokens were handed over through the store, and only {loaded} were there after 2.0 s" in caplog.text
    # The store has answered, so it is used as before, and nobody waits for the same tokens again.
    publish(scene, 16)
    assert scene.matched(request(TOKENS, "another")) == 16
    scene.side.finished(new)
    assert scene.used == 4


def test_what_was_there_by_the_deadline_is_loaded_also_where_nothing_is_staged(clock: SimulatedClock) -> None:
    scene = Scene(clock, rows=0, seconds=SECONDS)
    publish(scene, 12)
    new = handed(TOKENS, 16)
    assert scene.side.matched_tokens(new, 0) is None
    advance_to(scene, clock.monotonic() + SECONDS)
    assert scene.side.matched_tokens(new, 0) == 12


def test_a_request_waits_once(clock: SimulatedClock) -> None:
    scene = Scene(clock, seconds=SECONDS)
    new = handed(TOKENS, 16)
    assert scene.side.matched_tokens(new, 0) is None
    advance_to(scene, clock.monotonic() + SECONDS)
    assert scene.side.matched_tokens(new, 0) == 0
    begun = clock.monotonic()
    assert scene.matched(new, SIZE) == 0
    assert clock.monotonic() == begun


def test_a_request_waits_no_longer_because_vllms_own_cache_grows(clock: SimulatedClock) -> None:
    """Each time there is a new lookup, with a deadline of its own."""
    scene = Scene(clock, seconds=SECONDS)
    tokens, begun = list(range(100)), clock.monotonic()
    new = handed(tokens, 96)
    for computed in range(0, 80, SIZE):
        scene.side.matched_tokens(new, computed)
        clock.run_until_idle()
        if scene.side.matched_tokens(new, computed) is not None:
            break
        clock.advance(SECONDS / 4)
    assert SECONDS <= clock.monotonic() - begun <= 1.5 * SECONDS


def test_what_is_in_no_full_block_is_not_waited_for(clock: SimulatedClock) -> None:
    """Whatever a client says: the number is its own."""
    scene = Scene(clock, seconds=SECONDS)
    publish(scene, 8)
    begun = clock.monotonic()
    assert scene.matched(handed(TOKENS, 8 + SIZE - 1)) == 8
    assert clock.monotonic() == begun
    assert scene.counted.failures == []


def test_no_thread_waits_for_another_engine(clock: SimulatedClock) -> None:
    """However many requests wait, others are looked up meanwhile, also after the store has rested."""
    scene = Scene(clock, seconds=SECONDS)
    scene.stager._rests_until = clock.monotonic()
    waiting = [handed([number, *TOKENS], 16, str(number)) for number in range(3 * staging.MOST_THREADS)]
    assert scene.side.matched_tokens(waiting[0], 0) is None
    clock.run_until_idle()
    assert [scene.side.matched_tokens(one, 0) for one in waiting] == [None] * len(waiting)
    publish(scene, 16)
    assert scene.matched(request(TOKENS, "another")) == 16
    for one in waiting:
        scene.side.finished(one)
    clock.run_until_idle()
    assert not scene.stager._running


def test_a_medium_that_freezes_meanwhile_rests(clock: SimulatedClock) -> None:
    scene = Scene(clock, seconds=SECONDS)
    new = handed(TOKENS, 16)
    assert scene.side.matched_tokens(new, 0) is None
    clock.run_until_idle()
    scene.store.answers.clear()
    clock.advance(staging.AGAIN_SECONDS)
    assert scene.side.matched_tokens(new, 0) is None
    advance_to(scene, clock.monotonic() + SECONDS)
    assert scene.side.matched_tokens(new, 0) == 0
    assert scene.side.matched_tokens(request(TOKENS, "another"), 0) == 0
    scene.store.answers.set()
    clock.run_until_idle()
    assert not scene.stager._running


def test_a_hit_that_ends_early_for_other_reasons_is_not_waited_for(clock: SimulatedClock) -> None:
    """More tokens than are looked up, no room for all, a draft model's last block, and states at few places."""
    for scene, found in (
        (Scene(clock), 16),
        (Scene(clock, rows=2), 8),
        (Scene(clock, drops_last_block=True), 12),
        (Scene(clock, None, STATE), 0),
    ):
        publish(scene, 16)
        begun = clock.monotonic()
        assert scene.matched(handed(TOKENS, 1000)) == found
        assert clock.monotonic() == begun
        assert scene.counted.failures == []


def test_what_a_transport_brings_is_not_looked_up(clock: SimulatedClock) -> None:
    scene = Scene(clock, others=True)
    publish(scene, 16)
    new = handed(TOKENS, 16, do_remote_prefill=True)
    assert scene.side.matched_tokens(new, 0) == 0
    assert scene.store.lookups == 0
    new.kv_transfer_params["do_remote_prefill"] = False  # type: ignore[attr-defined] # the transport has failed
    assert scene.matched(new) == 16


def test_without_a_transport_the_mark_means_nothing(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    publish(scene, 16)
    assert scene.matched(handed(TOKENS, 16, do_remote_prefill=True)) == 16


def test_the_prefill_engine_says_what_it_saves(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    new = request(TOKENS)
    scene.admit(new)
    plan = scene.run(new, 18, scene.rows)
    assert scene.side.finished(new) == 16
    assert sum(len(moves.keys) for moves in plan.saves) == 4


@pytest.mark.parametrize("why", ["its role", "excluded", "no namespace", "short"])
def test_what_is_not_saved_is_not_announced(clock: SimulatedClock, why: str) -> None:
    scene = Scene(clock, saves=why != "its role", begins=why != "no namespace")
    new = request(TOKENS[:3] if why == "short" else TOKENS)
    scene.admit(new)
    scene.run(new, len(new.prompt), scene.rows)
    if why == "excluded":
        scene.side.exclude(new)
    assert scene.side.finished(new) == 0
