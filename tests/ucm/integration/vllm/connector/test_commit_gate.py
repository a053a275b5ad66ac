"""What becomes visible, against a model of an engine whose ranks fail to load."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from ucm.integration.vllm.connector.commit_gate import CommitGate, Pending
from ucm.store.base import BlockKey


def pending(step: int) -> Pending:
    return Pending(step, 0, [BlockKey(step.to_bytes(16, "little"))])


class Engine:
    """Plans steps, executes each on all ranks, and learns of an outcome when it must or may.

    ``wrong`` are the steps that may have computed with a block that failed to load: the step itself, and those that
    were planned before the failure was known. ``doubtful`` are those of which a rank cannot tell: as many steps as may
    be in flight, from the failed one on as it sees it, and up to the last planned one as the scheduler tells it.
    """

    def __init__(self, ranks: int, batches: int) -> None:
        self.batches = batches
        self.gates = [CommitGate(ranks, batches) for _ in range(ranks)]
        self.planned = 0
        self.void = 0
        self.wrong: set[int] = set()
        self.doubtful: set[int] = set()
        self.in_flight: deque[tuple[int, set[int]]] = deque()
        self.visible: list[set[int]] = [set() for _ in range(ranks)]
        self.dropped: list[set[int]] = [set() for _ in range(ranks)]

    def step(self, failing: set[int], learn: int) -> None:
        """Plan and execute a step, on some ranks with a failed load, then learn of some outcomes."""
        while len(self.in_flight) >= self.batches:
            self.learn()
        self.planned += 1
        settled = self.planned - self.batches
        for rank, gate in enumerate(self.gates):
            self.open(rank, settled)
            if rank in failing:
                gate.failed(self.planned)
            if not gate.is_wrong(self.planned):
                gate.add(pending(self.planned))
            self.open(rank, settled)
        self.in_flight.append((self.planned, failing))
        for _ in range(learn):
            if self.in_flight:
                self.learn()

    def learn(self) -> None:
        step, failing = self.in_flight.popleft()
        if failing:
            self.void = self.planned
            self.wrong.update(range(step, self.planned + 1))
            self.doubtful.update(range(step, step + self.batches))
            self.doubtful.update(range(self.planned - self.batches + 1, self.planned + 1))

    def open(self, rank: int, settled: int) -> None:
        # A plan carries what was known when it was made; nothing is learned between its making and its execution here,
        # which is the earliest that it can be executed.
        commit, drop = self.gates[rank].open(settled, self.void)
        self.visible[rank].update(found.step for found in commit)
        self.dropped[rank].update(found.step for found in drop)

    def finish(self) -> None:
        """Empty steps until all is known and told."""
        for _ in range(self.batches + 1):
            self.step(set(), self.batches)


steps = st.lists(
    st.tuples(st.sets(st.integers(0, 2), max_size=1) | st.just(set[int]()), st.integers(0, 2)), max_size=25
)


@given(st.integers(1, 3), st.integers(1, 3), steps)
def test_nothing_wrong_becomes_visible_and_everything_right_does(
    ranks: int, batches: int, script: list[tuple[set[int], int]]
) -> None:
    engine = Engine(ranks, batches)
    for failing, learn in script:
        engine.step({rank for rank in failing if rank < ranks}, learn)
    engine.finish()
    asked = set(range(1, len(script) + 1))
    for rank in range(ranks):
        assert engine.visible[rank].isdisjoint(engine.wrong)
        assert asked - engine.doubtful <= engine.visible[rank]
        assert engine.visible[rank].isdisjoint(engine.dropped[rank])


@given(st.integers(1, 4), st.integers(1, 3))
def test_without_failures_all_becomes_visible(ranks: int, batches: int) -> None:
    engine = Engine(ranks, batches)
    for _ in range(10):
        engine.step(set(), 0)
    engine.finish()
    assert all(set(range(1, 11)) <= visible for visible in engine.visible)
    assert all(not dropped for dropped in engine.dropped)


def test_one_rank_commits_at_once() -> None:
    gate = CommitGate(1, 2)
    gate.add(pending(7))
    assert gate.open(5, 0) == ([pending(7)], [])
    assert gate.open(5, 0) == ([], [])


def test_several_ranks_wait_for_the_scheduler() -> None:
    gate = CommitGate(2, 1)
    gate.add(pending(7))
    gate.add(pending(8))
    assert gate.open(6, 0) == ([], [])
    assert gate.open(7, 0) == ([pending(7)], [])
    assert gate.open(8, 8) == ([], [pending(8)])


def test_a_rank_distrusts_the_steps_that_were_planned_before_its_failure_was_known() -> None:
    gate = CommitGate(1, 3)
    gate.failed(4)
    assert [gate.is_wrong(step) for step in (4, 5, 6, 7)] == [True, True, True, False]
    gate.add(pending(6))
    gate.add(pending(7))
    assert gate.open(4, 0) == ([pending(7)], [pending(6)])


def test_what_was_seen_to_be_right_before_a_failure_is_kept() -> None:
    gate = CommitGate(2, 2)
    for step in (4, 5, 6):
        gate.add(pending(step))
    gate.failed(6)
    assert gate.open(5, 0) == ([pending(4), pending(5)], [pending(6)])
    other = CommitGate(2, 2)
    for step in (4, 5, 6):
        other.add(pending(step))
    assert other.open(5, 6) == ([pending(4)], [pending(5), pending(6)])
