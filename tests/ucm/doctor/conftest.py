"""The environments of the doctor's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.doctor.site import Site, write_overlay, write_vllm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bare(tmp_path: Path) -> Site:
    """An environment with only the runtime."""
    return Site.create(tmp_path / "venv")


@pytest.fixture
def site(bare: Site) -> Site:
    """An environment without problems."""
    write_vllm(bare.packages)
    write_overlay(bare.packages)
    return bare
