"""The worker side, call by call, with transfers that end when the test decides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from ucm.clock import SYSTEM, Event
from ucm.compat import LoadPolicy
from ucm.integration.vllm.connector import transfer_worker
from ucm.integration.vllm.connector.failures import PromisedBlockLostError
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
from ucm.integration.vllm.connector.transfer import GroupTransfer, SaveRoom, SaveTask
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.store.base import (
    BlockCorruptError,
    BlockKey,
    BlockMissingError,
    StoreFullError,
    StoreUnavailableError,
    Task,
    TaskResult,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.base import StoreError

LAYERS = [f"layer.{number}" for number in range(6)]
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(8)]


class Call(SaveTask):
    """A load, or a save, whose rows nobody needs here."""

    def __init__(self, scripted: Scripted, what: str, moves: BlockMoves, layers: range) -> None:
        super().__init__(scripted, moves, [memoryview(b"")] * len(moves.keys))
        keys = moves.keys
        self._scripted, self.what, self._layers = scripted, what, layers
        copied: Any = create_autospec(Event, instance=True)
        copied.wait.side_effect = lambda: scripted.log.append(f"copied {_names(keys)}")
        self.copied = copied
        self.finished = False

    def check(self) -> bool:
        return self.finished

    def wait(self) -> TaskResult:
        scripted = self._scripted
        scripted.log.append(f"wait {self.what} {_names(self.keys)}{_layers(self._layers)}")
        self.finished = True
        failed = {key: scripted.failing[self.what, key] for key in self.keys if (self.what, key) in scripted.failing}
        done = {key: "posix" for key in self.keys if key not in failed}
        return TaskResult(done, failed, len(done) * scripted.chunk_bytes, 0.1)


class Room(SaveRoom):
    """Is taken by the calls that have not ended."""

    def __init__(self, scripted: Scripted) -> None:
        super().__init__(0, scripted.chunk_bytes)
        self._calls = scripted.calls

    @property
    def taken_bytes(self) -> int:
        return Scripted.chunk_bytes * sum(len(call.keys) for call in self._calls if not call.finished)


class Scripted(GroupTransfer):
    """Records its calls, and returns scripted results."""

    layer_names = LAYERS
    chunk_bytes = 10
    chunk_tokens = 4

    def __init__(self, place: int, *, saves: bool = True) -> None:
        self.place, self.saves = place, saves
        self.log: list[str] = []
        self.calls: list[Call] = []
        self.failing: dict[tuple[str, BlockKey], StoreError] = {}
        self.shares: list[int] = []
        self.room = Room(self)

    def load(self, moves: BlockMoves, layers: range, share: int) -> Task:
        self.shares.append(share)
        call = Call(self, "load", moves, layers)
        self.calls.append(call)
        self.log.append(f"load {_names(moves.keys)}{_layers(layers)} into {moves.block_ids}")
        return call

    def save(self, moves: BlockMoves) -> SaveTask:
        call = Call(self, "save", moves, range(0))
        self.calls.append(call)
        self.log.append(f"copy {_names(moves.keys)} from {moves.block_ids}")
        return call

    def _copy(self, task: SaveTask) -> None:
        raise NotImplementedError

    def confirm(self, task: SaveTask) -> None:
        self.log.append(f"confirm {_names(task.keys)}")

    def drop(self, task: SaveTask) -> None:
        assert isinstance(task, Call)
        self.log.append(f"drop {_names(task.keys)}")
        task.finished = True

    def close(self) -> None:
        self.log.append("close")

    def finish(self) -> None:
        """Let all transfers end."""
        for call in self.calls:
            call.finished = True

    def said(self) -> list[str]:
        said, self.log = self.log, []
        return said


def _names(keys: Iterable[BlockKey]) -> str:
    return " ".join(str(KEYS.index(key)) for key in keys)


def _layers(layers: range) -> str:
    return f" layers {layers.start}-{layers.stop}" if layers and len(layers) < len(LAYERS) else ""


class Counts(ConnectorCounters):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Counter[str] = Counter()

    def loaded(
        self, blocks: int, nbytes: int, seconds: float, tiers: Iterable[str] | None = None, tokens_per_block: int = 0
    ) -> None:
        assert nbytes >= 0
        assert seconds >= 0
        assert tokens_per_block in {0, 4}
        self.blocks["loaded"] += blocks
        self.blocks.update(tiers or ())

    def saved(self, blocks: int, nbytes: int, seconds: float) -> None:
        assert nbytes >= 0
        assert seconds >= 0
        self.blocks["saved"] += blocks

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        self.blocks[f"{operation}.{cause}"] += blocks


class Setup:
    def __init__(
        self,
        *,
        layer_wise: bool = False,
        saves: bool = True,
        between_steps: bool = False,
        background: bool = False,
        fails_whole: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self.transfer = Scripted(1, saves=saves)
        self.counts = Counts()
        self.worker = TransferWorker(
            {(0, 0): self.transfer},
            self.counts,
            policy=LoadPolicy(between_steps, background, fails_whole=fails_whole),
            layer_wise=layer_wise,
            clock=clock,
        )


def moves(*blocks: int, request_id: str = "r", step: int = 0, adapter: int = 0) -> BlockMoves:
    """Return moves of blocks whose keys are their numbers."""
    keys = [KEYS[block] for block in blocks]
    return BlockMoves(request_id, 0, keys, list(blocks), list(blocks), step=step, adapter=adapter)


# Saves


def test_saves_are_copied_and_confirmed_after_the_forward() -> None:
    setup = Setup()
    plan = StepPlan(1, saves=[moves(1, 2), moves(3)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.transfer.said() == []
    setup.worker.save(plan)
    assert setup.transfer.said() == ["copy 1 2 from [1, 2]", "confirm 1 2", "copy 3 from [3]", "confirm 3"]


def test_a_step_waits_only_for_copies_of_what_it_writes_and_for_no_medium() -> None:
    setup = Setup()
    first = StepPlan(1, saves=[moves(1, 2), moves(3), moves(4)])
    setup.worker.begin(first)
    setup.worker.save(first)
    setup.transfer.said()
    setup.transfer.calls[2].finished = True
    setup.worker.begin(StepPlan(2, fresh_block_ids={2, 7}))
    assert setup.transfer.said() == ["copied 1 2", "wait save 4"]
    setup.transfer.finish()
    setup.worker.begin(StepPlan(3))
    assert setup.transfer.said() == ["wait save 1 2", "wait save 3"]
    assert setup.counts.blocks["saved"] == 4


def test_where_the_next_step_is_announced_too_late_no_copy_outlives_a_step() -> None:
    """vLLM zeroes blocks of such models, and the V2 runner does before it announces the step."""
    setup = Setup()
    setup.worker.settles = True
    plan = StepPlan(1, saves=[moves(1, 2)], late_saves=[moves(3)])
    setup.worker.begin(plan)
    assert "copied 3" in setup.transfer.said()
    setup.worker.save(plan)
    copied = [said for said in setup.transfer.said() if said.startswith("copied 1 2")]
    assert len(copied) == 1
    setup.worker.settles = False
    setup.worker.begin(plan := StepPlan(2, saves=[moves(4)]))
    setup.worker.save(plan)
    assert not any(said.startswith("copied") for said in setup.transfer.said())


def test_a_step_saves_once() -> None:
    setup = Setup()
    setup.worker.begin(plan := StepPlan(1, saves=[moves(1, 2)]))
    setup.worker.save(plan)
    assert "confirm 1 2" in setup.transfer.said()
    setup.worker.save(plan)
    assert setup.transfer.said() == []


def test_a_step_begins_once() -> None:
    setup = Setup()
    plan = StepPlan(1, late_saves=[moves(5)])
    setup.worker.begin(plan)
    setup.worker.begin(plan)
    assert setup.transfer.said() == ["copy 5 from [5]", "confirm 5"]


def test_a_rank_that_does_not_save_saves_nothing() -> None:
    setup = Setup(saves=False)
    plan = StepPlan(1, saves=[moves(1)], late_saves=[moves(2)])
    setup.worker.begin(plan)
    setup.worker.save(plan)
    assert setup.transfer.said() == []


def test_what_nobody_asks_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within a connector around this one that does not ask it for its reports."""
    monkeypatch.setattr(transfer_worker, "MOST_STORED", 3)
    setup = Setup()
    setup.worker.reports_stored = True
    for step, blocks in enumerate(([1, 2], [3, 4, 5], []), 1):
        plan = StepPlan(step, saves=[moves(*blocks)])
        setup.worker.begin(plan)
        setup.worker.save(plan)
        setup.transfer.finish()
    assert setup.worker.take_stored() == {(0, KEYS[block]): {1: "posix"} for block in (3, 4, 5)}
    assert setup.worker.take_stored() == {}


class Slices(Setup):
    """A rank that stores two slices of each block, the third and the fourth of all."""

    def __init__(self, *, between_steps: bool = False) -> None:
        super().__init__()
        self.transfers = [Scripted(2), Scripted(3)]
        self.worker = TransferWorker(
            {(0, place): transfer for place, transfer in enumerate(self.transfers)},
            self.counts,
            policy=LoadPolicy(between_steps, background=True),
        )
        self.worker.reports_stored = True


def test_each_slice_of_a_block_is_saved_and_reported() -> None:
    slices = Slices()
    plan = StepPlan(1, saves=[moves(1, 2)], late_saves=[moves(3)])
    slices.worker.begin(plan)
    slices.worker.save(plan)
    said = [transfer.said() for transfer in slices.transfers]
    assert said[0] == said[1]
    assert [what for what in said[0] if what.startswith("confirm")] == ["confirm 3", "confirm 1 2"]
    for transfer in slices.transfers:
        transfer.finish()
    slices.worker.begin(StepPlan(2))
    assert slices.worker.take_stored() == {(0, KEYS[block]): {2: "posix", 3: "posix"} for block in (1, 2, 3)}
    slices.worker.close()


@pytest.mark.parametrize("loads", ["staged", "read"])
def test_a_block_of_which_one_slice_fails_is_reported_as_failed(loads: str) -> None:
    """Its tokens are counted once, and its request waits for all slices."""
    slices = Slices(between_steps=True)
    slices.transfers[1].failing["load", KEYS[2]] = BlockCorruptError("bad")
    there = moves(1, 2)
    if loads == "staged":
        there.places, there.shares, there.tiers = [4096, 8192], (0, 512, 1024, 1536), ["posix", "posix"]
    plan = StepPlan(1, loads=[there])
    slices.worker.begin(plan)
    slices.worker.load(plan)
    if loads == "staged":
        assert [transfer.shares for transfer in slices.transfers] == [[1024], [1536]]
    for transfer in slices.transfers:
        transfer.finish()
    assert slices.worker.take_loaded() == {"r"}
    assert slices.worker.take_failed_blocks() == {2}
    assert slices.counts.blocks["loaded"] == 3
    assert slices.counts.blocks["load.corrupt"] == 1


def test_a_slice_that_fails_first_is_reported_with_the_last_one() -> None:
    """When vLLM hears of failed blocks, their request's load must have ended."""
    slices = Slices(between_steps=True)
    slices.transfers[0].failing["load", KEYS[1]] = BlockCorruptError("bad")
    plan = StepPlan(1, loads=[moves(1, 2)])
    slices.worker.begin(plan)
    slices.worker.load(plan)
    slices.transfers[0].finish()
    assert slices.worker.take_loaded() == set()
    assert slices.worker.take_failed_blocks() == set()
    slices.transfers[1].finish()
    assert slices.worker.take_loaded() == {"r"}
    assert slices.worker.take_failed_blocks() == {1}


def test_what_could_not_be_saved_is_counted_once() -> None:
    setup = Setup()
    setup.transfer.failing["save", KEYS[1]] = StoreFullError("full")
    plan = StepPlan(1, saves=[moves(1, 2)])
    setup.worker.begin(plan)
    setup.worker.save(plan)
    setup.transfer.finish()
    setup.worker.close()
    assert setup.counts.blocks == {"saved": 1, "save.full": 1}
    assert setup.worker.save_failures.counts == {"full": 1}


def test_closing_waits_for_what_gets_on(clock: SimulatedClock, caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(between_steps=True, background=True, clock=clock)
    plan = StepPlan(1, loads=[moves(4)], saves=[moves(1)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.save(plan)
    setup.transfer.said()
    took = transfer_worker.STILL_SECONDS - 1

    def get_on() -> None:
        for call in list(setup.transfer.calls):
            clock.sleep(took)
            call.finished = True

    clock.thread(get_on, "medium").start()
    begun = clock.monotonic()
    setup.worker.close()
    assert 2 * took <= clock.monotonic() - begun <= 2 * took + 0.1
    assert setup.transfer.said() == ["wait save 1", "close"]
    assert "does not answer" not in caplog.text


def test_closing_leaves_a_medium_that_does_nothing(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(clock=clock)
    over = clock.event()
    monkeypatch.setattr(setup.transfer, "close", over.wait)
    plan = StepPlan(1, saves=[moves(1, 2)])
    setup.worker.begin(plan)
    setup.worker.save(plan)
    begun = clock.monotonic()
    setup.worker.close()
    longest = transfer_worker.STILL_SECONDS + transfer_worker.CLOSE_SECONDS
    assert longest <= clock.monotonic() - begun <= longest + 0.1
    assert "does not answer: it is abandoned with 1 transfers in progress" in caplog.text


# Loads within a step


def test_all_loads_are_started_before_the_first_is_waited_for() -> None:
    setup = Setup()
    there = moves(3)
    there.places, there.shares, there.tiers = [4096], (0, 512), ["posix"]
    setup.worker.load(StepPlan(1, loads=[moves(1, 2), there]))
    assert setup.transfer.said() == ["load 1 2 into [1, 2]", "load 3 into [3]", "wait load 1 2", "wait load 3"]
    assert setup.transfer.shares == [0, 512]
    assert setup.counts.blocks == {"loaded": 3, "posix": 3}


def test_a_staged_block_that_cannot_be_copied_stops_the_engine() -> None:
    setup = Setup()
    setup.transfer.failing["load", KEYS[2]] = BlockCorruptError("the slab is gone")
    plan = StepPlan(1, loads=[moves(1, 2, request_id="chat-7")])
    setup.worker.begin(plan)
    with pytest.raises(PromisedBlockLostError, match="1 staged blocks") as stopped:
        setup.worker.load(plan)
    assert stopped.value.where == "request chat-7: the slab is gone"
    assert setup.counts.blocks["load.corrupt"] == 1


# Loads between steps


def test_a_step_waits_for_copies_of_staged_blocks() -> None:
    """The slab is reused when the step has ended."""
    setup = Setup(between_steps=True, background=True)
    there = moves(1)
    there.places, there.shares, there.tiers = [4096], (0, 0), ["posix"]
    plan = StepPlan(1, loads=[there, moves(2, request_id="direct")])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.worker.take_loaded() == {"r"}


def test_a_request_is_told_when_all_its_loads_have_ended() -> None:
    setup = Setup(between_steps=True, background=True)
    plan = StepPlan(1, loads=[moves(1, request_id="a"), moves(2, request_id="a"), moves(3, request_id="b")])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.worker.take_loaded() == set()
    setup.transfer.calls[0].finished = setup.transfer.calls[2].finished = True
    assert setup.worker.take_loaded() == {"b"}
    setup.transfer.finish()
    assert setup.worker.take_loaded() == {"a"}
    assert setup.worker.take_loaded() == set()


@pytest.mark.parametrize(("background", "idle"), [(False, False), (True, True)])
def test_a_step_waits_where_it_must_or_has_nothing_else_to_do(background: bool, idle: bool) -> None:
    setup = Setup(between_steps=True, background=background)
    plan = StepPlan(1, loads=[moves(1)], idle=idle)
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.worker.take_loaded() == {"r"}


def test_a_failed_load_between_steps_is_told_and_leaves_the_step_s_saves_alone() -> None:
    setup = Setup(between_steps=True)
    setup.transfer.failing["load", KEYS[1]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1)], saves=[moves(3)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.save(plan)
    assert setup.worker.take_loaded() == {"r"}
    assert setup.worker.take_failed_blocks() == {1}
    assert setup.worker.take_failed_blocks() == set()
    assert setup.counts.blocks["load.missing"] == 1
    assert "confirm 3" in setup.transfer.said()


def test_a_load_that_fails_as_a_whole_names_its_request_and_no_block() -> None:
    setup = Setup(between_steps=True, fails_whole=True)
    setup.transfer.failing["load", KEYS[2]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1, 2), moves(3, request_id="other")])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.worker.take_loaded() == {"r", "other"}
    assert setup.worker.take_failed_blocks() == set()
    assert setup.worker.take_failed_requests() == {"r"}
    assert setup.worker.take_failed_requests() == set()
    refused = StepPlan(2, loads=[moves(4)])
    setup.worker.refuse(refused)
    assert refused.loads == []
    assert setup.worker.take_loaded() == setup.worker.take_failed_requests() == {"r"}


def test_blocks_that_were_given_away_are_not_written_by_a_load_any_more() -> None:
    setup = Setup(between_steps=True, background=True)
    plan = StepPlan(1, loads=[moves(1, 2)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.transfer.said()
    setup.worker.begin(StepPlan(2, fresh_block_ids={2}))
    assert setup.transfer.said() == ["wait load 1 2"]


# Weights that were changed in place


def test_a_refused_step_moves_nothing_and_has_its_tokens_computed() -> None:
    """Including loads started before it: the request would continue from the old weights' KV."""
    setup = Setup(between_steps=True, background=True)
    first = StepPlan(1, loads=[moves(1, request_id="a")])
    setup.worker.begin(first)
    setup.worker.load(first)
    setup.transfer.said()
    plan = StepPlan(2, loads=[moves(2, 3, request_id="b")], saves=[moves(4)], late_saves=[moves(5)])
    setup.worker.refuse(plan)
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.save(plan)
    assert setup.transfer.said() == ["wait load 1"]
    assert setup.worker.take_failed_blocks() == {1, 2, 3}
    assert setup.worker.take_loaded() == {"a", "b"}
    assert (setup.worker.take_loaded(), setup.worker.take_failed_blocks()) == (set(), set())


def test_requests_of_a_replaced_adapter_alone_are_refused() -> None:
    setup = Setup(between_steps=True, background=True)
    first = StepPlan(1, loads=[moves(1, request_id="a", adapter=7), moves(2, request_id="b")])
    setup.worker.begin(first)
    setup.worker.load(first)
    kept = [moves(4, adapter=3)], [moves(6)], [moves(0)]
    plan = StepPlan(
        2,
        loads=[moves(3, request_id="c", adapter=7), *kept[0]],
        saves=[moves(5, adapter=7), *kept[1]],
        late_saves=[moves(7, adapter=7), *kept[2]],
    )
    setup.worker.refuse(plan, {7})
    assert (plan.loads, plan.saves, plan.late_saves) == kept
    assert setup.worker.take_failed_blocks() == {1, 3}
    setup.transfer.finish()
    assert setup.worker.take_loaded() == {"a", "b", "c"}


def test_promises_that_cannot_be_broken_stop_the_engine() -> None:
    setup = Setup()
    setup.worker.refuse(StepPlan(1, saves=[moves(4)]))
    with pytest.raises(PromisedBlockLostError, match="changed in place"):
        setup.worker.refuse(StepPlan(2, loads=[moves(1)]))


# Changes that another rank has seen


def test_what_is_not_confirmed_is_not_visible() -> None:
    setup = Setup()
    for step, confirmed in ((1, 0), (2, 0), (3, 1), (4, 2)):
        plan = StepPlan(step, saves=[moves(step, step=step)] if step < 3 else [], confirmed=confirmed)
        setup.worker.begin(plan)
        setup.worker.save(plan)
        setup.transfer.finish()
    said = [line for line in setup.transfer.said() if not line.startswith("wait")]
    assert said == ["copy 1 from [1]", "copy 2 from [2]", "confirm 1", "confirm 2"]


def test_late_saves_of_confirmed_steps_are_visible_at_once() -> None:
    setup = Setup()
    setup.worker.begin(StepPlan(5, late_saves=[moves(1, step=3), moves(2, step=4)], confirmed=3))
    assert setup.transfer.said() == ["copy 1 from [1]", "confirm 1", "copy 2 from [2]"]


def test_what_an_earlier_epoch_left_unconfirmed_is_forgotten() -> None:
    """Even if a later report covers its step: that report came from ranks that saw no change."""
    setup = Setup()
    plan = StepPlan(1, saves=[moves(1, 2, step=1)], confirmed=0)
    setup.worker.begin(plan)
    setup.worker.save(plan)
    setup.transfer.said()
    setup.worker.begin(StepPlan(2, epoch=1, confirmed=1))
    assert setup.transfer.said() == ["drop 1 2"]
    assert setup.counts.blocks["save.other"] == 2


def test_what_failed_before_it_was_forgotten_is_counted_once() -> None:
    setup = Setup()
    setup.transfer.failing = {("save", key): StoreUnavailableError("a copy on the device failed") for key in KEYS[1:3]}
    plan = StepPlan(1, saves=[moves(1, 2, step=1)], confirmed=0)
    setup.worker.begin(plan)
    setup.worker.save(plan)
    setup.transfer.calls[-1].rows = ()  # they were given back
    setup.transfer.finish()
    setup.worker.begin(StepPlan(2, epoch=1, confirmed=1))
    setup.worker.begin(StepPlan(3, epoch=1, confirmed=1))
    assert {name: blocks for name, blocks in setup.counts.blocks.items() if blocks} == {"save.unavailable": 2}


def test_nothing_confirms_what_the_end_finds() -> None:
    setup = Setup()
    plan = StepPlan(1, saves=[moves(1, step=1)], confirmed=0)
    setup.worker.begin(plan)
    setup.worker.save(plan)
    setup.transfer.said()
    setup.transfer.finish()
    setup.worker.close()
    assert setup.transfer.said() == ["drop 1", "wait save 1", "close"]


# Layer by layer


def forward(setup: Setup, plan: StepPlan, names: Sequence[str] = LAYERS) -> None:
    setup.worker.begin(plan)
    setup.worker.load(plan)
    for name in names:
        setup.worker.wait_for_layer(name)
        setup.transfer.log.append(name)


def test_a_layer_waits_for_its_portion() -> None:
    setup = Setup(layer_wise=True)
    plan = StepPlan(1, loads=[moves(1)], saves=[moves(2)])
    forward(setup, plan)
    assert setup.transfer.said() == [
        *(f"load 1 layers {begin}-{end} into [1]" for begin, end in ((0, 1), (1, 3), (3, 4), (4, 6))),
        *("wait load 1 layers 0-1", "layer.0"),
        *("wait load 1 layers 1-3", "layer.1", "layer.2"),
        *("wait load 1 layers 3-4", "layer.3"),
        *("wait load 1 layers 4-6", "layer.4", "layer.5"),
    ]
    setup.worker.save(plan)
    assert setup.transfer.said() == ["copy 2 from [2]", "confirm 2"]
    setup.transfer.finish()
    setup.worker.close()
    assert setup.counts.blocks == {"loaded": 1, "posix": 4, "saved": 1}


def test_layers_that_are_not_announced_are_not_forgotten() -> None:
    """For instance if a graph was replayed, or a draft model's layers ran elsewhere."""
    setup = Setup(layer_wise=True)
    plan = StepPlan(1, loads=[moves(1)], saves=[moves(2)])
    forward(setup, plan, [*LAYERS[:2], "shares another layer's cache"])
    setup.transfer.said()
    setup.worker.save(plan)
    said = setup.transfer.said()
    assert said == ["wait load 1 layers 3-4", "wait load 1 layers 4-6", "copy 2 from [2]", "confirm 2"]


def test_where_nothing_runs_between_the_layers_the_forward_waits_for_all() -> None:
    setup = Setup(layer_wise=True)
    setup.worker.overlaps = False
    plan = StepPlan(1, loads=[moves(1)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert [line for line in setup.transfer.said() if line.startswith("wait")] == [
        f"wait load 1 layers {begin}-{end}" for begin, end in ((0, 1), (1, 3), (3, 4), (4, 6))
    ]
