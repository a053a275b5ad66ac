"""Check that every hook exists that the rewritten modules call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ucm.errors import PIP
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.manifest import DEFAULT_SEAM
from ucm.overlay.switches import RUN_UPSTREAM

if TYPE_CHECKING:
    from ucm.overlay.manifest import Manifest

UPGRADE = (
    "install the runtime that was built with this overlay: "
    f"`{PIP} install --force-reinstall --no-deps <ucm_runtime wheel>`"
)


class SeamMismatchError(OverlayImportError):
    """The overlay calls hooks that the installed runtime lacks."""


def missing_hooks(manifest: Manifest) -> list[str]:
    """Return the hooks that the overlay's modules call and the installed runtime lacks."""
    missing = []
    for seam, called in manifest.seams.items():
        known = _names(seam)
        missing += [hook if seam == DEFAULT_SEAM else f"{seam}.{hook}" for hook in called if hook not in known]
    return sorted(missing)


def _names(seam: str) -> set[str]:
    """Return the names in a seam's module; none if it cannot be imported."""
    try:
        module = importlib.import_module(seam)
    except ImportError:
        return set()
    return set(getattr(module, "__all__", dir(module)))


def check_seam(manifest: Manifest) -> None:
    """Refuse an overlay that needs a newer runtime.

    Raises:
        SeamMismatchError: Naming the missing hooks, which otherwise fail in the middle of a step.
    """
    missing = missing_hooks(manifest)
    if missing:
        raise SeamMismatchError(
            "it calls hooks that the installed runtime lacks",
            [f"hooks: {', '.join(missing)}", f"overlay: {manifest.version}, {manifest.directory}"],
            [UPGRADE, RUN_UPSTREAM],
        )
