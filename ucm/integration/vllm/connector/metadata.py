"""Define the messages from the scheduler side to the workers, pickled between vLLM's processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ucm.integration.vllm.blend.scheduler import BlendPlan
    from ucm.store.base import BlockKey
    from ucm.store.memory.slab import SlabAddress

#: A KV-cache group's index, and which of a rank's parts of its blocks is meant.
Part = tuple[int, int]


@dataclass(slots=True)
class BlockMoves:
    """Chunks of one request in one KV-cache group, to be loaded or saved.

    Args:
        request_id: vLLM's request id.
        group: The KV-cache group's index.
        keys: Each chunk's key in the store.
        block_ids: The ids of the chunks' blocks in the KV cache, in the order of ``keys``; ``NO_BLOCK`` for blocks that
            are not moved.
        depths: Each chunk's depth, see ``BlockTransfer``.
        chunk_blocks: The number of blocks of each chunk.
        places: The offset of each staged chunk in the slab; empty if the ranks read the store.
        shares: The offset of each rank's part from there, in rank order.
        tiers: The tier that each chunk was read from.
        step: For a save, the last step that computes tokens of the blocks.
        adapter: The number (``lora_int_id``) of the request's LoRA adapter; 0 for none.
        retain_until: Of a save, until when to retain the chunks, in seconds since the epoch; 0: not at all.
        part: In a worker, which of its parts of the blocks is meant: of slices of KV heads it may store several.
    """

    request_id: str
    group: int
    keys: list[BlockKey]
    block_ids: list[int]
    depths: list[int]
    places: list[int] = field(default_factory=list)
    shares: tuple[int, ...] = ()
    tiers: list[str] = field(default_factory=list)
    step: int = 0
    adapter: int = 0
    chunk_blocks: int = 1
    retain_until: float = 0.0
    part: int = 0

    @property
    def of(self) -> Part:
        """The group, and the part of its blocks."""
        return self.group, self.part

    def chunks(self) -> Iterator[tuple[BlockKey, list[int]]]:
        """Yield each chunk's key with the ids of its blocks."""
        for place, key in enumerate(self.keys):
            yield key, self.block_ids[place * self.chunk_blocks : (place + 1) * self.chunk_blocks]


@dataclass(slots=True)
class StepPlan:
    """The workers' part of one engine step.

    Args:
        step: The number of the step, counted from 1.
        namespace: The namespace of the engine's blocks.
        loads: Blocks to load before the step's forward, or while the requests wait between steps.
        saves: Blocks to save after the step's forward has computed them.
        late_saves: Blocks to save at once: computed in earlier steps and not written by this one.
        fresh_block_ids: Blocks that this step allocates and may write: transfers that still read them must finish
            first.
        idle: Nothing is computed in this step.
        epoch: How often the blocks got new keys, counted from 0. A worker whose weights changed ignores plans of the
            epoch in which it noticed the change, and of earlier ones.
        verify: The weights may have changed: check all of them before the step.
        confirmed: The last step before which all ranks checked their weights and found no change; saves of later steps
            are held back. None with one rank, whose own check decides.
        slab: The address of the staging slab, until every rank has answered.
        authentication: The fingerprint of the scheduler's authentication key; empty if it has none.
        blend: The stretches to blend and the chunks to save; None for connectors that blend nothing.
    """

    step: int
    namespace: str = ""
    loads: list[BlockMoves] = field(default_factory=list)
    saves: list[BlockMoves] = field(default_factory=list)
    late_saves: list[BlockMoves] = field(default_factory=list)
    fresh_block_ids: set[int] = field(default_factory=set)
    idle: bool = False
    epoch: int = 0
    verify: bool = False
    confirmed: int | None = None
    slab: SlabAddress | None = None
    authentication: str = ""
    blend: BlendPlan | None = None

    @property
    def moves(self) -> bool:
        """Whether anything is loaded, saved or blended."""
        return bool(self.loads or self.saves or self.late_saves or (self.blend is not None and self.blend.blends))


@dataclass(slots=True)
class WeightsReport:
    """A worker's report about its weights and its model.

    Args:
        changed: The last epoch in which they changed; -1 for none.
        looked: The last step before which they were checked, if the scheduler waits for the report; 0 for none.
        adapters: The numbers of the LoRA adapters replaced in place so far.
        refused: Whether the model cannot be blended after all.
    """

    changed: int = -1
    looked: int = 0
    adapters: frozenset[int] = frozenset()
    refused: bool = False

    def to_record(self) -> dict[str, Any]:
        """Return the report as plain values, for its JSON."""
        return {**asdict(self), "adapters": sorted(self.adapters)}

    @classmethod
    def merged(cls, reports: Collection[WeightsReport], *, missing: bool = False) -> WeightsReport:
        """Merge what ranks have reported; ``missing``: some may have no report, and not because nothing is new."""
        return cls(
            changed=max((report.changed for report in reports), default=-1),
            looked=0 if missing else min(report.looked for report in reports),
            adapters=frozenset().union(*(report.adapters for report in reports)),
            refused=any(report.refused for report in reports),
        )


def geometry_record(places: Sequence[int], geometry: BlockGeometry) -> dict[str, Any]:
    """Return a rank's record of its parts of the blocks in one group, short enough for any number of layers."""
    runs = [[size, len(list(run))] for size, run in groupby(geometry.slice_sizes)]
    about = {"fingerprint": geometry.fingerprint.hex(), "element": geometry.element_size}
    return {"places": list(places), **about, "sizes": runs}


def geometries_of(
    records: Mapping[int, Mapping[str, Any]], places: Mapping[int, int]
) -> dict[int, list[BlockGeometry]]:
    """Return the block geometries that all ranks reported.

    Args:
        records: The ranks' records, by rank.
        places: For each group, the number of different parts of its blocks.

    Returns:
        For each group, the geometry of each part of its blocks.

    Raises:
        ValueError: Ranks with the same KV report different layouts, or a part of a group was not reported.
    """
    found: dict[int, list[BlockGeometry]] = {}
    for group, count in places.items():
        by_place: dict[int, BlockGeometry] = {}
        for rank, record in records.items():
            said = record["groups"][str(group)]
            sizes = tuple(size for size, times in said["sizes"] for _ in range(times))
            geometry = BlockGeometry(sizes, bytes.fromhex(said["fingerprint"]), said["element"])
            for place in said["places"]:
                if by_place.setdefault(place, geometry) != geometry:
                    raise ValueError(
                        f"rank {rank} lays out KV-cache group {group} differently from a rank that has the same KV"
                    )
        if set(by_place) != set(range(count)):
            raise ValueError(
                f"ranks have reported parts {sorted(by_place)} of KV-cache group {group}, which has {count}"
            )
        found[group] = [by_place[place] for place in range(count)]
    return found
