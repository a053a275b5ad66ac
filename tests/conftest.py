"""What holds for all tests."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_open() -> Iterator[None]:
    """A file or connection that a module's tests leave open fails that module, not whichever collects it as garbage."""
    yield
    gc.collect()
