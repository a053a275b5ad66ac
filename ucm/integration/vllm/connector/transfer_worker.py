"""Move whole blocks between the KV cache and the store on the worker side, as the scheduler's plan says."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucm.background import call_within, wait_while_it_shrinks
from ucm.clock import SYSTEM
from ucm.compat import LoadPolicy
from ucm.integration.vllm.connector.failures import FailureLog, PromisedBlockLostError
from ucm.integration.vllm.connector.kv_cache import NO_BLOCK
from ucm.integration.vllm.connector.metadata import StepPlan
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping

    from ucm.clock import Clock
    from ucm.integration.vllm.connector.events import Stored
    from ucm.integration.vllm.connector.metadata import BlockMoves, Part
    from ucm.integration.vllm.connector.transfer import GroupTransfer, SaveTask
    from ucm.integration.vllm.metrics import ConnectorCounters
    from ucm.store.base import BlockKey, StoreError, Task, TaskResult

logger = get_logger(__name__)


#: Stored blocks kept for ``take_stored``, which a connector around this one may never call; the oldest are dropped.
MOST_STORED = 1 << 14
#: How many seconds ``close`` waits for a medium without progress.
STILL_SECONDS = 10.0
#: How many seconds it waits for the stores to close; not less than the time that they take to write behind.
CLOSE_SECONDS = 20.0
#: Layers are loaded in this many portions.
PORTIONS = 4
#: Blocks are loaded within the step that needs them.
WITHIN_STEPS = LoadPolicy(between_steps=False)


@dataclass(slots=True)
class Load:
    """A load in progress."""

    moves: BlockMoves
    task: Task


class TransferWorker:
    """Loads before the forward, and saves in the background after it.

    A step that may write a block waits until the block has been copied. No step waits for a medium that is written to.

    Layer by layer, blocks are loaded in portions of their layers. All are requested at once, first layers first, and
    copied in that order, so that the next portion is in flight while the layers of the current one compute.

    Args:
        groups: The transfer of each group and each part of it that this rank stores.
        counters: Counts transfers.
        policy: When loads run. Loads of staged blocks always end with the step, because their place in the slab is
            reused afterwards.
        layer_wise: Whether blocks are loaded layer by layer; loads then run within steps.
        clock: Time and threads.
    """

    #: The group whose loaded blocks are counted in tokens; None if another rank counts them.
    counted_group: int | None = 0
    #: Whether a step ends after its saves were copied out of the KV cache, because vLLM zeroes blocks of the next step,
    #: or copies states to them, before it announces that step: its V2 runner does.
    settles = False
    #: Whether Python is certain to run between the layers of a step that loads. If not, the forward waits for all.
    overlaps = True

    def __init__(
        self,
        groups: dict[Part, GroupTransfer],
        counters: ConnectorCounters,
        *,
        policy: LoadPolicy = WITHIN_STEPS,
        layer_wise: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self.groups = groups
        self.counters = counters
        self._counted: set[tuple[str, Part, BlockKey]] = set()
        self._policy = policy
        self._layer_wise = layer_wise
        self._plan = StepPlan(0)
        self._loading: list[Load] = []  # for requests that wait between steps
        self._portions: dict[tuple[Part, int], list[Load]] = {}  # of the step's loads
        self._under_way: list[SaveTask] = []
        self._saved = False  # whether the step's saves have begun
        self._unconfirmed: list[tuple[SaveTask, int]] = []  # with the epoch of each
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._refused: set[str] = set()
        self.reports_stored = False  #: whether blocks that have become visible are collected for ``take_stored``
        self._stored: OrderedDict[tuple[int, BlockKey], dict[int, str]] = OrderedDict()
        self.load_failures = FailureLog("[UCM.Load]", "its tokens are recomputed")
        self.save_failures = FailureLog("[UCM.Save]", "the block is not stored")

    def begin(self, plan: StepPlan) -> None:
        """Begin a step before anything of it is written: free its blocks, and process earlier saves.

        vLLM calls this in two places, depending on the release; the second call of a step does nothing.
        """
        if plan.step == self._plan.step:
            return
        self._plan, self._portions, self._saved = plan, {}, False
        self._counted.clear()
        for load in self._loading:  # also into blocks that were given to another request after the first was aborted
            if not plan.fresh_block_ids.isdisjoint(load.moves.block_ids):
                load.task.wait()
        self._finish_saves(plan.fresh_block_ids)
        waiting, self._unconfirmed = self._unconfirmed, []
        for save, epoch in waiting:
            if epoch < plan.epoch:
                self._drop(save)
            else:
                self._confirm(save)
        self._save(plan.late_saves)

    def refuse(self, plan: StepPlan, adapters: Container[int] | None = None) -> None:
        """Move nothing of a step, because the weights were changed in place and its keys belong to the old ones.

        Args:
            plan: The plan of the step; moves that must not happen are removed from it.
            adapters: The LoRA adapters whose weights were changed; None if the model's were.

        Raises:
            PromisedBlockLostError: Blocks were promised, and vLLM cannot recompute their tokens.
        """

        def stays(moves: BlockMoves) -> bool:
            return adapters is not None and moves.adapter not in adapters

        ended = [load for load in self._loading if not stays(load.moves)]
        for load in ended:
            load.task.wait()
        refused = [*(load.moves for load in ended), *(moves for moves in plan.loads if not stays(moves))]
        self._loading = [load for load in self._loading if stays(load.moves)]
        plan.loads, plan.saves, plan.late_saves = (
            [moves for moves in of_kind if stays(moves)] for of_kind in (plan.loads, plan.saves, plan.late_saves)
        )
        for moves in refused:
            self.counters.failed("load", "other", len(moves.keys))
            self._note_failure(moves, moves.block_ids)
            self._refused.add(moves.request_id)
        if refused and not self._policy.between_steps:
            raise PromisedBlockLostError(
                "the weights were changed in place after blocks of the old ones had been promised",
                where=f"request {refused[0].request_id}",
                fix="call reset_prefix_cache after each change of the weights",
            )

    def load(self, plan: StepPlan) -> None:
        """Load a plan's blocks; return when they are loaded or, for requests that wait between steps, at once."""
        if self._policy.between_steps:
            for moves in self._of_parts(plan.loads):
                self._loading.append(Load(moves, self._start_load(moves, self._layers(moves.of))))
            return
        for portion in range(PORTIONS if self._layer_wise else 1):
            for moves in self._of_parts(plan.loads):
                layers = self._portion(moves.of, portion)
                if layers:
                    load = Load(moves, self._start_load(moves, layers))
                    self._portions.setdefault((moves.of, portion), []).append(load)
        if not (self._layer_wise and self.overlaps):
            self._finish_portions()

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, successfully or not.

        If there is nothing to compute, wait for the loads. In releases that free an aborted request's blocks while they
        are being loaded, no step may end before its loads. Failed blocks are reported with a request's last load.
        """
        wait = self._plan.idle or not self._policy.background
        waiting = {
            load.moves.request_id for load in self._loading if not (wait or load.moves.places or load.task.check())
        }
        ended = [load for load in self._loading if load.moves.request_id not in waiting]
        self._loading = [load for load in self._loading if load.moves.request_id in waiting]
        for load in ended:
            self.finish_load(load)
        refused, self._refused = self._refused if self._policy.between_steps else set(), set()
        return refused | {load.moves.request_id for load in ended}

    def _layers(self, part: Part) -> range:
        """Return the indexes of all layers of a group."""
        return range(len(self.groups[part].layer_names))

    def _portion(self, part: Part, portion: int) -> range:
        count, of = len(self._layers(part)), PORTIONS if self._layer_wise else 1
        return range(count * portion // of, count * (portion + 1) // of)

    def _of_parts(self, all_moves: Iterable[BlockMoves]) -> list[BlockMoves]:
        """Return moves of a plan for each part of the blocks that this rank stores."""
        return [
            replace(moves, part=part) if part else moves
            for moves in all_moves
            for group, part in self.groups
            if group == moves.group
        ]

    def _start_load(self, moves: BlockMoves, layers: range) -> Task:
        transfer = self.groups[moves.of]
        return transfer.load(moves, layers, moves.shares[transfer.place] if moves.places else 0)

    def finish_load(self, load: Load, *, whole: bool = True) -> None:
        """Wait for a load; failed blocks are reported to vLLM at the end of the step.

        Args:
            load: The load.
            whole: Whether it completes the blocks, with all layers.
        """
        moves, result = load.moves, load.task.wait()
        tokens = self.groups[moves.of].chunk_tokens if moves.of == (self.counted_group, 0) else 0
        blocks = len(result.done) if whole else 0
        self.counters.loaded(blocks, result.nbytes, result.seconds, result.done.values(), tokens)
        _log_done("[UCM.Load] request %s: %d blocks of KV-cache group %d loaded in %.1f ms", moves, result)
        if not result.failed:
            return
        self._count_failures("load", moves.of, result.failed, self.load_failures)
        if not self._policy.between_steps:
            first = next(iter(result.failed.values()))
            raise PromisedBlockLostError(
                f"{len(result.failed)} staged blocks could not be copied, and vLLM cannot recompute their tokens here",
                where=f"request {moves.request_id}: {first}",
            )
        self._note_failure(moves, [block for key, blocks in moves.chunks() if key in result.failed for block in blocks])

    def _note_failure(self, moves: BlockMoves, block_ids: Collection[int]) -> None:
        if self._policy.fails_whole:
            self._failed_requests.add(moves.request_id)
        else:
            self._failed_blocks.update(block for block in block_ids if block != NO_BLOCK)

    def _count_failures(
        self, operation: str, part: Part, failed: Mapping[BlockKey, StoreError], log: FailureLog
    ) -> None:
        """Count each failed block once per step, however many of its layers failed."""
        new = {key: error for key, error in failed.items() if (operation, part, key) not in self._counted}
        self._counted.update((operation, part, key) for key in new)
        log.record(new)
        for error in new.values():
            self.counters.failed(operation, error.cause, 1)

    def save(self, plan: StepPlan) -> None:
        """Save the blocks that a step has filled, after its forward; a second call of a step does nothing."""
        self._finish_portions()
        if not self._saved:
            self._saved = True
            self._save(plan.saves)

    def _save(self, saves: list[BlockMoves]) -> None:
        """Begin those saves that this rank performs."""
        for moves in self._of_parts(saves):
            if self.groups[moves.of].saves:
                save = self.groups[moves.of].save(moves)
                self._under_way.append(save)
                self._confirm(save)
        if self.settles:
            for save in self._under_way:
                save.copied.wait()

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait for the portion that contains the layer; for nothing if another layer has its KV cache."""
        self._finish_portions(layer_name)

    def _finish_portions(self, layer_name: str | None = None) -> None:
        """Wait for the loads of the portion with a layer, or of all."""
        for part, portion in list(self._portions):
            layers, names = self._portion(part, portion), self.groups[part].layer_names
            if layer_name is None or layer_name in names[layers.start : layers.stop]:
                for load in self._portions.pop((part, portion)):
                    self.finish_load(load, whole=layers.stop == len(names))

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that failed to load since the last call; vLLM may call this before ``save``."""
        self._finish_portions()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose loads failed since the last call, where a load fails as a whole.

        `take_loaded` has returned them as well, at the same step or before.
        """
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_stored(self) -> Stored:
        """Return the blocks that have become visible since the last call, with their tiers."""
        stored, self._stored = self._stored, OrderedDict()
        return stored

    def close(self) -> None:
        """Finish transfers as long as they make progress; abandon a medium without progress.

        Saves that nothing confirms are dropped.
        """
        started = self._clock.monotonic()
        waiting, self._unconfirmed = self._unconfirmed, []
        for save, *_ in waiting:
            self._drop(save)
        left = wait_while_it_shrinks(self._left, STILL_SECONDS, clock=self._clock)
        closed = call_within(self._close_transfers, "ucm-close", CLOSE_SECONDS, clock=self._clock)
        if not closed or left:
            logger.warning(
                "[UCM.Save] the store does not answer: it is abandoned with %d transfers in progress",
                len(self._under_way) + len(self._loading),
            )
        logger.info("[UCM.Save] closed after %.1f s", self._clock.monotonic() - started)

    def _left(self) -> int:
        """Return the sum of the transfers in progress and the bytes not written yet."""
        self._finish_saves(set())
        self._loading = [load for load in self._loading if not load.task.check()]
        waiting = sum(transfer.room.taken_bytes for transfer in self.groups.values())
        return len(self._loading) + len(self._under_way) + waiting

    def _close_transfers(self) -> None:
        for transfer in self.groups.values():
            transfer.close()

    def _confirm(self, save: SaveTask) -> None:
        """Write blocks as soon as no rank's weights had changed by the last step that computed some of their KV.

        Each rank checks only its own weights, and a change need not show there: the later layers of a pipeline may be
        unchanged, and a sample may miss the change. But the KV of all ranks belongs to the changed model. So with
        several ranks, each reports its checks to the scheduler, and the scheduler tells all ranks up to which step none
        found a change.
        """
        if self._plan.confirmed is None or save.moves.step <= self._plan.confirmed:
            self.groups[save.moves.of].confirm(save)
        else:
            self._unconfirmed.append((save, self._plan.epoch))

    def _drop(self, save: SaveTask) -> None:
        self.counters.failed("save", "other", len(save.rows))  # chunks without a row have failed already
        self.groups[save.moves.of].drop(save)

    def _finish_saves(self, block_ids: set[int]) -> None:
        """Process finished saves, and wait until none reads one of these blocks."""
        still: list[SaveTask] = []
        for save in self._under_way:
            of = save.moves.of
            if not block_ids.isdisjoint(save.moves.block_ids):
                save.copied.wait()
            if not save.check():
                still.append(save)
                continue
            result = save.wait()
            if self.reports_stored:
                for key, tier in result.done.items():
                    self._stored.setdefault((of[0], key), {})[self.groups[of].place] = tier
                while len(self._stored) > MOST_STORED:
                    self._stored.popitem(last=False)
            if result.done:
                self.counters.saved(len(result.done), result.nbytes, result.seconds)
                _log_done("[UCM.Save] request %s: %d blocks of KV-cache group %d saved in %.1f ms", save.moves, result)
            self._count_failures("save", of, result.failed, self.save_failures)
        self._under_way = still


def _log_done(text: str, moves: BlockMoves, result: TaskResult) -> None:
    """Log how long a transfer of a request's blocks took, from its start to the last byte."""
    logger.debug(text, moves.request_id, len(result.done), moves.group, result.seconds * 1000)
