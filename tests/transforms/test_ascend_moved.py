"""Patches of vLLM Ascend and the transforms in their place do the same to vLLM's own functions, in three releases.

Each function is that of a published release: once as it is, once after vLLM Ascend's published patch has run, once as
the overlay of the example rewrites it. All three get the same arguments. What they call elsewhere is a stand-in.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import enum
import functools
import importlib.abc
import importlib.machinery
import os
import re
import runpy
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import CodeType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args
from unittest.mock import MagicMock

import pydantic.dataclasses
import pytest

from tests.examples import EXAMPLES, registry_of
from tests.moved import PAGE, RELEASES, moved, rebound, rows
from transforms.ascend.registry import VLLM_ASCEND
from transforms.pipeline.build import make_overlay
from transforms.pipeline.product import compose
from transforms.pipeline.rebindings import pair
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Node = TypeVar("Node", bound=ast.stmt)

SINCE_24 = RELEASES[1:]
SINCE_30 = RELEASES[2:]
EXAMPLE = compose(registry_of("ascend_patches"))
SEAM = EXAMPLE.publisher.seam.alias
#: The packages of which nothing is installed here.
ABSENT = ("vllm", "vllm_ascend", "torch", "safetensors", "transformers")

#: The decorators without which a method is another kind of attribute.
KINDS = {"property", "staticmethod", "classmethod"}


class Names(dict[str, Any]):
    """The global names of a function: what is not given is a stand-in."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        self[name] = MagicMock(name=name)
        return self[name]


class StandIn(ModuleType):
    """A module whose missing attributes are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the absent packages."""

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        is_absent = fullname.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@functools.cache
def published(release: str, path: str) -> str:
    """Return a file of vLLM Ascend, or of the vLLM that belongs to it."""
    is_ascend = path.startswith(VLLM_ASCEND.name)
    tree = open_sources(release, package=VLLM_ASCEND) if is_ascend else open_sources(pair(release))
    return tree.read(path).decode()


@functools.cache
def patch_code(release: str, path: str) -> CodeType:
    """Return a compiled module of vLLM Ascend."""
    return compile(published(release, path), path, "exec")


@functools.cache
def rewritten(release: str) -> dict[str, str]:
    """Return the modules of the example's overlay."""
    return {module.path: module.rewritten.decode() for module in make_overlay(pair(release), product=EXAMPLE).modules}


class Base:
    """What the classes derive from; it keeps what its constructor is given."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given = (given, named)

    def register_buffer(self, *_: Any, **__: Any) -> None: ...


def defined(source: str, name: str, names: Names) -> Any:
    """Run one definition of a source, and return it.

    A class has a method of the name, and for the patches that look for others those without defaults.
    """
    first, _, rest = name.partition(".")
    nodes = [n for n in top_level(source) if getattr(n, "name", "") == first or first in _targets(n)]
    node = nodes[0]
    if isinstance(node, ast.ClassDef) and rest:
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and (n.name == rest or _is_simple(n))]
        nodes[0] = changed(
            node,
            body=[
                changed(one, decorator_list=[d for d in one.decorator_list if getattr(d, "id", "") in KINDS])
                for one in methods
            ],
            decorator_list=[],
            bases=[ast.Name("Base", ast.Load())],
            keywords=[],
        )
    names["Base"] = Base
    module = ast.fix_missing_locations(ast.Module(list(nodes), []))
    exec(compile(module, first, "exec", flags=__future__.annotations.compiler_flag), names)  # noqa: S102 - vLLM's
    return names[first]


@functools.cache
def top_level(source: str) -> tuple[ast.stmt, ...]:
    """Return the statements of a module, parsed once; they are not to be changed."""
    return tuple(ast.parse(source).body)


def changed(node: Node, **fields: Any) -> Node:
    """Return a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_simple(function: ast.FunctionDef) -> bool:
    return function.name != "__init__" and not (function.args.defaults or function.args.kw_defaults)


def _targets(node: ast.stmt) -> list[str]:
    return [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []


@dataclass
class World:
    """vLLM's place of one rebinding in one release, as published, patched or rewritten.

    Attributes:
        release: The release of vLLM Ascend.
        kind: ``published``, ``patched`` or ``rewritten``.
        names: The global names of vLLM's functions.
    """

    release: str
    kind: str
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        hooks = runpy.run_path(str(EXAMPLES / "ascend_patches" / "ascend_patches" / "hooks.py"))
        self.platform = stand_in("vllm.platforms").current_platform
        self.platform.device_name = self.platform.device_type = "npu"
        self.platform.is_cuda_alike.return_value = self.platform.is_rocm.return_value = False
        self.names |= {SEAM: SimpleNamespace(**hooks), "current_platform": self.platform, "os": os}

    def get(self, path: str, name: str, patch: str = "") -> Any:
        """Return vLLM's function or class, and run the patch of that name if this world is patched."""
        is_rewritten = self.kind == "rewritten" and path in rewritten(self.release)
        source = rewritten(self.release)[path] if is_rewritten else published(self.release, path)
        made = defined(source, name, self.names)
        module = stand_in(path.removesuffix(".py").replace("/", "."))
        first = name.partition(".")[0]
        setattr(module, first, made)
        if self.kind == "patched" and patch:
            self.run(patch)
        return getattr(module, first)

    def run(self, patch: str) -> dict[str, Any]:
        """Run a patch of vLLM Ascend, and return its names."""
        path = f"vllm_ascend/patch/{patch}.py"
        names = {"__name__": path.removesuffix(".py").replace("/", "."), "__builtins__": builtins}
        exec(patch_code(self.release, path), names)  # noqa: S102 - vLLM Ascend's
        return names


def stand_in(module: str) -> Any:
    """Import the stand-in of a module."""
    __import__(module)
    return sys.modules[module]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the absent packages be imported, anew for each world."""
    monkeypatch.setattr(sys, "meta_path", [StandIns(), *sys.meta_path])
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
        del sys.modules[name]


def told(act: Callable[[], Any]) -> Any:
    """Return what an act returns, or what it raises."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__


def refused(act: Callable[[], Any]) -> Any:
    """Return what an act returns, or that it raises: a patch and vLLM differ in the type of an error."""
    try:
        return act()
    except Exception:  # noqa: BLE001 - compared
        return "refused"


def outcomes(release: str, act: Callable[[World], Any]) -> list[Any]:
    """Return the outcomes in the three worlds: as published, patched, rewritten."""
    found = []
    for kind in ("published", "patched", "rewritten"):
        forget()
        found.append(act(World(release, kind)))
    return found


def same(release: str, act: Callable[[World], Any], *, differs: bool = True) -> Any:
    """Check that the transform does what the patch does, and that this is not what vLLM does; return it."""
    before, patched, now = outcomes(release, act)
    assert now == patched
    assert (before != patched) is differs
    return now


@pytest.mark.parametrize("release", RELEASES)
def test_steps_of_full_graphs_are_not_uniform(release: str) -> None:
    def act(world: World) -> list[Any]:
        mode = defined(published(release, "vllm/config/compilation.py"), "CUDAGraphMode", Names(enum=enum))
        stand_in("vllm.config").CUDAGraphMode = world.names["CUDAGraphMode"] = mode
        stand_in("vllm.forward_context").BatchDescriptor = world.names["BatchDescriptor"] = dict
        place = "vllm/v1/cudagraph_dispatcher.py", "CudagraphDispatcher._create_padded_batch_descriptor"
        made = world.get(*place, "worker/patch_cudagraph")
        found = []
        for one in mode:
            dispatcher = made()
            dispatcher.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=6))
            dispatcher.uniform_decode_query_len = 2
            dispatcher.cudagraph_mode = one
            dispatcher._bs_to_padded_graph_size = {5: 8, 16: 16}
            describe = dispatcher._create_padded_batch_descriptor
            found += [(one.name, describe(n, uniform, False, 0)) for n in (5, 16) for uniform in (True, False)]
        return found

    same(release, act)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("chosen", [None, True, False])
def test_the_environment_alone_chooses_the_runner(release: str, chosen: bool | None) -> None:
    def act(world: World) -> Any:
        stand_in("vllm").envs = world.names["envs"] = stand_in("vllm.envs")
        stand_in("vllm.envs").VLLM_USE_V2_MODEL_RUNNER = chosen
        world.names["HAS_TRITON"] = True
        made = world.get("vllm/config/vllm.py", "VllmConfig.use_v2_model_runner", "platform/patch_use_v2_model_runner")
        config = made()
        config.attention_config = SimpleNamespace(hisparse_config=None)
        config.model_config = SimpleNamespace(is_diffusion=False, architectures=["A"])
        config._is_default_v2_model_runner_model = MagicMock(return_value=True)
        made._get_v2_model_runner_unsupported_features = MagicMock(return_value=[])
        return config.use_v2_model_runner

    assert same(release, act, differs=chosen is None) is bool(chosen)


@pytest.mark.parametrize("release", SINCE_30)
def test_the_first_runner_has_some_features(release: str) -> None:
    def act(world: World) -> Any:
        name = "VllmConfig._get_v1_model_runner_unsupported_features"
        made = world.get("vllm/config/vllm.py", name, "platform/patch_use_v2_model_runner")
        config = made()
        config.parallel_config = SimpleNamespace(prefill_context_parallel_size=2, enable_batch_sharded_sampling=False)
        config.speculative_config = SimpleNamespace(method="dspark", enable_adaptive_verification=True)
        config.model_config = None
        config._dflash_needs_multi_kv_group = MagicMock(return_value=False)
        config._is_dflash2_draft = MagicMock(return_value=True)
        return config._get_v1_model_runner_unsupported_features()

    assert same(release, act) == ["prefill context parallel", "adaptive draft verification"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", ["minimax_m2", "llama"])
@pytest.mark.parametrize(
    ("given", "of_checkpoint"), [(None, "fp8"), ("fp8", "fp8"), ("fp8", None), (None, None), ("awq", "fp8")]
)
def test_minimax_in_fp8_is_loaded_as_bfloat16(
    release: str, model: str, given: str | None, of_checkpoint: str | None
) -> None:
    def act(world: World) -> Any:
        def verify(method: str) -> None:
            if method == "fp8":
                raise ValueError(method)

        world.platform.verify_quantization.side_effect = verify
        quant = MagicMock()
        quant.QUANTIZATION_METHODS, quant.DEPRECATED_QUANTIZATION_METHODS = ["fp8", "awq"], ()
        quant.get_quantization_config.return_value.override_quantization_method.return_value = None
        world.names |= {"me_quant": quant, "cast": cast, "get_args": get_args}
        made = world.get("vllm/config/model.py", "ModelConfig._verify_quantization", "platform/patch_minimax_m2_config")
        config = made()
        config.quantization, config.hf_config, config.hf_text_config = given, None, None
        wanted = {"quant_method": of_checkpoint} if of_checkpoint else None
        config.model_arch_config = SimpleNamespace(quantization_config=wanted, model_type=model)
        return told(config._verify_quantization), config.quantization

    is_fp8 = "fp8" in {given, of_checkpoint} and given != "awq"
    same(release, act, differs=model == "minimax_m2" and is_fp8)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", ["minimax_m2", "llama"])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("given", [None, "AIV", "AI_CPU"])
def test_collectives_are_expanded_for_graphs(
    release: str, model: str, eager: bool, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "HCCL_OP_EXPANSION_MODE"

    def act(world: World) -> Any:
        monkeypatch.delenv(variable, raising=False)
        if given is not None:
            monkeypatch.setenv(variable, given)
        made = world.get("vllm/config/model.py", "ModelConfig._verify_cuda_graph", "platform/patch_minimax_m2_config")
        config = made()
        config.is_encoder_decoder, config.enforce_eager = False, eager
        config.model_arch_config = SimpleNamespace(model_type=model)
        config._verify_cuda_graph()
        return os.environ.pop(variable, None)

    same(release, act, differs=model == "minimax_m2" and not eager and given is None)


@pytest.mark.parametrize("release", SINCE_30)
@pytest.mark.parametrize(
    ("model", "rank", "known", "differs"),
    [
        ("glm5_next", 512, False, True),
        ("glm5_next", None, False, False),
        ("llama", 512, False, False),
        ("deepseek_v3", 512, True, False),
    ],
)
def test_glm_has_latent_attention(release: str, model: str, rank: int | None, known: bool, differs: bool) -> None:
    def act(world: World) -> Any:
        made = world.get("vllm/config/model.py", "ModelConfig.is_deepseek_mla", "platform/patch_glm5next_config")
        config = made()
        config.model_arch_config = SimpleNamespace(is_deepseek_mla=known)
        config.hf_text_config = SimpleNamespace(model_type=model, kv_lora_rank=rank)
        return config.is_deepseek_mla

    same(release, act, differs=differs)


@pytest.mark.parametrize("release", SINCE_24)
@pytest.mark.parametrize(
    ("visible", "rank", "local", "assigned", "differs"),
    [
        ("0,1,2,3", 1, None, None, False),
        ("4,5", 0, None, None, False),
        ("4,5", 1, None, None, True),
        ("4,5,6", 3, 1, None, True),
        ("4", 1, None, None, False),
        ("", 1, None, None, False),
        (None, 1, None, None, False),
        ("4,5", 1, None, [0, 1, 2, 3], False),
    ],
)
def test_a_rank_finds_its_own_devices(
    release: str,
    visible: str | None,
    rank: int,
    local: int | None,
    assigned: list[int] | None,
    differs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    if visible is not None:
        monkeypatch.setenv(variable, visible)

    def act(world: World) -> Any:
        source = published(release, "vllm/platforms/interface.py")
        for name in ("device_id_to_physical_device_id", "device_control_id_to_physical_device_id"):
            names = Names(os=os, _assigned_physical_gpu_ids=None)
            setattr(Platform, name, vars(defined(source, f"Platform.{name}", names))[name])
        stand_in("vllm.platforms").current_platform = world.names["current_platform"] = Platform
        place = "vllm/v1/engine/utils.py", "get_physical_gpu_ids_for_local_dp_rank"
        made = world.get(*place, "platform/patch_dp_device_ids")
        return refused(lambda: made(variable, rank, 2, local, assigned))

    class Platform:
        device_control_env_var = variable
        device_name = "npu"

    before, patched, now = outcomes(release, act)
    if visible == "":  # Ray leaves it empty where all devices are visible, with which the patch fails
        assert (patched, now) == ("refused", before)
    else:
        assert now == patched
        assert (before != patched) is differs


@pytest.mark.parametrize("release", RELEASES)
def test_prefill_of_latent_attention_has_a_backend_that_does_nothing(release: str) -> None:
    def act(world: World) -> Any:
        base = stand_in("vllm.v1.attention.backends.mla.prefill.base")
        base.MLAPrefillBackend = Base
        world.platform.is_cpu.return_value = False
        world.platform.get_device_capability.return_value = None
        place = "vllm/v1/attention/backends/mla/prefill/selector.py", "get_mla_prefill_backend"
        found = world.get(*place)
        if world.kind == "patched":  # the patch rebinds the name where it is used
            world.run("platform/patch_mla_prefill_backend")
            found = stand_in("vllm.model_executor.layers.attention.mla_attention").get_mla_prefill_backend
        backend = found(MagicMock())
        if not isinstance(backend, type):
            return "FlashAttention's"
        made: Any = backend
        methods = {"run_prefill_new_tokens": (1, 2, 3, True), "run_prefill_context_chunk": (0, 1, 2, 3)}
        run = [told(functools.partial(getattr(made(), name), *given)) for name, given in methods.items()]
        return made.__name__, made.get_name(), made.is_available(), issubclass(made, Base), run

    same(release, act)


CONSTRAINTS = ("choice", "grammar", "json", "json_object", "regex")


@pytest.mark.parametrize("release", RELEASES)
def test_an_engine_keeps_one_backend_of_structured_outputs(release: str) -> None:
    def act(world: World) -> Any:
        stand_in("vllm.exceptions").VLLMValidationError = world.names["VLLMValidationError"] = InvalidError
        xgrammar = stand_in("vllm.v1.structured_output.backend_xgrammar")
        guidance = stand_in("vllm.v1.structured_output.backend_guidance")
        guidance.has_guidance_unsupported_json_features = MagicMock(return_value=False)
        world.names["_is_non_tekken_mistral"] = lambda *_, **__: False
        name = "SamplingParams._validate_structured_outputs"
        made = world.get("vllm/sampling_params.py", name, "platform/patch_structured_output")
        config = SimpleNamespace(backend="auto")
        found = []
        for fits_xgrammar in (True, True, False, True):
            xgrammar.validate_xgrammar_grammar = MagicMock(side_effect=None if fits_xgrammar else InvalidError)
            params = made()
            empty = dict.fromkeys(
                ("choice", "grammar", "json", "json_object", "regex", "_backend", "_backend_was_auto")
            )
            params.structured_outputs = SimpleNamespace(**empty, __post_init__=lambda: None)
            model = [SimpleNamespace(is_diffusion=False)] if release != "0.23.0" else []
            run = functools.partial(params._validate_structured_outputs, *model, config, MagicMock())
            found.append((told(run), params.structured_outputs._backend, sorted(vars(config).values())))
        return found

    class InvalidError(ValueError): ...

    kept = same(release, act)
    assert [one[0] for one in kept] == [None, None, "InvalidError", None]


@pytest.mark.parametrize("release", RELEASES)
def test_a_grammar_of_another_backend_is_refused_before_it_is_made(release: str) -> None:
    def act(world: World) -> Any:
        stand_in("vllm.exceptions").VLLMValidationError = InvalidError
        managers = stand_in("vllm.v1.structured_output")
        managers.StructuredOutputManager = type("Manager", (), {"backend": None, "grammar_init": make_grammar})
        world.names["Request"] = SimpleNamespace(from_engine_core_request=lambda request, _: request)
        made = world.get(
            "vllm/v1/engine/core.py", "EngineCore.preprocess_add_request", "platform/patch_structured_output"
        )
        engine = made()
        engine.mm_receiver_cache = engine.request_block_hasher = None
        engine.structured_output_manager = managers.StructuredOutputManager()
        found = []
        for wanted in ("xgrammar", "guidance", None, "xgrammar"):
            params = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=wanted))
            request = SimpleNamespace(
                use_structured_output=True, structured_output_request=1, sampling_params=params, current_wave=0, made=0
            )
            found.append((told(functools.partial(engine.preprocess_add_request, request)), request.made))
        return found

    def make_grammar(manager: Any, request: Any) -> None:
        request.made = 1
        manager.backend = manager.backend or type("XgrammarBackend", (), {})()

    class InvalidError(ValueError): ...

    assert [(one[0] == "InvalidError", one[1]) for one in same(release, act)] == [
        (False, 1),
        (True, 0),
        (False, 1),
        (False, 1),
    ]


@pytest.mark.parametrize("release", SINCE_30)
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_complete_grammar_accepts_the_last_token(release: str, is_finished: bool) -> None:
    def act(world: World) -> Any:
        path = "vllm/v1/structured_output/backend_outlines.py"
        made = world.get(path, "OutlinesGrammar.accept_tokens", "platform/patch_structured_output")
        grammar = made()
        grammar.guide = MagicMock(**{"is_finished.return_value": is_finished, "accepts_tokens.return_value": False})
        return grammar.accept_tokens("a", [2])

    same(release, act, differs=is_finished)


DRAFTS = {"llama_eagle3": "Eagle3LlamaForCausalLM", "deepseek_eagle3": "Eagle3DeepseekV2ForCausalLM"}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("path", "layers"), [("llama_eagle3", "LlamaModel"), ("deepseek_eagle3", "DeepseekV2Eagle3Model")]
)
def test_a_draft_model_s_layers_come_after_those_of_all_stages(release: str, path: str, layers: str) -> None:
    def act(world: World) -> Any:
        for other, name in DRAFTS.items():
            setattr(stand_in(f"vllm.model_executor.models.{other}"), name, type(name, (Base,), {}))
        module = f"vllm.model_executor.models.{path}"
        made_layers = MagicMock()
        world.names[layers] = made_layers
        setattr(stand_in(module), layers, made_layers)
        made = world.get(f"{module.replace('.', '/')}.py", f"{DRAFTS[path]}.__init__", "worker/patch_eagle3_init")
        config = MagicMock()
        config.model_config.get_num_layers.return_value = 31
        config.model_config.get_total_num_hidden_layers.return_value = 61
        built = made(vllm_config=config)
        return made_layers.call_args.kwargs["start_layer_id"], built.config.target_layer_count

    assert same(release, act, differs=release != "0.30.0rc1") == (61, 61)


@pytest.mark.parametrize("release", SINCE_30)
@pytest.mark.parametrize(
    ("path", "name", "owner", "setting", "patch", "more", "lost"),
    [
        ("cache", "CacheDType", "CacheConfig", "cache_dtype", "kv_cache_dtype", {"int8", "mxfp8"}, {"nvfp4_ds_mla"}),
        ("attention", "IndexerKVDType", "AttentionConfig", "indexer_kv_dtype", "indexer_kv_dtype", {"int8"}, set()),
    ],
)
def test_caches_have_dtypes_of_npus(
    release: str, path: str, name: str, owner: str, setting: str, patch: str, more: set[str], lost: set[str]
) -> None:
    """The patch copies vLLM's list for the KV cache, and lacks what vLLM has added since."""

    def act(world: World) -> Any:
        world.names["Literal"] = Literal
        known = world.get(f"vllm/config/{path}.py", name)
        made = type(owner, (), {"__annotations__": {setting: known}, setting: "auto"})
        config = pydantic.dataclasses.dataclass(made)
        setattr(stand_in(f"vllm.config.{path}"), owner, config)
        if world.kind == "patched":
            world.run(f"platform/patch_{patch}")
        named = {
            one
            for one in (*all_names, "int7")
            if told(functools.partial(config, **{setting: one})) != "ValidationError"
        }
        return named, set(get_args(getattr(stand_in(f"vllm.config.{path}"), name)))

    all_names = {
        *get_args(World(release, "published", Names(Literal=Literal)).get(f"vllm/config/{path}.py", name)),
        *more,
    }
    before, patched, now = outcomes(release, act)
    assert now[0] == now[1] == before[0] | more
    assert patched[0] == patched[1] == now[0] - lost


@pytest.mark.parametrize("release", SINCE_30)
@pytest.mark.parametrize("is_consumer", [True, False])
def test_an_encoder_cache_is_loaded_to_the_worker_s_own_device(release: str, is_consumer: bool) -> None:
    def act(world: World) -> Any:
        world.platform.current_device.return_value = 3
        load = world.names["safetensors"].torch.load_file = stand_in("safetensors.torch").load_file
        path = "vllm/distributed/ec_transfer/ec_connector/example_connector.py"
        stand_in(path.removesuffix(".py").replace("/", ".")).ECExampleConnectorMetadata = object
        world.names["ECExampleConnectorMetadata"] = object
        made = world.get(path, "ECExampleConnector.start_load_caches", "platform/patch_example_connector")
        connector = made()
        connector.is_consumer = is_consumer
        wanted = [SimpleNamespace(mm_hash="a"), SimpleNamespace(mm_hash="b")]
        connector._get_connector_metadata = MagicMock(return_value=SimpleNamespace(mm_datas=wanted))
        connector._generate_filename_debug = MagicMock(side_effect="{}.safetensors".format)
        cache: dict[str, Any] = {"b": "known"}
        connector.start_load_caches(cache)
        return [call.kwargs["device"] for call in load.call_args_list], sorted(cache)

    same(release, act, differs=is_consumer)


GLM = "[gMASK]<sop> Reasoning Effort: <tool_call><arg_key><arg_value>"


@pytest.mark.parametrize("release", SINCE_30)
@pytest.mark.parametrize(
    ("template", "chat", "differs"),
    [
        (GLM, {"enable_thinking": False}, True),
        (GLM, {"thinking": False, "other": 1}, True),
        (GLM, {"thinking": True}, False),
        (GLM, None, False),
        (f"{GLM} enable_thinking", {"enable_thinking": False}, False),
        (None, {"enable_thinking": False}, False),
    ],
)
def test_glm_always_thinks(release: str, template: str | None, chat: dict[str, Any] | None, differs: bool) -> None:
    def act(world: World) -> Any:
        world.names["glm47_moe_config"] = lambda thinking: thinking
        stand_in("vllm.parser").glm47_moe = module = stand_in("vllm.parser.glm47_moe")
        module._glm53_always_thinks = None
        del module._glm53_always_thinks
        module.__class__ = ModuleType  # the patch asks whether vLLM has a helper
        made = world.get("vllm/parser/glm47_moe.py", "Glm47MoeParser.__init__", "platform/patch_glm53_reasoning")
        given = {"chat_template_kwargs": chat} if chat is not None else {}
        parser = made(SimpleNamespace(chat_template=template), None, **given)
        return parser.thinking_enabled, parser.given[1]["parser_engine_config"], given

    same(release, act, differs=differs)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("variable", ["DYNAMIC_EPLB", "EXPERT_MAP_RECORD", ""])
def test_workers_that_balance_experts_may_have_children(
    release: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch copies the function, and no longer binds the process to a NUMA node as vLLM does."""
    if variable:
        monkeypatch.setenv(variable, "true")

    def act(world: World) -> Any:
        started: list[bool] = []
        made = world.get("vllm/v1/executor/multiproc_executor.py", "WorkerProc.make_worker_process")
        worker = made
        module = stand_in("vllm.v1.executor.multiproc_executor")
        module.MultiprocExecutor = type("MultiprocExecutor", (), {})
        context = stand_in("vllm.utils.system_utils").get_mp_context
        world.names["get_mp_context"] = context
        context.return_value.Pipe.side_effect = lambda **_: (MagicMock(), MagicMock())
        context.return_value.Process.side_effect = lambda **given: Process(given["daemon"], started)
        if world.kind == "patched" and variable:  # as the package of the patches imports it
            worker = world.run("platform/patch_multiproc_executor")["AscendWorkerProc"]
        worker.make_worker_process(MagicMock(), 0, 0, "", None, MagicMock(), False)
        return started, world.names["numa_utils"].configure_subprocess.called

    before, patched, now = outcomes(release, act)
    assert before == ([True], True)
    assert now == ([not variable], True)
    assert patched == ([not variable], not variable)


@dataclass
class Process:
    """A process; it notes whether it starts as a daemon."""

    daemon: bool
    started: list[bool]

    def start(self) -> None:
        self.started.append(self.daemon)


def test_the_page_lists_what_the_releases_rebind() -> None:
    """Its table of patches names attributes that are rebound, and its table of kinds counts them."""
    page = PAGE.read_text(encoding="utf-8")
    assert f"has\n{len(rows())} of them" in page
    assert f"of the {len(EXAMPLE.transforms)} transforms" in page
    for column, release in enumerate(RELEASES):
        counts = Counter(one.kind for one in moved(release))
        for kind, total in Counter(one.kind for one in rebound(release)).items():
            (told_of,) = re.findall(rf"^\| {kind} \| (.*) \|$", page, re.MULTILINE)
            assert told_of.split(" | ")[column] == f"{counts[kind]} of {total}", (release, kind)
        diff = EXAMPLE.directory(pair(release)) / "changes.diff"
        lines = sum(line.startswith("+") for line in diff.read_text(encoding="utf-8").splitlines())
        files = sum(line.startswith("+++") for line in diff.read_text(encoding="utf-8").splitlines())
        (inserted,) = re.findall(r"^\| lines inserted into vLLM \| (.*) \|$", page, re.MULTILINE)
        assert inserted.split(" | ")[column] == str(lines - files)
