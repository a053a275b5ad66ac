"""What requests tell the connector, and what its scheduler side and its workers tell each other.

A request's ``kv_transfer_params``, or vLLM's hints for KV caches, say:

- *How long it asks to be retained.* With an engine in the client's process, vLLM checks the type of neither.
- *What a prefill engine and a decode engine tell each other about a prompt.* A proxy asks the prefill engine for one
  token with vLLM's ``do_remote_decode``, and hands the ``kv_transfer_params`` of its answer to the decode engine, as
  for vLLM's transports. The answer comes before the prompt's last blocks are in the store, so it says how many tokens
  they will hold, and the decode engine's lookup waits for those.

Between the two sides, plans and reports are pickled, and records in the slab are JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.compat import optional, transfer_params
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ucm.integration.vllm.blend.scheduler import BlendPlan
    from ucm.store.base import BlockKey
    from ucm.store.memory.slab import SlabAddress
    from ucm.vllm_types import Request

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
    """Return a rank's record of its parts of the blocks in one group."""
    about = {"fingerprint": geometry.fingerprint.hex(), "element": geometry.element_size}
    return {"places": list(places), **about, "sizes": geometry.slice_sizes}


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
            geometry = BlockGeometry(tuple(said["sizes"]), bytes.fromhex(said["fingerprint"]), said["element"])
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


#: The key in a request's ``kv_transfer_params``.
RETAIN = "ucm_retain_seconds"
#: The type of an action among vLLM's hints, and its major version. vLLM 0.32.0 transports actions and defines none;
#: this is the form that is proposed there: ``directives``, each with an optional ``duration`` in seconds.
_ACTION, _VERSION = "kv.retain", "1"


class HintError(ValueError):
    """A request's hint is not understood."""


def retain_seconds(request: Request) -> float:
    """Return for how many seconds a request's blocks are worth keeping, the longest time that it gives; 0 if none.

    Raises:
        HintError: A hint is malformed.
    """
    params = transfer_params(request)
    if params is not None and not isinstance(params, Mapping):
        raise HintError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    times = [_seconds(RETAIN, params[RETAIN])] if params and RETAIN in params else []
    # There are no hints before 0.32.0. Nothing checks those of a client in the engine's process.
    for directive in _directives(optional(request, "kv_hints.actions") or ()):
        times += [_seconds("duration", directive["duration"])] if "duration" in directive else []
    return max(times, default=0.0)


def _directives(actions: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the directives of the actions that are ours; the others may have any payload."""
    if not isinstance(actions, list | tuple):
        raise HintError("the actions of kv_hints are no list")
    for action in actions:
        kind, version = optional(action, "action_type"), optional(action, "action_version")
        if not isinstance(kind, str) or not isinstance(version, str):
            raise HintError("the type or the version of an action of kv_hints is no string")
        if kind == _ACTION and version.partition(".")[0] == _VERSION:
            payload = optional(action, "payload")
            found = payload.get("directives") if isinstance(payload, Mapping) else None
            if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
                raise HintError(f"the directives of a {_ACTION} action are no list of objects")
            yield from found


def _seconds(name: str, value: object) -> float:
    # The value is not in the message: Python refuses to write long integers, wherever they are within it.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HintError(f"{name} is {type(value).__name__}, not a number of seconds")
    if not 0 <= value < math.inf:
        raise HintError(f"{name} is out of range, not a number of seconds")
    return float(min(value, 1 << 40))


#: The key of the number of a prompt's first tokens whose blocks are in the store, or on their way there.
SAVED = "ucm_saved_tokens"


def saved_tokens(request: Request) -> int:
    """Return how many tokens of a request another engine says it has saved; 0 if none says so.

    vLLM passes on what a client sends unchecked; what is no such number is as good as none.
    """
    found = _params(request).get(SAVED)
    return found if type(found) is int and found > 0 else 0


def is_handed_on(request: Request) -> bool:
    """Return whether another engine decodes the request: vLLM's ``do_remote_decode``."""
    return bool(_params(request).get("do_remote_decode"))


def comes_from_afar(request: Request) -> bool:
    """Return whether a transport has yet to bring the request's KV from the engine that computed it.

    That is vLLM's ``do_remote_prefill``, which a transport's connector clears once it has begun, also if it then fails.
    """
    return bool(_params(request).get("do_remote_prefill"))


def _params(request: Request) -> Mapping[str, Any]:
    params = transfer_params(request)
    return params if isinstance(params, Mapping) else {}
