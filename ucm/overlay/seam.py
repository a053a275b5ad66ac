"""Check that every hook exists that the rewritten modules call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ucm.errors import PIP
from ucm.overlay.errors import OverlayImportError
from ucm.overlay.manifest import DEFAULT_SEAM
from ucm.overlay.switches import RUN_UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.overlay.manifest import Manifest

UPGRADE = (
    "install the runtime that was built with this overlay: "
    f"`{PIP} install --force-reinstall --no-deps <ucm_runtime wheel>`"
)


class SeamMismatchError(OverlayImportError):
    """The overlay calls hooks that are not installed."""


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


def how_to_complete(manifest: Manifest, missing: Sequence[str]) -> list[str]:
    """Return what to install for missing hooks: the runtime, or the projects of other owners' seams."""
    seams = sorted({hook.rpartition(".")[0] for hook in missing} - {""})
    help_at = f" ({manifest.url})" if manifest.url else ""
    of = f"the project of {manifest.publisher} that has"
    others = [f"install {of} {seam}, in the release that this overlay needs{help_at}" for seam in seams]
    return [*([UPGRADE] if any("." not in hook for hook in missing) else []), *others]


def check_seam(manifest: Manifest) -> None:
    """Refuse an overlay that needs a newer runtime, or a project that is not installed.

    Raises:
        SeamMismatchError: Naming the missing hooks, which otherwise fail in the middle of a step.
    """
    missing = missing_hooks(manifest)
    if missing:
        raise SeamMismatchError(
            "it calls hooks that are not installed",
            [f"hooks: {', '.join(missing)}", f"overlay: {manifest.version}, {manifest.directory}"],
            [*how_to_complete(manifest, missing), RUN_UPSTREAM],
        )
