"""What the scheduler's side tells the workers at each step; it travels by pickle between vLLM's own processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.store.base import BlockKey
    from ucm.store.slab import SlabAddress


@dataclass(slots=True)
class BlockMoves:
    """Blocks of one request in one KV-cache group, to be loaded or dumped.

    Args:
        request_id: vLLM's request id.
        group: The KV-cache group's index.
        keys: Each block's key in the store.
        block_ids: Each block's place in the KV cache, as many as keys.
        places: Where each block was staged in the slab; empty where the ranks read the store.
        shares: How far from there each rank's part of it begins, in the ranks' order.
        tiers: The tier that each block came from.
        step: Of a dump, the last step that computes of the blocks.
        adapter: The number (``lora_int_id``) of the request's LoRA adapter; 0 for none.
    """

    request_id: str
    group: int
    keys: list[BlockKey]
    block_ids: list[int]
    places: list[int] = field(default_factory=list)
    shares: tuple[int, ...] = ()
    tiers: list[str] = field(default_factory=list)
    step: int = 0
    adapter: int = 0


@dataclass(slots=True)
class StepPlan:
    """One engine step.

    Args:
        step: Counts up by one with each step, from 1.
        namespace: Where the engine's blocks are kept.
        loads: To be loaded: before the step's forward, or while the requests wait between steps.
        dumps: To be dumped after the step's forward computed them.
        late_dumps: To be dumped at once: computed in earlier steps, and not written by this one.
        fresh_block_ids: Blocks that this step takes into use, and may write: what still reads them must finish first.
        idle: Nothing is computed in this step.
        epoch: Counts up with each start anew, from 0. A worker whose weights changed takes part in no plan of the epoch
            in which it found that out, or of one before.
        verify: The weights may have changed: look at all of them before anything of the step.
        looks: Look at the weights though this plan moves nothing, because the step moves something else.
        confirmed: The last step before which all ranks have looked at their weights and none has seen a change; what a
            later one dumped is kept back. None where there is one rank, or none can be heard: its own look decides.
        slab: Where blocks are staged, until every rank has answered.
    """

    step: int
    namespace: str = ""
    loads: list[BlockMoves] = field(default_factory=list)
    dumps: list[BlockMoves] = field(default_factory=list)
    late_dumps: list[BlockMoves] = field(default_factory=list)
    fresh_block_ids: set[int] = field(default_factory=set)
    idle: bool = False
    epoch: int = 0
    verify: bool = False
    looks: bool = False
    confirmed: int | None = None
    slab: SlabAddress | None = None


@dataclass(slots=True)
class WeightsReport:
    """What a worker has found out about its weights.

    Args:
        changed: The last epoch in which they changed; -1 for none.
        looked: The last step before which they were looked at, and the scheduler waits to hear of it; 0 for none.
        adapters: The numbers of the LoRA adapters that were replaced in place so far.
    """

    changed: int = -1
    looked: int = 0
    adapters: frozenset[int] = frozenset()


def geometry_record(place: int, geometry: BlockGeometry) -> dict[str, Any]:
    """What a rank tells the scheduler of its blocks of one group, short enough for any number of layers."""
    runs = [[size, len(list(run))] for size, run in groupby(geometry.shard_sizes)]
    return {"place": place, "fingerprint": geometry.fingerprint.hex(), "sizes": runs}


def geometries_of(
    records: Mapping[int, Mapping[str, Any]], places: Mapping[int, int]
) -> dict[int, list[BlockGeometry]]:
    """What all ranks have told.

    Args:
        records: Theirs, by rank.
        places: For each group, how many different parts its blocks have.

    Returns:
        For each group, what its blocks are in each place.

    Raises:
        ValueError: Ranks that hold the same KV lay it out in different ways, or one has not said anything of a group.
    """
    found: dict[int, list[BlockGeometry]] = {}
    for group, count in places.items():
        by_place: dict[int, BlockGeometry] = {}
        for rank, record in records.items():
            said = record["groups"][str(group)]
            sizes = tuple(size for size, times in said["sizes"] for _ in range(times))
            geometry = BlockGeometry(sizes, bytes.fromhex(said["fingerprint"]))
            if by_place.setdefault(said["place"], geometry) != geometry:
                raise ValueError(
                    f"rank {rank} lays KV-cache group {group} out in another way than one that has the same KV"
                )
        if set(by_place) != set(range(count)):
            raise ValueError(f"of {count} parts of KV-cache group {group}, ranks have told of {sorted(by_place)}")
        found[group] = [by_place[place] for place in range(count)]
    return found
