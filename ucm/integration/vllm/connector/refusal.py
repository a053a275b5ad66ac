"""What keeps a part of UCM from starting, said in the log."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucm.errors import UcmError
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def refusals_logged(tag: str) -> Iterator[None]:
    """Log an error of ours whole, under a tag of its own, on its way to vLLM.

    vLLM prints it among its tracebacks, once per process, with its own words before each line; in one record it is
    found by its tag.

    Args:
        tag: The part's, as ``UCM.Config``.

    Raises:
        UcmError: As it came.
    """
    try:
        yield
    except UcmError as error:
        get_logger(__name__).error("[%s] refused: %s", tag, error)
        raise
