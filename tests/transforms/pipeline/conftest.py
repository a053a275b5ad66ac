"""Fixtures of the miniature vLLM and its overlay, made once, and a checkout that builds it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import write_miniature
from transforms.pipeline.build import make_overlay
from transforms.pipeline.lock import accept
from transforms.pipeline.product import UCM
from transforms.pipeline.review.model import make_review
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.local import open_directory
from transforms.place import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.review.model import Review

#: The parts of this repository that the build of an overlay needs.
PARTS = ("transforms", "ucm", "pyproject.toml", "LICENSE", "NOTICE")


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains the miniature vLLM."""
    return write_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def overlay(miniature: Path) -> Overlay:
    """The overlay of the miniature vLLM."""
    return rewrite(open_directory(miniature, None))


@pytest.fixture(scope="session")
def review() -> Review:
    """The review of a published release."""
    return make_review(make_overlay("0.16.0"))


@pytest.fixture
def repository(tmp_path: Path, overlay: Overlay) -> Path:
    """A checkout whose only reviewed release is the miniature's."""
    root = tmp_path / "checkout"
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, root / name)
    accept(replace(overlay, product=replace(UCM, overlays=root / "overlays")))
    return root
