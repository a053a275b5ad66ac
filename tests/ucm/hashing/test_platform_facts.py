"""What of the machine counts."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from ucm.hashing import platform_facts as module
from ucm.hashing.platform_facts import platform_facts, vllm_release


def config(**device: Any) -> Any:
    return SimpleNamespace(device_config=SimpleNamespace(**device))


def test_a_cpu_by_the_instructions_that_choose_a_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    found = platform_facts(config(device_type="cpu"))
    assert found["device"] == "cpu"
    assert found["machine"]
    assert set(found["instructions"]) <= set(module._CPU_FLAGS)
    assert found == platform_facts(config(device_type="cpu"))


def test_an_accelerator_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capability in ((9, 0), (8, 0), None):
        platform = SimpleNamespace(get_device_capability=lambda value=capability: value)
        monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
        found.append(platform_facts(config(device_type="cuda"))["capability"])
    assert found == ["(9, 0)", "(8, 0)", None]
    monkeypatch.delitem(sys.modules, "vllm.platforms")
    assert platform_facts(config(device_type="npu"))["capability"] is None


@pytest.mark.parametrize("name", ["VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE"])
def test_variables_that_choose_a_layout(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = platform_facts(config(device_type="cpu"))
    monkeypatch.setenv(name, "X")
    assert platform_facts(config(device_type="cpu"))["environment"] == {**before["environment"], name: "X"}


def test_a_device_as_older_releases_name_it() -> None:
    assert platform_facts(config(device="cpu"))["device"] == "cpu"
    assert platform_facts(SimpleNamespace())["device"] == ""


def test_the_release_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(metadata, "version", {"vllm": "0.31.0"}.__getitem__)
    assert vllm_release() == "0.31.0"
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0+mine"))
    assert vllm_release() == "0.32.0+mine"


def test_no_release() -> None:
    assert "vllm" not in sys.modules
    assert vllm_release() == ""
