"""The workflow: a release's name in, an overlay that is what was reviewed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.lock import OVERLAYS, check_reviewed
from transforms.pipeline.package import BUILD, Built, build_package
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from pathlib import Path


class RewriteError(OverlayError):
    """Rules did not apply."""


def make_overlay(release: str | None, origin: str | None = None) -> Overlay:
    """Rewrite a release's modules and check the result.

    Args:
        release: The release; may be None where ``origin`` tells it.
        origin: None for the package index, ``installed``, or a path.

    Raises:
        OverlayError: If the sources cannot be had, a rule fails, or a check does.
    """
    overlay = rewrite(open_sources(release, origin))
    if overlay.failures:
        raise RewriteError(
            f"{len(overlay.failures)} of {len(overlay.outcomes)} rules do not apply to vLLM {overlay.release}:\n"
            + "\n".join(outcome.describe() for outcome in overlay.failures),
            fix=f"`nox -s drift -- {overlay.release}` shows every rule; give the failing ones a variant for this "
            "release (CONTRIBUTING.md, «Try a new vLLM release»)",
        )
    check_overlay(overlay)
    return overlay


def build_overlay(
    release: str | None, origin: str | None = None, *, out: Path = BUILD, overlays: Path = OVERLAYS
) -> Built:
    """Build the wheel of a reviewed overlay.

    Raises:
        OverlayError: If it cannot be made, or is not what was reviewed.
    """
    overlay = make_overlay(release, origin)
    lock = check_reviewed(overlay, overlays, origin)
    return build_package(overlay, lock, out)
