"""What can go wrong in a store. By itself none of these ends a request: what could not be loaded is recomputed.

Only where vLLM cannot do that does the connector stop the engine, rather than compute with what is not there.

Every class has a ``cause``, a short word that is the label of the failure counters.
"""

from __future__ import annotations

from typing import ClassVar

from ucm.errors import UcmError


class StoreError(UcmError):
    """A block could not be stored or brought back."""

    cause: ClassVar[str] = "other"


class BlockMissingError(StoreError):
    """The block is not in the store, or no longer."""

    cause = "missing"


class BlockCorruptError(StoreError):
    """The block's bytes are not what was stored: cut short, changed, or no block at all. It has been set aside."""

    cause = "corrupt"


class BlockForeignError(StoreError):
    """The block is whole, but of another format version, namespace, key or geometry than what is asked for."""

    cause = "foreign"


class BlockUnreadableError(StoreError):
    """The medium does not read this block, and lets it be taken out of the way, after an I/O error for instance."""

    cause = "unreadable"


class IncompleteBlockError(StoreError):
    """A block was committed whose shards did not all arrive, or could not all be written; nothing of it is kept."""

    cause = "incomplete"


class StoreFullError(StoreError):
    """The medium has no room, or the writer is too far behind to take more."""

    cause = "full"


def too_far_behind(limit: int) -> StoreFullError:
    """What a dump is told beyond ``StoreConfig.dump_queue_bytes``."""
    return StoreFullError(
        f"more than {limit} bytes wait for being written",
        fix="raise dump_queue, or dump_threads if the medium is not busy",
    )


class StoreUnavailableError(StoreError):
    """The medium does not answer: a directory that vanished, a permission withdrawn, an input/output error."""

    cause = "unavailable"


class StoreTimeoutError(StoreUnavailableError):
    """The medium did not answer in time: a frozen server, a network that drops packets, a mount that hangs."""

    cause = "timeout"
