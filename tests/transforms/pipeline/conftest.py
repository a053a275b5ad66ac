"""Fixtures of the miniature vLLM and its overlay, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import write_miniature
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.local import open_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains the miniature vLLM."""
    return write_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def overlay(miniature: Path) -> Overlay:
    """The overlay of the miniature vLLM."""
    return rewrite(open_directory(miniature, None))
