"""The environments of the doctor's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.doctor.site import Site, write_overlay, write_vllm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The environment of which `bare` is a copy."""
    return Site.create(tmp_path_factory.mktemp("runtime") / "venv")


@pytest.fixture
def bare(runtime: Site, tmp_path: Path) -> Site:
    """An environment with only the runtime."""
    return runtime.copy(tmp_path / "venv")


@pytest.fixture
def site(bare: Site) -> Site:
    """An environment without problems."""
    write_vllm(bare.packages)
    write_overlay(bare.packages)
    return bare
