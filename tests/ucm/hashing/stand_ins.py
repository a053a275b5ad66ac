"""Small stand-ins for vLLM's objects, with its attribute names; `test_with_vllm.py` has the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.hashing.file_contents import FileContents
from ucm.hashing.model_identity import model_identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ucm.clock import Clock
    from ucm.hashing.file_contents import DigestCache
    from ucm.hashing.model_identity import ModelIdentity


class ConstantList:
    """vLLM's read-only view of a list (``vllm.v1.utils``)."""

    def __init__(self, x: list[int]) -> None:
        self._x = x

    def __getitem__(self, item: Any) -> Any:
        return self._x[item]

    def __iter__(self) -> Iterator[int]:
        return iter(self._x)

    def __len__(self) -> int:
        return len(self._x)


@dataclass
class PlaceholderRange:
    """``vllm.multimodal.inputs``"""

    offset: int
    length: int
    is_embed: Any = None


@dataclass
class MultiModalFeatureSpec:
    """``vllm.multimodal.inputs``, from 0.10.2 on"""

    identifier: str
    mm_position: PlaceholderRange
    modality: str = "image"
    data: Any = None
    mm_hash: str | None = None


@dataclass
class LoRARequest:
    """``vllm.lora.request``"""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Request:
    """``vllm.v1.request`` as of 0.32.0, with only the attributes that keys depend on."""

    def __init__(  # noqa: PLR0913 - vLLM's has 20
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        *,
        prompt_embeds: Any = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        pooling_params: Any = None,
        resumable: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids
        self.mm_features = mm_features or []
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.pooling_params = pooling_params
        self.resumable = resumable
        self._all_token_ids = [0] * len(prompt_embeds) if prompt_token_ids is None else list(prompt_token_ids)
        self.all_token_ids = ConstantList(self._all_token_ids)
        self.block_hashes: list[Any] = []

    def append(self, *token_ids: int) -> None:
        self._all_token_ids.extend(token_ids)


class OldRequest:
    """``vllm.v1.request`` as of 0.9.1."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        multi_modal_hashes: list[str] | None = None,
        multi_modal_placeholders: list[PlaceholderRange] | None = None,
    ) -> None:
        self.request_id = request_id
        self.mm_hashes = multi_modal_hashes or []
        self.mm_positions = multi_modal_placeholders or []
        self.mm_inputs: list[Any] = []
        self.lora_request = None
        self.cache_salt = None
        self._all_token_ids = list(prompt_token_ids)
        self.all_token_ids = ConstantList(self._all_token_ids)


@dataclass
class HfConfig:
    """The part of transformers' ``PretrainedConfig`` that is read."""

    values: dict[str, Any]
    rope_parameters: dict[str, Any] | None = None
    _commit_hash: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.values, "_name_or_path": id(self)}


@dataclass
class ModelConfig:
    """``vllm.config.ModelConfig``"""

    model: str
    dtype: str = "torch.bfloat16"
    seed: int = 0
    revision: str | None = None
    code_revision: str | None = None
    quantization: str | None = None
    hf_overrides: Any = field(default_factory=dict)
    hf_config: HfConfig = field(default_factory=lambda: HfConfig({}))
    hf_text_config: HfConfig = field(default_factory=lambda: HfConfig({}))
    max_model_len: int = 4096
    model_weights: str = ""
    hf_config_path: str | None = None
    multimodal_config: Any = None
    use_mla: bool = False
    is_hybrid: bool = False
    is_encoder_decoder: bool = False


@dataclass
class CacheConfig:
    """``vllm.config.CacheConfig``"""

    block_size: int = 16
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    calculate_kv_scales: bool = False
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)


@dataclass
class ParallelConfig:
    """``vllm.config.ParallelConfig``"""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    rank: int = 0


@dataclass
class VllmConfig:
    """``vllm.config.VllmConfig``"""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    load_config: Any = field(default_factory=lambda: SimpleNamespace(load_format="auto", model_loader_extra_config={}))
    device_config: Any = field(default_factory=lambda: SimpleNamespace(device_type="cpu"))
    attention_config: Any = field(default_factory=lambda: SimpleNamespace(backend=None))
    kernel_config: Any = None
    speculative_config: Any = None
    lora_config: Any = None
    additional_config: Any = field(default_factory=dict)


def whole_identity(vllm_config: Any, **more: Any) -> ModelIdentity:
    """Return an engine's identity, with the contents of its files."""
    identity = model_identity(vllm_config, **more)
    return identity.with_contents(read_files(identity.unread.values()))


def write_adapter(directory: Path, weights: bytes) -> Path:
    """Write the files of a LoRA adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}', encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def write_model(directory: Path, weights: bytes = b"w" * 300_000, config: str = '{"model_type": "llama"}') -> Path:
    """Write the files of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config, encoding="utf-8")
    (directory / "model-00001-of-00001.safetensors").write_bytes(weights)
    return directory


def read_files(paths: Iterable[Path], cache: DigestCache | None = None, *, clock: Clock = SYSTEM) -> dict[Path, str]:
    """Return the digests of some files, read now; earlier changes are allowed."""
    contents = FileContents(float("inf"), cache, clock=clock)
    return contents.read(contents.look_up(paths)).of
