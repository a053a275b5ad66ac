"""Do the overlay and the runtime beside it belong together: does every hook exist that rewritten modules call?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ucm.overlay.errors import OverlayImportError
from ucm.overlay.switches import RUN_UPSTREAM

if TYPE_CHECKING:
    from ucm.overlay.manifest import Manifest

HOOKS = "ucm.integration.vllm.hooks"
UPGRADE = (
    "install the runtime that was built with this overlay: "
    "`pip install --force-reinstall --no-deps <ucm_runtime wheel>`"
)


class SeamMismatchError(OverlayImportError):
    """The overlay calls hooks that the installed runtime does not have."""


def missing_hooks(manifest: Manifest) -> list[str]:
    """The hooks that the overlay's modules call and the installed runtime lacks."""
    known = set(importlib.import_module(HOOKS).__all__)
    called = {hook for module in manifest.modules.values() for hook in module.hooks}
    return sorted(called - known)


def check_seam(manifest: Manifest) -> None:
    """Refuse an overlay that is newer than the runtime.

    Raises:
        SeamMismatchError: Naming the hooks; without it they would be missed in the middle of a step.
    """
    missing = missing_hooks(manifest)
    if missing:
        raise SeamMismatchError(
            "it calls hooks that the installed runtime does not have",
            [f"hooks: {', '.join(missing)}", f"overlay: {manifest.version}, {manifest.directory}"],
            [UPGRADE, RUN_UPSTREAM],
        )
