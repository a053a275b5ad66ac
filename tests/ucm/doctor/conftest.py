"""What the doctor's tests start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.doctor.site import Site, write_overlay, write_vllm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bare(tmp_path: Path) -> Site:
    """The runtime alone."""
    return Site.create(tmp_path / "venv")


@pytest.fixture
def site(bare: Site) -> Site:
    """All as it should be."""
    write_vllm(bare.packages)
    write_overlay(bare.packages)
    return bare
