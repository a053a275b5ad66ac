"""The settings of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

from tests.ucm.integration.vllm.connector.simulation.memory import KVMemory
from tests.ucm.integration.vllm.connector.simulation.truth import CELL, RING, STATE, Truth
from tests.ucm.stepping.setting import EngineSetting
from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups, in_chunks

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@dataclass(frozen=True)
class Setting(EngineSetting):
    """The settings of an engine.

    Args:
        groups: The block size, window (`STATE` for recurrent layers, see also `reach`) and number of layers of each
            group.
        precisions: Whether attention is latent, the same on all ranks, and every second layer of full attention is of
            another precision and page size.
        stored_tokens: The tokens of a stored chunk; 0: each block is stored alone.
        ranks: The number of workers.
        batches: The number of steps in flight.
        drafts: Draft tokens per step.
        layerwise: Whether blocks are transferred layer by layer.
        loads: How blocks are loaded: ``staged`` ones between two steps, while the request waits, or ``within`` the step
            that uses them; or ``direct``, between steps and from the store.
        rows: The maximum number of staged blocks.
        background: Whether a step may end before loads between steps do.
        reserves: Whether the scheduler reserves room for partly allocated requests (vLLM 0.23.0).
        failing_loads: The share of block loads that fail.
        failing_saves: The share of block saves and commits that fail.
        late: How late the store executes calls.
        aborts: The share of steps at which a request is aborted.
        losses: The share of steps at which blocks are deleted from the store.
        save_decode_blocks: Whether blocks of generated tokens are saved.
        staged: Whether the KV cache is on a device: torch's CPU.
        announced_late: Whether vLLM prepares the blocks of a step before it announces the step: its V2 runner does.
        slices: The slices of KV heads that a block is stored in, each of two heads; 0: each rank's part is stored as it
            is, and has one head.
        hash_tokens: The tokens that vLLM hashes as one, so that its own hits of states may end within a block; 0: those
            of a block.
    """

    groups: tuple[tuple[int, int | None, int], ...] = ((4, None, 5),)
    stored_tokens: int = 0
    ranks: int = 1
    batches: int = 1
    drafts: int = 0
    layerwise: bool = False
    loads: Literal["staged", "within", "direct"] = "staged"
    rows: int = 64
    background: bool = True
    reserves: bool = True
    failing_loads: float = 0.0
    failing_saves: float = 0.0
    late: float = 0.7
    aborts: float = 0.0
    losses: float = 0.0
    save_decode_blocks: bool = True
    staged: bool = False
    announced_late: bool = False
    hash_tokens: int = 0
    precisions: bool = False
    slices: int = 0
    blocks: int = field(default=24, kw_only=True)
    budget: int = field(default=16, kw_only=True)
    running: int = field(default=4, kw_only=True)

    @property
    def between_steps(self) -> bool:
        return self.loads != "within"

    @property
    def heads(self) -> int:
        """The KV heads of a rank."""
        return 2 * self.slices // self.ranks or 1

    def memory(self, rank: int) -> KVMemory:
        """Return the KV cache of a rank."""
        groups = self.cache_groups()
        return KVMemory(
            groups, self.blocks, rank, precisions=self.precisions, heads=self.heads, tokens_first=self.staged
        )

    def stored(self, group: CacheGroup, tokens: Sequence[int], truth: Truth, part: int) -> bytes:
        """Return what a block of a group must contain, of one of all ranks' parts of it.

        Args:
            group: The group.
            tokens: The tokens up to the block's end.
            truth: The expected results.
            part: The part's place.
        """
        windows = [window for _, window, count in self.groups for _ in range(count)]
        first = sum(count for _, _, count in self.groups[: group.index])
        layers = range(first, first + self.groups[group.index][2])
        heads = [2 * part, 2 * part + 1] if self.slices else [part]
        count = 1 if windows[first] == STATE else group.chunk_tokens
        cells = truth.cells(tokens)[heads][:, layers, -count:]
        by_block = cells.reshape(len(heads), len(layers), group.chunk_blocks, -1)
        return by_block.transpose((1, 2, 3, 0) if self.staged else (1, 2, 0, 3)).astype(CELL).tobytes()

    def cache_groups(self) -> CacheGroups:
        names = iter(f"layer.{number}" for number in range(sum(count for _, _, count in self.groups)))
        groups = tuple(
            CacheGroup(
                index,
                size,
                abs(window) if window else None,
                {},
                tuple(next(names) for _ in range(count)),
                is_recurrent=window == STATE,
                is_local=window is not None and window < 0,
                spec=SimpleNamespace(num_kv_heads=2) if self.slices else None,
                slices=self.slices // self.ranks,
            )
            for index, (size, window, count) in enumerate(self.groups)
        )
        rings = tuple(group for group in groups if group.window == RING)
        stored = tuple(group for group in groups if group.window != RING)
        return in_chunks(CacheGroups(stored, rings=rings), self.stored_tokens)

    def truth(self) -> Truth:
        return Truth(
            [window for _, window, count in self.groups for _ in range(count)],
            self.heads * self.ranks,
            replicated=self.precisions,
        )


#: Models: full attention; with windows in the same memory; with blocks of another size; only windows.
_ONE_GROUP = ((4, None, 5),)
_GROUPS: tuple[tuple[tuple[int, int | None, int], ...], ...] = (
    _ONE_GROUP,
    ((4, None, 3), (4, 6, 3)),
    ((4, None, 2), (4, 9, 2), (4, 1, 2)),
    ((2, 3, 2), (4, None, 2)),
    ((4, 5, 3),),
)


def any_setting(chance: random.Random) -> Setting:
    """Return random settings of an engine; the connector itself chooses how to load."""
    loads: Literal["staged", "within", "direct"] = chance.choice(("staged", "within", "direct"))
    groups = chance.choice(_GROUPS) if loads == "within" else _ONE_GROUP
    batches = chance.randint(1, 3)
    found = Setting(
        groups=groups,
        stored_tokens=chance.choice((0, 0, 8, 12)),
        ranks=chance.choice((1, 1, 2, 3)),
        batches=batches,
        asynchronous=batches > 1 and chance.random() < 0.6,
        drafts=chance.choice((0, 0, 1, 3)),
        blocks=chance.choice((18, 24, 40)) * len(groups) + 8,
        budget=chance.choice((8, 16, 40)),
        chunk=chance.choice((0, 0, 5)),
        running=chance.choice((2, 4, 6)),
        layerwise=loads == "within" and chance.random() < 0.6,
        caching=chance.random() < 0.75,
        loads=loads,
        background=chance.random() < 0.7,
        reserves=chance.random() < 0.7,
        rows=chance.choice((3, 64)),
        failing_loads=chance.choice((0, 0.05, 0.3)),
        failing_saves=chance.choice((0, 0.1, 0.3)),
        late=chance.choice((0, 0.5, 0.9)),
        aborts=chance.choice((0, 0.05, 0.3)),
        losses=chance.choice((0, 0.1)),
        save_decode_blocks=chance.random() < 0.8,
    )
    return replace(found, slices=found.ranks * chance.choice((0, 0, 1, 2)))
