"""Full CUDA graphs are lowered on vLLM's real configuration, and vLLM's own dispatcher then has no full graph.

Pretended: the platform is vLLM's own class for CUDA, with a capability, a name and a memory that no device has, and
empty modules instead of compiled kernels. Real: the configuration with all that it decides, and what reads it later.
"""

from __future__ import annotations

import json
import logging
import sys
import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

from vllm import platforms
from vllm.config import CompilationConfig, CUDAGraphMode, ModelConfig, VllmConfig

from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[..., Any]

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that makes the configuration that an engine on one H100 would have."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    # Before CUDA is pretended: vLLM inspects the model's class in a process of its own, and some modules look for
    # kernels when they are imported.
    import_module("vllm.v1.cudagraph_dispatcher")
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, max_model_len=256)
    for name in ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: PLC0415 - wants the modules above
    from vllm.platforms.interface import DeviceCapability  # noqa: PLC0415

    class Pretended(NonNvmlCudaPlatform):  # type: ignore[misc] # vLLM is not there when types are checked
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            del device_id
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            del device_id
            return 80 << 30

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            del device_id
            return "pretended"

    monkeypatch.setattr(platforms, "_current_platform", Pretended())

    def make(*, eager: bool = False, **compilation: Any) -> Any:
        model.enforce_eager = eager
        return VllmConfig(model_config=model, compilation_config=CompilationConfig(**compilation))

    return make


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment,method-assign]
    logger = get_logger("ucm.integration.vllm.sparse.requirements")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def lower(config: Any) -> Any:
    AttentionLayers(config).require_engine()
    return config.compilation_config.cudagraph_mode


def captured(config: Any) -> set[str]:
    """The kinds of graphs that vLLM's V1 runner captures with this configuration, after it has resolved the mode."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: PLC0415 - as above

    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1)
    return {mode.name for mode, keys in dispatcher.cudagraph_keys.items() if keys}


def test_a_default_engine_keeps_its_piecewise_graphs(on_cuda: Make, told: list[logging.LogRecord]) -> None:
    config = on_cuda()
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert captured(config) == {"FULL", "PIECEWISE"}
    sizes = list(config.compilation_config.cudagraph_capture_sizes)
    assert lower(config) == CUDAGraphMode.PIECEWISE
    assert captured(config) == {"PIECEWISE"}
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    (record,) = told
    assert record.levelno == logging.WARNING
    for part in ("FULL_AND_PIECEWISE", '{"cudagraph_mode": "PIECEWISE"}', "The cost:"):
        assert part in record.getMessage()


def test_the_warning_comes_once_per_engine(on_cuda: Make, told: list[logging.LogRecord]) -> None:
    config = on_cuda()
    lower(config)
    lower(config)
    other = on_cuda()
    other.parallel_config.rank = 1
    assert lower(other) == CUDAGraphMode.PIECEWISE
    assert len(told) == 1


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_chosen_full_graphs_become_piecewise_where_the_model_is_split(on_cuda: Make, mode: str) -> None:
    assert lower(on_cuda(cudagraph_mode=mode)) == CUDAGraphMode.PIECEWISE


def test_a_model_that_inductor_splits_keeps_piecewise_graphs(on_cuda: Make) -> None:
    assert lower(on_cuda(use_inductor_graph_partition=True)) == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_attention_that_inductor_leaves_in_a_graph_has_no_graphs(on_cuda: Make, mode: str) -> None:
    config = on_cuda(use_inductor_graph_partition=True, splitting_ops=[], cudagraph_mode=mode)
    assert lower(config) == CUDAGraphMode.NONE


@pytest.mark.parametrize("chosen", [{"splitting_ops": []}, {"pass_config": {"fuse_attn_quant": True}}])
def test_without_a_split_there_are_no_graphs(on_cuda: Make, told: list[logging.LogRecord], chosen: Any) -> None:
    """Piecewise graphs of an unsplit model would contain its attention."""
    config = on_cuda(**chosen)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL
    assert lower(config) == CUDAGraphMode.NONE
    assert captured(config) == set()
    assert "splitting_ops" in told[0].getMessage()


def test_graphs_that_are_interrupted_at_each_attention(on_cuda: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    config = on_cuda(mode=0, cudagraph_mode="FULL_AND_PIECEWISE")
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert lower(config) == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("chosen", [{"eager": True}, {"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "NONE"}])
def test_engines_without_full_graphs_are_left_alone(
    on_cuda: Make, told: list[logging.LogRecord], chosen: dict[str, Any]
) -> None:
    config = on_cuda(**chosen)
    before = config.compilation_config.cudagraph_mode
    assert lower(config) == before
    assert not told


def test_cpu_engines_are_left_alone(tmp_path: Path, told: list[logging.LogRecord]) -> None:
    """Nothing is pretended here."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, max_model_len=256)
    config = VllmConfig(model_config=model)
    before = config.compilation_config.cudagraph_mode
    assert lower(config) == before
    assert not told
