"""The published modules that the transforms change, read once per test process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import libcst as cst

from transforms.ascend.registry import VLLM_ASCEND
from transforms.pipeline.rewrite import module_path
from transforms.pipeline.sources.open import open_sources
from transforms.registry import VLLM

if TYPE_CHECKING:
    from transforms.engine.registry import Package
    from transforms.engine.transform import Transform
    from transforms.pipeline.sources.tree import SourceTree


def package_of(transform: Transform) -> Package:
    """Return the package that a transform changes."""
    return VLLM_ASCEND if transform.id.startswith("ascend.") else VLLM


@functools.cache
def sources(release: str, package: Package = VLLM) -> SourceTree:
    return open_sources(release, package=package)


def source(transform: Transform, release: str) -> tuple[str, bytes] | None:
    """Return the path and the bytes of a transform's module; None if the release has none that is used."""
    tree = sources(release, package_of(transform))
    path = module_path(transform, tree)
    return (path, tree.read(path)) if path else None


def parsed(transform: Transform, release: str) -> tuple[str, cst.Module] | None:
    """Return the path and the tree of a transform's module."""
    found = source(transform, release)
    return (found[0], cst.parse_module(found[1])) if found else None
