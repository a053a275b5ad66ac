"""Our finder among others: it is installed once, in front, and does not affect the rest of the import system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import SCHEDULER

if TYPE_CHECKING:
    from tests.ucm.overlay.environment import Environment

COUNT = "import sys; print([type(f).__name__ for f in sys.meta_path].count('OverlayFinder'))"
#: Acts like tracing tools: finds every module through the whole import system, and wraps its loader.
WATCHING_FINDER = """
import importlib.util, sys

class Watcher:
    looking = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.looking:
            return None
        cls.looking.add(name)
        try:
            return importlib.util.find_spec(name)
        finally:
            cls.looking.remove(name)

sys.meta_path.insert({place}, Watcher)
"""


def test_it_is_the_first_finder(shared: Environment) -> None:
    assert shared.run("import sys; print(type(sys.meta_path[0]).__name__)") == "OverlayFinder"


def test_site_run_again_changes_nothing(shared: Environment) -> None:
    assert shared.run(COUNT) == "1"
    assert shared.run(f"import site; site.main(); site.main(); {COUNT}") == "1"


def test_install_called_again_changes_nothing(shared: Environment) -> None:
    assert shared.run(f"import ucm_vllm_overlay._boot as boot; boot.install(); boot.install(); {COUNT}") == "1"


@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
def test_a_finder_that_asks_all_finders(shared: Environment, place: int) -> None:
    code = WATCHING_FINDER.format(place=place) + f"import {SCHEDULER} as s; print(s.__file__)"
    assert shared.run(code) == str(shared.overlay_file(SCHEDULER))


@pytest.mark.parametrize("modules", [f"{{{SCHEDULER!r}: 1}}", "None"], ids=["that has it", "of another kind"])
def test_a_finder_with_modules_of_its_own(shared: Environment, modules: str) -> None:
    """An attribute of the same name does not make it an overlay."""
    code = (
        f"import sys; other = {{'modules': {modules}, 'find_spec': lambda *_: None}}; "
        "sys.meta_path.append(type('Other', (), other)()); "
        f"import {SCHEDULER} as s; print(s.__file__)"
    )
    assert shared.run(code) == str(shared.overlay_file(SCHEDULER))


def test_a_finder_of_the_old_kind(shared: Environment) -> None:
    """Python up to 3.11 still calls finders that only have ``find_module``."""
    code = (
        "import sys; sys.meta_path.insert(0, type('Old', (), {'find_module': lambda *_: None})()); "
        f"import {SCHEDULER} as s; print(s.__file__)"
    )
    assert shared.run(code, "-W", "ignore") == str(shared.overlay_file(SCHEDULER))


def test_vllm_where_a_finder_of_its_own_serves_it(overlaid: Environment) -> None:
    """In an editable install of vLLM, a finder at the end of the list finds the package elsewhere."""
    checkout = overlaid.root / "checkout"
    checkout.mkdir()
    (overlaid.site / "vllm").rename(checkout / "vllm")
    overlaid.write(
        "editable_vllm.py",
        "import sys\nfrom importlib.machinery import PathFinder\n\n"
        "class Editable:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(checkout)!r}]) if name == 'vllm' else None\n\n"
        "sys.meta_path.append(Editable)\n",
    )
    overlaid.write("editable_vllm.pth", "import editable_vllm\n")
    assert overlaid.origin(SCHEDULER) == overlaid.overlay_file(SCHEDULER)
    assert overlaid.run("import vllm; print(vllm.__file__)") == str(checkout / "vllm" / "__init__.py")


def test_names_that_it_does_not_shadow_are_none_of_its_business(shared: Environment) -> None:
    code = (
        "from ucm_vllm_overlay._boot import FINDER as f; import sys; "
        "print(f.find_spec('vllm'), f.find_spec('vllm.v1'), f.find_spec('json'), f.find_spec(''), 'ucm' in sys.modules)"
    )
    assert shared.run(code) == "None None None None False"


CALL = """
from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    point.load()()
"""
#: Installs a finder in front of ours, after our .pth line, that loads vLLM's own file of a module.
TAKING_FINDER = f"""
import sys
from importlib.machinery import PathFinder

class Taker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name == {SCHEDULER!r} else None

sys.meta_path.insert(0, Taker)
"""
CLAIMED = "OverlayImportError: UCM overlay: a finder in front of its own would load modules that it shadows"


def test_a_finder_in_front_that_would_take_a_module_is_refused_before_it_does(shared: Environment) -> None:
    error = shared.fail(f"import vllm.v1.core.sched\n{TAKING_FINDER}{CALL}print({SCHEDULER!r} in sys.modules)")
    assert CLAIMED in error
    assert f"    {SCHEDULER}: __main__.Taker finds {shared.upstream_file(SCHEDULER)}\n" in error
    assert "- remove the package that puts this finder into sys.meta_path" in error


def test_a_finder_in_front_for_a_group_that_is_off(shared: Environment) -> None:
    code = f"import vllm.v1.core.sched\n{TAKING_FINDER}{CALL}print('called')"
    assert shared.run(code, UCM_DISABLE_SCHEDULER_PATCH="1") == "called"


def test_a_finder_in_front_is_not_asked_for_modules_whose_package_is_not_loaded(shared: Environment) -> None:
    """It might import the package to answer; it is checked again when a feature starts."""
    assert shared.run(f"{TAKING_FINDER}{CALL}print('called')") == "called"


def test_a_finder_in_front_that_leaves_our_modules_to_us(shared: Environment) -> None:
    code = WATCHING_FINDER.format(place=0) + f"import vllm.v1.core.sched\n{CALL}print('called')"
    assert shared.run(code) == "called"


def test_a_finder_in_front_that_fails(shared: Environment) -> None:
    code = TAKING_FINDER.replace("PathFinder.find_spec(name, path)", "{}['mine']") + CALL
    assert "__main__.Taker finds KeyError('mine')" in shared.fail(f"import vllm.v1.core.sched\n{code}")


def test_a_finder_that_comes_after_the_plug_ins_is_refused_when_a_feature_starts(shared: Environment) -> None:
    late = f"import vllm.v1.core.sched\n{CALL}{TAKING_FINDER}"
    check = "from ucm.overlay.activation import check_feature\ncheck_feature(['scheduler'])\n"
    assert shared.run(f"import vllm.v1.core.sched\n{CALL}{check}print('fine')") == "fine"
    assert CLAIMED in shared.fail(late + check)


def test_a_loader_of_another_that_takes_our_file(shared: Environment) -> None:
    """The content is then unchecked: only our loader compiles the bytes that it has hashed."""
    code = TAKING_FINDER.replace("PathFinder.find_spec(name, path)", "u.spec_from_file_location(name, FILE)")
    code = f"import importlib.util as u\nFILE = {str(shared.overlay_file(SCHEDULER))!r}\n{code}"
    error = shared.fail(f"{code}import {SCHEDULER}\n{CALL}")
    assert f"    {SCHEDULER}: {shared.overlay_file(SCHEDULER)}, by another loader, " in error
    assert "SourceFileLoader\n" in error
