"""Generate the files that are kept in git: locks, diffs, fingerprints and the pages of transforms.

CI runs this and then `git diff --exit-code`: nobody edits `overlays/` by hand.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.pipeline.build import make_overlay
from transforms.pipeline.census import census_path, census_text
from transforms.pipeline.lock import accepted_files, check_not_shipped, read_lock
from transforms.pipeline.parallel import each_release
from transforms.pipeline.product import UCM, parse, products
from transforms.pipeline.rebindings import rebindings_page
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.transforms_page import transforms_page
from transforms.place import IS_CHECKOUT, ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from transforms.pipeline.product import Product

FINGERPRINTS = ROOT / "ucm" / "overlay" / "fingerprints.json"
README = ROOT / "README.md"
#: The page of each product of this repository, by the owner of its rules.
PAGES = ROOT / "docs"
#: The page of all published releases, which `adopt published` draws.
RELEASES = PAGES / "releases.md"

#: How the README counts the reviewed releases.
RANGE = re.compile(r"\b\d+ releases \(\d[\w.]* to \d[\w.]*\)")
ALL = re.compile(r"\ball \d+ overlays\b")
#: A release in the table of published ones, up to its state.
ROW = re.compile(r"(\| ([\w.]+) \|.*\|) [^|]+ \|")


class RegenerationError(OverlayError):
    """Some overlays cannot be regenerated; nothing was written."""


def regenerate(releases: Sequence[str], console: Console) -> list[Path]:
    """Write all generated files, or none if one of them fails.

    Args:
        releases: The releases whose overlays to regenerate, as a command line names them.
        console: Where progress is shown.

    Returns:
        The files whose content changed, relative to the repository.

    Raises:
        RegenerationError: Naming every release that fails, and why.
    """
    made = list(each_release(_made_again, [(release,) for release in releases], console))
    failed = [f"{release}: {problem}" for release, problem, _ in made if problem]
    if failed:
        raise RegenerationError(
            f"{len(failed)} of {len(made)} overlays cannot be made again, and nothing was written:\n"
            + "\n".join(failed),
            fix="`nox -s drift -- all` shows every rule in every release",
        )
    files = {path: text for _, _, texts in made for path, text in texts.items()}
    changed = write_changed(files)
    return [*changed, *write_generated()]


def write_changed(files: Mapping[Path, str]) -> list[Path]:
    """Write files.

    Returns:
        Those whose content changed, relative to the repository.

    Raises:
        LockError: If one that changed is in the wheel of the tooling.
    """
    changed = []
    for path, text in files.items():
        if not path.exists() or path.read_bytes() != text.encode():
            check_not_shipped(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(shown(path))
    return changed


def write_generated(product: Product = UCM) -> list[Path]:
    """Write this repository's files that depend only on its locks and transforms; return those that changed.

    Args:
        product: The product whose lock was written. Another owner's changes none of them.
    """
    return write_changed(generated()) if IS_CHECKOUT and product in products() else []


def generated() -> dict[Path, str]:
    """Return the files that depend only on this repository's locks and transforms, by path."""
    pages = {PAGES / page_of(product): transforms_page(product) for product in products()}
    rebound = {
        PAGES / f"{product.publisher.owner}_rebindings.md": rebindings_page(product)
        for product in products()
        if product.package.rebinds and product.reviewed()
    }
    readme = {README: counted(README.read_text(encoding="utf-8"))} if README.exists() else {}
    listed = {RELEASES: marked(RELEASES.read_text(encoding="utf-8"))} if RELEASES.exists() else {}
    return {FINGERPRINTS: fingerprints(), **readme, **pages, **rebound, **listed}


def marked(text: str) -> str:
    """Return the page of all published releases with those that have a lock now marked as reviewed."""
    reviewed = {product.package.title: product.reviewed() for product in products()}
    lines, title = [], ""
    for line in text.splitlines():
        title = line.removeprefix("## ") if line.startswith("## ") else title
        row = ROW.fullmatch(line)
        lines.append(f"{row[1]} reviewed |" if row and row[2] in reviewed.get(title, ()) else line)
    return "\n".join(lines) + "\n"


def counted(text: str) -> str:
    """Return a text with the number and the range of the reviewed releases of vLLM as they are now."""
    reviewed = UCM.reviewed()
    if not reviewed:
        return text
    count = f"{len(reviewed)} releases ({reviewed[0]} to {reviewed[-1]})"
    return ALL.sub(f"all {len(reviewed)} overlays", RANGE.sub(count, text))


def page_of(product: Product) -> str:
    """Return the file name of a product's page of transforms."""
    return "transforms.md" if product.is_default else f"transforms_{'_'.join(product.owners)}.md"


def shown(path: Path) -> Path:
    """Return a path for printing: relative to the repository if it is in it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def fingerprints(product: Product = UCM) -> str:
    """Return the hashes of the upstream modules per reviewed release, by which `ucm doctor` recognises a release.

    One line per release: the path of each shadowed module, and the hash of vLLM's file there.
    """
    lines = []
    for release in product.reviewed():
        lock = read_lock(release, product)
        modules = {m["path"]: m["upstream_sha256"] for m in lock["modules"]} if lock else {}
        lines.append(f" {json.dumps(release)}: {json.dumps(modules)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def overlay_files(release: str, product: Product) -> dict[Path, str]:
    """Return the files of a reviewed overlay, made again.

    Raises:
        OverlayError: If the overlay cannot be made.
    """
    census = census_text(open_sources(release, package=product.package), product)
    return {**accepted_files(make_overlay(release, product=product)), census_path(release, product): census}


def _made_again(job: tuple[str]) -> tuple[str, str, dict[Path, str]]:
    """Return a release, its error (empty if none), and the files of its overlay."""
    (named,) = job
    try:
        product, release = parse(named)
        return named, "", overlay_files(release, product)
    except OverlayError as error:
        return named, str(error), {}
