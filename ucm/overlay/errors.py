"""The error that prevents a rewritten module from loading: an ImportError, so that vLLM never runs half rewritten."""

from __future__ import annotations

import functools
from typing import Any


class OverlayImportError(ImportError):
    """A shadowed module cannot be loaded as reviewed, or an installed overlay is inactive in this process.

    Args:
        what: What is wrong, in one sentence.
        details: Lines of evidence.
        ways_out: What can be done about it.
        name: The module.
    """

    def __init__(self, what: str, details: list[str], ways_out: list[str], *, name: str | None = None) -> None:
        lines = [f"UCM overlay: {what}", *(f"    {line}" for line in details)]
        lines += ["  ways out:", *(f"    - {line}" for line in ways_out)] if ways_out else []
        super().__init__("\n".join(lines), name=name)
        self.what, self.details, self.ways_out = what, details, ways_out

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: a child process sends the whole error to its parent."""
        return functools.partial(type(self), name=self.name), (self.what, self.details, self.ways_out)
