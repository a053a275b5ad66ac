"""Log errors that keep a part of UCM from starting."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucm.errors import UcmError
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def refusals_logged(tag: str) -> Iterator[None]:
    """Log UCM's errors as one record under a tag, and raise them on to vLLM.

    vLLM prints such an error among its tracebacks, once per process, with a prefix before each line; the tag makes it
    easy to find.

    Args:
        tag: The part's tag, for instance ``UCM.Config``.

    Raises:
        UcmError: The error, unchanged.
    """
    try:
        yield
    except UcmError as error:
        get_logger(__name__).error("[%s] refused: %s", tag, error)
        raise
