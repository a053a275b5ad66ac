"""Errors of a store. None of them ends a request by itself: blocks that could not be loaded are recomputed.

Where vLLM cannot recompute them, the connector stops the engine rather than compute with missing KV.

Every class has a ``cause``, a short word that labels the failure counters.
"""

from __future__ import annotations

from typing import ClassVar

from ucm.errors import UcmError


class StoreError(UcmError):
    """A block could not be stored or loaded."""

    cause: ClassVar[str] = "other"


class BlockMissingError(StoreError):
    """The block is not in the store, or not any more."""

    cause = "missing"


class BlockCorruptError(StoreError):
    """The block's bytes differ from those stored: truncated, changed, or not a block. It has been quarantined."""

    cause = "corrupt"


class BlockForeignError(StoreError):
    """The block is intact but has another format version, namespace, key or geometry than expected."""

    cause = "foreign"


class BlockUnreadableError(StoreError):
    """The medium cannot read this block, for instance because of an I/O error, but lets it be moved away."""

    cause = "unreadable"


class IncompleteBlockError(StoreError):
    """A block was committed without all of its layer slices, or some could not be written; none are kept."""

    cause = "incomplete"


class StoreFullError(StoreError):
    """The medium has no room, or the write queue is full."""

    cause = "full"


def too_far_behind(limit: int) -> StoreFullError:
    """Return the error of a save that exceeds ``StoreConfig.save_queue_bytes``."""
    return StoreFullError(
        f"more than {limit} bytes wait for being written",
        fix="raise save_queue, or save_threads if the medium is not busy",
    )


class StoreUnavailableError(StoreError):
    """The medium does not answer: a directory vanished, a permission was withdrawn, an I/O error occurred."""

    cause = "unavailable"


class StoreTimeoutError(StoreUnavailableError):
    """The medium did not answer in time: a frozen server, a network that drops packets, a mount that hangs."""

    cause = "timeout"
