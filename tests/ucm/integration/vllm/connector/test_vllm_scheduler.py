"""vLLM's own scheduler with our whole connector, and a miniature model in which every wrong byte shows."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import create_autospec, patch

import pytest

from tests.simulated import repeatable
from tests.ucm.integration.vllm.connector.simulation.setting import Setting, any_kinds
from tests.ucm.integration.vllm.connector.simulation.truth import RING, STATE
from tests.ucm.integration.vllm.connector.simulation.vllm_runs import REQUESTS, check_stored, play, serve
from tests.ucm.integration.vllm.connector.test_simulation import prompts

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import kv_cache_interface

from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine
from ucm.compat import hands_over_states
from ucm.integration.vllm.connector.identity import LiveWeights
from ucm.integration.vllm.ucm_connector import UCMConnector

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import SimulatedClock

pytest_plugins = ("tests.simulated",)

ENGINES = {
    "staged": Setting(),
    "staged, reads fail": Setting(ranks=2, failing_loads=0.3, failing_saves=0.05, aborts=0.2),
    "staged, asynchronous": Setting(asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct": Setting(loads="direct", ranks=2),
    "direct, loads fail": Setting(loads="direct", ranks=2, failing_loads=0.3, failing_saves=0.05, aborts=0.2),
    "direct, all loads fail": Setting(loads="direct", failing_loads=1.0),
    "direct, asynchronous": Setting(loads="direct", asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct, no prefix cache": Setting(loads="direct", caching=False, failing_loads=0.1),
    "layer by layer": Setting(layerwise=True, ranks=2),
    "layer by layer, loads fail": Setting(layerwise=True, failing_loads=0.3, aborts=0.3, budget=8, chunk=5),
    "layer by layer, asynchronous": Setting(layerwise=True, asynchronous=True, aborts=0.2),
    "chunks": Setting(stored_tokens=8, ranks=2, failing_loads=0.2, aborts=0.1),
    "chunks, direct, loads fail": Setting(stored_tokens=10, loads="direct", failing_loads=0.2, aborts=0.1),
    "chunks, layer by layer, asynchronous": Setting(stored_tokens=8, layerwise=True, asynchronous=True, aborts=0.2),
    "chunks, a window": Setting(groups=((4, None, 3), (4, 9, 3)), stored_tokens=8, ranks=2, blocks=48, aborts=0.1),
    "a window beside full attention": Setting(groups=((4, None, 3), (4, 6, 3)), ranks=2, blocks=48, aborts=0.1),
    "only windows": Setting(groups=((4, 9, 3),), ranks=2, failing_loads=0.1, aborts=0.1),
    "only windows, direct, loads fail": Setting(groups=((4, 9, 3),), loads="direct", failing_loads=0.1, aborts=0.1),
    "only windows, direct, asynchronous": Setting(
        groups=((4, 9, 3),), loads="direct", ranks=2, asynchronous=True, failing_loads=0.1
    ),
    "only windows, layer by layer": Setting(groups=((4, 9, 3),), layerwise=True, failing_loads=0.2),
    "slices of heads": Setting(slices=4, ranks=2, failing_loads=0.2, failing_saves=0.05, aborts=0.1),
    "slices of heads, chunks, layer by layer": Setting(slices=2, stored_tokens=8, layerwise=True, failing_loads=0.2),
    "slices of heads, a window, direct": Setting(
        groups=((4, None, 3), (4, 6, 3)), slices=2, ranks=2, loads="direct", blocks=48, failing_loads=0.1
    ),
    "slices of heads, on a device": Setting(slices=4, ranks=2, staged=True, asynchronous=True, failing_loads=0.1),
    "a window, asynchronous": Setting(
        groups=((4, None, 2), (4, 9, 2), (4, 1, 2)), asynchronous=True, blocks=72, layerwise=True
    ),
    # Sparse drafts, whose KV is wrong.
    "drafts": Setting(drafts=3, ranks=2, failing_loads=0.2, aborts=0.1, resets=0.02),
    "drafts, layer by layer": Setting(drafts=2, stored_tokens=8, layerwise=True, failing_saves=0.1, aborts=0.1),
    "drafts, a window, direct": Setting(
        groups=((4, None, 3), (4, 6, 3)), drafts=4, loads="direct", blocks=48, failing_loads=0.1
    ),
}
_HYBRID = ((4, None, 2), (4, STATE, 2), (4, STATE, 2))
#: Models with recurrent layers, which are refused before 0.30.0; another test says so.
HYBRIDS = {
    "staged": Setting(groups=_HYBRID, blocks=72),
    "aborts": Setting(groups=_HYBRID, blocks=48, ranks=2, aborts=0.2, failing_saves=0.1),
    "reads fail": Setting(groups=_HYBRID, blocks=48, ranks=2, failing_loads=0.3, aborts=0.1),
    "direct": Setting(groups=_HYBRID, blocks=48, loads="direct", ranks=2),
    "direct, loads fail": Setting(groups=_HYBRID, blocks=48, loads="direct", failing_loads=0.3, aborts=0.1),
    "asynchronous": Setting(groups=_HYBRID, blocks=72, asynchronous=True, failing_loads=0.1, aborts=0.1),
    "layer-wise connector": Setting(groups=_HYBRID, blocks=72, layerwise=True, aborts=0.1),
    "small steps": Setting(groups=_HYBRID, blocks=48, budget=8, chunk=5, aborts=0.1),
    "chunks": Setting(groups=_HYBRID, blocks=72, stored_tokens=8, ranks=2, failing_loads=0.1, aborts=0.1),
    "announced late": Setting(groups=_HYBRID, blocks=48, announced_late=True, aborts=0.2),
    "announced late, asynchronous": Setting(groups=_HYBRID, blocks=48, announced_late=True, asynchronous=True),
    # A step zeroes blocks that the last one saves, before it is announced: wrong tokens unless steps wait for copies.
    "on a device, announced late": Setting(
        groups=_HYBRID, blocks=28, running=6, budget=40, announced_late=True, staged=True, ranks=2, aborts=0.1
    ),
    "prompts alone": Setting(groups=_HYBRID, blocks=48, save_decode_blocks=False),
    "hits within a block": Setting(
        groups=((8, None, 2), (8, STATE, 2), (8, STATE, 2)), blocks=48, ranks=2, hash_tokens=4, aborts=0.1
    ),
    "hits within a block, asynchronous": Setting(
        groups=((8, STATE, 2), (8, None, 2)), blocks=48, hash_tokens=2, asynchronous=True, announced_late=True
    ),
    "with a window": Setting(groups=((4, None, 2), (4, 9, 2), (4, STATE, 2)), blocks=72, failing_loads=0.1, aborts=0.1),
    # Of latents all ranks have the same, and of states each its own (Kimi-Linear).
    "latents": Setting(groups=_HYBRID, precisions=True, blocks=72, ranks=2, failing_loads=0.1, aborts=0.1),
    "states alone": Setting(groups=((4, STATE, 2),), ranks=2, failing_loads=0.1, aborts=0.1),
}
#: Models whose specifications early releases lack: latents with an indexer's keys beside them, in other precisions and
#: page sizes (DeepSeek V3.2, GLM-5); chunked local attention (Llama 4); compressed windows with blocks of many sizes
#: (DeepSeek V4); rings (DeepSeek V4.1, GLM-5.3).
_DSA: dict[str, Any] = {"groups": ((4, None, 4),), "precisions": True}
_LOCAL: dict[str, Any] = {"groups": ((4, -8, 2), (4, None, 2)), "blocks": 48}
_COMPRESSED: dict[str, Any] = {
    "groups": ((8, None, 2), (4, 9, 1), (2, 3, 1), (1, 2, 1)),
    "precisions": True,
    "blocks": 160,
}
_RINGS: dict[str, Any] = {"groups": ((4, RING, 1), (4, None, 2), (4, RING, 2)), "blocks": 48}
KINDS = {
    "latents and keys": Setting(**_DSA, ranks=2, failing_loads=0.2, failing_saves=0.1, aborts=0.2),
    "latents and keys, direct": Setting(**_DSA, loads="direct", failing_loads=0.3, aborts=0.1),
    "latents and keys, layer by layer": Setting(**_DSA, layerwise=True, asynchronous=True, announced_late=True),
    "latents and keys, chunks": Setting(**_DSA, stored_tokens=8, ranks=2, failing_loads=0.1),
    "local": Setting(**_LOCAL, ranks=2, failing_loads=0.2, failing_saves=0.1, aborts=0.2),
    "local, direct": Setting(**_LOCAL, loads="direct", failing_loads=0.2, aborts=0.1),
    "local, layer by layer": Setting(**_LOCAL, layerwise=True, aborts=0.1, budget=8, chunk=5),
    "local, chunks": Setting(**_LOCAL, stored_tokens=8, asynchronous=True, failing_loads=0.1),
    "local, longer chunks": Setting(groups=((4, -12, 2), (4, None, 2)), blocks=48, stored_tokens=8, aborts=0.1),
    "compressed": Setting(**_COMPRESSED, ranks=2, failing_loads=0.2, failing_saves=0.1, aborts=0.2),
    "compressed, direct": Setting(**_COMPRESSED, loads="direct", failing_loads=0.1, aborts=0.1),
    "compressed, asynchronous": Setting(**_COMPRESSED, asynchronous=True, announced_late=True, aborts=0.1),
    "compressed, chunks": Setting(**_COMPRESSED, stored_tokens=16, failing_loads=0.1),
    "rings": Setting(**_RINGS, ranks=2, failing_loads=0.2, failing_saves=0.1, aborts=0.2),
    "rings, direct": Setting(**_RINGS, loads="direct", asynchronous=True, failing_loads=0.3, aborts=0.1),
    "rings, layer by layer": Setting(**_RINGS, layerwise=True, announced_late=True, aborts=0.2),
    "rings and states": Setting(groups=((4, RING, 1), (4, STATE, 2), (4, None, 2)), blocks=64, failing_loads=0.1),
}


if hasattr(kv_cache_interface, "CircularBufferSpec"):

    @pytest.mark.parametrize("name", KINDS)
    def test_models_with_other_kinds_of_groups(name: str, tmp_path: Path) -> None:
        setting = KINDS[name]
        chance = random.Random(1)  # noqa: S311 - no secret
        happened = serve(VllmEngine, setting, tmp_path, chance, setting.truth(), prompts(chance), range(1, 7))
        print(name, dict(happened))


if hands_over_states():

    @pytest.mark.parametrize("name", HYBRIDS)
    def test_models_with_recurrent_layers(name: str, tmp_path: Path) -> None:
        setting = HYBRIDS[name]
        chance = random.Random(1)  # noqa: S311 - no secret
        more = ["copies"] if setting.hash_tokens else []
        happened = serve(VllmEngine, setting, tmp_path, chance, setting.truth(), prompts(chance), range(1, 13), *more)
        print(name, dict(happened))

    @pytest.mark.parametrize("seed", range(10))
    def test_any_kinds_of_groups_in_one_store_with_steps_of_several_sizes(seed: int, tmp_path: Path) -> None:
        """Resets, aborts, evictions and failures come in any order, and each engine's steps end elsewhere."""
        chance = random.Random(seed)  # noqa: S311 - no secret
        setting = any_kinds(chance)
        print(setting)
        truth, some = setting.truth(), prompts(chance)
        clock, known, happened = repeatable(seed), dict[bytes, tuple[int, ...]](), Counter[str]()
        for budget in (setting.budget, *chance.sample((8, 12, 16, 40), 2)):
            engine = VllmEngine(replace(setting, budget=budget), tmp_path, chance, truth, clock)
            happened += play(engine, some, range(1, 13), known)
        assert happened["finished"] == 3 * REQUESTS

    @pytest.mark.parametrize("group", [0, 1, 2])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_one_rank_lacks_is_not_found_and_is_saved_again(
        clock: SimulatedClock, tmp_path: Path, rank: int, group: int
    ) -> None:
        """Also where vLLM's own cache serves the prefix meanwhile: it hands over a state once."""
        chance = random.Random(3)  # noqa: S311 - no secret
        setting = Setting(groups=_HYBRID, blocks=72, ranks=2)
        truth = setting.truth()

        def run(engine: VllmEngine) -> int:
            """Serve the prompt; return how many blocks were loaded."""
            before = engine.happened["loads"]
            engine.submit(list(range(1, 31)), 6)
            while engine.scheduler.has_requests():
                engine.turn()
                clock.run_until_idle()
            engine.drain()
            visible(engine)
            return engine.happened["loads"] - before

        def lose() -> set[Path]:
            found = set(tmp_path.glob(f"store/*tp{rank}of2*-g{group}-*/*/*"))
            for path in found:
                path.unlink()
            return found

        first = VllmEngine(setting, tmp_path, chance, truth, clock)
        assert not run(first)
        lost = lose()
        assert lost
        assert not run(first)  # vLLM has all of it
        back = {path for path in lost if path.exists()}
        assert back
        check_stored(first)
        first.close()
        second = VllmEngine(setting, tmp_path, chance, truth, clock)
        assert run(second) == 7 + 2  # the attention's blocks, and a state of each other group
        second.close()
        lose()
        third = VllmEngine(setting, tmp_path, chance, truth, clock)
        assert not run(third)
        third.close()


if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):
    from vllm.v1.metrics.stats import PrefixCacheStats

    @pytest.mark.parametrize(
        ("loads", "groups", "sources"),
        [
            ("staged", ((4, None, 3),), {"disk": 28}),
            ("staged", _HYBRID, {"disk": 28}),
            ("staged", ((4, 9, 3),), {"disk": 8, "external_unspecified": 20}),  # what a window reaches
            ("direct", ((4, None, 3),), {"external_unspecified": 28}),  # the workers find out
        ],
    )
    def test_vllm_counts_hits_by_where_they_come_from(
        clock: SimulatedClock,
        tmp_path: Path,
        loads: Literal["direct", "staged"],
        groups: tuple[tuple[int, int | None, int], ...],
        sources: dict[str, int],
    ) -> None:
        chance = random.Random(3)  # noqa: S311 - no secret
        setting = Setting(groups=groups, blocks=72, loads=loads)
        truth = setting.truth()
        for start in range(2):
            engine = VllmEngine(setting, tmp_path, chance, truth, clock)
            engine.scheduler.connector_prefix_cache_stats = stats = PrefixCacheStats()  # as if statistics were logged
            engine.submit(list(range(1, 31)), 1)
            engine.drain()
            assert {source.value: count for source, count in stats.hits_by_source.items()} == (sources if start else {})
            assert stats.hits == (28 if start else 0)
            engine.close()


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    setting = ENGINES[name]
    chance = random.Random(1)  # noqa: S311 - no secret
    more = ["drafts"] if setting.drafts else []
    happened = serve(VllmEngine, setting, tmp_path, chance, setting.truth(), prompts(chance), range(1, 13), *more)
    print(name, dict(happened))


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_an_engine_of_another_size_finds_whole_blocks_alone(
    clock: SimulatedClock, tmp_path: Path, sizes: tuple[int, int], *, layerwise: bool
) -> None:
    """In slices of heads: a block of which one slice is lost or damaged is computed, and saved again."""
    chance = random.Random(3)  # noqa: S311 - no secret
    setting = Setting(slices=4, layerwise=layerwise)
    truth, known = setting.truth(), dict[bytes, tuple[int, ...]]()

    def run(size: int) -> int:
        """Serve the prompt on a new engine of a size; return how many blocks were loaded."""
        engine = VllmEngine(replace(setting, ranks=size), tmp_path, chance, truth, clock)
        with engine._patched:
            engine.submit(list(range(1, 31)), 6)
            while engine.scheduler.has_requests():
                engine.turn()
                clock.run_until_idle()
            engine.drain()
            visible(engine)
            known.update(engine.known)
            engine.known = known
            check_stored(engine)
            engine.close()
        return engine.happened["loads"]

    assert run(sizes[0]) == 0
    assert run(sizes[1]) == 7
    for place in range(4):
        found = {path.parent.name + path.name: path for path in tmp_path.glob(f"store/*kv{place}of4-pp0of1-g0-*/*/*")}
        damaged, *_, lost = (found[key.hex()] for key in known if key.hex() in found)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")  # only what a hit reaches is read, so the first one
        lost.unlink()
        assert run(sizes[1]) < 7
        assert run(sizes[0]) == 7, "what was missing is there again"


def test_a_request_that_there_are_no_blocks_for_does_not_stop_those_that_load(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    """They hold the blocks, and vLLM starts them only when it reaches them after it in its queue."""
    chance = random.Random(5)  # noqa: S311 - no secret
    setting = Setting(loads="direct")
    truth = setting.truth()
    large, *small = (list(range(first, first + count)) for first, count in ((1, 38), (50, 18), (80, 18), (110, 18)))
    before = VllmEngine(setting, tmp_path, chance, truth, clock)
    for prompt in (large, *small):
        before.submit(prompt, 1)
        before.drain()
    before.close()
    engine = VllmEngine(setting, tmp_path, chance, truth, clock)
    scene = engine.connector._scheduler
    matched, loading = scene.matched_tokens, set[str]()

    def matched_late(request: Any, num_computed_tokens: int) -> int | None:
        """Delay the lookup of the large request."""
        found: int | None = matched(request, num_computed_tokens)
        if len(request.prompt_token_ids) == len(large):
            return found if len(loading) == len(small) else None
        loading.update([request.request_id] if found else [])
        return found

    with patch.object(scene, "matched_tokens", matched_late):
        for prompt in (large, *small):
            engine.submit(prompt, 4)
        engine.drain()
    assert len(loading) == len(small)
    assert engine.happened["finished"] == 4
    engine.close()


@pytest.mark.parametrize("loads", ["direct", "staged"])
def test_whichever_block_of_a_window_is_damaged_the_tokens_are_the_same(
    clock: SimulatedClock, tmp_path: Path, loads: Literal["direct", "staged"]
) -> None:
    """vLLM would compute again from the damaged block on, with a window that reaches blocks that were not loaded."""
    chance = random.Random(7)  # noqa: S311 - no secret
    window, length = 18, 38
    setting = Setting(groups=((4, window, 3),), loads=loads)
    truth = setting.truth()
    failed = []
    for number in range(length // 4):
        prompt = [number + 1, *range(20, 19 + length)]
        before = VllmEngine(setting, tmp_path, chance, truth, clock)
        before.submit(prompt, 1)
        before.drain()
        key = next(key for key, tokens in before.known.items() if len(tokens) == 4 * (number + 1)).hex()
        before.close()
        [path] = before.store_directory.glob(f"*/{key[:2]}/{key[2:]}")
        path.write_bytes(path.read_bytes()[:-1])
        engine = VllmEngine(setting, tmp_path, chance, truth, clock)
        with engine._patched:  # a failure here must not leak its patches into the next test
            engine.submit(prompt, 6)
            engine.drain()
            assert engine.happened["finished"] == 1
            # Before vLLM 0.30.0, a load that fails as a whole is impossible: what is not verified first is not loaded.
            may_fail = engine.connector._scheduler.policy.fails_whole
            assert (engine.happened["loads"] > 0) == (may_fail or loads == "staged")
            failed.append(bool(engine.happened["invalid"]))
            engine.close()
    first = (4 * (length // 4) - window + 1) // 4
    assert failed == [may_fail and loads == "direct" and number >= first for number in range(length // 4)]


def silence_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers send nothing to the scheduler, as before vLLM 0.18.0."""
    monkeypatch.delattr(KVConnectorBase_V1, "build_connector_worker_meta")
    monkeypatch.setattr(UCMConnector, "build_connector_worker_meta", lambda self: None)


def visible(engine: VllmEngine) -> Counter[Path]:
    """Return the number of stored blocks of each rank."""
    engine.clock.run_until(lambda: not any(worker._worker.worker._left() for worker in engine.workers))
    files = (path for path in engine.store_directory.rglob("*") if path.is_file())
    return Counter(path.parents[1] for path in files if re.fullmatch("[0-9a-f]{32,}", path.parent.name + path.name))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("reports", [True, False])
def test_a_change_that_one_rank_alone_sees_is_in_no_ranks_blocks(
    clock: SimulatedClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asynchronous: bool,
    layerwise: bool,
    reports: bool,
) -> None:
    """For instance if later pipeline stages keep their weights, but their inputs change.

    Without ``reports``, see `silence_workers`.
    """
    if not reports:
        silence_workers(monkeypatch)
    chance = random.Random(3)  # noqa: S311 - no secret
    setting = Setting(ranks=2, asynchronous=asynchronous, layerwise=layerwise)
    engine = VllmEngine(setting, tmp_path, chance, setting.truth(), clock)
    watching: list[Any] = [create_autospec(LiveWeights, instance=True) for _ in engine.workers]
    for worker, weights in zip(engine.workers, watching, strict=True):
        weights.changed.return_value = False
        worker._worker._weights = weights

    def serve_one(first: int) -> list[int]:
        engine.submit(list(range(first, first + 30)), 1)
        engine.drain()
        return sorted(visible(engine).values())

    assert serve_one(0) == [7, 7]

    unseen = iter([True])
    watching[1].changed.side_effect = lambda **_of: next(unseen, False)
    assert serve_one(40) == [7, 7]
    assert serve_one(80) == [14, 14]
    engine.close()
