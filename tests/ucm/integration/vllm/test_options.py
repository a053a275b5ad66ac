"""Messages name only vLLM options and variables that the release has."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import ucm
from tests.releases import REVIEWED
from tests.ucm.integration.vllm.published import definition, fields, module
from ucm.compat import choose_backend, leave_out, no_whole_graphs, runs_micro_batches
from ucm.errors import SparseMethodError
from ucm.integration.vllm.connector.failures import UnsupportedModelError, refuse_what_cannot_work
from ucm.integration.vllm.sparse.requirements import require_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
VARIABLE = re.compile(r"\bVLLM_[A-Z0-9_]+")
CONFIG = "vllm/config/{}.py", "vllm/config/__init__.py", "vllm/config.py"
BACKENDS = (
    "vllm/v1/attention/backends/registry.py",
    "vllm/attention/backends/registry.py",
    "vllm/platforms/interface.py",
)
#: Options that every release has, so any message may name them.
EVERYWHERE = {
    *("additional-config", "block-size", "compilation-config", "enable-lora", "enable-sleep-mode", "enforce-eager"),
    *("hf-overrides", "kv-cache-dtype", "kv-transfer-config", "max-model-len", "no-enable-prefix-caching"),
    *("gpu-memory-utilization", "num-gpu-blocks-override", "scheduler-cls", "speculative-config"),
}
#: Options of other programs, for instance `ucm doctor` and `build-overlay`.
NOT_VLLMS = {"config", "hooks", "json", "run", "shm-size"}


@functools.cache
def options_of(release: str) -> set[str]:
    return set(fields(release, "vllm/engine/arg_utils.py", "EngineArgs"))


@functools.cache
def variables_of(release: str) -> set[str]:
    tree = module(release, "vllm/envs.py")
    assert tree is not None
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in strings if VARIABLE.fullmatch(text)}


@functools.cache
def config_of(release: str, part: str, name: str) -> set[str]:
    """Return the fields of a part of vLLM's configuration, at its path in the release."""
    for path in (place.format(part) for place in CONFIG):
        if definition(release, path, name) is not None:
            return set(fields(release, path, name))
    raise AssertionError(f"vLLM {release} has no {name}")


@functools.cache
def backends_of(release: str) -> tuple[str, set[str]]:
    """Return the location of the attention backends' names, and the names."""
    for path in BACKENDS:
        for name in ("AttentionBackendEnum", "_Backend"):
            found = definition(release, path, name)
            if isinstance(found, ast.ClassDef):
                names = {ast.unparse(t) for n in found.body if isinstance(n, ast.Assign) for t in n.targets}
                if "FLASH_ATTN" in names:
                    return path, names
    raise AssertionError(f"vLLM {release} names no backends")


def named(message: object) -> tuple[set[str], set[str]]:
    """Return the options, as fields, and the variables that a message names."""
    text = str(message)
    options = {option.replace("-", "_") for option in OPTION.findall(text)}
    return {option.removeprefix("no_") for option in options}, set(VARIABLE.findall(text))


@pytest.fixture
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A release whose modules, on which messages depend, can be imported."""
    release = str(request.param)
    place, names = backends_of(release)
    interface = ModuleType("vllm.platforms.interface")
    if place.endswith("interface.py"):
        interface._Backend = SimpleNamespace(**dict.fromkeys(names))  # type: ignore[attr-defined]
    envs = ModuleType("vllm.envs")
    envs.environment_variables = dict.fromkeys(variables_of(release))  # type: ignore[attr-defined]
    for name in variables_of(release):
        setattr(envs, name, name == "VLLM_USE_V2_MODEL_RUNNER")
    platforms = ModuleType("vllm.platforms")
    platforms.interface = interface  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.envs, vllm.platforms = envs, platforms  # type: ignore[attr-defined]
    for one in (vllm, envs, platforms, interface):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return release


every_release = pytest.mark.parametrize("release", REVIEWED, indirect=True)


@every_release
def test_the_choice_of_an_attention_backend(release: str) -> None:
    message = choose_backend()
    options, variables = named(message)
    assert options | variables
    assert options <= options_of(release)
    assert variables <= variables_of(release)
    backends = set(re.findall(r"[A-Z0-9_]+", message.replace("VLLM_ATTENTION_BACKEND=", "")))
    backends -= {"GPU"}
    assert len(backends) == 2
    assert backends <= backends_of(release)[1]


@every_release
def test_micro_batches(release: str) -> None:
    there = {"enable_dbo", "ubatch_size"} & config_of(release, "parallel", "ParallelConfig")
    for chosen in there:
        values = {name: (2 if name == "ubatch_size" else True) if name == chosen else 0 for name in there}
        parallel = SimpleNamespace(**values)
        assert runs_micro_batches(SimpleNamespace(parallel_config=parallel))
        where, how = leave_out(parallel, "enable_dbo", "ubatch_size")
        assert (where, named(how)[0]) == (chosen, {chosen})
        assert chosen in options_of(release)


@every_release
def test_whole_graphs(release: str) -> None:
    there = config_of(release, "compilation", "CompilationConfig")
    message = no_whole_graphs(SimpleNamespace(**dict.fromkeys({"cudagraph_mode", "full_cuda_graph"} & there, True)))
    assert set(re.findall(r'"(\w+)":', message)) <= there
    assert named(message)[0] <= options_of(release)


@every_release
def test_context_parallelism(release: str) -> None:
    names = {"decode_context_parallel_size", "prefill_context_parallel_size"}
    for name in names & config_of(release, "parallel", "ParallelConfig"):
        config = engine(parallel_config=SimpleNamespace(**{name: 2}))
        with pytest.raises(SparseMethodError) as caught:
            require_engine(config)
        assert named(caught.value)[0] == {name}
        assert name in options_of(release)
        with pytest.raises(UnsupportedModelError) as refused:
            refuse_what_cannot_work(config, None)
        assert named(refused.value)[0] <= options_of(release)


def engine(**parts: Any) -> Any:
    """Return a supported configuration, except for the given parts."""
    model = {"use_mla": False, "is_encoder_decoder": False, "model": "m", "enforce_eager": True}
    return SimpleNamespace(
        **{
            "model_config": SimpleNamespace(**model),
            "cache_config": SimpleNamespace(sliding_window=None),
            "speculative_config": None,
            "compilation_config": SimpleNamespace(),
            **parts,
        }
    )


def spoken(path: Path) -> Iterator[str]:
    """Yield the strings of a module, except docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


ROOMS = ("integration", "sparse", "store", "config", "hashing")


def test_no_message_names_an_option_that_only_some_releases_have() -> None:
    """Other options are named only by `ucm.compat`, or where the engine has enabled them."""
    root = Path(ucm.__file__).parent
    texts = [text for room in ROOMS for path in (root / room).rglob("*.py") for text in spoken(path)]
    found = {option for text in texts for option in OPTION.findall(text)}
    by_release = {"attention-backend", "no-async-scheduling", "no-swa-bounded-replay"}
    assert found <= EVERYWHERE | NOT_VLLMS | by_release, found - EVERYWHERE - NOT_VLLMS - by_release


@pytest.mark.parametrize("release", REVIEWED)
def test_every_release_has_the_options_that_are_named_everywhere(release: str) -> None:
    missing = {one for one in EVERYWHERE if one.removeprefix("no-").replace("-", "_") not in options_of(release)}
    assert missing == set()
