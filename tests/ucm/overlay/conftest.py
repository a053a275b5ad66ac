"""A miniature vLLM, its overlay from the real pipeline, and environments with both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.environment import Environment
from tests.ucm.overlay.miniature import write_miniature
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.lock import accept, check_reviewed
from transforms.pipeline.package import build_package, build_runtime
from transforms.pipeline.product import UCM
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.local import open_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Wheels:
    """The wheels installed beside the miniature vLLM.

    Attributes:
        overlay: The overlay of the miniature vLLM.
        runtime: The runtime that it calls.
    """

    overlay: Path
    runtime: Path


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Both wheels, built like `build-overlay` does."""
    root = tmp_path_factory.mktemp("overlay")
    overlay = rewrite(open_directory(write_miniature(root / "upstream"), None))
    assert not overlay.failures
    check_overlay(overlay)
    overlay = replace(overlay, product=replace(UCM, overlays=root / "overlays"))
    accept(overlay)
    built = build_package(overlay, check_reviewed(overlay), root)
    return Wheels(built.wheel, build_runtime(root))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, wheels: Wheels) -> Environment:
    """An environment with vLLM, the overlay and the runtime, shared by tests that do not modify it."""
    environment = Environment.create(tmp_path_factory.mktemp("shared") / "venv")
    write_miniature(environment.site)
    environment.install(wheels.overlay, wheels.runtime)
    return environment


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """An empty environment."""
    return Environment.create(tmp_path / "venv")


@pytest.fixture
def upstream(bare: Environment) -> Environment:
    """An environment with only the miniature vLLM."""
    write_miniature(bare.site)
    return bare


@pytest.fixture
def overlaid(upstream: Environment, wheels: Wheels) -> Environment:
    """An environment with vLLM, the overlay and the runtime, which a test may modify."""
    upstream.install(wheels.overlay, wheels.runtime)
    return upstream


@pytest.fixture
def elsewhere(tmp_path: Path, wheels: Wheels) -> Callable[[], Path]:
    """Install the overlay into a directory that is not a site-packages directory."""

    def unpack() -> Path:
        target = tmp_path / "elsewhere"
        Environment(tmp_path, tmp_path, target).install(wheels.overlay)
        return target

    return unpack
