"""Fixtures of the end-to-end tests: the engines of the release that ``UCM_E2E_RELEASE`` names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.e2e.shared import Shared
from tests.e2e.tests_inside import run_inside
from tests.system import VLLM

if TYPE_CHECKING:
    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.scenarios import Environments, Runs

VARIABLE = "UCM_E2E_RELEASE"
#: The time limit of a test with all of its engines, in seconds.
PATIENCE = 1500


#: The files that run first: the promise that tokens are the same, then the slowest, so that all test processes end at
#: about the same time.
FIRST = (
    "test_prefix_cache",
    "test_tokens",
    "test_real_model",
    "test_inside",
    "test_inside_newest",
    "test_ranks",
    "test_v2_runner",
    "test_sparse_company",
)
#: Judges of what methods find, which few changes can move: where the minutes do not suffice, they are not run.
LAST = ("test_sparse_judges", "test_real_answers", "test_sparse_quality")
#: All others are between them, in the order in which they were collected.
TURNS = {name: turn for first, names in ((-len(FIRST), FIRST), (1, LAST)) for turn, name in enumerate(names, first)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: TURNS.get(item.path.stem, 0))
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.fixture(scope="session")
def release() -> str:
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        pytest.skip(f"starts real vLLM engines: `nox -s e2e`, or set {VARIABLE}=0.32.0")
    VLLM.require()
    return wanted


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Results shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return Shared((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared")


@pytest.fixture(scope="session")
def environments(release: str, shared: Shared) -> Environments:
    from tests.e2e.scenarios import make_environments  # noqa: PLC0415 - only engines need the build's packages

    return shared.get("environments", lambda: make_environments(release))


@pytest.fixture(scope="session")
def runs(environments: Environments, shared: Shared) -> Runs:
    from tests.e2e.scenarios import Runs  # noqa: PLC0415

    return Runs(environments, shared)


@pytest.fixture(scope="session")
def prefix_runs(environments: Environments, shared: Shared) -> PrefixRuns:
    from tests.e2e.prefix_runs import PrefixRuns  # noqa: PLC0415

    return PrefixRuns(environments, shared)


@pytest.fixture(scope="module")
def wrong(request: pytest.FixtureRequest, environments: Environments) -> dict[str, str]:
    """The problems of the files that the selected tests of a module name, all run inside vLLM in one interpreter."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if isinstance(item, pytest.Function)]
    return run_inside(environments.overlay.python, [str(of["file"]) for of in params if "file" in of])
