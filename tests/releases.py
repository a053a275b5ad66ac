"""The supported releases: those with a reviewed overlay, oldest first. The tests cover all of them."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

OVERLAYS = Path(__file__).parents[1] / "overlays"


def reviewed(project: str) -> tuple[str, ...]:
    """Return the releases of a project that have a lock in this repository, oldest first."""
    names = (lock.parent.name.removeprefix(f"{project}-") for lock in OVERLAYS.glob(f"{project}-[0-9]*/lock.json"))
    return tuple(sorted(names, key=Version))


REVIEWED = reviewed("vllm")
#: The releases of vLLM Ascend, with candidates.
ASCEND = reviewed("vllm-ascend")
