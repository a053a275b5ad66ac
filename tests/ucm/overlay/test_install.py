"""Both wheels can be installed with pip."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.ucm.overlay.miniature import SCHEDULER

if TYPE_CHECKING:
    from tests.ucm.overlay.conftest import Wheels
    from tests.ucm.overlay.environment import Environment


def pip(environment: Environment, *arguments: str) -> None:
    """Run this interpreter's pip on another environment, offline."""
    subprocess.run([sys.executable, "-m", "pip", "--python", environment.python, *arguments], check=True)


def test_pip_installs_and_uninstalls_it(upstream: Environment, wheels: Wheels) -> None:
    before = {path: path.read_bytes() for path in upstream.site.rglob("*.py")}
    # Shadowing needs none of the packages that the connectors import.
    pip(upstream, "install", "--quiet", "--no-index", "--no-deps", str(wheels.runtime), str(wheels.overlay))

    assert upstream.origin(SCHEDULER) == upstream.overlay_file(SCHEDULER)
    assert {path: path.read_bytes() for path in before} == before

    pip(upstream, "uninstall", "--quiet", "--yes", "ucm-vllm-overlay")

    assert upstream.origin(SCHEDULER) == upstream.upstream_file(SCHEDULER)
    assert not list(upstream.site.glob("ucm_vllm_overlay*"))
