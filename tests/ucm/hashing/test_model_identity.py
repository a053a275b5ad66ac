"""Engines with different blocks have different namespaces; all processes of one engine share one.

With stand-ins for vLLM's configuration; `test_with_vllm.py` has the real one.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ucm.hashing.fake_vllm import FakeVllm
from tests.ucm.hashing.stand_ins import HfConfig, ModelConfig, VllmConfig, whole_identity, write_model
from ucm.errors import ConfigError
from ucm.hashing import model_identity as module
from ucm.hashing.model_identity import WeightsUnknownError, namespace, plain, platform_facts, vllm_release
from ucm.hashing.request_hasher import frame

if TYPE_CHECKING:
    from collections.abc import Callable

COMMIT, OTHER = "a" * 40, "b" * 40
LLAMA = '{"model_type": "llama", "rope_theta": 10000.0}'


@pytest.fixture
def base(tmp_path: Path) -> VllmConfig:
    return VllmConfig(ModelConfig(str(write_model(tmp_path / "llama", config=LLAMA))))


def change(path: str, value: Any) -> Callable[[VllmConfig], None]:
    """Set one attribute, by its dotted path."""

    def apply(config: VllmConfig) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return apply


DIFFERENCES = {
    "KV dtype fp8": change("cache_config.cache_dtype", "fp8"),
    "KV dtype fp8_e5m2": change("cache_config.cache_dtype", "fp8_e5m2"),
    "KV dtype float16": change("cache_config.cache_dtype", "float16"),
    "layers without KV quantization": change("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "dtype": change("model_config.dtype", "torch.float16"),
    "quantization": change("model_config.quantization", "fp8"),
    "RoPE by override": change("model_config.hf_overrides", {"rope_theta": 5e5}),
    "another RoPE by override": change("model_config.hf_overrides", {"rope_theta": 1e6}),
    "RoPE by argument, up to 0.11": change("model_config.rope_theta", 5e5),
    "window": change("model_config.disable_sliding_window", True),
    "remote code": change("model_config.code_revision", OTHER),
    "implementation": change("model_config.model_impl", "transformers"),
    "media options": change("model_config.multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
    "attention backend": change("attention_config.backend", "FLASHINFER"),
    "queries of 8 bits": change("attention_config", SimpleNamespace(use_prefill_query_quantization=True)),
    "kernels of experts": change("kernel_config", SimpleNamespace(moe_backend="marlin")),
    "files that are not loaded": change("load_config.ignore_patterns", ["*.safetensors"]),
    "device": change("device_config.device_type", "cuda"),
    "format of the files": change("load_config.load_format", "pt"),
    "random weights": change("load_config.load_format", "dummy"),
    "options of the loader": change("load_config.model_loader_extra_config", {"a": 1}),
    "platform options": change("additional_config", {"kv_nz": True}),
    "MLA": change("model_config.use_mla", True),
}


def test_whatever_shapes_the_kv_makes_another_identity(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch).release("0.29.0")
    digests = {"base": whole_identity(base).digest}
    for name, apply in DIFFERENCES.items():
        changed = copy.deepcopy(base)
        apply(changed)
        digests[name] = whole_identity(changed).digest
    assert len(set(digests.values())) == len(DIFFERENCES) + 1


def test_two_models_with_one_basename(tmp_path: Path) -> None:
    models = [write_model(tmp_path / owner / "llama", owner.encode() * 100_000) for owner in ("a", "b")]
    one, other = (whole_identity(VllmConfig(ModelConfig(str(model)))) for model in models)
    assert one.name == other.name == "llama"
    assert namespace(one) != namespace(other)


def test_two_rope_settings_in_the_files(tmp_path: Path) -> None:
    models = [write_model(tmp_path / theta, config=f'{{"rope_theta": {theta}}}') for theta in ("10000.0", "500000.0")]
    digests = {whole_identity(VllmConfig(ModelConfig(str(model)))).digest for model in models}
    assert len(digests) == 2


def test_two_revisions(base: VllmConfig) -> None:
    found = [whole_identity(VllmConfig(ModelConfig("a/llama", revision=commit))) for commit in (COMMIT, OTHER)]
    assert found[0].digest != found[1].digest
    assert namespace(found[0]).startswith("llama-")
    assert whole_identity(base).digest not in {identity.digest for identity in found}


def test_two_releases(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for release in ("0.31.0", "0.32.0"):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
        identity = whole_identity(base)
        assert identity.facts["vllm"] == release
        digests.add(identity.digest)
    assert len(digests) == 2


def test_how_vllm_hashes_makes_no_other_identity(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for seed, algorithm in (("0", "sha256"), ("1", "sha256"), ("1", "sha256_cbor"), ("1", "xxhash")):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        base.cache_config.prefix_caching_hash_algo = algorithm
        FakeVllm(monkeypatch).release("0.29.0")
        digests.add(whole_identity(base).digest)
    assert len(digests) == 1


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_served_length_counts_where_rope_depends_on_it(base: VllmConfig, kind: str) -> None:
    base.model_config.hf_text_config.rope_parameters = {"rope_type": kind, "factor": 4.0}
    short = whole_identity(base).digest
    base.model_config.max_model_len *= 2
    assert whole_identity(base).digest != short


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3"}, {"full_attention": {"rope_type": "yarn"}}])
def test_the_served_length_does_not_count_elsewhere(base: VllmConfig, rope: Any) -> None:
    base.model_config.hf_text_config.rope_parameters = rope
    short = whole_identity(base).digest
    base.model_config.max_model_len *= 2
    assert whole_identity(base).digest == short


def test_what_workers_change_in_their_copy_does_not_count(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model code modifies the Hugging Face configuration; the engine sets sizes, and each worker its rank."""
    monkeypatch.setattr(module, "configuration_since", lambda: float("inf"))
    for dtype in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        worker = copy.deepcopy(base)
        base.cache_config.cache_dtype, worker.cache_config.cache_dtype = "fp8", dtype
        worker.model_config.hf_config.values["first_k_dense_replace"] = 3
        worker.model_config.model = base.model_config.model
        worker.cache_config.block_size = 128
        worker.parallel_config.rank = 3
        worker.instance_id = "another"  # type: ignore[attr-defined]
        assert whole_identity(worker).digest == whole_identity(base).digest


def test_an_operators_function_over_the_configuration_is_known_by_what_it_did(base: VllmConfig) -> None:
    def override(config: Any) -> Any:
        return config

    base.model_config.hf_overrides = override
    digests = set()
    kept = [HfConfig({"rope_theta": theta}) for theta in (1e4, 1e4, 5e5)]
    for base.model_config.hf_config in kept:
        digests.add(whole_identity(base).digest)
    assert len(digests) == 2  # neither the address of an object nor the path of a copy counts


def test_a_configuration_from_another_place_is_known_by_what_it_says(base: VllmConfig) -> None:
    base.model_config.hf_config_path = "c/d"
    before = whole_identity(base).digest
    base.model_config.hf_config.values["rope_theta"] = 1.0
    assert whole_identity(base).digest != before


def test_a_configuration_that_may_have_been_replaced_after_it_was_read_is_known_by_what_it_says(
    base: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts EngineCore's has read it, and nothing tells whether the file is the same since."""
    digests = set()
    for since in (0.0, float("inf")):
        monkeypatch.setattr(module, "configuration_since", lambda value=since: value)
        for base.model_config.hf_config in (HfConfig({"rope_theta": 1e4}), HfConfig({"rope_theta": 5e5})):
            digests.add(whole_identity(base).digest)
    assert len(digests) == 3


def test_the_scales_of_a_vision_tower_count_by_their_content(base: VllmConfig, tmp_path: Path) -> None:
    path, digests = tmp_path / "scales.json", set()
    base.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=str(path))
    for content in ('{"a": 1}', '{"a": 2}', '{"a": 1}'):
        path.write_text(content, encoding="utf-8")
        digests.add(whole_identity(base).digest)
    assert len(digests) == 2


def draft(path: Path, method: str, weights: bytes = b"d" * 200_000) -> SimpleNamespace:
    model = ModelConfig(str(write_model(path, weights)))
    return SimpleNamespace(method=method, num_speculative_tokens=3, draft_model_config=model)


def test_a_draft_models_layers_count(base: VllmConfig, tmp_path: Path) -> None:
    drafts = [
        None,
        draft(tmp_path / "one", "eagle"),
        draft(tmp_path / "one", "eagle3"),
        draft(tmp_path / "two", "eagle", b"e" * 200_000),
        SimpleNamespace(method="mtp", num_speculative_tokens=1, draft_model_config=None),
    ]
    digests = set()
    for base.speculative_config in drafts:
        digests.add(whole_identity(base).digest)
    assert len(digests) == 5


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafting_without_layers_does_not_count(base: VllmConfig, method: str) -> None:
    before = whole_identity(base).digest
    base.speculative_config = SimpleNamespace(method=method, num_speculative_tokens=3, draft_model_config=None)
    assert whole_identity(base).digest == before


def test_whatever_else_the_caller_says_counts(base: VllmConfig) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"more": {"sparse": {"GSA": {"ratio": 0.3}}}},
        {"more": {"sparse": {"GSA": {"ratio": 0.4}}}},
        {"weights_id": "mine"},
    ]
    assert len({whole_identity(base, **kind).digest for kind in kinds}) == 4


def test_the_operators_name_for_the_weights_is_believed(tmp_path: Path) -> None:
    config = VllmConfig(ModelConfig(str(tmp_path)))
    with pytest.raises(WeightsUnknownError):
        whole_identity(config)
    assert whole_identity(config, weights_id="mine").facts["model"]["weights"]["stated"] == "mine"


def test_kv_that_only_its_engine_can_read_is_refused(base: VllmConfig) -> None:
    base.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="no other engine can read its blocks") as caught:
        whole_identity(base)
    assert caught.value.where == "calculate_kv_scales"


def test_kv_that_its_prefix_does_not_determine_is_refused(base: VllmConfig) -> None:
    base.model_config.is_diffusion = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a prefix does not determine its KV"):
        whole_identity(base)


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct-"),
        ("a/" + "x" * 60, "x" * 40 + "-"),
        ("a/Modèle №1", "mod-le-1-"),
        ("a/...", "model-"),
    ],
)
def test_a_namespace_can_be_read_and_stored_anywhere(model: str, prefix: str) -> None:
    identity = whole_identity(VllmConfig(ModelConfig(model, revision=COMMIT)))
    found = namespace(identity)
    assert re.fullmatch(re.escape(prefix) + r"[0-9a-f]{32}", found)
    assert re.fullmatch(r"[a-z0-9._-]+", found)


def test_the_record_for_operators_says_everything(base: VllmConfig) -> None:
    identity = whole_identity(base)
    record = json.loads(identity.to_json())
    assert record["digest"] == identity.digest.hex()
    assert {"name": "llama", **identity.facts} == {key: value for key, value in record.items() if key != "digest"}


SCRIPT = """
import sys
from types import SimpleNamespace
from tests.ucm.hashing.stand_ins import ModelConfig, VllmConfig, whole_identity
from ucm.hashing import model_identity
model_identity.configuration_since = lambda: float("inf")  # the test has just written the files
config = VllmConfig(ModelConfig(sys.argv[1]))
config.additional_config = {"names": {"b", "a", "c"}}
print(whole_identity(config).digest.hex())
"""


def test_every_process_comes_to_the_same(base: VllmConfig) -> None:
    digests = set()
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, base.model_config.model],
            cwd=Path(__file__).parents[3],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


class Backend(Enum):
    FLASH = "flash"
    TORCH = "torch"


class Text(str):
    __slots__ = ()


@dataclass
class Options:
    backend: Backend
    layers: frozenset[int]


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


class Described:
    def to_dict(self) -> dict[Any, Any]:
        return {"theta": 1e4, 1: (None, True)}


def override(config: Any, theta: float) -> Any:
    return config, theta


HERE = __name__


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (True, True),
        (0.5, 0.5),
        ("a", "a"),
        (Text("a"), "a"),
        (np.float32(2), "2.0"),
        (Path("/a"), "/a"),
        ((1, [2]), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        (Backend.FLASH, "FLASH"),
        (Options(Backend.TORCH, frozenset({2, 1})), {"backend": "TORCH", "layers": [1, 2]}),
        (Options, f"{HERE}.Options"),
        (override, f"{HERE}.override"),
        (functools.partial(override, theta=2.0), [f"{HERE}.override", [], {"theta": 2.0}]),
        (Opaque(3), {"type": f"{HERE}.Opaque", "value": 3}),
        (Described(), {"theta": 1e4, "1": [None, True]}),
    ],
)
def test_what_becomes_of_it(value: Any, wanted: Any) -> None:
    assert plain(value) == wanted
    assert type(plain(value)) is type(wanted)
    assert frame(plain(value))
    assert json.dumps(plain(value))


def test_something_that_holds_itself_ends() -> None:
    chain = Opaque(1)
    chain.value = chain  # type: ignore[assignment]
    assert json.dumps(plain(chain)).count("Opaque") == 13


def test_what_lies_deep_counts() -> None:
    found = set()
    for value in (1, 2):
        nested: Any = value
        for _ in range(20):
            nested = {"inner": nested}
        found.add(json.dumps(plain(nested)))
    assert len(found) == 2


def config(**device: Any) -> Any:
    return SimpleNamespace(device_config=SimpleNamespace(**device))


def test_a_cpu_by_the_instructions_that_choose_a_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    found = platform_facts(config(device_type="cpu"))
    assert found["device"] == "cpu"
    assert found["machine"]
    assert set(found["instructions"]) <= set(module._CPU_FLAGS)
    assert found == platform_facts(config(device_type="cpu"))


@dataclass
class CudaPlatform:
    """``vllm.platforms.cuda``"""

    capability: Any

    def get_device_capability(self) -> Any:
        return self.capability


class RocmPlatform(CudaPlatform):
    """``vllm.platforms.rocm``; its devices are named ``cuda`` as well."""


def test_an_accelerator_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capability in ((9, 0), (8, 0), None):
        platform = CudaPlatform(capability)
        monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
        found.append(platform_facts(config(device_type="cuda"))["capability"])
    assert found == ["(9, 0)", "(8, 0)", None]
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=RocmPlatform((9, 0))))
    found = [platform_facts(config(device_type="cuda"))]
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=CudaPlatform((9, 0))))
    assert platform_facts(config(device_type="cuda")) not in found
    monkeypatch.delitem(sys.modules, "vllm.platforms")
    assert platform_facts(config(device_type="npu"))["capability"] is None


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
        *("VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
        *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_BATCH_INVARIANT", "VLLM_DISABLED_KERNELS"),
    ],
)
def test_variables_that_choose_a_layout(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = platform_facts(config(device_type="cpu"))
    monkeypatch.setenv(name, "X")
    assert platform_facts(config(device_type="cpu"))["environment"] == {**before["environment"], name: "X"}


@pytest.mark.parametrize(
    "name", ["VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "VLLM_DEEP_GEMM_WARMUP", "VLLM_PORT", "VLLM_HOST_IP"]
)
def test_variables_that_shape_no_kv_do_not_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = platform_facts(config(device_type="cpu"))
    monkeypatch.setenv(name, "X")
    assert platform_facts(config(device_type="cpu")) == before


def test_a_plugin_that_vllm_does_not_load_does_not_count(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("register", "acme_models:register", "vllm.general_plugins")

    def entry_points(**params: Any) -> list[metadata.EntryPoint]:
        return [point] if params["group"] == point.group else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    found = []
    for named in (None, "register", "other,register", "other", ""):
        if named is not None:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        found.append(whole_identity(base).digest)
    assert found[0] == found[1] == found[2] != found[3] == found[4]


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
