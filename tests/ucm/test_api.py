"""`ucm.api` as other packages see it, in an environment with only the built wheels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

import ucm.api
from tests.ucm.overlay.environment import Environment
from transforms.pipeline.package import build_runtime, build_wheel
from transforms.place import ROOT
from ucm.errors import ConfigError
from ucm.sparse import factory
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from pathlib import Path

#: A third-party method and store, each with one mistake that only type checking finds.
OUTSIDE = """
from collections.abc import Sequence
from ucm.api import API_VERSION, BlockKey, BlockGeometry, KVStore, MethodOptions, Role, SparseMethod, parse_options
from ucm.api import Request, VllmConfig

class Options(MethodOptions):
    depth: int = 1

class Mine(SparseMethod):
    options_type = Options

    def before_allocation(self, request: Request) -> str:  # wrong: bool
        reveal_type(request.num_prompt_tokens)
        return "yes"

def found(store: KVStore, keys: Sequence[BlockKey]) -> str:
    return store.lookup_on_prefix(keys)  # wrong: int

reveal_type(API_VERSION)
reveal_type(parse_options(Options, "Mine", {}).depth)
reveal_type(BlockGeometry((1,), b"").nbytes)
def ranks(config: VllmConfig) -> None:
    reveal_type(Mine(config, Role.WORKER, {}).attention.ranks)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the runtime and the example package; dependencies come from the tests' own environment."""
    directory = tmp_path_factory.mktemp("outside")
    environment = Environment.create(directory / "venv")
    environment.install(wheel, build_wheel(ROOT / "examples" / "sparse_method", directory))
    environment.write("needs.pth", sysconfig.get_path("purelib") + "\n")
    return environment


def test_the_wheel_says_that_it_has_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "ucm/py.typed" in archive.namelist()


def test_a_package_outside_sees_the_types(wheel: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not in this environment; `nox -s lint` runs this test")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    source = tmp_path / "outside.py"
    source.write_text(OUTSIDE, encoding="utf-8")
    flags = ["--config-file=", "--strict", f"--cache-dir={ROOT / '.mypy_cache' / 'outside'}", "--python-version=3.11"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(source)],
        env={"MYPYPATH": str(tmp_path / "site"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("outside.py")]
    assert [line.rpartition("[")[2] for line in told if line.startswith("error")] == ["override]", "return-value]"]
    revealed = [line.partition('"')[2].rstrip('"') for line in told if "Revealed type" in line]
    assert [line.replace("builtins.", "") for line in revealed] == ["int", "tuple[int, int]", "int", "int", "int"]


def test_an_installed_package_brings_a_method_by_name(environment: Environment) -> None:
    lines = environment.run(
        "from ucm.sparse.factory import method_class\n"
        "method = method_class('FirstAndRecent')\n"
        "print(method.__module__, method.identity({})['options'], method.lasting_tokens({}, 7))"
    )
    assert lines == "ucm_first_and_recent {'recent_blocks': 16} 7"
    said = environment.fail("from ucm.sparse.factory import method_class\nmethod_class('FirstAndLast')")
    assert "there is no sparse method 'FirstAndLast'" in said
    assert "FirstAndRecent" in said, "names the installed ones"


def test_its_settings_are_checked_without_an_engine(environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(
        f"store: {{directories: {tmp_path}}}\nucm_sparse_config: {{FirstAndRecent: {{recent_blocks: 0}}}}\n"
    )
    said = environment.start("-m", "ucm", "doctor", "--config", str(file))
    assert said.returncode == 1
    assert "ucm_sparse_config.FirstAndRecent.recent_blocks: 0" in said.stdout, said.stderr
    assert "the number of most recent blocks to read, 1 or more" in said.stdout


def test_two_packages_with_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints  # noqa: PLC0415 - only this test makes some

    def entry_points(**params: Any) -> EntryPoints:
        group = factory.ENTRY_POINT_GROUP
        return EntryPoints([EntryPoint("Twice", f"{name}:M", group) for name in ("one", "two")]).select(**params)

    monkeypatch.setattr(factory, "entry_points", entry_points)
    with pytest.raises(ConfigError, match="2 installed packages register a sparse method 'Twice'") as caught:
        method_class("Twice")
    assert "one:M, two:M" in caught.value.where


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in ucm.api.__all__:
        assert f"::: ucm.api.{name}\n" in page, name
        if name != "API_VERSION":
            assert getattr(ucm.api, name).__doc__ or name in {"BlockKey", "Buffer"}, name
