"""What the end-to-end tests share: the engines of the release that ``UCM_E2E_RELEASE`` names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.scenarios import Environments, Runs

VARIABLE = "UCM_E2E_RELEASE"


@pytest.fixture(scope="session")
def release() -> str:
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        pytest.skip(f"starts real vLLM engines: `nox -s e2e`, or set {VARIABLE}=0.32.0")
    return wanted


@pytest.fixture(scope="session")
def environments(release: str) -> Environments:
    from tests.e2e.scenarios import Environments  # noqa: PLC0415 - only engines need the build's packages

    return Environments(release)


@pytest.fixture(scope="session")
def runs(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    from tests.e2e.scenarios import Runs  # noqa: PLC0415

    made = Runs(environments, tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def prefix_runs(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixRuns]:
    from tests.e2e.prefix_runs import PrefixRuns  # noqa: PLC0415

    made = PrefixRuns(release, tmp_path_factory.mktemp("prefix-engines"))
    yield made
    made.close()
