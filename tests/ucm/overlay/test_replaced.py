"""Overlay functions that other packages replace at run time: named when plugins load, refused when a feature starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import ATTENTION, SCHEDULER, WORKER

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import CompletedProcess

    from tests.ucm.overlay.environment import Environment

PLUGINS = """
from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    point.load()()
"""
#: A method that needs some groups of hooks, started for a scheduler as the rewritten `Scheduler.__init__` starts it.
START = """
from types import SimpleNamespace
from ucm.integration.vllm import hooks
from ucm.sparse.base import SparseMethod
import sys

class Method(SparseMethod):
    needed_hooks = {groups!r}

sys.modules["method_of_a_test"] = SimpleNamespace(Method=Method)
scheduler = {scheduler}
scheduler.vllm_config.additional_config = {{"ucm_sparse_config": {{"method_of_a_test:Method": {{}}}}}}
hooks.scheduler_init(scheduler)
print("started")
"""
#: Ways in which a package replaces a function without calling ours.
REPLACING = {
    "method": "Scheduler.schedule = lambda self: None",
    "class": "import vllm.v1.core.sched.scheduler as m\nclass Mine:\n    pass\nm.Scheduler = Mine",
    "derived": """
import vllm.v1.core.sched.scheduler as m
class Mine(Scheduler):
    def schedule(self):
        return None
m.Scheduler = Mine""",
    "same-file-name": """
code = compile("def schedule(self):\\n    return None\\n", Scheduler.schedule.__code__.co_filename, "exec")
space = {}
exec(code, space)
Scheduler.schedule = space["schedule"]""",
    "code": "Scheduler.schedule.__code__ = (lambda self: None).__code__",
    "static": "Scheduler.schedule = staticmethod(lambda: None)",
    "partial": "import functools\nScheduler.schedule = functools.partial(lambda self: None)",
    "deleted": "del Scheduler.schedule",
    "wrapped-copy": """
import functools
def copy(self):
    return None
@functools.wraps(copy)
def wrapper(self):
    return copy(self)
Scheduler.schedule = wrapper""",
    "any-attribute": "from unittest.mock import Mock\nScheduler.schedule = Mock()",
}
#: Ways in which a package wraps our function.
WRAPPING = {
    "wraps": """
import functools
def around(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
Scheduler.schedule = around(Scheduler.schedule)""",
    "closure": """
def around(function):
    return lambda *args: function(*args)
Scheduler.schedule = around(around(Scheduler.schedule))""",
    "global": """
original = Scheduler.schedule
def wrapper(self):
    return original(self)
Scheduler.schedule = wrapper""",
    "member": """
Scheduler.first_schedule = Scheduler.schedule
def wrapper(self):
    return self.first_schedule()
Scheduler.schedule = wrapper""",
    "default": "Scheduler.schedule = lambda self, original=Scheduler.schedule: original(self)",
    "partial": "import functools\nScheduler.schedule = functools.partialmethod(Scheduler.schedule)",
    "super": """
import vllm.v1.core.sched.scheduler as m
class Mine(Scheduler):
    def schedule(self):
        return super().schedule()
m.Scheduler = Mine""",
    "super-of-super": """
import vllm.v1.core.sched.scheduler as m
class First(Scheduler):
    def schedule(self):
        return super().schedule()
class Second(First):
    def schedule(self):
        return super().schedule()
class Third(Second):
    def schedule(self):
        return super().schedule()
class Mine(Third):
    def schedule(self):
        return super().schedule()
m.Scheduler = Mine""",
    "base": """
import vllm.v1.core.sched.scheduler as m
class Mine(Scheduler):
    def schedule(self):
        return Scheduler.schedule(self)
m.Scheduler = Mine""",
    "inherited": "import vllm.v1.core.sched.scheduler as m\nclass Mine(Scheduler):\n    pass\nm.Scheduler = Mine",
    "another": "Scheduler.peek_request = lambda self: None",
}
IMPORTED = f"from {SCHEDULER} import Scheduler\n"


@dataclass(frozen=True)
class Intruder:
    """A package in its own directory, imported first in every program of a test."""

    place: Path
    environment: Environment

    def has(self, code: str) -> None:
        (self.place / "intruder.py").write_text(IMPORTED + code + "\n")

    def start(self, code: str) -> CompletedProcess[str]:
        return self.environment.start("-c", code, PYTHONPATH=str(self.place))


@pytest.fixture
def intruder(tmp_path: Path, shared: Environment) -> Intruder:
    info = tmp_path / "vllm_intruder-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-intruder\nVersion: 1.2\n")
    (info / "RECORD").write_text("intruder.py,,\n")
    return Intruder(tmp_path, shared)


def start_of(*groups: str, scheduler: str = "Scheduler()") -> str:
    return START.format(groups=groups, scheduler=scheduler)


@pytest.mark.parametrize("code", REPLACING.values(), ids=REPLACING)
def test_a_replacement_is_named_and_refused_to_a_method_that_needs_it(intruder: Intruder, code: str) -> None:
    intruder.has(code)
    done = intruder.start(f"{IMPORTED}import intruder\n{PLUGINS}{start_of('SCHEDULER')}")
    assert f"[UCM.Patch] {SCHEDULER}.Scheduler.schedule is replaced by " in done.stderr
    refused = "SparseMethodError: method_of_a_test:Method needs hooks that another package has taken out\n  where: "
    assert f"{SCHEDULER}.Scheduler.schedule is replaced by " in done.stderr.rpartition(refused)[2].splitlines()[0]
    assert done.stdout == ""


DECORATOR = "import contextlib\n@contextlib.contextmanager(lambda: iter([None]))()\n"


@pytest.mark.parametrize("decorator", ["", DECORATOR], ids=["plain", "decorated"])
def test_who_replaced_it_is_told(intruder: Intruder, decorator: str) -> None:
    intruder.has(f"{decorator}def mine(self):\n    return None\nScheduler.schedule = mine")
    told = intruder.start(f"import intruder\n{PLUGINS}").stderr
    file = intruder.place / "intruder.py"
    assert f"is replaced by intruder.mine (vllm-intruder 1.2, {file}); a feature that needs it" in told


@pytest.mark.parametrize("code", WRAPPING.values(), ids=WRAPPING)
def test_a_wrapper_around_ours_is_no_replacement(intruder: Intruder, code: str) -> None:
    intruder.has(code)
    done = intruder.start(f"{IMPORTED}import intruder\n{PLUGINS}{start_of('SCHEDULER')}")
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert "replaced" not in done.stderr


def test_a_method_that_needs_other_hooks_starts(intruder: Intruder) -> None:
    intruder.has(REPLACING["method"])
    modules = f"import intruder, {ATTENTION}, {WORKER}\n{IMPORTED}"
    assert intruder.start(modules + start_of("ATTENTION", "WORKER")).stdout == "started\n"


def test_without_a_method_nothing_is_refused(intruder: Intruder) -> None:
    intruder.has(REPLACING["method"])
    assert intruder.start(f"{IMPORTED}import intruder\nScheduler()\nprint('started')").stdout == "started\n"


def test_a_class_that_runs_and_is_no_longer_ours(intruder: Intruder) -> None:
    """Another package's scheduler derives from ours and copies the function that makes a step."""
    intruder.has("class Copied(Scheduler):\n    def schedule(self):\n        return None")
    error = intruder.start(f"import intruder\n{start_of('SCHEDULER', scheduler='intruder.Copied()')}").stderr
    assert (
        f"where: {SCHEDULER}.Scheduler.schedule is replaced by intruder.Copied.schedule (vllm-intruder 1.2, " in error
    )


@pytest.mark.parametrize(("code", "refused"), [("pass", True), ("super()._update_states(scheduler_output)", False)])
def test_a_model_runner_that_copies_a_hooked_function_is_refused(intruder: Intruder, code: str, refused: bool) -> None:
    """Its execute_model is ours, but the method would not learn which blocks the scheduler frees."""
    runner = "vllm.v1.worker.gpu_model_runner"
    intruder.has(
        f"import {runner} as r\nclass Derived(r.GPUModelRunner):\n"
        f"    def _update_states(self, scheduler_output):\n        {code}"
    )
    owner = "SimpleNamespace(worker=SimpleNamespace(model_runner=intruder.Derived()), vllm_config=SimpleNamespace("
    owner += "kv_transfer_config=None, compilation_config=SimpleNamespace(static_forward_context={})))"
    start = start_of("MODEL_RUNNER", scheduler=owner).replace("scheduler_init", "worker_init")
    replaced = f"{runner}.GPUModelRunner._update_states is replaced by intruder.Derived._update_states"
    assert (replaced in intruder.start(f"import intruder\n{start}").stderr) is refused


def test_a_function_of_a_module(intruder: Intruder) -> None:
    intruder.has(f"import {ATTENTION} as a\ndef mine(*args): pass\na.unified_attention_with_output = mine")
    told = intruder.start(f"import intruder\n{PLUGINS}").stderr
    assert f"{ATTENTION}.unified_attention_with_output is replaced by intruder.mine" in told


def test_a_class_whose_fields_are_ours(intruder: Intruder) -> None:
    output = "vllm.v1.core.sched.output"
    intruder.has(f"import {output} as o\nclass Mine: pass\no.SchedulerOutput = Mine")
    told = intruder.start(f"import intruder\n{PLUGINS}").stderr
    assert f"{output}.SchedulerOutput is replaced by intruder.Mine" in told


def test_a_function_that_its_decorator_hides(intruder: Intruder) -> None:
    """Our code is not visible in it, so only the object's identity shows that it is ours."""
    hide = f"from {SCHEDULER} import Scheduler\nfrom ucm.overlay import replaced as r\nr.LOADED[Scheduler.__module__]"
    intruder.has("Scheduler.schedule = len")
    for change, named in (("", False), ("import intruder\n", True)):
        code = f"{hide}['Scheduler.schedule'] = r.Definition(Scheduler.schedule, ())\n{change}{PLUGINS}"
        assert ("Scheduler.schedule is replaced by " in intruder.start(code).stderr) is named


def test_the_check_imports_nothing_of_vllm(shared: Environment) -> None:
    code = f"import sys\n{PLUGINS}print(*[name for name in sys.modules if name.partition('.')[0] == 'vllm'])"
    assert shared.run(code) == ""


def test_a_reloaded_module_is_still_ours(shared: Environment) -> None:
    start = start_of("SCHEDULER", scheduler="m.Scheduler()")
    assert shared.run(f"import importlib, {SCHEDULER} as m\nimportlib.reload(m)\n{start}") == "started"


def test_a_second_copy_of_a_module_takes_nothing_from_the_first(shared: Environment) -> None:
    second = "import importlib.util as u\ns = m.__spec__\nc = u.module_from_spec(s)\ns.loader.exec_module(c)\n"
    start = start_of("SCHEDULER", scheduler="m.Scheduler()")
    assert shared.run(f"import {SCHEDULER} as m\n{second}{start}") == "started"
