"""What is generated and kept: locks, diffs, fingerprints and the page of transforms.

CI runs this and then `git diff --exit-code`: nothing under `overlays/` is ever edited by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.pipeline.build import make_overlay
from transforms.pipeline.lock import OVERLAYS, accepted_files, read_lock, reviewed_releases
from transforms.pipeline.parallel import each_release
from transforms.pipeline.transforms_page import transforms_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

ROOT = Path(__file__).parents[2]
FINGERPRINTS = ROOT / "ucm" / "overlay" / "fingerprints.json"
TRANSFORMS_PAGE = ROOT / "docs" / "transforms.md"


class RegenerationError(OverlayError):
    """Some overlays cannot be made again; nothing was written."""


def regenerate(releases: Sequence[str], console: Console) -> list[Path]:
    """Write everything generated anew: all of it, or nothing.

    Args:
        releases: The releases whose overlays are made again.
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
    kept = [*files, FINGERPRINTS, TRANSFORMS_PAGE]
    before = {path: path.read_bytes() if path.exists() else b"" for path in kept}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    write_generated()
    return [path.relative_to(ROOT) for path in kept if path.read_bytes() != before[path]]


def write_generated() -> None:
    """Write what follows from the locks and the transforms alone."""
    FINGERPRINTS.write_text(fingerprints(), encoding="utf-8")
    TRANSFORMS_PAGE.parent.mkdir(exist_ok=True)
    TRANSFORMS_PAGE.write_text(transforms_page(), encoding="utf-8")


def fingerprints(overlays: Path = OVERLAYS) -> str:
    """The upstream contents of every reviewed release, so that `ucm doctor` can tell a release by its files.

    One line per release: the path of each module that its overlay shadows, and the content that vLLM has there.
    """
    lines = []
    for release in reviewed_releases(overlays):
        lock = read_lock(release, overlays)
        modules = {m["path"]: m["upstream_sha256"] for m in lock["modules"]} if lock else {}
        lines.append(f" {json.dumps(release)}: {json.dumps(modules)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _made_again(job: tuple[str]) -> tuple[str, str, dict[Path, str]]:
    """A release, what is wrong with it (nothing, if empty), and the files of its overlay."""
    (release,) = job
    try:
        return release, "", accepted_files(make_overlay(release))
    except OverlayError as error:
        return release, str(error), {}
