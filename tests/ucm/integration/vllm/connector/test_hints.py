"""Requests that ask for their blocks to be retained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulated import begin_span
from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, request
from ucm.integration.vllm.connector import staging
from ucm.integration.vllm.connector.metadata import HintError, retain_seconds
from ucm.integration.vllm.connector.staging import Use
from ucm.store.base import BlockKey

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

TOUCH = 60.0


def hints(*payloads: Any, kind: Any = "kv.retain", version: Any = "1.0") -> Any:
    """Return vLLM's envelope with actions."""
    actions = [SimpleNamespace(action_type=kind, action_version=version, payload=payload) for payload in payloads]
    return SimpleNamespace(actions=actions)


def directives(*durations: float) -> dict[str, Any]:
    return {"directives": [{"start": 0, "end": None, "priority": 9, "duration": seconds} for seconds in durations]}


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({}, 0.0),
        ({"kv_transfer_params": None}, 0.0),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 0.0),
        ({"kv_transfer_params": {"ucm_retain_seconds": 90}}, 90.0),
        ({"kv_transfer_params": {"ucm_retain_seconds": 1.5}}, 1.5),
        ({"kv_transfer_params": {"ucm_retain_seconds": 10**400}}, float(1 << 40)),
        ({"kv_hints": hints(directives(60, 300), directives(5))}, 300.0),
        ({"kv_hints": hints({"directives": [{"covers_output": True, "priority": 1}]})}, 0.0),
        ({"kv_hints": hints(directives(60), kind="kv.fetch")}, 0.0),
        ({"kv_hints": hints(directives(60), version="2.0")}, 0.0),
        ({"kv_hints": hints(directives(60)), "kv_transfer_params": {"ucm_retain_seconds": 90}}, 90.0),
    ],
)
def test_what_a_request_asks(more: dict[str, Any], seconds: float) -> None:
    assert retain_seconds(request(TOKENS, **more)) == seconds


BAD = [True, "600", None, -1, float("nan"), float("inf"), [600], -(10**5000), [10**5000]]


@pytest.mark.parametrize("value", BAD, ids=range(len(BAD)))
def test_a_malformed_hint_is_refused(value: object) -> None:
    for more in (
        {"kv_transfer_params": {"ucm_retain_seconds": value}},
        {"kv_hints": hints({"directives": [{"duration": value}]})},
    ):
        with pytest.raises(HintError, match="not a number of seconds"):
            retain_seconds(request(TOKENS, **more))


@pytest.mark.parametrize(
    "more",
    [
        {"kv_transfer_params": [1]},
        {"kv_hints": hints([])},
        {"kv_hints": hints({"directives": {}})},
        {"kv_hints": hints({"directives": [1]})},
        {"kv_hints": hints(directives(60), version=1)},
        {"kv_hints": hints(directives(60), kind=b"kv.retain")},
        {"kv_hints": SimpleNamespace(actions=1)},
        {"kv_hints": SimpleNamespace(actions=[{"action_type": "kv.retain"}])},
    ],
)
def test_what_has_another_type_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(HintError, match="no"):
        retain_seconds(request(TOKENS, **more))


def test_found_and_saved_blocks_are_retained_until_one_time_per_span(clock: SimulatedClock) -> None:
    scene = Scene(clock, touch_seconds=TOUCH, lease_seconds=600.0)
    begin_span(clock, TOUCH)
    chain = scene.keep(TOKENS[:8])
    until = (clock.time() // TOUCH + 1) * TOUCH + 300.0
    new = request(TOKENS, kv_transfer_params={"ucm_retain_seconds": 300})
    scene.admit(new, computed=8, had=[70, 71])
    plan = scene.run(new, 8, scene.rows)
    assert [(one.depths, one.retain_until) for one in plan.saves] == [([12, 16], until)]
    clock.run_until_idle()
    assert scene.store.retained == [(chain[:2], until)]
    clock.advance(TOUCH)  # an answer that takes long: the time counts from its end
    scene.side.finished(new)
    clock.run_until_idle()
    assert scene.store.retained[1:] == [(scene.keys.chain(TOKENS, SIZE)[:4], until + TOUCH)]
    assert scene.counted.hints == ["retained"]


def test_the_operator_bounds_the_time(clock: SimulatedClock) -> None:
    for longest in (0.0, 100.0):
        scene = Scene(clock, touch_seconds=TOUCH, lease_seconds=longest)
        scene.keep(TOKENS[:8])
        new = request(TOKENS, kv_transfer_params={"ucm_retain_seconds": 1e9})
        span_ends = (clock.time() // TOUCH + 1) * TOUCH
        scene.admit(new, computed=8, had=[70, 71])
        clock.run_until_idle()
        assert [until for _, until in scene.store.retained] == ([span_ends + longest] if longest else [])


def test_a_malformed_hint_costs_nothing_but_a_line(clock: SimulatedClock, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(clock, lease_seconds=600.0)
    chain = scene.keep(TOKENS[:8])
    for number in range(3):
        bad = request(TOKENS, f"r{number}", kv_transfer_params={"ucm_retain_seconds": "for ever"})
        assert scene.admit(bad) == 8
        scene.run(bad, 8, scene.rows)
        scene.side.finished(bad)
    clock.run_until_idle()
    assert scene.store.retained == []
    assert chain in scene.store.renewed
    assert scene.counted.hints == ["malformed"] * 3
    assert caplog.text.count("not retained: ucm_retain_seconds is str, not a number of seconds") <= 1


def test_all_requests_that_end_in_one_step_are_retained(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(clock, lease_seconds=600.0)
    chain = [BlockKey(one) for one in scene.keep(TOKENS[:8])]
    uses = [Use(str(number), scene.groups.groups[0], chain, range(0), 1e9) for number in range(1000)]
    for one in uses:
        scene.stager.use(one)
    clock.run_until_idle()
    assert len(scene.store.retained) == 1000
    monkeypatch.setattr(staging, "_MOST_USED_KEYS", 3)
    for one in uses[:3]:  # not more than there is room for, but always one
        scene.stager.use(one)
    clock.run_until_idle()
    assert len(scene.store.retained) == 1001


def test_an_uncached_request_is_not_retained(clock: SimulatedClock) -> None:
    scene = Scene(clock, lease_seconds=600.0)
    new = request(TOKENS, resumable=True, kv_transfer_params={"ucm_retain_seconds": 300})
    scene.admit(new)
    scene.side.finished(new)
    clock.run_until_idle()
    assert scene.store.retained == []
    assert scene.counted.hints == []
