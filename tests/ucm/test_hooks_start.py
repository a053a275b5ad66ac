"""The log lines when a sparse method starts, or fails to start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.test_hooks import Scheduler, VllmConfig, started
from ucm.errors import SparseMethodError, UcmError
from ucm.integration.vllm import hooks
from ucm.logger import get_logger
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_works_sparsely", False)


class Starting(SparseMethod):
    """Does nothing."""


class Refusing(SparseMethod):
    """Refuses to start on either side."""

    def worker_started(self) -> None:
        raise SparseMethodError("it cannot be served", where="here", fix="do without")

    def scheduler_started(self, scheduler: Any) -> None:
        raise SparseMethodError("it cannot be served", where=type(scheduler).__name__, fix="do without")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=get_logger().name):
        yield caplog
    get_logger().removeHandler(caplog.handler)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", [f"{__name__}:Refusing", "Unheard"])
def test_a_refusal_is_one_record_and_nothing_says_active(name: str, role: Role, log: pytest.LogCaptureFixture) -> None:
    config = VllmConfig({"ucm_sparse_config": {name: {}}})
    with pytest.raises(UcmError) as caught:
        _start(role, config)
    (record,) = log.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"[UCM.Sparse] refused: {caught.value}"


@pytest.mark.parametrize("role", Role)
def test_what_was_started_is_active(role: Role, log: pytest.LogCaptureFixture) -> None:
    _start(role, VllmConfig({"ucm_sparse_config": {f"{__name__}:Starting": {}}}))
    (record,) = log.records
    assert record.getMessage() == f"[UCM.Sparse] {__name__}:Starting is active on the {role.value} side"


def _start(role: Role, config: VllmConfig) -> None:
    if role is Role.WORKER:
        started(config)
    else:
        hooks.scheduler_init(Scheduler(config))
