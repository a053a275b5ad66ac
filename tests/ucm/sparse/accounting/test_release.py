"""The conditions of releasing blocks, one at a time, on vLLM's own scheduler."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.ucm.sparse.accounting.engine import BLOCK, Engine, Setting
from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS = {"sink_tokens": 4, "window_tokens": 16}
LONG = [1 + place % 5 for place in range(300)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Setting(OPTIONS, blocks=200, budget=32), random.Random(0))  # noqa: S311 - no secret
    yield made
    made.drain()


def step(engine: Engine, count: int = 1) -> None:
    for _ in range(count):
        engine.schedule()
        engine.execute()


def test_memory_stays_flat_while_the_context_grows(engine: Engine) -> None:
    request = engine.submit(LONG, 200)
    held = []
    while not request.is_finished():
        held.append(engine.held(request))
        step(engine)
    assert request.num_tokens == 500
    # Sinks: 1 block; a chunk: 8; a window: 4, and one more if it begins within a block.
    assert max(held) <= 1 + 8 + 4 + 1
    # Decoding: sinks, window, and the filled part of the tile of 6 tokens.
    assert set(held[-150:]) == {6, 7}


def test_released_blocks_are_null_in_place(engine: Engine) -> None:
    request = engine.submit(LONG, 50)
    step(engine, 12)
    row = engine.manager.req_to_blocks[request.request_id]
    assert len(row) == -(-request.num_computed_tokens // BLOCK)
    first = (request.num_computed_tokens - 1 - 16) // BLOCK
    assert [block.is_null for block in row] == [1 <= place < first for place in range(len(row))]
    assert engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][1] == 0


def test_a_shared_block_stays_with_the_other_request(engine: Engine) -> None:
    first = engine.submit(LONG[:64], 100)
    engine.schedule()
    shared = list(engine.manager.req_to_blocks[first.request_id])
    assert len(shared) == 8
    engine.execute()
    second = engine.submit(LONG[:64], 100)
    # The first releases the blocks between sinks and window; the second finds all of them, and holds them for a step.
    step(engine, 2)
    assert [block.is_null for block in engine.manager.req_to_blocks[first.request_id][:8]] == [False, *[True] * 7]
    assert [block.ref_cnt for block in shared] == [2, *[1] * 7]
    assert engine.manager.req_to_blocks[second.request_id][:8] == shared
    step(engine)
    assert [block.ref_cnt for block in shared] == [2, *[0] * 7]


def test_a_released_block_is_found_again_by_its_prefix(engine: Engine) -> None:
    first = engine.submit(LONG, 1)
    while not first.is_finished():
        step(engine)
    second = engine.submit(LONG, 1)
    step(engine)
    assert second.is_finished()
    assert engine.happened["hits"] == 1


def test_a_preempted_request_starts_again_in_windows(engine: Engine) -> None:
    request = engine.submit(LONG, 60)
    step(engine, 30)
    engine.reset(running=True)
    assert request.status == RequestStatus.PREEMPTED
    held = []
    while not request.is_finished():
        step(engine)
        held.append(engine.held(request))
    assert max(held) <= 14


def test_a_request_that_was_taken_back_is_computed_anew(engine: Engine) -> None:
    """As vLLM's recovery sets back a running request when some of its blocks were not loaded."""
    request, other = engine.submit(LONG, 60), engine.submit(LONG[::-1], 60)
    step(engine, 25)
    engine.take_back(request, 40)
    step(engine)
    assert request.num_preemptions == 1
    while not (request.is_finished() and other.is_finished()):
        step(engine)
    assert request.num_output_tokens == other.num_output_tokens == 60
    assert not other.num_preemptions, "it is not in the way"


def test_a_request_that_was_taken_back_within_its_window_goes_on(engine: Engine) -> None:
    request = engine.submit(LONG, 60)
    step(engine, 25)
    engine.take_back(request, request.num_computed_tokens - 1)
    step(engine)
    assert not request.num_preemptions


@pytest.mark.parametrize(
    ("kind", "name", "hook"),
    [(KVCacheManager, "allocate_slots", "before_allocation"), (Scheduler, "schedule", "scheduler_output_built")],
)
@pytest.mark.parametrize("derived", [False, True])
def test_what_gives_vllm_its_own_function_back_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, hook: str, derived: bool
) -> None:
    """Otherwise no blocks would be released; for vLLM's class and for a derived one."""
    holder = engine.scheduler.kv_cache_manager if kind is KVCacheManager else engine.scheduler
    if derived:
        monkeypatch.setattr(holder, "__class__", _calling(type(holder), name))
    request = engine.submit(LONG, 60)
    step(engine, 25)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, _of_vllm(kind, name))
        with pytest.raises(SparseMethodError, match="SmallTiles was not told of a step that runs") as caught:
            step(engine, 3)
    assert hook in str(caught.value.where)
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def _calling(kind: type, name: str) -> type:
    """Return a class derived from one of vLLM's, as on other platforms, whose method calls the overridden one."""

    def method(self: Any, *arguments: Any, **more: Any) -> Any:
        return getattr(kind, name)(self, *arguments, **more)

    return type(f"Derived{kind.__name__}", (kind,), {name: method})


def _of_vllm(kind: type, name: str) -> Any:
    """Return the function from vLLM's own file, which the overlay shadows."""
    file = Path(importlib.import_module("vllm").__file__ or "").parents[1] / f"{kind.__module__.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location("of_vllm", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(getattr(module, kind.__name__))[name]


def test_prompts_are_admitted_that_fit_only_in_windows() -> None:
    """Four prompts of 75 blocks each run at once in 80 blocks."""
    engine = Engine(Setting(OPTIONS, blocks=81, budget=32), random.Random(0))  # noqa: S311
    requests = [engine.submit([place, *LONG], 40) for place in range(1, 5)]
    together = 0
    while not all(request.is_finished() for request in requests):
        step(engine)
        together = max(together, sum(request.status == RequestStatus.RUNNING for request in requests))
    assert together == 4
    assert not engine.happened["preemptions"]
    engine.drain()


def test_a_dense_prompt_is_held_until_it_is_computed() -> None:
    options = {**OPTIONS, "prefill": "dense"}
    engine = Engine(Setting(options, blocks=120, budget=32), random.Random(0))  # noqa: S311
    request = engine.submit(LONG, 60)
    held: list[int] = []
    while not request.is_finished():
        step(engine)
        held.append(engine.held(request))
    assert max(held) == 75
    assert set(held[-40:-1]) == {6, 7}
    engine.drain()


def test_a_session_s_dense_prompts_find_all_that_came_before() -> None:
    """A streaming session's output becomes part of its next prompt, so none of its blocks are released."""
    options = {**OPTIONS, "prefill": "dense"}
    engine = Engine(Setting(options, blocks=120, budget=32), random.Random(0))  # noqa: S311
    request: Any = engine.submit(LONG, 60)
    request.resumable = True
    step(engine, 40)
    assert engine.held(request) == -(-request.num_computed_tokens // BLOCK)
    request.resumable = False
    engine.drain()
