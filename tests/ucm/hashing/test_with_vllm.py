"""Keys and identities of real vLLM objects."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from tests.stand_in import disagreement
from tests.ucm.hashing.fake_vllm import FakeVllm
from tests.ucm.hashing.stand_ins import whole_identity, write_adapter
from ucm import vllm_types
from ucm.hashing import model_identity, request_content
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.model_identity import namespace
from ucm.hashing.rank_geometry import must_save, part_tags, rank_tags
from ucm.hashing.request_hasher import RequestHasher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # allows running our function in workers
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

TOKENS = [7 * i % 900 for i in range(100)]
SIZE = 16
CAT, DOG = "c" * 64, "d" * 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
#: From this release on, vLLM's chains start from a fixed seed.


def model(directory: Path, **changes: Any) -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    return str(directory)


def engine_config(path: str, **arguments: Any) -> Any:
    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, **arguments}
    return EngineArgs(model=path, **arguments).create_engine_config()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return model(tmp_path / "llama")


def vllm_hasher(config: Any, block_size: int = SIZE) -> Callable[[Request], list[bytes]]:
    """Return the hasher that EngineCore creates at its start."""
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415 - elsewhere in releases that have no such module

    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(function)
    hasher: Callable[[Request], list[bytes]] = kv_cache_utils.get_request_block_hasher(block_size, function)
    return hasher


def request(number: int, tokens: list[int] | None = TOKENS, **more: Any) -> Request:
    return Request(f"r{number}", tokens, SamplingParams(max_tokens=200), None, **more)


def test_objects_have_what_their_types_declare(path: str) -> None:
    real = {
        vllm_types.Request: set(dir(request(1))),
        vllm_types.VllmConfig: set(dir(engine_config(path))),
        vllm_types.SchedulerOutput: {field.name for field in dataclasses.fields(SchedulerOutput)},
        vllm_types.KVCacheConfig: {field.name for field in dataclasses.fields(KVCacheConfig)},
    }
    for protocol, there in real.items():
        declared = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
        assert declared
        assert declared <= there, protocol


def test_all_that_a_request_may_carry_is_known() -> None:
    assert set(inspect.signature(Request.__init__).parameters) <= request_content._KNOWN_FIELDS


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", [None, "0"])
def test_keys_follow_from_no_hash_seed(
    path: str, monkeypatch: pytest.MonkeyPatch, seed: str | None, algorithm: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = engine_config(path, prefix_caching_hash_algo=algorithm)
    keys = BlockKeys(config, b"identity")
    hasher = vllm_hasher(config)
    for number, salt in enumerate([None, "a", "b"]):
        one = request(number, list(TOKENS), cache_salt=salt, block_hasher=hasher)
        content = keys._reader.read(one)
        for size in (SIZE, 3 * SIZE):
            assert keys.of(one, size) == RequestHasher(b"identity").generate_block_hashes(TOKENS, size, content)
        one.append_output_token_ids(list(range(30)))
        assert len(keys.of(one, SIZE) or []) == len(one.block_hashes) == 8


def test_what_a_request_holds_beside_tokens(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(request_content, "process_started", lambda: float("inf"))  # after the adapters are written
    config = engine_config(path)
    hasher = vllm_hasher(config)
    loras = [LoRARequest(f"sql-{n}", n, str(write_adapter(tmp_path / str(n), b"%d" % n))) for n in (1, 2)]

    def field(values: torch.Tensor) -> MultiModalFieldElem:
        about = {
            name: "image" for name in ("modality", "key") if name in inspect.signature(MultiModalFieldElem).parameters
        }
        return MultiModalFieldElem(data=values, field=MultiModalBatchedField(), **about)

    def image(name: str, offset: int, is_embed: Any = None) -> list[MultiModalFeatureSpec]:
        data = MultiModalKwargsItem({"pixel_values": field(torch.tensor(list(name.encode()), dtype=torch.bfloat16))})
        return [MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset, 4, is_embed))]

    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        *({"lora_request": lora} for lora in loras),
        *({"mm_features": image(name, 3)} for name in (CAT, DOG)),
        {"mm_features": image(CAT, 4)},
        {"mm_features": image(CAT, 3, torch.tensor([True, False, True, True]))},
    ]
    keys = BlockKeys(config, b"identity")
    requests = [request(n, list(TOKENS), block_hasher=hasher, **kind) for n, kind in enumerate(kinds)]
    for number, step in enumerate((0, 1)):
        embeds = torch.zeros(100, 8, dtype=torch.bfloat16)
        embeds[number] = step
        requests.append(request(100 + number, None, prompt_embeds=embeds, block_hasher=hasher))
    found = [keys.of(one, SIZE) or [] for one in requests]
    assert [len(of_request) for of_request in found] == [6] * 11
    assert len({key for of_request in found for key in of_request}) == 66
    assert not keys.refused


def test_an_input_that_is_only_named_is_not_cacheable(path: str) -> None:
    keys = BlockKeys(engine_config(path), b"identity")
    named = MultiModalFeatureSpec(None, "image", "0-image-0", PlaceholderRange(0, 4))
    assert keys.of(request(0, list(TOKENS), mm_features=[named]), SIZE) is None


def test_engines_that_must_not_share(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a" / "llama"), model(tmp_path / "b" / "llama", rope_theta=5e5)
    configs = [
        engine_config(one),
        engine_config(other),
        engine_config(one, dtype="float32"),
        engine_config(one, kv_cache_dtype="fp8_e5m2"),
        engine_config(one, kv_cache_dtype="fp8"),
        engine_config(one, hf_overrides={"rope_theta": 5e5}),
        engine_config(one, seed=1),
    ]
    found = [namespace(whole_identity(config)) for config in configs]
    assert len(set(found)) == len(configs)
    assert {name.rpartition("-")[0] for name in found} == {"llama"}


def test_block_sizes_that_must_not_share(path: str) -> None:
    configs = [engine_config(path, block_size=size) for size in (16, 32)]
    assert len({tag for config in configs for tag in part_tags(config, 0)}) == 2


def _in_worker(worker: Any) -> tuple[str, str, bool]:
    config = worker.vllm_config
    return namespace(whole_identity(config)), part_tags(config, 0)[0], must_save(config)


def test_all_processes_of_an_engine_agree(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two separate workers report their identity after they have loaded the model.

    The model of this test is younger than this process, but not than the workers' parent: only EngineCore's process
    asks when the configuration was read.
    """
    monkeypatch.setattr(model_identity, "configuration_since", lambda: float("inf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before = namespace(whole_identity(engine_config(path, tensor_parallel_size=2)))
    llm = LLM(
        path,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        tensor_parallel_size=2,
        enforce_eager=True,
    )
    config = llm.llm_engine.vllm_config
    workers = llm.collective_rpc(_in_worker)
    assert {name for name, _, _ in workers} == {before, namespace(whole_identity(config))}
    assert [tag for _, tag, _ in workers] == rank_tags(config, 0)
    assert [tag[:7] for _, tag, _ in workers] == ["tp0of2-", "tp1of2-"]
    assert [saves for _, _, saves in workers] == [True, True]


def test_what_stands_for_vllm_s_hashing_elsewhere_takes_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = FakeVllm(monkeypatch).release("0.29.0").utils
    pairs = [
        (vars(kv_cache_utils)[name], of)
        for name, of in vars(stand_in).items()
        if inspect.isfunction(of) and name in vars(kv_cache_utils)
    ]
    assert pairs
    assert [disagreement(real, of) for real, of in pairs] == [None] * len(pairs)
