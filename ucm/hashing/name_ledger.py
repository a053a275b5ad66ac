"""Remember which content each name stood for by which vLLM finds something in a cache of its own.

Our keys follow from content. But vLLM finds blocks in its prefix cache, encodings of media and loaded adapters by a
name: that of an adapter and its path, the uuid of an image, a hash that leaves something out. If a name stood for two
contents, vLLM may have computed a request's KV from the other one, so that KV must not be saved under the request's own
content.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple

from ucm.hashing.request_hasher import frame

#: Names whose contents are remembered, some 20 MB.
NAMES = 100_000
#: Bits of the filter of names that must not be trusted, 4 MiB once there is one; and the bits of each name. With a
#: million such names it holds 1 in 6000 others to be one of them, with five millions 1 in 24.
_FILTER_BITS, _BITS_OF_NAME = 1 << 25, 4


class NameLedger:
    """The contents that the names of one of vLLM's caches stood for, since it was last empty.

    A name is *ambiguous* once it stood for two contents, or for one that could not be identified, and stays so until
    the ledger is cleared. The memory is bounded: a name that was not used for long is forgotten, and ambiguous from
    then on, because its next content cannot be compared. Ambiguous names are kept in a Bloom filter, which forgets
    none. It may take a name for ambiguous that is not, which costs a hit; never the reverse.
    """

    def __init__(self, most: int = NAMES) -> None:
        self._most = most
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()
        self._ambiguous: bytearray | None = None
        self.changes = 0  #: how often a name became ambiguous

    def stands_for(self, name: bytes, content: bytes | None) -> bool:
        """Note what a name stands for; return whether it never stood for anything else.

        Args:
            name: The result of `named`.
            content: Its content; None: it cannot be identified.
        """
        if self.is_ambiguous(name):
            return False
        known = self._contents.get(name)
        if content is None or known not in {None, content}:
            self._contents.pop(name, None)
            self._distrust(name)
            return False
        self._contents[name] = content
        self._contents.move_to_end(name)
        if len(self._contents) > self._most:
            self._distrust(self._contents.popitem(last=False)[0])
        return True

    def is_ambiguous(self, name: bytes) -> bool:
        """Return whether a name may have stood for two contents, or for an unknown one."""
        bits = self._ambiguous
        return bits is not None and all(bits[place >> 3] & 1 << (place & 7) for place in _places(name))

    def forget(self, name: bytes) -> None:
        """Note that nothing is in vLLM's cache under a name; an ambiguous one stays so."""
        self._contents.pop(name, None)

    def clear(self) -> None:
        """Note that vLLM's cache is empty, so that no name stands for anything."""
        self._contents.clear()
        self._ambiguous = None

    def _distrust(self, name: bytes) -> None:
        if self._ambiguous is None:
            self._ambiguous = bytearray(_FILTER_BITS // 8)
        for place in _places(name):
            self._ambiguous[place >> 3] |= 1 << (place & 7)
        self.changes += 1


def named(*parts: Any) -> bytes:
    """Return the 16 bytes under which a ledger keeps a name or a content of plain values."""
    return hashlib.sha256(frame(parts)).digest()[:16]


def _places(name: bytes) -> list[int]:
    return [int.from_bytes(name[at : at + 4], "little") % _FILTER_BITS for at in range(0, 4 * _BITS_OF_NAME, 4)]


class Naming(NamedTuple):
    """A name of a request's and its content; None: it cannot be identified."""

    ledger: NameLedger
    name: bytes
    content: bytes | None

    def holds(self) -> bool:
        """Note it; return whether the name never stood for anything else."""
        return self.ledger.stands_for(self.name, self.content)
