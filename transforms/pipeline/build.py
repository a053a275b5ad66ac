"""The workflow: make an overlay for a release, compare it with its lock, build the wheel.

Wheels that are installed together share a folder, so that one command installs them: an overlay and the runtime. For a
package that itself changes vLLM, as vLLM Ascend does, vLLM's overlay is with them.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.pipeline.census import check_classified, current
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.installed import installed
from transforms.pipeline.lock import check_reviewed
from transforms.pipeline.package import Built, build_package, build_runtime, folder_name
from transforms.pipeline.product import UCM, parse
from transforms.pipeline.rebindings import check_hooks_survive, pair, paired
from transforms.pipeline.results import Results
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.sources.tree import SourceError
from transforms.pipeline.trial import check_answered
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.pipeline.census import Found
    from transforms.pipeline.installed import Python
    from transforms.pipeline.product import Product
    from transforms.pipeline.sources.tree import SourceTree


class RewriteError(OverlayError):
    """Rules did not apply."""


def make_overlay(release: str | None, origin: str | SourceTree | None = None, product: Product = UCM) -> Overlay:
    """Rewrite a release's modules and check the result.

    Args:
        release: The release; may be None if ``origin`` states it.
        origin: None for the package index, ``installed``, a path, or opened sources.
        product: The package and the rules to apply to it.

    Raises:
        OverlayError: If the sources cannot be read, or a rule or check fails.
    """
    if origin is None or isinstance(origin, str):
        origin = open_sources(release, origin, package=product.package)
    results = Results(product, origin.release)
    overlay = rewrite(origin, product, results)
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


def check_complete(overlay: Overlay, found: Found, tree: SourceTree) -> None:
    """Refuse an overlay past which something runs, or whose record nobody wrote.

    Something runs past it at places that nobody classified, and in functions that lose hooks.

    Args:
        overlay: The overlay.
        found: The places of its release, see `transforms.pipeline.census`.
        tree: The sources that it was made of.

    Raises:
        OverlayError: Naming each.
    """
    check_answered(overlay.product)
    check_classified(found, overlay)
    if overlay.product.package.rebinds:
        check_hooks_survive(overlay, tree)


def build_overlay(
    release: str | None,
    origin: str | SourceTree | None = None,
    *,
    product: Product = UCM,
    out: Path = BUILD,
    all_hooks: bool = False,
    folder: str = "",
) -> Built:
    """Build the wheel of a reviewed overlay.

    Args:
        release: See `make_overlay`.
        origin: See `make_overlay`.
        product: See `make_overlay`.
        out: See `build_package`.
        all_hooks: Also insert the hooks that no shipped feature uses.
        folder: See `build_package`.

    Raises:
        OverlayError: If the overlay cannot be made, differs from its lock, or misses places that nobody has classified.
    """
    if origin is None or isinstance(origin, str):
        place, tree = origin, open_sources(release, origin, package=product.package)
    else:
        place, tree = None, origin
    overlay = make_overlay(release, tree, product)
    lock = check_reviewed(overlay, place)
    check_complete(overlay, current(tree, product), tree)
    return build_package(overlay, lock, out, all_hooks=all_hooks, folder=folder)


@dataclass(frozen=True)
class Order:
    """One overlay to build.

    Attributes:
        named: Its name on a command line; None: its sources state their release.
        origin: See `make_overlay`.
        folder: See `build_package`.
    """

    named: str | None
    origin: str | SourceTree | None = None
    folder: str = ""

    def build(self, out: Path, *, all_hooks: bool) -> Built:
        """Build the wheel.

        Raises:
            OverlayError: As `build_overlay`.
        """
        product, release = parse(self.named) if self.named else (UCM, None)
        return build_overlay(release, self.origin, product=product, out=out, all_hooks=all_hooks, folder=self.folder)


def ordered(names: Sequence[str | None], origin: str | None, *, all_hooks: bool) -> list[Order]:
    """Return what to build for some releases.

    A package that changes vLLM itself needs vLLM's overlay in its folder: the one of the paired release that is also
    named, for instance with another owner's rules, or UCM's.

    Raises:
        OverlayError: If a name is wrong, or the overlay of the paired vLLM release has not been reviewed.
    """
    parsed = {named: parse(named) for named in names if named}
    of_vllm = {release: named for named, (product, release) in parsed.items() if product.package == UCM.package}
    pairs = {named: pair(release) for named, (product, release) in parsed.items() if product.package.rebinds}
    orders = []
    for named in names:
        if named in pairs:
            product, release = parsed[named]
            folder = folder_name(product, release, all_hooks=all_hooks)
            vllm = of_vllm.get(pairs[named]) or paired(release)
            orders += [Order(vllm, _with_vllm(origin, pairs[named]), folder), Order(named, origin, folder)]
        elif named is None or parsed[named][1] not in pairs.values():
            orders.append(Order(named, origin))
    return orders


def _with_vllm(origin: str | None, release: str) -> str | None:
    """Return the origin of another package's sources if it has a vLLM release, too."""
    if origin is not None and (origin == "installed" or Path(origin).is_dir()):
        with contextlib.suppress(SourceError):
            open_sources(release, origin)
            return origin
    return None


def order_for(python: Python, *, all_hooks: bool) -> tuple[list[Order], list[str]]:
    """Return what to build for an interpreter's packages, and a sentence on each of their releases.

    Raises:
        OverlayError: As `installed`.
    """
    found = installed(python)
    product, tree, _ = found[-1]  # the package that changes vLLM, if there is one
    folder = folder_name(product, tree.release, all_hooks=all_hooks)
    return [Order(one.named(of.release), of, folder) for one, of, _ in found], [why for _, _, why in found]


def complete(built: list[Built]) -> dict[Path, list[Path]]:
    """Put the runtime's wheel into each folder.

    Returns:
        All wheels by folder, the runtime's first.

    Raises:
        PackageError: If hatchling fails.
    """
    folders: dict[Path, list[Path]] = {}
    for one in built:
        folders.setdefault(one.wheel.parent, []).append(one.wheel)
    runtime: Path | None = None
    for folder, wheels in folders.items():
        runtime = build_runtime(folder) if runtime is None else Path(shutil.copy(runtime, folder))
        wheels.insert(0, runtime)
    return folders
