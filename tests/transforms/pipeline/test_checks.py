"""Each check refuses its kind of invalid overlay before anything is written."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from transforms.engine.transform import DEFAULT_SEAM
from transforms.pipeline.checks import (
    CheckError,
    Signatures,
    changed_definitions,
    check_module,
    check_overlay,
    hook_signatures,
    hook_uses,
)
from transforms.pipeline.rewrite import RewrittenModule
from transforms.worker import TRANSFORM as WORKER

if TYPE_CHECKING:
    from transforms.pipeline.rewrite import Overlay

SEAM = """
from ucm.sparse.limits import LIMIT
from ucm.block_table import clear_row as clear

def begin(layer, query, key=None): ...
def _private(): ...
"""
IMPORT = "from ucm.integration.vllm import hooks as _ucm_hooks\n"
SIGNATURES: Signatures = {
    DEFAULT_SEAM: {
        "begin": ast.parse("def begin(layer, query, key=None): ...").body[0].args,  # type: ignore[attr-defined]
        "NAME": None,
    }
}


def module(upstream: str, rewritten: str | None = None, path: str = "vllm/v1/x.py") -> RewrittenModule:
    after = upstream if rewritten is None else rewritten
    area = replace(
        WORKER, id="area", rules=(), cases=(), opt_in=(), census=(), not_counted="there is nothing to count here"
    )
    return RewrittenModule((area,), path, upstream.encode(), after.encode(), ())


def refusal(checked: RewrittenModule) -> CheckError:
    with pytest.raises(CheckError) as caught:
        check_module(checked, SIGNATURES)
    assert checked.name in caught.value.what
    assert f"{checked.path}" in caught.value.where
    assert "(transform area)" in caught.value.where
    assert caught.value.fix
    return caught.value


def test_the_miniature_s_overlay_passes(overlay: Overlay) -> None:
    check_overlay(overlay)


@pytest.mark.parametrize("code", ["def f(:\n", "x = 1\n  y\n", "return\n", "a\0b\n"])
def test_it_compiles(code: str) -> None:
    assert "does not compile" in refusal(module("x = 1\n", code)).what


def test_a_package_s_init_is_not_shadowed() -> None:
    assert "is a package's __init__" in refusal(module("x = 1\n", path="vllm/v1/__init__.py")).what


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("x = 1\nHERE = __file__\n", "__file__"),
        ("\ny = __spec__.origin\n", "__spec__"),
        ("import pkgutil\ndata = pkgutil.get_data('vllm', 'x')\n", "pkgutil.get_data"),
        ("\nimport importlib.resources\n", "importlib.resources"),
        ("\nfrom importlib import resources\n", "importlib.resources"),
        ("def f():\n    from importlib.resources import files\n", "importlib.resources"),
        ("import inspect\nplace = inspect.getsourcefile(f)\n", "inspect.getsourcefile"),
    ],
)
def test_a_module_that_is_tied_to_its_place_is_not_shadowed(code: str, name: str) -> None:
    error = refusal(module(code))
    assert f"depends on where its file lies: `{name}`" in error.what
    assert error.where.startswith("vllm/v1/x.py:2 ")


def test_a_word_in_a_string_ties_nothing() -> None:
    check_module(module("x = '__file__'\n"), SIGNATURES)


def test_a_hook_that_the_seam_does_not_have() -> None:
    error = refusal(module("def f(): ...\n", f"{IMPORT}def f():\n    _ucm_hooks.other()\n"))
    assert "calls a hook that ucm/integration/vllm/hooks.py does not have: other" in error.what
    assert error.where.startswith("vllm/v1/x.py:3 ")


@pytest.mark.parametrize("call", ["begin()", "begin(1)", "begin(1, 2, 3, 4)", "begin(1, 2, value=3)", "begin(key=1)"])
def test_arguments_that_a_hook_does_not_take(call: str) -> None:
    error = refusal(module("def f(): ...\n", f"{IMPORT}def f():\n    _ucm_hooks.{call}\n"))
    assert "calls begin with arguments that it does not take" in error.what


@pytest.mark.parametrize("call", ["begin(1, 2)", "begin(1, 2, 3)", "begin(1, query=2)", "begin(1, 2, key=3)", "NAME"])
def test_arguments_that_a_hook_takes(call: str) -> None:
    check_module(module("def f(): ...\n", f"{IMPORT}def f():\n    x = _ucm_hooks.{call}\n"), SIGNATURES)


@pytest.mark.parametrize(
    "body",
    [
        "    _ucm_hooks.begin(layer, 1)\n",
        "    _ucm_hooks.begin(layer, 1)\n    layer = 1\n",
        "    if other:\n        x = _ucm_hooks.begin(1, layer)\n",
    ],
)
def test_a_name_that_is_not_bound(body: str) -> None:
    error = refusal(module("def f(other): ...\n", f"{IMPORT}def f(other):\n{body}"))
    assert "uses `layer`, which is not bound there" in error.what


@pytest.mark.parametrize(
    "code",
    [
        "def f(layer):\n    _ucm_hooks.begin(layer, 1)\n",
        "def f(*layer):\n    _ucm_hooks.begin(layer, len(layer))\n",
        "def f():\n    for layer in range(3):\n        _ucm_hooks.begin(layer, __name__)\n",
        "def f():\n    layer = 1\n    def g():\n        _ucm_hooks.begin(layer, 1)\n",
        "layer = 1\ndef f():\n    _ucm_hooks.begin(layer, 1)\n",
        "try:\n    import layer\nexcept ImportError:\n    pass\ndef f():\n    _ucm_hooks.begin(layer, 1)\n",
        "class layer: ...\ndef f():\n    _ucm_hooks.begin(layer, 1)\n",
    ],
)
def test_a_name_that_is_bound(code: str) -> None:
    check_module(module(code.replace("_ucm_hooks.begin", "print"), IMPORT + code), SIGNATURES)


@pytest.mark.parametrize(
    "after",
    [
        "def f(self, b, a=1, *, k=2): ...",
        "def f(self, a, *, k=2): ...",
        "def f(self, a=2, *, k=2): ...",
        "def f(self, new=0, a=1, *, k=2): ...",
        "def f(self, a=1, *, k=3): ...",
        "def f(self, a=1, *, k=2, new=0): ...",
        "def f(self, a=1, *new, k=2): ...",
        "def f(self, a=1, *, k=2, **new): ...",
        "def f(self, a: int = 1, *, k=2): ...",
    ],
)
def test_a_changed_signature(after: str) -> None:
    error = refusal(module("class C:\n    def f(self, a=1, *, k=2): ...\n", f"class C:\n    {after}\n"))
    assert "changes the signature of C.f other than by a defaulted parameter at its end" in error.what


def test_a_parameter_with_a_default_at_the_end() -> None:
    check_module(module("def f(a, *, k=2): ...\n", "def f(a, new=0, *, k=2): ...\n"), SIGNATURES)


def test_a_lost_function() -> None:
    assert "no longer defines C.f" in refusal(module("class C:\n    def f(self): ...\n", "class C: ...\n")).what


def test_each_definition_of_a_name_counts() -> None:
    """For instance overloads and property setters."""
    before = "def f(a): ...\ndef f(a, b): ...\n"
    check_module(module(before), SIGNATURES)
    assert "changes the signature of f:1" in refusal(module(before, "def f(a): ...\ndef f(b, a): ...\n")).what


def test_the_seam_is_read_from_its_source(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("seam") / "hooks.py"
    source.write_text(SEAM)
    found = hook_signatures(source)
    assert {name: args is not None for name, args in found.items()} == {
        "LIMIT": False,
        "clear": False,
        "begin": True,
    }


def test_the_uses_of_hooks_are_found_in_order() -> None:
    source = (
        f"{IMPORT}x = _ucm_hooks.NAME\n\ndef f(a=_ucm_hooks.NAME):\n    return _ucm_hooks.begin(a, other._ucm_hooks)\n"
    )
    uses = hook_uses(source.encode())
    assert [(use.hook, use.line, use.call is not None) for use in uses] == [
        ("NAME", 2, False),
        ("NAME", 4, False),
        ("begin", 5, True),
    ]


def test_what_rules_changed_is_found_by_their_marks() -> None:
    source = f"""{IMPORT.rstrip()}  # ucm: area.import

def plain(a):
    return a

if True:
    def f(a):
        def inner(b):
            return _ucm_hooks.begin(b)  # ucm: area.inner
        return inner

class Output:
    total: int
    more: object = None  # ucm: area.field

    def total(self):
        return self.total

class Scheduler:
    def schedule(self):
        _ucm_hooks.begin(self)  # ucm: area.begin
        if _ucm_hooks.NAME:
            _ucm_hooks.finished(self)  # ucm: area.finished

    def other(self):
        return None
"""
    assert changed_definitions(source.encode()) == {
        "f": ["begin"],
        "Output": [],
        "Scheduler.schedule": ["NAME", "begin", "finished"],
    }


@pytest.mark.parametrize("value", ["_ucm_hooks.NAME", "_ucm_hooks.begin(1, 2)"])
@pytest.mark.parametrize("before", ["LIMIT = ", "LIMIT: int = ", "if True:\n    LIMIT = "])
def test_a_variable_of_the_module_counts_whatever_it_gets_from_the_seam(value: str, before: str) -> None:
    rewritten = f"{IMPORT}{before}{value}  # ucm: area.limit\n"
    assert changed_definitions(rewritten.encode()) == {"LIMIT": [value.partition(".")[2].partition("(")[0]]}
    check_module(module("", rewritten), SIGNATURES)


@pytest.mark.parametrize("use", ["begin(1, 2)", "NAME"])
def test_a_use_of_the_seam_that_could_not_be_proved_to_be_ours(use: str) -> None:
    """It is in no function, class or variable, so a process cannot inspect it."""
    error = refusal(module("", f"{IMPORT}_ucm_hooks.{use}  # ucm: area.begin\n"))
    assert f"uses {use.partition('(')[0]} outside of every function" in str(error)
