"""Access to the projects in `examples/`, imported like any third-party project."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from transforms.pipeline.package import ROOT

if TYPE_CHECKING:
    from transforms.engine.registry import Registry

EXAMPLES = ROOT / "examples"


def registry_of(project: str) -> Registry:
    """Return the registry of an example that changes a package."""
    found: Registry = runpy.run_path(str(EXAMPLES / project / project / "rules.py"))["REGISTRY"]
    return found
