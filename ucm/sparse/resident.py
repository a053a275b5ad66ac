"""Which blocks of a request's middle are in its resident blocks, and which ones a step wants there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.sparse.representatives import bounded_products, bounds_of, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ucm.sparse.middle_store import Fetch

#: Blocks that there is room for at first.
LEAST = 64
#: Blocks whose keys are read at once.
AT_ONCE_BLOCKS = 64
#: How many of a chunk's tokens are its last few.
LATE = 32
#: Scores that are looked at together: bounds the memory of a long chunk's selection, 16 MiB in float32.
AT_ONCE = 1 << 22


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


class MiddleBounds:
    """The greatest and the least value of each channel of the keys of each block, in one layer of one middle.

    They bound the product of any query with any of these keys from above (Quest, arXiv:2406.10774).
    """

    def __init__(self) -> None:
        #: ``[num_kv_heads, at least size, 2 * head_size]``: the greatest values, and behind them the least.
        self._bounds: Tensor | None = None
        self._size = 0
        self._block_size = 1

    def append(self, block_ids: Sequence[int], read_keys: Callable[[Tensor], Tensor], device: Any) -> None:
        """Take the bounds of blocks that follow on those before.

        Args:
            block_ids: Where their keys are now.
            read_keys: Gives ``[n, block_size, num_kv_heads, head_size]`` for ``[n]`` block ids.
            device: The cache's.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        ids = torch.tensor(list(block_ids), dtype=torch.int64, device=device)
        for some in ids.split(AT_ONCE_BLOCKS):
            keys = read_keys(some)
            self._block_size = keys.shape[1]
            bounds = bounds_of(keys)
            self._room(bounds, self._size + len(some))[:, self._size : self._size + len(some)] = bounds
            self._size += len(some)

    def choose(self, query: Tensor, key: Tensor, lost: Sequence[int], count: int) -> list[int]:
        """The blocks that some tokens read, in order, counted from the middle's first; see `wanted`.

        A chunk's last token, from which the next one is generated, chooses three quarters of them as it would alone;
        its last few, often the question, choose an eighth; all together choose the rest. Every token of a chunk would
        have some block, and together they would crowd out the few that matter most.
        """
        scores = self.wanted(query[-1:], key[-1:], lost)
        for last, quota in ((LATE, count - count // 4), (len(query), count - count // 8)):
            if len(query) > 1:
                taken = scores.topk(quota, sorted=False).indices
                scores = self.wanted(query[-last:], key[-last:], lost).index_fill(0, taken, float("inf"))
        return sorted(scores.topk(count, sorted=False).indices.tolist())

    def wanted(self, query: Tensor, key: Tensor, lost: Sequence[int]) -> Tensor:
        """How much each block is wanted by any of some tokens.

        A token's heads share out their attention over the blocks as if the bounds were the products (a softmax): so a
        token that means one block counts as much as it can, and one that means none in particular hardly counts,
        however great its products are. The step's own tokens have their share, too, in blocks of their own: one that
        means what stands right before it hardly counts either. Of several tokens the one counts that wants a block
        most.

        Args:
            query: ``[tokens, num_heads, head_size]``: of tokens that follow each other.
            key: ``[tokens, num_kv_heads, head_size]``: of the same tokens.
            lost: Blocks that are not to be had, counted from the middle's first.

        Returns:
            ``[blocks]``, float32.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        if self._bounds is None:
            raise RuntimeError("nothing to choose from")
        own = self._own(key.to(self._bounds.dtype))
        bounds = self._bounds[:, : self._size]
        blocks = bounds.shape[1] + own.shape[1]
        tokens, heads, _ = query.shape
        begins = torch.arange(own.shape[1], device=query.device) * self._block_size
        best = self._bounds.new_zeros(self._size, dtype=torch.float32)
        at_once = max(1, AT_ONCE // (heads * blocks))
        for first in range(0, tokens, at_once):
            some = signed(query[first : first + at_once].to(bounds.dtype), len(bounds))
            both = [bounded_products(some.flatten(1, 2), of) for of in (bounds, own)]
            products = torch.cat(both, -1).view(*some.shape[:3], blocks)
            if lost:
                products[..., list(lost)] = -torch.inf
            later = begins > torch.arange(first, first + some.shape[1], device=query.device)[:, None, None]
            products[..., self._size :].masked_fill_(later, -torch.inf)
            shares = products.softmax(-1)[..., : self._size]
            best = torch.maximum(best, shares.sum((0, 2)).amax(0))
        return best

    def _own(self, key: Tensor) -> Tensor:
        """The bounds of the step's own tokens, in blocks from the first one on."""
        import torch  # noqa: PLC0415 - vLLM brings it

        whole = len(key) // self._block_size * self._block_size
        parts = [key[:whole].unflatten(0, (-1, self._block_size)), key[None, whole:]]
        found = [bounds_of(part) for part in parts if part.numel()]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _room(self, like: Tensor, size: int) -> Tensor:
        """The bounds with room for so many blocks and some more, so that a growing context copies them seldom."""
        if self._bounds is None or self._bounds.shape[1] < size:
            grown = like.new_zeros((like.shape[0], max(LEAST, size + size // 4), like.shape[2]))
            if self._bounds is not None:
                grown[:, : self._size] = self._bounds[:, : self._size]
            self._bounds = grown
        return self._bounds


@dataclass(slots=True)
class Middle:
    """A request's middle, as a worker knows it.

    Attributes:
        admission: Of the request.
        first: The place of its first block.
        stored: Blocks of it.
        resident: The blocks that it is brought back into.
        lost: Its blocks that cannot be had, counted from the first.
        bounds: By layer.
        layers: By layer, what is in the resident blocks.
    """

    admission: int
    first: int
    stored: int = 0
    resident: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    bounds: dict[str, MiddleBounds] = field(default_factory=dict)
    layers: dict[str, ResidentLayer] = field(default_factory=dict)

    @property
    def reads(self) -> int:
        """Blocks of the middle that a step reads."""
        return min(len(self.resident), self.stored - len(self.lost))
