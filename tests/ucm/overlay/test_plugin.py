"""vLLM's general plugin raises if an installed overlay is inactive, for instance if its `.pth` file was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import ATTENTION, RELEASE, SCHEDULER
from transforms.pipeline.sources.open import open_sources

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.overlay.conftest import Wheels
    from tests.ucm.overlay.environment import Environment

CALL = """
from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    print(point.name, point.value, point.load()())
"""
ACTIVE = "ucm_overlay ucm_vllm_overlay._plugin:register None"
DISABLE = "- run upstream's vLLM, without UCM: set UCM_DISABLE_PATCHES=1, or uninstall the overlay\n"
NOT_ACTIVE = "OverlayImportError: UCM overlay: it is installed, and its finder does not run in this process\n"
LATE = "OverlayImportError: UCM overlay: modules that it shadows were imported before its finder ran, or bypassed it\n"
TWO = "OverlayImportError: UCM overlay: more than one overlay is installed, and only the first on sys.path is active\n"
#: A finder that loads vLLM's own file of a module, bypassing the overlay.
OTHER_FINDER = """
import sys
from importlib.machinery import PathFinder

class Other:
    asked = 0

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.asked += 1
        return PathFinder.find_spec(name, path) if name == {answers!r} else None

sys.meta_path.insert(0, Other)
"""


def test_an_active_overlay(shared: Environment) -> None:
    assert shared.run(CALL) == ACTIVE


def test_an_active_overlay_whose_modules_are_loaded(shared: Environment) -> None:
    assert shared.run(f"import {SCHEDULER}, {ATTENTION}\n{CALL}{CALL}") == f"{ACTIVE}\n{ACTIVE}"


def test_an_active_overlay_in_a_child(shared: Environment) -> None:
    script = shared.root / "plugin.py"
    body = CALL.replace("\n", "\n    ")
    script.write_text(
        f"import multiprocessing\ndef call():\n    {body}\n"
        "if __name__ == '__main__':\n    child = multiprocessing.get_context('spawn').Process(target=call)\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    done = shared.start(str(script))
    assert (done.returncode, done.stdout.strip()) == (0, ACTIVE), done.stderr


@pytest.mark.parametrize("way", ["PYTHONPATH", "target"])
def test_an_overlay_where_pth_files_are_not_read(
    upstream: Environment, wheels: Wheels, elsewhere: Callable[[], Path], way: str
) -> None:
    """`pip install --target` puts the wheel's files into a directory that PYTHONPATH or sys.path then contains."""
    upstream.install(wheels.runtime)
    place = str(elsewhere())
    variables = {"PYTHONPATH": place} if way == "PYTHONPATH" else {}
    code = CALL if variables else f"import sys; sys.path.insert(0, {place!r})\n{CALL}"
    assert upstream.origin(SCHEDULER, **variables) == upstream.upstream_file(SCHEDULER)

    error = upstream.fail(code, **variables)

    assert NOT_ACTIVE in error
    assert f"overlay: {place}/ucm_vllm_overlay\n" in error
    assert f"process: {upstream.python} -c" in error
    assert "Python reads .pth files only in site-packages directories" in error
    assert (
        f"- install the wheel into the environment that runs vLLM: `{upstream.python} -m pip install <wheel>`\n"
        in error
    )
    assert DISABLE in error
    assert upstream.run(code, UCM_DISABLE_PATCHES="1", **variables) == ACTIVE


def test_an_interpreter_without_site(overlaid: Environment) -> None:
    assert NOT_ACTIVE in overlaid.fail(CALL, "-S", PYTHONPATH=str(overlaid.site))


def test_two_overlays(overlaid: Environment, elsewhere: Callable[[], Path]) -> None:
    place = elsewhere()
    error = overlaid.fail(CALL, PYTHONPATH=str(place))
    assert TWO in error
    assert f"{RELEASE}.post1: {place}\n" in error
    assert f"{RELEASE}.post1: {overlaid.site.resolve()}\n" in error
    assert (
        f"- uninstall all but the one that you want: `{overlaid.python} -m pip uninstall ucm-vllm-overlay`, or" in error
    )
    assert DISABLE in error


def test_one_overlay_under_two_names(overlaid: Environment) -> None:
    """This happens in an environment whose lib64 is a link to lib."""
    link = overlaid.root / "lib-too"
    link.symlink_to(overlaid.site)
    assert overlaid.run(CALL, PYTHONPATH=str(link)) == ACTIVE


def test_a_shadowed_module_was_imported_at_interpreter_start(overlaid: Environment) -> None:
    """Only a .pth file that sorts before ours runs earlier."""
    overlaid.write("aaa.pth", f"import {SCHEDULER}\n")
    assert overlaid.origin(SCHEDULER) == overlaid.upstream_file(SCHEDULER)
    error = overlaid.fail(CALL)
    assert LATE in error
    assert f"    {SCHEDULER}: {overlaid.upstream_file(SCHEDULER)}\n" in error
    assert (
        "- find what imports vLLM at interpreter start (another .pth file, sitecustomize, another import hook)" in error
    )
    assert DISABLE in error


def test_nothing_else_can_import_a_shadowed_module_before_the_finder(overlaid: Environment) -> None:
    """Everything else runs after `site` has read our line: later .pth files, sitecustomize, the program.

    (In a virtual environment `site` reads each file twice, hence the dict.)
    """
    record = f"import {SCHEDULER} as s, sys; sys.origins = [*getattr(sys, 'origins', []), ({{!r}}, s.__file__)]\n"
    overlaid.write("zzz.pth", record.format("pth"))
    overlaid.write("sitecustomize.py", record.format("sitecustomize"))
    show = "print(*[f'{who} {file}' for who, file in dict.fromkeys(sys.origins)], sep='\\n')"
    # Debian's Python has a sitecustomize of its own; this path comes before it.
    found = overlaid.run(record.format("program") + show, PYTHONPATH=str(overlaid.site))
    file = overlaid.overlay_file(SCHEDULER)
    assert found.splitlines() == [f"pth {file}", f"sitecustomize {file}", f"program {file}"]


def test_another_finder_that_takes_a_shadowed_module(shared: Environment) -> None:
    code = OTHER_FINDER.format(answers=SCHEDULER) + f"import {SCHEDULER}\n{CALL}"
    error = shared.fail(code)
    assert LATE in error
    assert f"    {SCHEDULER}: {shared.upstream_file(SCHEDULER)}\n" in error


def test_another_finder_that_does_not_care(shared: Environment) -> None:
    code = OTHER_FINDER.format(answers="other") + f"import {SCHEDULER} as s\nprint(s.__file__, Other.asked > 0)\n{CALL}"
    assert shared.run(code).splitlines() == [f"{shared.overlay_file(SCHEDULER)} True", ACTIVE]


def test_a_group_that_is_off_may_be_upstream_s(shared: Environment) -> None:
    code = f"import {SCHEDULER} as s; print(s.__file__)\n{CALL}"
    found = shared.run(code, UCM_DISABLE_SCHEDULER_PATCH="1")
    assert found.splitlines() == [str(shared.upstream_file(SCHEDULER)), ACTIVE]


def test_without_the_runtime_it_can_be_loaded_and_raises_when_called(upstream: Environment, wheels: Wheels) -> None:
    """vLLM only logs a plugin that cannot be loaded, but stops at one that raises when called."""
    upstream.install(wheels.overlay)
    load = (
        "from importlib.metadata import entry_points; (p,) = entry_points(group='vllm.general_plugins'); f = p.load()"
    )
    assert upstream.run(f"{load}; print(f.__module__)") == "ucm_vllm_overlay._plugin"
    error = upstream.fail(f"{load}; f()").splitlines()[-1]
    assert error.startswith("ImportError: UCM overlay: it is installed without the runtime that it calls")
    assert f"`{upstream.python} -m pip install <folder>/ucm_runtime-*.whl`" in error
    assert error.endswith("or set UCM_DISABLE_PATCHES=1.")
    assert upstream.run(f"{load}; print(f())", UCM_DISABLE_PATCHES="1") == "None"


def test_vllm_s_own_loader_stops_at_an_inactive_overlay(
    upstream: Environment, wheels: Wheels, elsewhere: Callable[[], Path]
) -> None:
    """Uses the real source of vLLM's plugin loader, which loads entry points in a `try` and calls them outside it."""
    name = "vllm/plugins/__init__.py"
    loader = upstream.site / name
    loader.parent.mkdir()
    loader.write_bytes(open_sources("0.32.0").read(name))
    code = "from vllm.plugins import load_general_plugins; load_general_plugins(); print('started')"
    upstream.install(wheels.runtime)
    assert NOT_ACTIVE in upstream.fail(code, PYTHONPATH=str(elsewhere()))
    upstream.install(wheels.overlay)
    assert upstream.run(code) == "started"


class TestVllmIsToldToLeaveThePluginOut:
    """``VLLM_PLUGINS`` names other plug-ins, so vLLM calls none of ours."""

    ASK = "from ucm.overlay.activation import check_left_out; check_left_out(); print('checked')"

    @pytest.mark.parametrize("named", ["", "other"])
    def test_a_connector_refuses_an_inactive_overlay(
        self, upstream: Environment, wheels: Wheels, elsewhere: Callable[[], Path], named: str
    ) -> None:
        """Where vLLM makes the check, it is not made twice."""
        upstream.install(wheels.runtime)
        place = str(elsewhere())
        assert NOT_ACTIVE in upstream.fail(self.ASK, PYTHONPATH=place, VLLM_PLUGINS=named)
        assert upstream.run(self.ASK, PYTHONPATH=place) == "checked"
        assert upstream.run(self.ASK, PYTHONPATH=place, VLLM_PLUGINS="ucm_overlay") == "checked"
        assert upstream.run(self.ASK, PYTHONPATH=place, VLLM_PLUGINS=named, UCM_DISABLE_PATCHES="1") == "checked"

    def test_a_sparse_method_refuses_two_overlays(self, overlaid: Environment, elsewhere: Callable[[], Path]) -> None:
        code = "from ucm.overlay.activation import check_feature; print(check_feature(['scheduler']))"
        place = str(elsewhere())
        assert TWO in overlaid.fail(code, PYTHONPATH=place, VLLM_PLUGINS="other")
        assert overlaid.run(code, VLLM_PLUGINS="other") == "[]"

    def test_an_environment_without_an_overlay_has_nothing_to_check(
        self, upstream: Environment, wheels: Wheels
    ) -> None:
        upstream.install(wheels.runtime)
        assert upstream.run(self.ASK, VLLM_PLUGINS="other") == "checked"
