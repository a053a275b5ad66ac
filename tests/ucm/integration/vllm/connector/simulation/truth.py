"""The expected results: every KV cell, the next token, and block keys, as functions of the tokens alone."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ucm.hashing.block_keys import BlockKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: A cell is the KV of one token in one layer of one rank.
CELL = np.dtype("<u8")
#: Token 0 ends a request. The vocabulary is small, so that requests share prefixes.
VOCABULARY = 6
END = 0
#: In place of a layer's window: the layer is recurrent. Its cell of a token is its state after it.
STATE = 0
#: In place of a layer's window: its cells are in a ring, a block per request, and tokens attend to those of their pool.
RING, POOL = 1 << 20, 4


def reach(position: int, window: int | None) -> int:
    """Return the first token that a token attends to.

    Args:
        position: The token's position.
        window: The layer's attention window; None for full attention, negative for chunks of so many tokens, or `RING`.
    """
    if window is None:
        return 0
    if window == RING or window < 0:
        size = POOL if window == RING else -window
        return position // size * size
    return max(0, position + 1 - max(window, 1))


def digest(*parts: int) -> int:
    """Return a hash of the parts."""
    return xxhash.xxh3_64_intdigest(np.array(parts, CELL).tobytes())


def embed(token: int, position: int) -> int:
    """Return the first layer's input for a token."""
    return digest(token, position)


def cell(hidden: int, layer: int, rank: int) -> int:
    """Return a token's cell, from the layer's input."""
    return digest(hidden, layer, rank)


def state_after(before: int, hidden: int, layer: int, rank: int) -> int:
    """Return a recurrent layer's state after a token, from the state before it (0 at the start) and its input."""
    return digest(before, hidden, layer, rank)


def attend(context: bytes) -> int:
    """Return the attention output of the cells that a token attends to, oldest first, its own last."""
    return xxhash.xxh3_64_intdigest(context)


def next_token(hidden: int) -> int:
    """Return the token that follows, from the last layer's output."""
    return hidden % VOCABULARY


class Truth:
    """The model without an engine: like in a transformer, each layer of each rank adds to the next layer's input.

    Args:
        windows: The attention window of each layer, see `reach`; `STATE` for a recurrent layer.
        ranks: The number of ranks, each with its own KV.
        replicated: Whether all ranks have the same KV instead, as latent attention has.
    """

    def __init__(self, windows: Sequence[int | None], ranks: int, *, replicated: bool = False) -> None:
        self.windows = tuple(windows)
        self.ranks = ranks
        self._parts = [0 if replicated else rank for rank in range(ranks)]
        self._cells: dict[tuple[int, ...], NDArray[np.uint64]] = {}
        self._following: dict[tuple[int, ...], int] = {}

    def cells(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        """Return all cells of these tokens: ``[ranks, layers, tokens]``."""
        whole = tuple(tokens)
        known = self._cells.get(whole)
        if known is None:
            known = np.zeros((self.ranks, len(self.windows), len(whole)), CELL)
            if whole:
                known[..., :-1] = self.cells(whole[:-1])
                hidden = embed(whole[-1], len(whole) - 1)
                for layer, window in enumerate(self.windows):
                    begin = reach(len(whole) - 1, window)
                    if window == STATE:
                        before = known[:, layer, -2] if len(whole) > 1 else np.zeros(self.ranks, CELL)
                        states = [state_after(int(one), hidden, layer, rank) for rank, one in enumerate(before)]
                        known[:, layer, -1] = states
                    else:
                        known[:, layer, -1] = [cell(hidden, layer, part) for part in self._parts]
                    hidden = digest(hidden, *(attend(row[begin:].tobytes()) for row in known[:, layer]))
                self._following[whole] = next_token(hidden)
            self._cells[whole] = known
        return known

    def following(self, tokens: Sequence[int]) -> int:
        """Return the token after these."""
        self.cells(tokens)
        return self._following[tuple(tokens)]


class Keys(BlockKeys):
    """Makes block keys, and records the tokens of each."""

    def __init__(self) -> None:
        self._made: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        #: The tokens up to the end of the block, by key.
        self.tokens: dict[bytes, tuple[int, ...]] = {}

    def of(self, request: Any, block_size: int, first: int = 0) -> list[bytes] | None:
        """Return the keys of a request's full blocks."""
        return self.chain(request.all_token_ids, block_size)[first:]

    def chain(self, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Return the keys of all full blocks of these tokens."""
        keys: list[bytes] = []
        parent = block_size.to_bytes(16, "little")
        for end in range(block_size, len(tokens) + 1, block_size):
            block = tuple(tokens[end - block_size : end])
            key = self._made.get((parent, block))
            if key is None:
                key = hashlib.blake2b(parent + bytes(block), digest_size=16).digest()
                self._made[parent, block] = key
                self.tokens[key] = tuple(tokens[:end])
            keys.append(key)
            parent = key
        return keys

    def is_ready(self, request: Any) -> bool:
        return not getattr(request, "unread", False)

    def wait(self, seconds: float) -> None:
        """Do nothing: no key is computed in the background."""

    def may_change(self, request: Any) -> bool:
        return bool(getattr(request, "adapter", False))

    def is_same(self, request: Any) -> bool:
        return bool(request.adapter == "same")

    def note(self, request: Any) -> None:
        del request

    def is_invalidated(self, request: Any) -> bool:
        return bool(getattr(request, "adapter", "") == "replaced")

    def forget(self, request_id: str) -> None:
        """Do nothing: there is no state by request."""
