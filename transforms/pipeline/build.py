"""The workflow: make an overlay for a release, compare it with its lock, build the wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.lock import check_reviewed
from transforms.pipeline.package import BUILD, Built, build_package
from transforms.pipeline.product import UCM
from transforms.pipeline.results import Results
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.product import Product


class RewriteError(OverlayError):
    """Rules did not apply."""


def make_overlay(release: str | None, origin: str | None = None, product: Product = UCM) -> Overlay:
    """Rewrite a release's modules and check the result.

    Args:
        release: The release; may be None if ``origin`` states it.
        origin: None for the package index, ``installed``, or a path.
        product: The package and the rules to apply to it.

    Raises:
        OverlayError: If the sources cannot be read, or a rule or check fails.
    """
    tree = open_sources(release, origin, package=product.package)
    results = Results(product, tree.release)
    overlay = rewrite(tree, product, results)
    if overlay.failures:
        raise RewriteError(
            f"{len(overlay.failures)} of {len(overlay.outcomes)} rules do not apply to {overlay.title}:\n"
            + "\n".join(outcome.describe() for outcome in overlay.failures),
            fix=f"`nox -s drift -- {overlay.named}` shows every rule; give the failing ones a variant for this "
            "release (CONTRIBUTING.md, 'Try a new vLLM release')",
        )
    check_overlay(overlay, passed=results.found)
    results.keep(overlay.modules)
    return overlay


def build_overlay(
    release: str | None,
    origin: str | None = None,
    *,
    product: Product = UCM,
    out: Path = BUILD,
    all_hooks: bool = False,
) -> Built:
    """Build the wheel of a reviewed overlay.

    Args:
        release: See `make_overlay`.
        origin: See `make_overlay`.
        product: See `make_overlay`.
        out: See `build_package`.
        all_hooks: Also insert the hooks that no shipped feature uses.

    Raises:
        OverlayError: If the overlay cannot be made, or differs from its lock.
    """
    overlay = make_overlay(release, origin, product)
    lock = check_reviewed(overlay, origin)
    return build_package(overlay, lock, out, all_hooks=all_hooks)
