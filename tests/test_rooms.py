"""Packages import only what the architecture allows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: For each package or module: the top-level names or dotted prefixes that its files must not import, and the subfolders
#: with rules of their own.
ROOMS = {
    "transforms/engine": (("transforms.pipeline", "transforms.registry", "ucm", "vllm", "torch"), ()),
    "transforms/pipeline": (("ucm", "vllm", "torch"), ()),
    "transforms": (("ucm", "vllm", "torch"), ("engine", "pipeline")),
    "website": (("transforms", "vllm", "torch"), ()),
    "examples": (("transforms", "vllm"), ("ascend_patches", "early_kv")),
    "ucm": (("transforms", "libcst", "vllm"), ()),
    "ucm/overlay": (("transforms", "libcst", "vllm", "torch", "numpy", "ucm.sparse", "ucm.integration"), ()),
    "ucm/sparse": (("ucm.integration", "ucm.overlay"), ()),
    "ucm/store": (("ucm.integration", "ucm.overlay", "ucm.sparse", "ucm.hashing", "vllm"), ()),
    "ucm/blend.py": (("ucm.integration", "ucm.overlay", "ucm.sparse", "vllm"), ()),
    "ucm/hashing": (("ucm.integration", "ucm.overlay", "ucm.sparse", "ucm.store"), ()),
    "ucm/compat.py": (
        (
            "torch",
            "numpy",
            *(f"ucm.{name}" for name in ("config", "errors", "hashing", "integration", "sparse", "store")),
        ),
        (),
    ),
}
#: Third-party packages that parts of the runtime may import, all declared in pyproject.toml. The modules that every
#: Python start and every vLLM process imports (the finder's library, the hooks) need none.
RUNTIME_MAY_IMPORT = frozenset({"numpy", "pydantic", "tqdm", "xxhash", "yaml"})
#: Modules that need an extra of pyproject.toml, and are imported only if configured, or what vLLM has on a GPU.
OPTIONAL = {
    "ucm/store/authentication.py": {"blake3"},
    "ucm/store/compression.py": {"zstandard"},
    "ucm/store/remote/mooncake_client.py": {"mooncake"},
    "ucm/store/remote/redis_client.py": {"redis"},
    "ucm/store/remote/s3_client.py": {"obstore"},
    "ucm/sparse/topk/kernels.py": {"triton"},
    **{f"ucm/testing/{name}.py": {"pytest"} for name in ("conformance", "sparse")},
}
#: Modules that only vLLM imports, by the name in its settings.
LOADED_BY_VLLM = {f"ucm/integration/vllm/{name}_connector.py" for name in ("blend", "ucm")}
#: Modules of ucm.sparse that the hooks and ``ucm doctor`` import; a method is imported only if configured.
LEAN = (
    *("ucm/overlay", "ucm/doctor"),
    *(f"ucm/sparse/{name}.py" for name in ("__init__", "base", "factory", "probe")),
)


#: Who may ask objects for attributes by name, and how many times: only `ucm.compat` asks vLLM's.
PROBES = {
    "ucm/compat.py": 68,
    # Arbitrary values of settings, multimodal data and tensors.
    "ucm/hashing/model_identity.py": 5,
    "ucm/hashing/request_content.py": 3,
    # Python's modules, import finders and functions.
    "ucm/overlay": 17,
    "ucm/commands": 1,
    "ucm/doctor": 1,
    "ucm/logger.py": 2,
    "ucm/sparse": 3,
    "ucm/testing": 2,
    "ucm/store": 9,
    "ucm/config": 2,
    # Names that are chosen at run time: fields of metadata, hooks of a method, torch's module of a device.
    "ucm/integration/vllm": 20,
}


def files(room: str, apart: tuple[str, ...]) -> list[Path]:
    root = ROOT / room
    if root.is_file():
        return [root]
    return [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in apart]


def imports(path: Path, *, at_import_time: bool) -> set[str]:
    """Return the modules that a file imports: all of them, or only those imported at import time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(_run_at_import(tree)) if at_import_time else list(ast.walk(tree))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def _run_at_import(tree: ast.AST) -> list[ast.AST]:
    """Return the statements outside functions and outside `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += [node, *_run_at_import(node)]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_that_it_may_not(room: str) -> None:
    forbidden, apart = ROOMS[room]
    found = files(room, apart)
    assert found
    for path in found:
        lazily_allowed = room == "ucm"  # the runtime may import vLLM inside a function
        for name in imports(path, at_import_time=lazily_allowed):
            if str(path.relative_to(ROOT)) in LOADED_BY_VLLM and name.startswith("vllm."):
                continue
            strangers = [f for f in forbidden if name == f or name.startswith(f"{f}.")]
            assert not strangers, f"{path.relative_to(ROOT)} imports {name}"


def test_the_runtime_needs_only_its_declared_packages_at_import() -> None:
    for path in files("ucm", ()):
        lean = str(path.relative_to(ROOT)).startswith(LEAN)
        allowed = sys.stdlib_module_names | {"ucm"} | (frozenset() if lean else RUNTIME_MAY_IMPORT)
        if str(path.relative_to(ROOT)) in LOADED_BY_VLLM:
            allowed |= {"vllm"}
        allowed |= OPTIONAL.get(str(path.relative_to(ROOT)), set())
        strangers = {name for name in imports(path, at_import_time=True) if name.partition(".")[0] not in allowed}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_transforms_know_no_engine_internals_of_each_other() -> None:
    """A transform may use another one's module record, but nothing of the pipeline."""
    for path in files("transforms", ("engine", "pipeline")):
        if path.name == "__main__.py":
            continue
        strangers = {n for n in imports(path, at_import_time=False) if n.startswith("transforms.pipeline")}
        assert not strangers, f"{path.name} imports {strangers}"


def _probes(path: Path) -> int:
    """Return how many calls of ``getattr`` and ``hasattr`` a file has."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return sum(isinstance(call.func, ast.Name) and call.func.id in {"getattr", "hasattr"} for call in calls)


def test_only_compat_asks_what_a_vllm_release_has() -> None:
    found: dict[str, int] = {}
    for path in files("ucm", ()):
        file = path.relative_to(ROOT).as_posix()
        room = max((name for name in PROBES if file == name or file.startswith(f"{name}/")), key=len, default=file)
        found[room] = found.get(room, 0) + _probes(path)
    for room, count in found.items():
        most = PROBES.get(room, 0)
        assert count <= most, (
            f"{room} has {count} calls of getattr and hasattr, and may have {most}. For what only some releases of "
            "vLLM have, write a function with a typed result in ucm/compat.py; read fields of "
            "configurations by its `optional`. For an object that is not vLLM's, raise the number in PROBES."
        )
