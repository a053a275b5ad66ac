"""The worker's side, call by call, with transfers that end when the test says so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from ucm.integration.vllm.connector.commit_gate import CommitGate
from ucm.integration.vllm.connector.errors import PromisedBlockLostError
from ucm.integration.vllm.connector.layerwise import LayerWiseWorker
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
from ucm.integration.vllm.connector.transfer import GroupTransfer
from ucm.integration.vllm.connector.worker import TransferWorker
from ucm.store.base import BlockKey, Task, TaskResult
from ucm.store.errors import BlockCorruptError, BlockMissingError, IncompleteBlockError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.errors import StoreError

LAYERS = [f"layer.{number}" for number in range(6)]
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(8)]


class Call(Task):
    def __init__(self, what: str, keys: Sequence[BlockKey], layers: range) -> None:
        self.what, self.keys, self.layers = what, list(keys), layers
        self.finished = False


class Scripted(GroupTransfer):
    """Writes down what it is asked, and answers as it was told."""

    layer_names = LAYERS
    block_bytes = 10
    tokens_per_block = 4

    def __init__(self) -> None:
        self.log: list[str] = []
        self.calls: list[Call] = []
        self.failing: dict[tuple[str, BlockKey], StoreError] = {}
        self.leases: list[str | None] = []
        self.stands_back: list[bool] = []

    def stand_back(self, *, active: bool) -> None:
        self.stands_back.append(active)

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, *, lease: str | None = None
    ) -> Task:
        self.leases.append(lease)
        return self._call("load", keys, layers, f" into {list(block_ids)}")

    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        return self._call("dump", keys, layers, f" from {list(block_ids)}")

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        return self._call("commit", keys, range(0))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        self.log.append(f"discard {_names(keys)}")

    def check(self, task: Task) -> bool:
        assert isinstance(task, Call)
        return task.finished

    def wait(self, task: Task) -> TaskResult:
        assert isinstance(task, Call)
        self.log.append(f"wait {task.what} {_names(task.keys)}{_layers(task.layers)}")
        task.finished = True
        failed = {key: self.failing[task.what, key] for key in task.keys if (task.what, key) in self.failing}
        done = {key: "posix" for key in task.keys if key not in failed}
        return TaskResult(done, failed, len(done) * self.block_bytes, 0.1)

    def close(self) -> None:
        self.log.append("close")

    def finish(self) -> None:
        """All that was asked for has ended by itself."""
        for call in self.calls:
            call.finished = True

    def said(self) -> list[str]:
        said, self.log = self.log, []
        return said

    def _call(self, what: str, keys: Sequence[BlockKey], layers: range, more: str = "") -> Task:
        call = Call(what, keys, layers)
        self.calls.append(call)
        self.log.append(f"{what} {_names(keys)}{_layers(layers)}{more}")
        return call


def _names(keys: Iterable[BlockKey]) -> str:
    return " ".join(str(KEYS.index(key)) for key in keys)


def _layers(layers: range) -> str:
    return f" layers {layers.start}-{layers.stop}" if layers and len(layers) < len(LAYERS) else ""


class Counts:
    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()

    def loaded(
        self, blocks: int, nbytes: int, seconds: float, tiers: Iterable[str] | None = None, tokens_per_block: int = 0
    ) -> None:
        assert nbytes >= 0
        assert seconds > 0
        assert tokens_per_block in {0, 4}
        self.blocks["loaded"] += blocks
        self.blocks.update(tiers or ())

    def dumped(self, blocks: int, nbytes: int, seconds: float) -> None:
        assert nbytes >= 0
        assert seconds > 0
        self.blocks["dumped"] += blocks

    def failed(self, operation: str, cause: str, blocks: int) -> None:
        self.blocks[f"{operation}.{cause}"] += blocks


class Setup:
    def __init__(
        self,
        kind: type[TransferWorker] = TransferWorker,
        *,
        ranks: int = 1,
        saves: bool = True,
        recovers: bool = True,
        between_steps: bool = False,
        background: bool = False,
    ) -> None:
        self.transfer = Scripted()
        self.counts = Counts()
        self.worker = kind(
            {0: self.transfer},
            CommitGate(ranks, 1),
            self.counts,
            places={0: 1},
            saves={0} if saves else set(),
            recovers=recovers,
            between_steps=between_steps,
            background=background,
        )


def moves(*blocks: int, request_id: str = "r", leases: tuple[str, ...] = ()) -> BlockMoves:
    """Blocks with the keys of their numbers."""
    return BlockMoves(request_id, 0, [KEYS[block] for block in blocks], list(blocks), leases)


# Dumps


def test_dumps_are_started_after_the_forward_and_committed() -> None:
    setup = Setup()
    plan = StepPlan(1, dumps=[moves(1, 2), moves(3)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.transfer.said() == []
    setup.worker.dump(plan)
    assert setup.transfer.said() == ["dump 1 2 from [1, 2]", "dump 3 from [3]", "commit 1 2", "commit 3"]


def test_a_step_waits_only_for_dumps_that_read_what_it_writes() -> None:
    setup = Setup()
    first = StepPlan(1, dumps=[moves(1, 2), moves(3), moves(4)])
    setup.worker.begin(first)
    setup.worker.dump(first)
    setup.transfer.said()
    setup.transfer.calls[2].finished = True
    setup.worker.begin(StepPlan(2, fresh_block_ids={2, 7}))
    assert setup.transfer.said() == ["wait dump 1 2", "wait dump 4"]
    setup.transfer.finish()
    setup.worker.begin(StepPlan(3))
    assert setup.transfer.said() == ["wait dump 3", "wait commit 1 2", "wait commit 3", "wait commit 4"]
    assert setup.counts.blocks["dumped"] == 4


@pytest.mark.parametrize("kind", [TransferWorker, LayerWiseWorker])
def test_dumps_stand_back_during_a_forward(kind: type[TransferWorker]) -> None:
    setup = Setup(kind)
    for plan in (StepPlan(1, dumps=[moves(1)]), StepPlan(2, idle=True), StepPlan(3)):
        setup.worker.begin(plan)
        setup.worker.begin(plan)
        setup.worker.load(plan)
        if not plan.idle:  # vLLM has no forward then, and does not tell of the end
            setup.worker.dump(plan)
    assert setup.transfer.stands_back == [True, False, False, True, False]


def test_a_step_begins_once() -> None:
    setup = Setup()
    plan = StepPlan(1, late_dumps=[moves(5)])
    setup.worker.begin(plan)
    setup.worker.begin(plan)
    assert setup.transfer.said() == ["dump 5 from [5]"]


def test_a_rank_that_does_not_save_dumps_nothing() -> None:
    setup = Setup(saves=False)
    plan = StepPlan(1, dumps=[moves(1)], late_dumps=[moves(2)])
    setup.worker.begin(plan)
    setup.worker.dump(plan)
    assert setup.transfer.said() == []


def test_several_ranks_commit_when_the_scheduler_knows_all_outcomes() -> None:
    setup = Setup(ranks=2)
    for step, settled in ((1, 0), (2, 1)):
        plan = StepPlan(step, dumps=[moves(step)], settled=settled)
        setup.worker.begin(plan)
        setup.worker.dump(plan)
    assert setup.transfer.said() == ["dump 1 from [1]", "commit 1", "dump 2 from [2]"]
    setup.worker.begin(StepPlan(3, settled=2, void=2))
    assert setup.transfer.said() == ["wait dump 1", "wait commit 1", "wait dump 2", "discard 2"]


def test_what_could_not_be_dumped_is_counted_once() -> None:
    setup = Setup()
    setup.transfer.failing["dump", KEYS[1]] = StoreFullError("full")
    setup.transfer.failing["commit", KEYS[1]] = IncompleteBlockError("not all of it")
    plan = StepPlan(1, dumps=[moves(1, 2)])
    setup.worker.begin(plan)
    setup.worker.dump(plan)
    setup.worker.close()
    assert setup.counts.blocks == {"dumped": 1, "dump.full": 1}
    assert setup.worker.save_failures.counts == {"full": 1}


def test_closing_waits_for_everything() -> None:
    setup = Setup(between_steps=True, background=True)
    plan = StepPlan(1, loads=[moves(4)], dumps=[moves(1)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.dump(plan)
    setup.transfer.said()
    setup.worker.close()
    assert setup.transfer.said() == ["wait load 4", "wait dump 1", "wait commit 1", "close"]


# Loads within a step


def test_all_loads_are_started_before_the_first_is_waited_for() -> None:
    setup = Setup()
    setup.worker.load(StepPlan(1, loads=[moves(1, 2), moves(3, leases=("other rank's", "ours"))]))
    assert setup.transfer.said() == ["load 1 2 into [1, 2]", "load 3 into [3]", "wait load 1 2", "wait load 3"]
    assert setup.transfer.leases == [None, "ours"]
    assert setup.counts.blocks == {"loaded": 3, "posix": 3}


def test_blocks_that_failed_are_told_once_and_nothing_is_dumped() -> None:
    setup = Setup()
    setup.transfer.failing["load", KEYS[2]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1, 2)], dumps=[moves(3)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.dump(plan)
    assert setup.transfer.said() == ["load 1 2 into [1, 2]", "wait load 1 2"]
    assert setup.worker.take_failed_blocks() == {2}
    assert setup.worker.take_failed_blocks() == set()
    assert setup.counts.blocks == {"loaded": 1, "posix": 1, "load.missing": 1}


def test_blocks_that_failed_before_are_reported_again() -> None:
    setup = Setup()
    setup.worker.begin(StepPlan(1, failed_block_ids={7}))
    assert setup.worker.take_failed_blocks() == {7}


def test_a_broken_promise_stops_the_engine() -> None:
    setup = Setup(recovers=False)
    setup.transfer.failing["load", KEYS[2]] = BlockCorruptError("the checksum of shard 3 is wrong")
    plan = StepPlan(1, loads=[moves(1, 2, request_id="chat-7")])
    setup.worker.begin(plan)
    with pytest.raises(PromisedBlockLostError, match="1 blocks") as stopped:
        setup.worker.load(plan)
    assert stopped.value.where == "request chat-7: the checksum of shard 3 is wrong"
    assert stopped.value.fix
    assert setup.counts.blocks["load.corrupt"] == 1


# Loads between steps


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


def test_a_failed_load_between_steps_makes_no_step_wrong() -> None:
    setup = Setup(between_steps=True)
    setup.transfer.failing["load", KEYS[1]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1)], dumps=[moves(3)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.dump(plan)
    assert setup.worker.take_loaded() == {"r"}
    assert setup.worker.take_failed_blocks() == {1}
    assert "commit 3" in setup.transfer.said()


def test_blocks_that_were_given_away_are_not_written_by_a_load_any_more() -> None:
    setup = Setup(between_steps=True, background=True)
    plan = StepPlan(1, loads=[moves(1, 2)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.transfer.said()
    setup.worker.begin(StepPlan(2, fresh_block_ids={2}))
    assert setup.transfer.said() == ["wait load 1 2"]


# Layer by layer


def forward(setup: Setup, plan: StepPlan, names: Sequence[str] = LAYERS) -> None:
    setup.worker.begin(plan)
    setup.worker.load(plan)
    for name in names:
        setup.worker.wait_for_layer(name)
        setup.transfer.log.append(name)
        setup.worker.layer_computed(name)


def test_a_layer_waits_for_its_portion_and_is_dumped_when_computed() -> None:
    setup = Setup(LayerWiseWorker)
    plan = StepPlan(1, loads=[moves(1)], dumps=[moves(2)])
    forward(setup, plan)
    assert setup.transfer.said() == [
        *(f"load 1 layers {begin}-{end} into [1]" for begin, end in ((0, 1), (1, 3), (3, 4), (4, 6))),
        *("wait load 1 layers 0-1", "layer.0", "dump 2 layers 0-1 from [2]"),
        *("wait load 1 layers 1-3", "layer.1", "dump 2 layers 1-2 from [2]"),
        *("layer.2", "dump 2 layers 2-3 from [2]"),
        *("wait load 1 layers 3-4", "layer.3", "dump 2 layers 3-4 from [2]"),
        *("wait load 1 layers 4-6", "layer.4", "dump 2 layers 4-5 from [2]"),
        *("layer.5", "dump 2 layers 5-6 from [2]"),
    ]
    setup.worker.dump(plan)
    assert setup.transfer.said() == ["commit 2"]
    setup.worker.close()
    assert setup.counts.blocks == {"loaded": 1, "posix": 4, "dumped": 1}


def test_layers_that_are_not_announced_are_not_forgotten() -> None:
    """A graph was replayed, or a draft model's layers ran elsewhere."""
    setup = Setup(LayerWiseWorker)
    plan = StepPlan(1, loads=[moves(1)], dumps=[moves(2)])
    forward(setup, plan, [*LAYERS[:2], "shares another layer's cache"])
    setup.transfer.said()
    setup.worker.dump(plan)
    said = setup.transfer.said()
    assert said[:2] == ["wait load 1 layers 3-4", "wait load 1 layers 4-6"]
    assert said[2:] == [*(f"dump 2 layers {layer}-{layer + 1} from [2]" for layer in range(2, 6)), "commit 2"]


def test_a_layer_is_dumped_once() -> None:
    setup = Setup(LayerWiseWorker)
    plan = StepPlan(1, dumps=[moves(2)])
    forward(setup, plan, ["layer.0", "layer.0"])
    assert setup.transfer.said() == ["layer.0", "dump 2 layers 0-1 from [2]", "layer.0"]


def test_a_load_that_fails_on_the_way_takes_back_what_was_dumped() -> None:
    setup = Setup(LayerWiseWorker)
    setup.transfer.failing["load", KEYS[1]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1)], dumps=[moves(2)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    setup.worker.layer_computed("layer.0")
    setup.worker.wait_for_layer("layer.1")
    setup.worker.layer_computed("layer.1")
    setup.transfer.said()
    setup.worker.dump(plan)
    said = setup.transfer.said()
    assert said[-1] == "discard 2"
    assert not any(line.startswith(("dump", "commit")) for line in said)
    assert setup.worker.take_failed_blocks() == {1}
    assert setup.counts.blocks["load.missing"] == 1


def test_failures_are_known_when_vllm_asks_before_the_dump() -> None:
    setup = Setup(LayerWiseWorker)
    setup.transfer.failing["load", KEYS[1]] = BlockMissingError("gone")
    plan = StepPlan(1, loads=[moves(1)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert setup.worker.take_failed_blocks() == {1}


def test_where_nothing_runs_between_the_layers_the_forward_waits_for_all() -> None:
    setup = Setup(LayerWiseWorker)
    assert isinstance(setup.worker, LayerWiseWorker)
    setup.worker.overlaps = False
    plan = StepPlan(1, loads=[moves(1)])
    setup.worker.begin(plan)
    setup.worker.load(plan)
    assert [line for line in setup.transfer.said() if line.startswith("wait")] == [
        f"wait load 1 layers {begin}-{end}" for begin, end in ((0, 1), (1, 3), (3, 4), (4, 6))
    ]
