"""Which blocks of a request's offloaded context are in its resident blocks, and which ones a step wants there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucm.sparse.topk.representatives import bounded_products, bounds_of, shares, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ucm.sparse.esa.offload_store import Fetch

#: Blocks that there is room for at first.
LEAST = 64
#: Blocks whose keys are read at once.
AT_ONCE_BLOCKS = 64


class ResidentLayer:
    """One layer's use of a request's resident blocks: the same block holds other content in another layer."""

    def __init__(self) -> None:
        #: The place in the request of what each resident block holds; None for nothing.
        self._holds: list[int | None] = []
        self._slots: dict[int, int] = {}
        #: For the next step, what this one's query wants: the places, and their transfers.
        self.ahead: tuple[list[int], Fetch | None] | None = None

    def missing(self, chosen: Sequence[int]) -> list[int]:
        """Those of some places that are in no resident block."""
        return [place for place in chosen if place not in self._slots]

    def assign(self, places: Sequence[int], chosen: Sequence[int], resident: int) -> list[int]:
        """Give missing places resident blocks whose content is not chosen.

        Args:
            places: The places; none is there.
            chosen: All places that the step reads.
            resident: How many resident blocks there are; not fewer than chosen places.

        Returns:
            Of each place, its resident block, counted from 0.
        """
        self._holds += [None] * (resident - len(self._holds))
        kept = set(chosen)
        free = (slot for slot, place in enumerate(self._holds) if place is None or place not in kept)
        given = []
        for place, slot in zip(places, list(free), strict=False):
            old = self._holds[slot]
            if old is not None:
                del self._slots[old]
            self._holds[slot] = place
            self._slots[place] = slot
            given.append(slot)
        return given

    def slots(self, chosen: Sequence[int]) -> list[int]:
        """The resident blocks of places that are there."""
        return [self._slots[place] for place in chosen]


class OffloadedBounds:
    """The greatest and the least value of each channel of the keys of each block, in a layer of an offloaded context.

    They bound the product of any query with any of these keys from above (Quest, arXiv:2406.10774).
    """

    def __init__(self) -> None:
        #: ``[num_kv_heads, at least size, 2 * head_size]``: the greatest values, and behind them the least.
        self._bounds: Tensor | None = None
        #: Blocks that have them.
        self.size = 0

    def append(self, block_ids: Tensor, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Take the bounds of blocks that follow on those before.

        Args:
            block_ids: ``[n]``, int64, on the cache's device: where their keys are now.
            read_keys: Gives ``[n, block_size, num_kv_heads, head_size]`` for some of them.
        """
        for some in block_ids.split(AT_ONCE_BLOCKS) if len(block_ids) else ():
            self.append_keys(read_keys(some))

    def append_keys(self, keys: Tensor) -> None:
        """Take the bounds of ``[n, block_size, num_kv_heads, head_size]``, which follow on those before."""
        bounds = bounds_of(keys)
        self._room(bounds, self.size + len(keys))[:, self.size : self.size + len(keys)] = bounds
        self.size += len(keys)

    def wanted(self, query: Tensor, key: Tensor, blocks: int) -> Tensor:
        """How much a token wants each block.

        Its heads share out their attention over the blocks as if the bounds were the products (a softmax): a head that
        means one block counts as much as it can, and one that means none in particular hardly counts. The token's own
        key has its share, too.

        Args:
            query: ``[num_heads, head_size]``: of the token.
            key: ``[num_kv_heads, head_size]``: of the token.
            blocks: How many blocks, from the offloaded context's first, it may read.

        Returns:
            ``[blocks]``, int64, as of `ucm.sparse.topk.representatives.shares`.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        if self._bounds is None or blocks > self.size:
            raise RuntimeError("nothing to choose from")
        own = bounds_of(key[None, None].to(self._bounds.dtype))
        some = signed(query[None].to(self._bounds.dtype), len(self._bounds)).flatten(1, 2)
        products = [bounded_products(some, of) for of in (self._bounds[:, :blocks], own)]
        scores = torch.cat(products, -1)[:, None]
        return shares(scores, None)[0, :blocks]

    def _room(self, like: Tensor, size: int) -> Tensor:
        """The bounds with room for so many blocks and some more, so that a growing context copies them seldom."""
        if self._bounds is None or self._bounds.shape[1] < size:
            grown = like.new_zeros((like.shape[0], max(LEAST, size + size // 4), like.shape[2]))
            if self._bounds is not None:
                grown[:, : self.size] = self._bounds[:, : self.size]
            self._bounds = grown
        return self._bounds


@dataclass(slots=True)
class OffloadedContext:
    """A request's offloaded context, as a worker knows it.

    Attributes:
        admission: Of the request; None before any of it is released.
        first: The place of its first block.
        stored: Blocks of it that are released; those behind them are where they were.
        resident: The blocks that they are brought back into.
        lost: Its blocks that cannot be had, counted from the first.
        bounds: By layer.
        layers: By layer, what is in the resident blocks.
    """

    admission: int | None
    first: int
    stored: int = 0
    resident: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    bounds: dict[str, OffloadedBounds] = field(default_factory=lambda: defaultdict(OffloadedBounds))
    layers: dict[str, ResidentLayer] = field(default_factory=lambda: defaultdict(ResidentLayer))
