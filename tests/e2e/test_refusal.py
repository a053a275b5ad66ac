"""A real engine refuses to run partly rewritten: it ends with our message, whichever process notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.engine import PATIENCE
from tests.e2e.scenarios import EDITED, TAMPERED

if TYPE_CHECKING:
    from tests.e2e.scenarios import Runs

pytestmark = pytest.mark.e2e


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "tampered",
            f"UCM overlay: the rewritten {_dotted(TAMPERED)} is not the one that was reviewed",
            marks=pytest.mark.newest_only,
        ),
        # One reason is enough to see that a release's processes end: the others differ in our own checks.
        ("edited", f"UCM overlay: {_dotted(EDITED)} is not the file of vLLM"),
        pytest.param(
            "on PYTHONPATH",
            "UCM overlay: it is installed, and its finder does not run in this process",
            marks=pytest.mark.newest_only,
        ),
    ],
)
def test_the_engine_ends_with_our_message(runs: Runs, name: str, message: str) -> None:
    run = runs[name]
    assert run.code > 0
    assert run.seconds < PATIENCE
    assert not run.phases
    assert message in run.log
    assert "ways out:" in run.log
