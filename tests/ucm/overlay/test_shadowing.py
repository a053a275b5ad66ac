"""The rewritten module runs in each process, however it starts, and each tool sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import ATTENTION, RELEASE, SCHEDULER, SOURCES

if TYPE_CHECKING:
    from tests.ucm.overlay.environment import Environment

CHILD = """
import multiprocessing, sys

def origin(name):
    __import__(name)
    return sys.modules[name].__file__

if __name__ == "__main__":
    method, name = sys.argv[1:]
    with multiprocessing.get_context(method).Pool(1) as pool:
        print(name in sys.modules, pool.apply(origin, (name,)))
"""
PICKLE = """
import multiprocessing, sys
from vllm.v1.core.sched.output import SchedulerOutput

def step(output):
    output.ucm_sparse_meta = [output.ucm_sparse_meta, SchedulerOutput.__module__]
    return output

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        sent = SchedulerOutput(total=3)
        sent.ucm_sparse_meta = {"request": 7}
        back = pool.apply(step, (sent,))
    assert isinstance(back, SchedulerOutput)
    print(back.total, back.ucm_sparse_meta)
"""
THREADS = """
import sys, threading
name, path = {name!r}, {path!r}
loads, found, barrier = [], [], threading.Barrier(8)
sys.addaudithook(lambda event, args: event == "exec" and args[0].co_filename == path and loads.append(1))

def load():
    barrier.wait()
    __import__(name)
    found.append(sys.modules[name])

threads = [threading.Thread(target=load) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(loads), len(found), len(set(map(id, found))), found[0].__file__ == path)
"""
ALL_AT_ONCE = """
import importlib, json, pathlib, sys, threading
names = {names!r}
errors, barrier = [], threading.Barrier(len(names))

def load(name):
    barrier.wait()
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=load, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([errors, [sys.modules[name].__file__ for name in names]]))
"""
STEP = """
from types import SimpleNamespace
from {scheduler} import Scheduler
scheduler = Scheduler()
for name in "ab":
    scheduler.add_request(SimpleNamespace(request_id=name))
first, second = scheduler.schedule(), scheduler.schedule()
scheduler._preempt_request(scheduler.running[0])
scheduler._free_request(scheduler.running[1])
print(first.total, second.total, scheduler.running[0].status, sorted(scheduler.requests))
"""
SHADOWED = [
    "vllm.model_executor.layers.attention.attention",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.output",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.worker_base",
]
#: The first has no insertions; the others have only opt-in hooks.
UPSTREAM = [
    "vllm.v1.worker.block_table",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.worker.gpu.block_table",
]


def test_every_rewritten_module_shadows_vllm_s_own(shared: Environment) -> None:
    code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {SHADOWED}]"
    assert shared.run(code).split() == [str(shared.overlay_file(name)) for name in SHADOWED]


def test_a_module_without_changes_stays_upstream_s(shared: Environment) -> None:
    assert {*SHADOWED, *UPSTREAM, "vllm", "vllm.envs"} == {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SOURCES
    }
    code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {UPSTREAM}]"
    assert shared.run(code).split() == [str(shared.upstream_file(name)) for name in UPSTREAM]


def test_the_rewritten_code_does_what_upstream_s_does(shared: Environment) -> None:
    code = STEP.format(scheduler=SCHEDULER)
    assert shared.run(code) == shared.run(code, UCM_DISABLE_PATCHES="1")


def test_metadata_and_version_stay_vllm_s(shared: Environment) -> None:
    code = "import importlib.metadata, vllm; print(vllm.__version__, importlib.metadata.version('vllm'))"
    assert shared.run(code) == f"{RELEASE} {RELEASE}"


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-B",), ("-O",), ("-OO",), ("-X", "utf8")], ids=str)
def test_interpreter_options(shared: Environment, flags: tuple[str, ...]) -> None:
    assert shared.origin(SCHEDULER, *flags) == shared.overlay_file(SCHEDULER)


def test_a_script(shared: Environment) -> None:
    script = shared.root / "script.py"
    script.write_text(f"import {SCHEDULER} as s; print(s.__file__)")
    assert shared.start(str(script)).stdout.strip() == str(shared.overlay_file(SCHEDULER))


def test_a_program_run_with_m(shared: Environment) -> None:
    shared.write("program.py", f"import {SCHEDULER} as s; print(s.__file__)")
    assert shared.start("-m", "program").stdout.strip() == str(shared.overlay_file(SCHEDULER))


def test_a_shadowed_module_run_with_m(shared: Environment) -> None:
    code = "import runpy; print(runpy.run_module({!r}, run_name='__main__')['__file__'])"
    assert shared.run(code.format(SCHEDULER)) == str(shared.overlay_file(SCHEDULER))
    assert shared.start("-m", SCHEDULER).returncode == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process(shared: Environment, method: str) -> None:
    script = shared.root / "script.py"
    script.write_text(CHILD)
    done = shared.start(str(script), method, ATTENTION)
    assert done.stdout.split() == ["False", str(shared.overlay_file(ATTENTION))], done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_an_object_of_a_shadowed_class_travels_between_processes(shared: Environment, method: str) -> None:
    script = shared.root / "script.py"
    script.write_text(PICKLE)
    done = shared.start(str(script), method)
    assert done.stdout == "3 [{'request': 7}, 'vllm.v1.core.sched.output']\n", done.stderr


def test_threads_that_import_one_module_at_once(shared: Environment) -> None:
    code = THREADS.format(name=SCHEDULER, path=str(shared.overlay_file(SCHEDULER)))
    assert shared.run(code) == "1 8 1 True"


def test_threads_that_import_all_modules_at_once(shared: Environment) -> None:

    errors, files = json.loads(shared.run(ALL_AT_ONCE.format(names=SHADOWED)))
    assert errors == []
    assert files == [str(shared.overlay_file(name)) for name in SHADOWED]


def test_a_traceback_shows_the_rewritten_line(shared: Environment) -> None:
    error = shared.fail(f"from {SCHEDULER} import Scheduler; Scheduler().fail()")
    text = '        raise RuntimeError("on purpose")'
    line, upstream = (
        place.read_text().splitlines().index(text) + 1
        for place in (shared.overlay_file(SCHEDULER), shared.upstream_file(SCHEDULER))
    )
    assert line > upstream
    assert f'File "{shared.overlay_file(SCHEDULER)}", line {line}, in fail\n    {text.strip()}' in error


def test_inspect_shows_the_rewritten_source(shared: Environment) -> None:
    code = (
        f"import inspect; from {SCHEDULER} import Scheduler; "
        "print(inspect.getsource(Scheduler.__init__)); print(inspect.getsourcefile(Scheduler))"
    )
    found = shared.run(code)
    assert "_ucm_hooks.scheduler_init(self)  # ucm: scheduler.init" in found
    assert found.endswith(str(shared.overlay_file(SCHEDULER)))


def test_a_line_tracer_sees_the_rewritten_file(shared: Environment) -> None:
    """Coverage and debuggers rely on this."""
    code = (
        f"import trace; from {SCHEDULER} import Scheduler; tracer = trace.Trace(count=1, trace=0); "
        "tracer.runfunc(Scheduler); print(*{name for name, _ in tracer.results().counts}, sep='\\n')"
    )
    assert str(shared.overlay_file(SCHEDULER)) in shared.run(code).splitlines()


@pytest.mark.parametrize("mode", ["TIMESTAMP", "UNCHECKED_HASH", "CHECKED_HASH"])
def test_bytecode_of_another_source_does_not_run(overlaid: Environment, mode: str) -> None:
    """It is in Python's cache for this module, and its time, size or kind seems to match."""
    file = overlaid.overlay_file(SCHEDULER)
    reviewed = file.read_bytes()
    cached = Path(overlaid.run(f"import importlib.util as u; print(u.cache_from_source({str(file)!r}))"))
    overlaid.run(f"import os; os.utime({str(file)!r}, (1e9, 1e9))")
    file.write_bytes(reviewed.replace(b"on purpose", b"on aniseed"))
    make = "import os, py_compile as p; os.utime({0!r}, (1e9, 1e9)); p.compile({0!r}, {1!r}, invalidation_mode={2})"
    overlaid.run(make.format(str(file), str(cached), f"p.PycInvalidationMode.{mode}"))
    file.write_bytes(reviewed)
    overlaid.run(f"import os; os.utime({str(file)!r}, (1e9, 1e9))")
    planted = cached.read_bytes()

    error = overlaid.fail(f"from {SCHEDULER} import Scheduler; Scheduler().fail()")

    assert "RuntimeError: on purpose" in error
    assert cached.read_bytes() == planted


def test_bytecode_is_neither_read_nor_written(overlaid: Environment) -> None:
    overlaid.origin(SCHEDULER)
    assert not list(overlaid.overlay_file(SCHEDULER).parent.glob("__pycache__/*"))
    assert not list(overlaid.upstream_file(SCHEDULER).parent.glob("__pycache__/scheduler.*.pyc"))


def test_a_reload_stays_with_the_rewritten_module(shared: Environment) -> None:
    code = f"import importlib, {SCHEDULER} as s; print(importlib.reload(s).__file__)"
    assert shared.run(code) == str(shared.overlay_file(SCHEDULER))


def test_find_spec_tells_the_truth_without_importing(shared: Environment) -> None:
    code = (
        f"import importlib.util as u, sys; spec = u.find_spec({SCHEDULER!r}); "
        f"print(spec.origin, type(spec.loader).__name__, {SCHEDULER!r} in sys.modules)"
    )
    assert shared.run(code) == f"{shared.overlay_file(SCHEDULER)} OverlayLoader False"
