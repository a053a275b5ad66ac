"""A LoRA adapter that vLLM's manager replaces in place is noticed; evicting and reloading one is ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from ucm.integration.vllm.connector.identity import LiveAdapters


class Adapters:
    """vLLM's managers for a model without modules, with room for two adapters; no files are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager: Any = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
        manager.model = SimpleNamespace(lora_manager=manager)
        manager.lora_config = SimpleNamespace(max_loras=2, max_cpu_loras=2)
        manager.packed_modules, manager.modules, manager.lora_index_to_id = {}, {}, [None, None]
        manager._registered_adapters = AdapterLRUCache(2, manager.deactivate_adapter)
        manager._active_adapters = AdapterLRUCache(2, manager._deactivate_adapter)
        manager._enable_mixed_moe_lora_format = False
        self.worker: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        self.worker._adapter_manager = manager
        layer = LoRALayerWeights("layer.0", 8, 8, torch.zeros(8, 4), torch.zeros(4, 8))
        monkeypatch.setattr(
            self.worker,
            "_load_adapter",
            lambda lora_request: LoRAModel(lora_request.lora_int_id, 8, {"layer.0": layer}),
        )
        self.live = LiveAdapters.of(manager.model)

    def add(self, number: int, *, in_place: bool = False) -> None:
        self.worker.add_adapter(LoRARequest(f"a{number}", number, "/adapter", load_inplace=in_place))

    def replaced(self) -> frozenset[int]:
        assert self.live is not None
        return self.live.replaced()


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Adapters:
    return Adapters(monkeypatch)


def test_an_adapter_that_is_loaded_in_place_was_replaced(adapters: Adapters) -> None:
    assert adapters.replaced() == frozenset()
    adapters.add(1)
    adapters.add(2)
    assert adapters.replaced() == frozenset()
    adapters.add(1)
    assert adapters.replaced() == frozenset()
    adapters.add(1, in_place=True)
    assert adapters.replaced() == {1}
    adapters.add(2)
    assert adapters.replaced() == {1}


def test_one_that_is_loaded_in_place_for_the_first_time_replaces_nothing(adapters: Adapters) -> None:
    adapters.add(1, in_place=True)
    assert adapters.replaced() == frozenset()


def test_one_that_was_evicted_is_told_by_its_next_request(adapters: Adapters) -> None:
    for number in (1, 2, 3, 1):
        adapters.add(number)
        assert adapters.replaced() == frozenset()


def test_a_model_without_adapters_has_nothing_to_watch() -> None:
    assert LiveAdapters.of(SimpleNamespace()) is None
    assert LiveAdapters.of(None) is None
