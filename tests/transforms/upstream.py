"""The published modules that the transforms change, read once per test process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import libcst as cst

from transforms.pipeline.rewrite import module_path
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from transforms.engine.transform import Transform
    from transforms.pipeline.sources.tree import SourceTree


@functools.cache
def sources(release: str) -> SourceTree:
    return open_sources(release)


def source(transform: Transform, release: str) -> tuple[str, bytes] | None:
    """The path and the bytes of a transform's module; None where the release has none that is for use."""
    path = module_path(transform, sources(release))
    return (path, sources(release).read(path)) if path else None


def parsed(transform: Transform, release: str) -> tuple[str, cst.Module] | None:
    """The path and the tree of a transform's module."""
    found = source(transform, release)
    return (found[0], cst.parse_module(found[1])) if found else None
