"""Memory shared by an engine's processes: attached by address, allocated by rows, bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from ast import literal_eval
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ucm.store.base import BlockTransfer
from ucm.store.format import LARGE_BYTES
from ucm.store.memory import slab as slabs
from ucm.store.memory.slab import PAGE, Slab, SlabAddress, SlabReader, State
from ucm.testing.blocks import key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.clock import SimulatedClock
    from ucm.clock import Queue
    from ucm.store.memory.slab import Row

ROWS = 4
SIZES = (10, 20, 5)
KEYS = [key(number) for number in range(8)]

#: The program of another process: create a slab, fill a row, print the address, and wait to be killed.
OWNER = f"""
import sys
from dataclasses import astuple
from ucm.testing.blocks import key
from ucm.store.memory.slab import PAGE, Slab
slab = Slab({ROWS} * PAGE, 2)
slab.lay_out({sum(SIZES)})
row, _ = slab.claim(0, key(0))
memory = slab.memory(row, 0, {sum(SIZES)})
memory[:] = b"".join(bytes([number + 1]) * nbytes for number, nbytes in enumerate({SIZES}))
print(repr((astuple(slab.address), slab.offset(row))), flush=True)
while sys.stdin.readline():
    print(slab.records(), flush=True)
"""


@pytest.fixture(params=[False, True], ids=["shared", "private"])
def slab(clock: SimulatedClock, request: pytest.FixtureRequest) -> Iterator[Slab]:
    made = Slab(ROWS * PAGE, 2, private=request.param, clock=clock)
    made.lay_out(sum(SIZES))
    yield made
    made.close()


@pytest.fixture
def reader(clock: SimulatedClock) -> Iterator[SlabReader]:
    made = SlabReader(clock=clock)
    yield made
    made.close()


def claim(slab: Slab, number: int, group: int = 0) -> tuple[Row, bool]:
    claimed = slab.claim(group, KEYS[number])
    assert claimed is not None
    return claimed


def stage(slab: Slab, number: int) -> Row:
    """Fill and hold a row."""
    row, mine = claim(slab, number)
    assert mine
    slab.filled(row, "posix")
    return row


def copied(reader: SlabReader, place: int, first: int = 0) -> list[bytes]:
    memories = [bytearray(size) for size in SIZES[first:]]
    block = BlockTransfer(KEYS[0], [memoryview(memory) for memory in memories], first)
    result = reader.load([block], [place], ["posix"]).wait()
    assert not result.failed
    assert result.done == {KEYS[0]: "posix"}
    return [bytes(memory) for memory in memories]


def test_in_the_owners_process_a_reader_maps_nothing(slab: Slab, reader: SlabReader) -> None:
    row, _ = slab.claim(0, KEYS[0]) or pytest.fail("no room")
    slab.memory(row, 0, SIZES[0])[:] = b"x" * SIZES[0]

    def mappings() -> int:
        with open("/proc/self/maps", encoding="ascii") as lines:  # noqa: PTH123 - a file of the kernel
            return sum("ucm-staging" in line for line in lines)

    before = mappings()
    assert reader.attach(slab.address, 0, {})
    assert mappings() == before + 1  # its report's page
    into = bytearray(SIZES[0])
    reader.load([BlockTransfer(KEYS[0], [memoryview(into)])], [slab.offset(row)], ["disk"]).wait()
    assert into == b"x" * SIZES[0]
    with pytest.raises(TypeError, match="read-only"):
        slab.whole()[0] = 0


def test_another_process_attaches_answers_and_outlives_the_owner(reader: SlabReader, clock: SimulatedClock) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        parts, place = literal_eval(owner.stdout.readline())
        address = SlabAddress(*parts)
        assert reader.attach(address, 1, {"hello": [1, 2]})
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline().strip() == "{1: {'hello': [1, 2]}}"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert copied(reader, place) == [b"\x01" * 10, b"\x02" * 20, b"\x03" * 5]
    assert copied(reader, place + 10, first=1) == [b"\x02" * 20, b"\x03" * 5]
    assert not SlabReader(clock=clock).attach(address, 1, {})  # it disappeared with its owner


def test_private_memory_is_not_for_other_processes(clock: SimulatedClock) -> None:
    slab = Slab(ROWS * PAGE, 2, private=True, clock=clock)
    program = (
        "import ast, sys; from ucm.store.memory.slab import SlabAddress, SlabReader; "
        "print(SlabReader().attach(SlabAddress(*ast.literal_eval(sys.argv[1])), 1, {}))"
    )
    asked = [sys.executable, "-c", program, repr(astuple(slab.address))]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == "False"
    assert slab.records() == {}
    slab.close()


def test_rows_are_shared_where_the_system_refuses_private_memory() -> None:
    """A limit of a process's data, like strict overcommit, counts private memory before it is used."""
    program = (
        "import resource; from ucm.store.memory.slab import PAGE, Slab, SlabReader; "
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, -1)); "
        "slab = Slab(1 << 31, 1, private=True); "
        "print(slab.lay_out(PAGE) == (1 << 31) // PAGE, SlabReader().attach(slab.address, 0, {}), slab.records())"
    )
    asked = [sys.executable, "-c", program]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == "True True {0: {}}"


def test_private_memory_is_given_back(clock: SimulatedClock) -> None:
    slab = Slab(ROWS * PAGE, 1, private=True, clock=clock)
    slab.lay_out(PAGE)
    row = fill(slab, 0)[0]
    slab.release([row])
    for _ in range(2):
        clock.advance(slabs.KEEP_SECONDS)
        slab.trim()
    assert slab.holds(0, KEYS[:1]) == 0
    assert bytes(slab.memory(row, 0, PAGE)) == bytes(PAGE), "the next use of the page is its first"
    slab.close()


def test_nothing_but_the_slab_is_taken_for_it(slab: Slab, clock: SimulatedClock) -> None:
    address = slab.address
    for wrong in (
        replace(address, token=b"x" * 16),
        replace(address, descriptor=9999),
        replace(address, pid=2**22 + 1),
    ):
        assert not SlabReader(clock=clock).attach(wrong, 0, {})
    read, write = os.pipe()
    try:
        assert not SlabReader(clock=clock).attach(replace(address, descriptor=read), 0, {})
    finally:
        os.close(read)
        os.close(write)
    assert slab.records() == {}


def test_a_record_that_is_too_long_is_no_answer(slab: Slab, clock: SimulatedClock) -> None:
    assert not SlabReader(clock=clock).attach(slab.address, 0, {"x": "y" * slabs.RECORD_BYTES})


def test_a_rank_replaces_its_report_and_keeps_its_record(slab: Slab, reader: SlabReader) -> None:
    with pytest.raises(ValueError, match="no slab is attached"):
        reader.report({})
    assert reader.attach(slab.address, 1, {"hello": 1})
    assert slab.reports() == {}
    for number in (1, 22, 3):
        assert reader.report({"number": number})
        assert slab.reports() == {1: {"number": number}}
    assert not reader.report({"x": "y" * PAGE})
    assert slab.reports() == {1: {"number": 3}}
    assert slab.records() == {1: {"hello": 1}}
    at = 2 * PAGE + 2 * slabs.RECORD_BYTES - PAGE - PAGE
    slab._head[at + slabs._RECORD.size] ^= 1  # as if it were being written
    assert slab.reports() == {}


@pytest.mark.parametrize("size", [1, PAGE, LARGE_BYTES - 1, LARGE_BYTES, 5 * LARGE_BYTES + 3])
def test_slices_of_every_size_are_copied_whole_and_nothing_beside_them(
    reader: SlabReader, size: int, clock: SimulatedClock
) -> None:
    slab = Slab(8 * size + PAGE, 1, clock=clock)
    slab.lay_out(2 * size)
    assert reader.attach(slab.address, 0, {})
    for number in range(2):  # a row is reused for another block through the mapping of its first use
        row, _ = claim(slab, number)
        slab.memory(row, 0, 2 * size)[:] = bytes([1 + number]) * size + bytes([2 + number]) * size
        slab.filled(row, "posix")
        target = bytearray(b"z" * (2 * size + 2))
        slices = [memoryview(target)[1 : 1 + size], memoryview(target)[1 + size : -1].cast("B", [size])]
        result = reader.load([BlockTransfer(KEYS[number], slices)], [slab.offset(row)], ["posix"]).wait()
        assert (result.failed, result.nbytes) == ({}, 2 * size)
        assert target == b"z" + bytes([1 + number]) * size + bytes([2 + number]) * size + b"z"
        slab.failed(row)
        slab.release([row])
    slab.close()


def test_what_cannot_be_copied_is_told(slab: Slab, reader: SlabReader) -> None:
    block = BlockTransfer(KEYS[0], [memoryview(bytearray(PAGE))])
    assert "does not exist" in str(reader.load([block], [0], ["posix"]).wait().failed[KEYS[0]])
    assert reader.attach(slab.address, 0, {})
    end = ROWS * PAGE
    assert not reader.load([block], [end - PAGE], ["posix"]).wait().failed
    assert "ends before" in str(reader.load([block], [end - PAGE + 1], ["posix"]).wait().failed[KEYS[0]])
    frozen = BlockTransfer(KEYS[0], [memoryview(bytes(LARGE_BYTES))])
    assert KEYS[0] in reader.load([frozen], [0], ["posix"]).wait().failed


def test_memory_is_taken_only_where_it_is_written(clock: SimulatedClock) -> None:
    large = Slab(1 << 40, 1, clock=clock)
    large.lay_out(PAGE)
    assert os.fstat(large.address.descriptor).st_blocks * 512 < 1 << 20
    large.close()


def test_a_block_is_shared_by_all_who_want_it(slab: Slab) -> None:
    row, mine = claim(slab, 1)
    assert mine
    assert slab.holds(0, KEYS[1:2]) == 0
    assert slab.hold(0, KEYS[1:2]) is None
    again, mine = claim(slab, 1)
    assert (again is row, mine) == (True, False)
    slab.filled(row, "posix")
    assert slab.holds(0, KEYS[1:3]) == 1
    assert slab.holds(1, KEYS[1:2]) == 0  # it belongs to another group
    assert slab.hold(0, KEYS[1:2]) == [row]
    assert row.users == 3  # the first, second and current users, but no longer the one that filled it


def test_no_more_is_staged_than_there_is_room_for(slab: Slab) -> None:
    rows = [stage(slab, number) for number in range(ROWS)]
    assert len({slab.offset(row) for row in rows}) == ROWS
    assert slab.claim(0, KEYS[4]) is None
    slab.release([rows[2]])
    assert stage(slab, 4).number == rows[2].number
    assert slab.claim(0, KEYS[5]) is None


def test_what_was_not_used_for_longest_goes_first(slab: Slab) -> None:
    rows = [stage(slab, number) for number in range(ROWS)]
    slab.release(rows)
    assert slab.hold(0, KEYS[:1]) == rows[:1]
    slab.release(rows[:1])
    stage(slab, 5)
    assert [slab.holds(0, [one]) for one in KEYS[:ROWS]] == [1, 0, 1, 1]


def test_a_row_that_is_being_filled_is_given_to_nobody(slab: Slab) -> None:
    """A stuck read may write to it at any time, even if the row has had no users for long."""
    stuck, _ = claim(slab, 0)
    for number in range(1, 8):
        slab.release([stage(slab, number)])
    assert stuck.state is State.READING
    assert slab.offset(stuck) not in {slab.offset(claim(slab, number)[0]) for number in (5, 6, 7)}
    slab.failed(stuck)
    assert slab.claim(0, KEYS[1]) is None
    slab.release([stuck])
    assert claim(slab, 1)[0].number == stuck.number


def test_a_block_that_failed_is_found_by_nobody(slab: Slab) -> None:
    row, _ = claim(slab, 0)
    slab.failed(row)
    assert slab.holds(0, KEYS[:1]) == 0
    other, mine = claim(slab, 0)
    assert mine
    assert other is not row


@pytest.fixture
def keeping(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slab]:
    """A slab of eight rows that keeps the memory of three."""
    monkeypatch.setattr(slabs, "_TOUCHED_SHARE", 1)
    made = Slab(8 * PAGE, 1, 3 * PAGE, clock=clock)
    made.lay_out(PAGE)
    yield made
    made.close()


def touched(slab: Slab) -> int:
    """Return how many rows have memory; the slab's first page and the first of its records have some, too."""
    return os.fstat(slab.address.descriptor).st_blocks * 512 // PAGE - 1


def fill(slab: Slab, *numbers: int) -> list[Row]:
    """Write blocks into rows and hold them."""
    rows = [stage(slab, number) for number in numbers]
    for row in rows:
        slab.memory(row, 0, PAGE)[:] = b"x" * PAGE
    return rows


def test_kept_memory_is_touched_at_the_start_and_used_before_any_other(keeping: Slab) -> None:
    assert touched(keeping) == 3
    rows = fill(keeping, 0, 1, 2)
    assert touched(keeping) == 3
    rows += fill(keeping, 3)
    assert touched(keeping) == 4, "all of it was in use"
    assert len({row.number for row in rows}) == 4


def test_the_row_that_was_freed_last_is_used_first(keeping: Slab) -> None:
    rows = [claim(keeping, number)[0] for number in range(3)]
    for row in rows:
        keeping.release([row])
        keeping.failed(row)
    assert [claim(keeping, number)[0].number for number in (3, 4, 5)] == [row.number for row in reversed(rows)]


def test_however_many_blocks_are_staged_one_after_the_other_no_more_memory_is_used(keeping: Slab) -> None:
    for number in range(8):
        keeping.release(fill(keeping, number))
    assert touched(keeping) == 3
    assert [keeping.holds(0, [key]) for key in KEYS] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_memory_that_is_not_needed_any_more_is_given_back(keeping: Slab, clock: SimulatedClock) -> None:
    rows = fill(keeping, *range(6))
    keeping.release(rows[1:])
    clock.advance(slabs.KEEP_SECONDS)
    keeping.trim()
    assert touched(keeping) == 6, "it was needed a moment ago"
    keeping.trim()
    assert touched(keeping) == 6, "that was only a moment after the last time"
    clock.advance(slabs.KEEP_SECONDS)
    keeping.trim()
    assert touched(keeping) == 3
    assert [keeping.holds(0, [key]) for key in KEYS[:6]] == [1, 0, 0, 0, 1, 1]
    again = fill(keeping, *range(1, 8))
    assert len({row.number for row in (rows[0], *again)}) == 8
    assert keeping.claim(1, KEYS[0]) is None


def test_memory_in_use_is_never_given_back(keeping: Slab, clock: SimulatedClock) -> None:
    rows = fill(keeping, *range(5))
    for _ in range(3):
        clock.advance(slabs.KEEP_SECONDS)
        keeping.trim()
    assert touched(keeping) == 5
    assert all(bytes(keeping.memory(row, 0, PAGE)) == b"x" * PAGE for row in rows)


def test_what_rests_in_a_stuck_thread_is_not_given_back_either(keeping: Slab, clock: SimulatedClock) -> None:
    stuck = fill(keeping, *range(4))[0]
    late, _ = claim(keeping, 4)
    keeping.release([late])
    keeping.failed(late, at_rest=False)
    keeping.release([stuck])
    for _ in range(2):
        clock.advance(slabs.KEEP_SECONDS)
        keeping.trim()
    assert late.number not in {row.number for row in fill(keeping, 5, 6, 7)}


def test_an_eighth_of_the_limit_is_touched_at_most_and_less_is_kept(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "_KEPT_BYTES", 2 * PAGE)
    made = Slab(64 * PAGE, 1, 64 * PAGE, clock=clock)
    made.lay_out(PAGE)
    assert touched(made) == 8
    for rows in (8, 2, 2):
        clock.advance(slabs.KEEP_SECONDS)
        made.trim()
        assert touched(made) == rows
    assert len({row.number for row in fill(made, *range(8))}) == 8
    assert touched(made) == 8
    made.close()


def test_jobs_come_in_order_and_memory_is_given_back_between_them(keeping: Slab, clock: SimulatedClock) -> None:
    jobs: Queue[Callable[[], None] | None] = clock.queue()
    done: list[int] = []
    keeping.release(fill(keeping, *range(6)))

    def work() -> None:
        for job in slabs.jobs_of(jobs, keeping):
            job()
        done.append(-1)

    clock.thread(work, "worker").start()
    for number in range(6):
        jobs.put(partial(done.append, number))
        clock.advance(0.6 * slabs.KEEP_SECONDS)  # never without a job for so long that the thread looks up by itself
    assert done == list(range(6))
    assert touched(keeping) == 3
    jobs.put(None)
    clock.run_until_idle()
    assert done == [*range(6), -1]


def test_a_block_in_use_for_long_is_read_again_once_it_is_free(slab: Slab, clock: SimulatedClock) -> None:
    """This way its tiers see that it is used."""
    row = stage(slab, 0)
    clock.advance(slabs.STALE_SECONDS + 1)
    assert claim(slab, 0) == (row, False)
    slab.release([row, row])
    assert slab.holds(0, KEYS[:1]) == 0
    assert claim(slab, 0)[1]


def test_after_a_new_start_nothing_of_before_is_found(slab: Slab) -> None:
    used, unused, reading = stage(slab, 0), stage(slab, 1), claim(slab, 2)[0]
    slab.release([unused])
    slab.clear()
    slab.filled(reading, "posix")
    assert slab.holds(0, KEYS[:1]) == slab.holds(0, KEYS[1:2]) == slab.holds(0, KEYS[2:3]) == 0
    slab.release([used, reading])
    assert [claim(slab, number)[1] for number in range(4)] == [True] * 4
