"""The boot module runs as little as possible at interpreter start, and hides nothing."""

from __future__ import annotations

import ast
import re
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import RELEASE

if TYPE_CHECKING:
    from tests.ucm.overlay.conftest import Wheels
    from tests.ucm.overlay.environment import Environment

#: The allowed top-level statements of the boot module: definitions, and constants made of literals.
HARMLESS = (ast.Expr, ast.Import, ast.Assign, ast.ClassDef, ast.FunctionDef)
IMPORTED = re.compile(r"import time:\s+\d+ \|\s+\d+ \|\s*(\S+)")


@pytest.fixture(scope="module")
def files(wheels: Wheels) -> dict[str, str]:
    """The text of each file in the overlay wheel."""
    with zipfile.ZipFile(wheels.overlay) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture(scope="module")
def boot(files: dict[str, str]) -> ast.Module:
    return ast.parse(files["ucm_vllm_overlay/_boot.py"])


def test_the_boot_module_imports_sys_alone(boot: ast.Module) -> None:
    imports = [node for node in boot.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import sys"]


def test_what_its_functions_import_they_import_when_a_shadowed_module_is_imported(boot: ast.Module) -> None:
    for function in (node for node in ast.walk(boot) if isinstance(node, ast.FunctionDef)):
        inner = {node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
        assert {ast.unparse(node) for node in inner} == (
            {"import os", "from ucm.overlay.finder import find_overlay_spec"} if function.name == "find_spec" else set()
        )
        if inner:
            guard, leave = function.body[0], ast.unparse(function.body[0])
            assert isinstance(guard, ast.If)
            assert leave == "if fullname not in MODULES:\n    return None"


def test_the_boot_module_does_nothing_when_imported(boot: ast.Module) -> None:
    assert all(isinstance(node, HARMLESS) for node in boot.body)
    assert [node for node in boot.body if isinstance(node, ast.Expr)] == boot.body[:1]  # its docstring
    calls = [
        ast.unparse(n) for s in boot.body if isinstance(s, ast.Assign) for n in ast.walk(s) if isinstance(n, ast.Call)
    ]
    assert [call.partition("(")[0] for call in calls] == ["frozenset", "len", "OverlayFinder"]


def test_the_package_itself_is_empty(files: dict[str, str]) -> None:
    (only,) = ast.parse(files["ucm_vllm_overlay/__init__.py"]).body
    assert isinstance(only, ast.Expr)


def test_the_pth_file_is_one_readable_line(files: dict[str, str]) -> None:
    text = files["ucm_vllm_overlay.pth"]
    assert text == "import ucm_vllm_overlay._boot; ucm_vllm_overlay._boot.install()\n"
    assert not re.search(r"exec|eval|compile|__import__", text)


def test_the_start_file_names_the_same_function(files: dict[str, str], shared: Environment) -> None:
    """PEP 829: a Python that reads `.start` files skips the import lines of the `.pth` file with the same stem."""
    (name,) = [name for name in files if name.endswith(".start")]
    (pth,) = [name for name in files if name.endswith(".pth")]
    assert name.removesuffix(".start") == pth.removesuffix(".pth")
    (entry,) = files[name].splitlines()
    assert re.fullmatch(r"[\w.]+:[\w.]+", entry)
    module, _, function = entry.partition(":")
    assert f"{module}.{function}()" in files[pth]
    code = "from importlib.metadata import EntryPoint; print(callable(EntryPoint('', {!r}, '').load()))"
    assert shared.run(code.format(entry)) == "True"


def test_an_interpreter_start_imports_two_modules_more(shared: Environment, upstream: Environment) -> None:
    def imported(environment: Environment) -> set[str]:
        return set(IMPORTED.findall(environment.start("-X", "importtime", "-c", "").stderr))

    upstream.write("none.pth", "# for any .pth file, site itself imports a codec from Python 3.13\n")
    assert imported(shared) - imported(upstream) == {"ucm_vllm_overlay", "ucm_vllm_overlay._boot"}


def test_the_import_of_vllm_itself_needs_no_more(shared: Environment) -> None:
    code = "import sys, vllm; print([name for name in sys.modules if name.split('.')[0] == 'ucm'])"
    assert shared.run(code) == "[]"


def test_the_first_shadowed_import_brings_the_standard_library_and_ucm_alone(shared: Environment) -> None:
    code = (
        "import sys; before = set(sys.modules); import vllm.v1.worker.worker_base; "
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert shared.run(code) == "ucm vllm"


def test_the_modules_that_it_names_are_the_manifest_s(files: dict[str, str], shared: Environment) -> None:
    code = "from ucm_vllm_overlay._boot import MODULES; print(*sorted(MODULES))"
    rewritten = [name for name in files if name.startswith("ucm_vllm_overlay/modules/")]
    names = sorted(name.removeprefix("ucm_vllm_overlay/modules/")[:-3].replace("/", ".") for name in rewritten)
    assert shared.run(code).split() == names
    assert RELEASE in files["ucm_vllm_overlay/__init__.py"]
