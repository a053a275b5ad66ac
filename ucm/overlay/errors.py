"""Errors that prevent a rewritten module from loading: ImportErrors, so that vLLM never runs half rewritten."""

from __future__ import annotations

import functools
from typing import Any


class OverlayImportError(ImportError):
    """A shadowed module cannot be loaded as reviewed."""

    def __init__(self, what: str, details: list[str], ways_out: list[str], *, name: str | None = None) -> None:
        lines = [f"UCM overlay: {what}", *(f"    {line}" for line in details)]
        lines += ["  ways out:", *(f"    - {line}" for line in ways_out)] if ways_out else []
        super().__init__("\n".join(lines), name=name)
        self.what, self.details, self.ways_out = what, details, ways_out

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: a child process sends the whole error to its parent."""
        return functools.partial(type(self), name=self.name), (self.what, self.details, self.ways_out)


class UpstreamMismatchError(OverlayImportError):
    """The installed vLLM module is not the one from which the overlay was made."""


class SharedModuleError(OverlayImportError):
    """Two overlays shadow the same module."""


class SeamMismatchError(OverlayImportError):
    """The overlay calls hooks that are not installed."""


class TamperedOverlayError(OverlayImportError):
    """A file of the overlay is not the one that was reviewed."""


class InactiveOverlayError(OverlayImportError):
    """An overlay is installed but inactive in this process."""
