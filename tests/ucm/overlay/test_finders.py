"""Our finder among others: it is there once, in front, and leaves the rest of the import system as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import SCHEDULER

if TYPE_CHECKING:
    from tests.ucm.overlay.environment import Environment

COUNT = "import sys; print([type(f).__name__ for f in sys.meta_path].count('OverlayFinder'))"
#: What tracing tools do: look every module up through the whole import system and wrap what was found.
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


def test_a_finder_of_the_old_kind(shared: Environment) -> None:
    """Python up to 3.11 still asks finders that have nothing but ``find_module``."""
    code = (
        "import sys; sys.meta_path.insert(0, type('Old', (), {'find_module': lambda *_: None})()); "
        f"import {SCHEDULER} as s; print(s.__file__)"
    )
    assert shared.run(code, "-W", "ignore") == str(shared.overlay_file(SCHEDULER))


def test_vllm_where_a_finder_of_its_own_serves_it(overlaid: Environment) -> None:
    """An editable install of vLLM: its package lies elsewhere, and a finder at the end of the list knows where."""
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
