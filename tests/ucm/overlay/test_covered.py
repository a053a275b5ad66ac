"""One overlay's function may replace another's if it calls all of the same hooks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from ucm.overlay import replaced
from ucm.overlay.manifest import Manifest, ShadowedModule
from ucm.overlay.replaced import note, replacements

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNER, PATCH = "made_up.runner", "made_up_ascend.patch"
SOURCES = {
    RUNNER: "class Runner:\n    def update(self):\n        return 'vllm'\n",
    PATCH: "def update(self):\n    return 'ascend'\n\nclass Own:\n    def update(self):\n        return 'own'\n",
}


def shadowed(name: str, changed: dict[str, tuple[str, ...]]) -> ShadowedModule:
    return ShadowedModule(name, f"{name}.py", "model_runner", "", "", (), ("worker",), changed)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[ShadowedModule], ModuleType]:
    """Load a made-up module as the overlay's loader does."""
    monkeypatch.setattr(replaced, "LOADED", {})

    def loaded(module: ShadowedModule) -> ModuleType:
        made = ModuleType(module.name)
        monkeypatch.setitem(sys.modules, module.name, made)
        code = compile(SOURCES[module.name], module.path, "exec")
        exec(code, vars(made))  # noqa: S102 - our own words
        note(module, vars(made), code)
        return made

    return loaded


def manifest(*modules: ShadowedModule) -> Manifest:
    return Manifest(Path(), "1", "1", {module.name: module for module in modules}, {"model_runner": ()})


@pytest.mark.parametrize(
    ("hooks", "accepted"), [(("update_states", "finished"), True), (("update_states",), False), ((), False)]
)
def test_a_copy_that_another_overlay_rewrote(
    load: Callable[[ShadowedModule], ModuleType], hooks: tuple[str, ...], accepted: bool
) -> None:
    ours = shadowed(RUNNER, {"Runner.update": ("update_states", "finished")})
    runner, patch = load(ours), load(shadowed(PATCH, {"update": hooks, "Own.update": hooks}))
    assert not replacements(manifest(ours), ["model_runner"])
    runner.Runner.update = patch.update
    assert (not replacements(manifest(ours), ["model_runner"])) is accepted


@pytest.mark.parametrize(("hooks", "accepted"), [(("update_states", "finished", "more"), True), (("more",), False)])
def test_an_override_that_another_overlay_rewrote(
    load: Callable[[ShadowedModule], ModuleType], hooks: tuple[str, ...], accepted: bool
) -> None:
    ours = shadowed(RUNNER, {"Runner.update": ("update_states", "finished")})
    runner, patch = load(ours), load(shadowed(PATCH, {"Own.update": hooks}))
    kind = type("Derived", (patch.Own, runner.Runner), {})
    assert (not replacements(manifest(ours), ["model_runner"], kind)) is accepted
