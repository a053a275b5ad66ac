"""In vLLM's own MultiConnector: what another connector has loaded is not saved, and only that one hands over."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.ucm.stepping.setting import EngineSetting
from tests.ucm.stepping.vllm_objects import Requests, engine_config, make_scheduler, runner_output
from ucm.integration.vllm.connector import identity

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 4
FOREIGN = list(range(10, 30))
OURS = list(range(40, 60))


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM is untyped here
    """Another connector, with the KV of some tokens."""

    has: ClassVar[dict[int, int]] = {}  # the number of tokens, by the first token of a prompt

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, self.has.get(request.prompt_token_ids[0], 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, {"remote_block_ids": block_ids} if request.kv_transfer_params else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class Engine:
    """vLLM's scheduler with both connectors, of which ours only saves."""

    def __init__(self, directory: Path) -> None:
        store = {"pipeline": "Posix", "directories": [str(directory)]}
        ours = {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
            "kv_connector_extra_config": {"store": store, "metrics_log_interval": 0},
        }
        other = {"kv_connector": "OtherConnector", "kv_role": "kv_both", "kv_connector_module_path": __name__}
        transfer = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [other, ours]}
        )
        setting = EngineSetting(blocks=64, budget=64)
        config = engine_config(write_model(MODEL), setting, SIZE, 256, kv_transfer_config=transfer)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, head_size_v=0, dtype=torch.int64)
        with patch.object(identity, "process_started", lambda: float("inf")):
            self.scheduler = make_scheduler(config, KVCacheConfig(64, [], [KVCacheGroupSpec(["layer.0"], spec)]))
        self._new = Requests(SIZE)
        #: The ``kv_transfer_params`` of the last answers.
        self.handed_over: list[dict[str, Any] | None] = []

    def saved(self, prompt: list[int], **params: Any) -> int:
        """Compute a request's prompt in one step; return how many of its blocks are saved."""
        request = self._new.make(prompt, 1)
        request.kv_transfer_params = params or None
        self.scheduler.add_request(request)
        count = 0
        while self.scheduler.has_requests():
            output = self.scheduler.schedule()
            plan = output.kv_connector_metadata.metadata[1].plan
            count += sum(len(moves.keys) for moves in (*plan.saves, *plan.late_saves))
            sampled = {request_id: [3] for request_id in output.num_scheduled_tokens}
            for answers in self.scheduler.update_from_output(output, runner_output(output, sampled)).values():
                self.handed_over = [answer.kv_transfer_params for answer in answers.outputs] or self.handed_over
        return count


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(OtherConnector, "has", {FOREIGN[0]: 2 * SIZE})
    return Engine(tmp_path)


def test_what_another_connector_has_loaded_is_not_saved_nor_what_is_behind_it(engine: Engine) -> None:
    assert engine.saved(FOREIGN) == 0


def test_not_even_by_another_request_that_finds_it_in_vllms_own_prefix_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.saved(FOREIGN)
    monkeypatch.setattr(OtherConnector, "has", {})
    assert engine.saved([*FOREIGN, *range(90, 98)]) == 0
    assert engine.saved([*FOREIGN[: 2 * SIZE], *range(70, 79)]) == 0
    assert engine.saved([*FOREIGN[:SIZE], *range(70, 79)]) == 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.saved(FOREIGN) == 5


def test_what_the_engine_has_computed_is_saved(engine: Engine) -> None:
    """Including hits in the engine's own prefix cache: the store skips blocks that it already has."""
    engine.saved(FOREIGN)
    assert engine.saved(OURS) == 5
    assert engine.saved([*OURS, *range(90, 98)]) == 7


def test_a_prompt_that_another_connector_has_before_its_first_whole_block(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a block has no hash until it is full."""
    monkeypatch.setattr(OtherConnector, "has", {5: 2})
    assert engine.saved([5, 6, 7]) == 0
    assert engine.saved(OURS) == 5
    assert engine.saved([*OURS, *range(90, 98)]) == 0  # it is no longer known which connector filled vLLM's blocks


def test_only_the_other_connector_says_where_a_request_s_blocks_are(engine: Engine) -> None:
    """Before vLLM merged the answers of two connectors, it ended the engine."""
    assert engine.saved(OURS, do_remote_decode=True) == 5
    (handed_over,) = engine.handed_over
    assert handed_over is not None
    assert set(handed_over) == {"remote_block_ids"}


def test_a_failed_load_is_computed_though_the_engine_has_another_configuration(engine: Engine) -> None:
    assert engine.scheduler.recompute_kv_load_failures


def test_vllm_asks_ours_where_a_hit_of_ours_comes_from(engine: Engine) -> None:
    request = engine._new.make(OURS, 1)
    multi = engine.scheduler.connector
    side = multi._connectors[1]._scheduler
    multi._requests_to_connector[request.request_id] = 1
    found = Counter({"dram": SIZE, "posix": 2 * SIZE, "redis": SIZE, "s3": SIZE})
    with patch.object(side, "tiers", autospec=True, return_value=found):
        told = multi.get_external_cache_hit_sources(request, 22)
    assert {source.value: tokens for source, tokens in told.items()} == {
        "host": SIZE,
        "disk": 2 * SIZE,
        "external_unspecified": 2 * SIZE + 2,
    }


@pytest.mark.parametrize("name", ["UCMConnector", "UCMDirectConnector", "UCMLayerWiseConnector", "UCMMockConnector"])
def test_metrics_that_arrive_from_another_process_are_read(name: str) -> None:
    """vLLM then looks up the connector by its registered name, which used to end the engine."""
    importlib.import_module("ucm.integration.vllm.ucm_connector")
    assert MultiConnector.build_kv_connector_stats({name: {}}) is not None


@pytest.mark.parametrize("rebuilds", [True, False])
def test_metrics_that_vllm_cannot_bring_to_another_process_are_not_given_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rebuilds: bool
) -> None:
    """That of 0.11.0 takes what arrives for what was sent; its first log of statistics ended the engine."""
    if not rebuilds:
        monkeypatch.delattr(multi_connector, "MultiKVConnectorPromMetrics")
    ours = Engine(tmp_path).scheduler.connector._connectors[1]
    ours._scheduler.counters.looked_up(8, 4, 0.1)
    assert (ours.get_kv_connector_stats() is not None) == rebuilds
