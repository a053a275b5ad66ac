"""What sparse methods touch of vLLM, read from the published sources of every release: the support matrix."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm
from ucm.integration.vllm.sparse import cpu, paged, requirements

BACKENDS = "vllm/v1/attention/backends"
FLASH, TRITON, CPU = (f"{BACKENDS}/{name}_attn.py" for name in ("flash", "triton", "cpu"))
OPERATORS = "vllm/_custom_ops.py"
LAYER = ("vllm/model_executor/layers/attention/attention.py", "vllm/attention/layer.py")
#: Fields that a restricted step may keep: counts of its queries, buffers by size, and what is refused where it matters.
NEUTRAL = {
    *("max_query_len", "causal", "slot_mapping"),
    *("num_decode_reqs", "num_prefill_reqs", "num_decode_tokens", "num_prefill_tokens", "max_dcp_context_kv_len"),
    *("max_num_splits", "sliding_window", "rswa_window", "rswa_window_tensor"),
    *("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"),
    *("isa", "use_sdpa_prefill", "sdpa_attn_masks", "sdpa_start_loc", "encoder_cache"),
}


def since(first: str) -> tuple[str, ...]:
    return REVIEWED[REVIEWED.index(first) :]


def metadata_fields(release: str, path: str) -> dict[str, set[str]]:
    """The metadata classes that a backend's module sees, as `paged.metadata_class` would find them: by their fields."""
    tree = vllm.module(release, path)
    if tree is None:
        return {}
    names = {node.name: path for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "vllm.v1.attention.backends.flash_attn":
            names |= {alias.name: FLASH for alias in node.names}
    found = {
        name: set(vllm.fields(release, where, name))
        for name, where in names.items()
        if isinstance(vllm.definition(release, where, name), ast.ClassDef)
    }
    return {name: fields for name, fields in found.items() if fields.issuperset(paged.FIELDS)}


def implementations(release: str, path: str) -> set[str]:
    tree = vllm.module(release, path)
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} if tree else set()
    return found & {*paged.IMPLEMENTATIONS, cpu.IMPLEMENTATION}


#: Backends and the releases that they are served in.
MATRIX = {FLASH: REVIEWED, TRITON: REVIEWED, CPU: since("0.11.1")}


@pytest.mark.parametrize("path", MATRIX)
@pytest.mark.parametrize("release", REVIEWED)
def test_the_matrix_of_backends(release: str, path: str) -> None:
    served = bool(implementations(release, path)) and bool(metadata_fields(release, path))
    assert served == (release in MATRIX[path])


@pytest.mark.parametrize("path", MATRIX)
@pytest.mark.parametrize("release", REVIEWED)
def test_every_field_of_a_served_metadata_is_known(release: str, path: str) -> None:
    """A field that nobody has looked at may say where its keys are."""
    known = {*paged.FIELDS, *paged.AHEAD, *paged.OTHER_READERS, *NEUTRAL}
    for name, fields in metadata_fields(release, path).items():
        assert fields <= known, name


class Shaped:
    """As much of a tensor as tells its shape through the views of `paged.planes_of`."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def transpose(self, first: int, second: int) -> Shaped:
        return Shaped(self.array.swapaxes(first, second))

    def __getitem__(self, key: Any) -> Shaped:
        return Shaped(self.array[key])


SIZES = {"num_blocks": 7, "block_size": 16, "num_kv_heads": 3, "head_size": 8}


def cache_shape(release: str, path: str) -> tuple[int, ...] | None:
    """The last shape that a backend's function returns, which is the plain one; None where it has no such function."""
    tree = vllm.module(release, path)
    assert tree is not None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_shape":
            found = [child.value for child in vllm.in_order(node) if isinstance(child, ast.Return) and child.value]
            shape: tuple[int, ...] = eval(ast.unparse(found[-1]), {**SIZES, "padded_hs": 8})  # noqa: S307
            return shape
    return None


@pytest.mark.parametrize("path", [FLASH, TRITON])
@pytest.mark.parametrize("release", REVIEWED)
def test_keys_are_found_in_every_layout(release: str, path: str) -> None:
    shape = cache_shape(release, path)
    if shape is None:  # from 0.29.0 on the allocator knows it; what the backend makes of it tells the same
        assert release in since("0.29.0")
        text = ast.unparse(vllm.module(release, path) or ast.Pass())
        assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in text
        shape = (7, 3, 16, 2 * 8)
    shaped: Any = Shaped(np.empty(shape))
    planes = paged.planes_of(shaped, 3, 8)
    assert planes is not None
    assert [plane.shape for plane in planes] == [(7, 16, 3, 8)] * 2


@pytest.mark.parametrize("release", since("0.11.1"))
def test_the_cpus_cache_has_one_of_two_shapes(release: str) -> None:
    shape = cache_shape(release, CPU)
    assert shape in {(2, 7, 3, 16, 8), (7, 3, 16, 16), None}
    assert (shape is None) == (release in since("0.29.0"))
    text = ast.unparse(vllm.module(release, CPU) or ast.Pass())
    halves = "kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))" in text
    assert halves == (release in since("0.23.0"))
    assert halves or "kv_cache.unbind(0)" in text


@functools.cache
def known_arguments() -> dict[str, set[str]]:
    """What our module gives to vLLM's functions, by an argument that only one of them has."""
    tree = ast.parse(Path(cpu.__file__ or "").read_text(encoding="utf-8"))
    keys = [
        {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
    ]
    return {mark: next(k for k in keys if mark in k) for mark in ("num_reqs", "slot_mapping", "block_size")}


@pytest.mark.parametrize("release", since("0.11.1"))
def test_the_cpus_functions_take_what_we_have(release: str) -> None:
    functions = {
        "num_reqs": (OPERATORS, "cpu_attn_get_scheduler_metadata"),
        "slot_mapping": (OPERATORS, "cpu_attn_reshape_and_cache"),
        "block_size": (CPU, "_get_attn_isa"),
    }
    for mark, (path, name) in functions.items():
        node = vllm.function(release, path, name)
        taken = [argument.arg for argument in node.args.args]
        given = cpu._arguments(_called_like(taken), dict.fromkeys(known_arguments()[mark]))
        assert list(given) == taken


def _called_like(names: list[str]) -> Any:
    def function() -> None:
        """Stands for one with these parameters."""

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    setattr(function, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return function


@pytest.mark.parametrize("release", REVIEWED)
def test_the_layer_has_what_is_read_of_it(release: str) -> None:
    path = next(path for path in LAYER if vllm.definition(release, path, "Attention"))
    needed = {"impl", "num_heads", "num_kv_heads", "head_size", "sliding_window", "attn_type"}
    assert needed <= vllm.attributes(release, path, "Attention")


@pytest.mark.parametrize("release", REVIEWED)
def test_the_v1_runners_batch_has_what_is_read_of_it(release: str) -> None:
    found = vllm.attributes(release, "vllm/v1/worker/gpu_input_batch.py", "InputBatch")
    assert {"req_ids", "num_computed_tokens_cpu", "num_prompt_tokens"} <= found
    assert "idx_mapping_np" not in found, "this tells a V2 batch"


@pytest.mark.parametrize("release", since("0.16.0"))
def test_the_v2_runners_batch_has_what_is_read_of_it(release: str) -> None:
    fields = vllm.fields(release, "vllm/v1/worker/gpu/input_batch.py", "InputBatch")
    assert {"req_ids", "idx_mapping_np"} <= fields.keys()
    assert "prompt_len" in vllm.attributes(release, "vllm/v1/worker/gpu/states.py", "RequestState")
    assert "req_states" in vllm.attributes(release, vllm.RUNNER_V2, "GPUModelRunner")
    cached = vllm.fields(release, vllm.OUTPUT, "CachedRequestData")
    assert {"req_ids", "num_computed_tokens"} <= cached.keys()
    assert "num_computed_tokens" in vllm.fields(release, vllm.OUTPUT, "NewRequestData")


#: Classes of vLLM's configuration, wherever a release keeps them, and what is read of them without a fallback.
CONFIGURATION = {
    "VllmConfig": {"speculative_config", "model_config", "cache_config", "parallel_config", "compilation_config"},
    "ModelConfig": {"model", "use_mla", "is_encoder_decoder", "enforce_eager"},
    "CacheConfig": {"sliding_window", "block_size", "cache_dtype"},
    "CompilationConfig": {"static_forward_context"},
}
PLACES = [
    "vllm/config.py",
    *(f"vllm/config/{name}.py" for name in ("__init__", "vllm", "model", "cache", "compilation")),
]


@pytest.mark.parametrize("release", REVIEWED)
def test_the_configuration_has_what_is_read_of_it(release: str) -> None:
    for name, needed in CONFIGURATION.items():
        path = next(path for path in PLACES if vllm.definition(release, path, name))
        found = vllm.attributes(release, path, name)
        assert needed <= found, name
        if name == "CompilationConfig":
            assert {"full_cuda_graph", "cudagraph_mode"} & found
            if "cudagraph_mode" in found:
                assert "has_full_cudagraphs" in vllm.attributes(release, path, "CUDAGraphMode")
                modes = vllm.definition(release, path, "CUDAGraphMode")
                named = {ast.unparse(of.targets[0]) for of in modes.body if isinstance(of, ast.Assign)} if modes else ()
                assert {"PIECEWISE", "NONE"} <= set(named)
                assert "splitting_ops_contain_attention" in found
                assert {"mode", "level"} & found


#: What runs in a worker before its hook, and after vLLM's configuration was made.
BEFORE_THE_HOOK = (
    ("vllm/v1/worker/gpu_worker.py", "Worker"),
    ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner"),
    ("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner"),
)
EARLY = {"__init__", "init_device", "_init_device"}


@pytest.mark.parametrize("release", since("0.10.1.1"))
def test_nothing_but_whether_there_are_graphs_is_decided_before_they_are_lowered(release: str) -> None:
    """Otherwise `lower_graphs` would come too late; up to 0.10.0 the runner keeps the flag.

    In some releases the V2 runner's graphs have their manager from the start, which tells `lower_graphs` so.
    """
    for path, name in BEFORE_THE_HOOK:
        if vllm.definition(release, path, name) is None:
            continue
        for called, method in vllm.methods(release, path, name).items():
            if called in EARLY:
                reads = [of for of in ast.walk(method) if isinstance(of, ast.Attribute) and of.attr == "cudagraph_mode"]
                compared = [
                    of.left
                    for of in ast.walk(method)
                    if isinstance(of, ast.Compare) and ast.unparse(of.comparators[0]) == "CUDAGraphMode.NONE"
                ]
                made = [of for of in ast.walk(method) if isinstance(of, ast.Assign) and isinstance(of.value, ast.Call)]
                managers = [of for of in made if ast.unparse(of.targets[0]) == f"self.{requirements.MANAGER}"]
                given = {id(read) for manager in managers for read in ast.walk(manager)}
                assert all(of in compared or id(of) in given for of in reads), f"{path}: {name}.{called}"
