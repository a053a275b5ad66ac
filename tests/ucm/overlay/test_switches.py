"""The kill switches: what each turns off, what goes off with it, and the messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import ATTENTION, RELEASE, SCHEDULER, WORKER
from transforms.pipeline.package import group_needs
from ucm.overlay.manifest import MANIFEST
from ucm.overlay.switches import disabled_groups, is_set, variable_of

if TYPE_CHECKING:
    from tests.ucm.overlay.environment import Environment

#: The groups of the default overlay; `models` is only in one with all hooks.
GROUPS = sorted(set(group_needs()) - {"models"})
ORIGINS = "import importlib, json; print(json.dumps({n: importlib.import_module(n).__file__ for n in %r}))"
NEEDS = {"top": ("middle",), "middle": ("bottom",), "bottom": (), "other": ()}
LOAD_ALL = f"import {SCHEDULER}, {ATTENTION}"


def upstream_groups(environment: Environment, **variables: str) -> set[str]:
    """Return the groups whose modules are all vLLM's own; check that in the others all are rewritten."""
    modules = json.loads((environment.site / "ucm_vllm_overlay" / MANIFEST).read_text())["modules"]
    files = json.loads(environment.run(ORIGINS % [m["name"] for m in modules], **variables))
    found: dict[str, set[bool]] = {}
    for module in modules:
        found.setdefault(module["group"], set()).add(
            str(environment.upstream_file(module["name"])) == files[module["name"]]
        )
    assert all(len(states) == 1 for states in found.values())
    return {group for group, (state,) in found.items() if state}


def dependants(group: str) -> set[str]:
    """Return a group and all groups that rely on it."""
    needs, found = group_needs(), {group}
    while more := {name for name, others in needs.items() if name not in found and found & set(others)}:
        found |= more
    return found & set(GROUPS)


def test_all_groups_are_on_by_default(shared: Environment) -> None:
    assert upstream_groups(shared) == set()


def test_the_main_switch_turns_everything_off(shared: Environment) -> None:
    assert upstream_groups(shared, UCM_DISABLE_PATCHES="1") == set(GROUPS)


def test_with_the_main_switch_nothing_of_ours_is_imported(shared: Environment) -> None:
    code = f"import {SCHEDULER}, sys; print([name for name in sys.modules if name.split('.')[0] == 'ucm'])"
    assert shared.run(code, UCM_DISABLE_PATCHES="1") == "[]"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_s_switch_takes_along_what_relies_on_it(shared: Environment, group: str) -> None:
    assert upstream_groups(shared, **{variable_of(group): "1"}) == dependants(group)


@pytest.mark.parametrize("group", ["attention", "scheduler"])
def test_the_switches_that_operators_know(group: str) -> None:
    assert group in GROUPS
    assert variable_of(group) == f"UCM_DISABLE_{group.upper()}_PATCH"


def test_what_goes_along_is_said_with_its_reason(shared: Environment) -> None:
    done = shared.start("-c", f"import {ATTENTION}", UCM_DISABLE_WORKER_PATCH="1")
    assert "[UCM.Patch] group worker stays upstream's: UCM_DISABLE_WORKER_PATCH is set\n" in done.stderr
    reason = "it relies on worker, which is off: UCM_DISABLE_WORKER_PATCH is set"
    assert f"[UCM.Patch] group attention stays upstream's: {reason}\n" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "false", "No", "OFF", " 0 "])
def test_values_that_leave_a_switch_off(shared: Environment, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCH", value)
    assert not is_set("SWITCH")
    file = shared.origin(SCHEDULER, UCM_DISABLE_PATCHES=value, UCM_DISABLE_SCHEDULER_PATCH=value)
    assert file == shared.overlay_file(SCHEDULER)
    code = f"import ucm_vllm_overlay._plugin as p; import {SCHEDULER}; p.register()"
    shared.run(code, UCM_DISABLE_PATCHES=value)


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "2"])
def test_values_that_turn_a_switch_on(shared: Environment, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCH", value)
    assert is_set("SWITCH")
    assert shared.origin(SCHEDULER, UCM_DISABLE_PATCHES=value) == shared.upstream_file(SCHEDULER)


@pytest.mark.parametrize(
    ("switches", "off"),
    [
        ((), {}),
        (("OTHER",), {"other": "UCM_DISABLE_OTHER_PATCH is set"}),
        (
            ("BOTTOM",),
            {
                "bottom": "UCM_DISABLE_BOTTOM_PATCH is set",
                "middle": "it relies on bottom, which is off: UCM_DISABLE_BOTTOM_PATCH is set",
                "top": "it relies on middle, which is off: it relies on bottom, which is off: "
                "UCM_DISABLE_BOTTOM_PATCH is set",
            },
        ),
        (
            ("MIDDLE", "TOP"),
            {"middle": "UCM_DISABLE_MIDDLE_PATCH is set", "top": "UCM_DISABLE_TOP_PATCH is set"},
        ),
    ],
    ids=["none", "alone", "chain", "own-reason"],
)
def test_what_is_off_and_why(switches: tuple[str, ...], off: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in switches:
        monkeypatch.setenv(f"UCM_DISABLE_{name}_PATCH", "1")
    assert disabled_groups(NEEDS) == off


def test_the_main_switch_is_everyone_s_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_DISABLE_PATCHES", "1")
    assert disabled_groups(NEEDS) == dict.fromkeys(NEEDS, "UCM_DISABLE_PATCHES is set")


def test_without_a_word_by_default(shared: Environment) -> None:
    assert shared.start("-c", LOAD_ALL).stderr == ""


def test_verbose_names_each_module_with_its_process(shared: Environment) -> None:
    code = f"import os, {WORKER}; print(os.getpid())"
    done = shared.start("-c", code, UCM_PATCH_VERBOSE="1")
    (line,) = done.stderr.splitlines()
    assert f"pid={done.stdout.strip()} MainProcess [UCM.Patch] {WORKER} is loaded from " in line
    assert line.endswith(f"{shared.overlay_file(WORKER)} (vLLM {RELEASE})")


def test_verbose_names_the_child_process(shared: Environment) -> None:
    script = shared.root / "verbose.py"
    script.write_text(
        "import importlib, multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        f"    process = context.Process(target=importlib.import_module, args=({WORKER!r},), name='EngineCore_0')\n"
        "    process.start(); process.join(); print(process.pid)\n"
    )
    done = shared.start(str(script), UCM_PATCH_VERBOSE="1")
    assert f"pid={done.stdout.strip()} EngineCore_0 [UCM.Patch] {WORKER} is loaded from " in done.stderr


@pytest.mark.parametrize(
    ("level", "warnings", "infos"), [("DEBUG", 1, 1), ("info", 1, 1), ("WARNING", 1, 0), ("ERROR", 0, 0)]
)
def test_the_level_of_our_log(shared: Environment, level: str, warnings: int, infos: int) -> None:
    variables = {"UNIFIED_CACHE_LOG_LEVEL": level, "UCM_PATCH_VERBOSE": "1", "UCM_DISABLE_MODEL_RUNNER_PATCH": "1"}
    lines = shared.start("-c", f"import {WORKER}", **variables).stderr.splitlines()
    assert [sum(word in line for line in lines) for word in ("stays upstream's", "is loaded from")] == [warnings, infos]


def test_a_level_that_does_not_exist(shared: Environment) -> None:
    done = shared.start("-c", f"import {WORKER}", UNIFIED_CACHE_LOG_LEVEL="LOUD", UCM_PATCH_VERBOSE="1")
    assert "[UCM] UNIFIED_CACHE_LOG_LEVEL='LOUD' is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL" in done.stderr
    assert "is loaded from" in done.stderr
