"""The scheduler's part says at its start what a lost block will do to the engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig, write_model
from ucm.config.load import load_connector_config
from ucm.integration.vllm.connector.scheduler_side import SchedulerSide
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SENTENCE = (
    "[UCM.Connector] a block that is lost between lookup and load will stop the engine: with connector: layerwise, "
    "vLLM cannot compute the tokens of failed blocks under asynchronous scheduling; "
    "set connector: direct, or start vLLM with --no-async-scheduling"
)


class Base:
    """vLLM's connector class, as it stands since 0.19.1."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def requires_piecewise_for_cudagraph(self) -> bool:
        return False

    def bind_gpu_block_pool(self, pool: object) -> None:
        raise NotImplementedError(pool)


class FullAttentionSpec:
    """As much of vLLM's specification as is read."""

    block_size = 16
    page_size_bytes = 1024


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, "ucm"):
        yield caplog
    get_logger().removeHandler(caplog.handler)


def start(directory: Path, connector: str, *, asynchronous: bool, loads: bool = True) -> None:
    """Create the scheduler's part, and close it."""
    extra = {"store": {"directories": str(directory / "store")}, "connector": connector, "metrics": False}
    engine: Any = VllmConfig(ModelConfig(str(write_model(directory / "model"))))
    engine.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
    engine.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config=extra, is_kv_consumer=loads, is_kv_producer=True
    )
    engine.cache_config.enable_prefix_caching = True
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=FullAttentionSpec())
    kv_cache = SimpleNamespace(num_blocks=9, kv_cache_groups=[group])
    SchedulerSide(engine, kv_cache, load_connector_config(extra), Base).close()


def test_where_vllm_cannot_mend_a_lost_block_the_operator_is_warned(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    start(tmp_path, "layerwise", asynchronous=True)
    warned = [text for text in log.messages if "lost between lookup and load" in text]
    assert warned == [SENTENCE]


@pytest.mark.parametrize(
    ("connector", "asynchronous", "loads"),
    [("direct", True, True), ("layerwise", False, True), ("layerwise", True, False)],
)
def test_else_nobody_is(
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    connector: str,
    asynchronous: bool,
    loads: bool,
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    start(tmp_path, connector, asynchronous=asynchronous, loads=loads)
    assert not [text for text in log.messages if "will stop the engine" in text]
