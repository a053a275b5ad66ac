"""The probe: its counters, its inertness, and the persistence of its reports."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ucm
from tests.ucm.test_hooks import VllmConfig, started
from ucm.errors import ConfigError, UcmError
from ucm.integration.vllm import hooks
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.probe import (
    CREATED,
    FILE,
    HOOKS,
    IN_MODEL,
    METADATA_RECEIVED,
    Probe,
    ProcessReport,
    read_reports,
)

#: An argument that the Probe ignores.
NOTHING: Any = None
STEP = SimpleNamespace(ucm_sparse_meta=None)

FORKED = """
import multiprocessing, sys
from pathlib import Path
from ucm.sparse.base import Role
from ucm.sparse.probe import Probe

def work():
    inherited.request_freed(None)
    worker = Probe(None, Role.WORKER, options)
    worker.execute_begin(None, None, None)

options = {"report_dir": sys.argv[1]}
inherited = Probe(None, Role.SCHEDULER, options)
inherited.request_added(None)
child = multiprocessing.get_context("fork").Process(name="Worker-0", target=work)
child.start()
child.join()
inherited.request_added(None)
print(child.pid, child.exitcode)
"""

KILLED = """
import os, signal, sys
from ucm.sparse.base import Role
from ucm.sparse.probe import Probe

probe = Probe(None, Role.WORKER, {"report_dir": sys.argv[1]})
for _ in range(1000):
    probe.execute_begin(None, None, None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def probe(directory: Path, role: Role = Role.WORKER) -> Probe:
    return Probe(None, role, {"report_dir": str(directory)})


def only_report(directory: Path) -> ProcessReport:
    (report,) = read_reports(directory)
    return report


def fired(report: ProcessReport) -> dict[str, int]:
    return {name: count for name, count in report.counts.items() if count}


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(directory)]
    root = Path(ucm.__file__).parents[1]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)


def arguments_of(name: str) -> list[object]:
    parameters = inspect.signature(getattr(SparseMethod, name)).parameters
    return [object() for _ in parameters][1:]


def stand_in_for_torch(monkeypatch: pytest.MonkeyPatch, *, compiling: bool) -> None:
    torch: Any = ModuleType("torch")
    torch.compiler = SimpleNamespace(is_compiling=lambda: compiling)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_a_fresh_report_has_every_hook_in_order_at_zero(tmp_path: Path) -> None:
    probe(tmp_path)
    report = only_report(tmp_path)
    assert report == ProcessReport(os.getpid(), "MainProcess", (Role.WORKER,), dict.fromkeys(report.counts, 0))
    assert list(report.counts) == [*HOOKS, METADATA_RECEIVED]
    assert HOOKS[0] == "request_added"
    assert HOOKS[-1] == "execute_finished"
    assert set(vars(SparseMethod)) - set(HOOKS) == {
        *(name for name in vars(SparseMethod) if name.startswith("__")),
        *(
            "scheduler_started",
            "worker_started",
            "layer_seen",
            "layers_seen",
            "bytes_beside_block",
            "options_type",
            "needed_hooks",
            "serves_latent",
            "serves_drafts",
            "serves_hybrids",
            "optional_hooks",
        ),
        *(
            "allocating",
            "asked",
            "awaits_begin",
            "decided",
            "frees_blocks",
            "identity",
            "lasting_tokens",
            "prompts_are_dense",
            "revision",
        ),
        *("advice", "asks_workers", "complaints", "confirms", "figures"),
    }


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_counted_and_answers_as_the_base_class_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stand_in_for_torch(monkeypatch, compiling=False)
    method = probe(tmp_path)
    arguments = arguments_of(name)
    found = getattr(method, name)(*arguments)
    assert fired(only_report(tmp_path)) == {name: 1}
    if name != "build_metadata":
        neutral = getattr(SparseMethod(NOTHING, Role.WORKER, {}), name)(*arguments)
        assert found == neutral
    getattr(method, name)(*arguments)
    assert fired(only_report(tmp_path)) == {name: 2}


@pytest.mark.parametrize("name", IN_MODEL)
def test_what_is_traced_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stand_in_for_torch(monkeypatch, compiling=True)
    arguments = arguments_of(name)
    found = getattr(probe(tmp_path), name)(*arguments)
    assert found == getattr(SparseMethod(NOTHING, Role.WORKER, {}), name)(*arguments)
    assert fired(only_report(tmp_path)) == {}


def test_the_hooks_of_the_model_are_those_that_may_be_traced() -> None:
    first, behind_last = HOOKS.index("kv_write_begin"), HOOKS.index("execute_finished")
    assert HOOKS[first:behind_last] == IN_MODEL


def test_torch_compile_traces_through_without_a_graph_break(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="only an end-to-end environment has torch")
    method = probe(tmp_path)

    def layer(hidden: Any, residual: Any) -> Any:
        hidden, residual = method.ffn_begin(None, hidden, residual)
        hidden, residual = method.layer_finished(None, None, hidden + residual, residual)
        return hidden

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert fired(only_report(tmp_path)) == {}
    layer(torch.ones(2), torch.ones(2))
    assert fired(only_report(tmp_path)) == {"layer_finished": 1, "ffn_begin": 1}


def test_torch_compile_traces_through_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including hooks that determine which forward is running."""
    torch = pytest.importorskip("torch", reason="only an end-to-end environment has torch")
    config = VllmConfig({"ucm_sparse_config": {"Probe": {"report_dir": str(tmp_path)}}})
    monkeypatch.setattr(hooks, "_works_sparsely", False)
    context = SimpleNamespace(no_compile_layers=config.compilation_config.static_forward_context)
    forward = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", forward)
    runner = started(config)

    def layer(hidden: Any, residual: Any) -> Any:
        hidden, residual = hooks.layer_begin(None, None, hidden, residual)
        hidden, residual = hooks.ffn_finished(None, hidden + residual, residual)
        return hidden

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert fired(only_report(tmp_path)) == {}
    layer(torch.ones(2), torch.ones(2))
    assert fired(only_report(tmp_path)) == {"layer_begin": 1, "ffn_finished": 1}
    assert type(getattr(runner, hooks.METHOD)) is Probe


def test_every_allocation_goes_on(tmp_path: Path) -> None:
    assert probe(tmp_path, Role.SCHEDULER).before_allocation(NOTHING)


def test_metadata_that_travelled_is_counted_where_it_arrives(tmp_path: Path) -> None:
    scheduler, worker = probe(tmp_path, Role.SCHEDULER), probe(tmp_path)
    for number in (1, 2):
        metadata = scheduler.build_metadata(STEP)
        assert pickle.loads(pickle.dumps(metadata)) == {"step": number}  # noqa: S301 - as vLLM's queue does
        worker.update_states(None, SimpleNamespace(ucm_sparse_meta=metadata))
    worker.update_states(None, STEP)
    worker.update_states(None, SimpleNamespace())
    assert fired(only_report(tmp_path)) == {"build_metadata": 2, "update_states": 4, METADATA_RECEIVED: 2}


def test_both_roles_of_a_process_share_a_file(tmp_path: Path) -> None:
    scheduler = probe(tmp_path, Role.SCHEDULER)
    assert only_report(tmp_path).roles == (Role.SCHEDULER,)
    worker = probe(tmp_path)
    scheduler.request_added(NOTHING)
    worker.execute_begin(None, NOTHING, None)
    assert only_report(tmp_path).roles == (Role.SCHEDULER, Role.WORKER)
    assert fired(only_report(tmp_path)) == {"request_added": 1, "execute_begin": 1}


def test_it_counts_behind_the_real_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_works_sparsely", False)
    config = VllmConfig({"ucm_sparse_config": {"Probe": {"report_dir": str(tmp_path)}}})
    scheduler, request = (
        SimpleNamespace(vllm_config=config, kv_cache_manager=SimpleNamespace()),
        SimpleNamespace(request_id="r1", num_computed_tokens=0),
    )
    step = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())
    hooks.scheduler_init(scheduler)
    runner = started(config)
    hooks.request_added(scheduler, request)
    assert hooks.limit_new_tokens(scheduler, request, 0, 5) == 5
    assert hooks.before_allocation(scheduler.kv_cache_manager, request)
    hooks.scheduler_output_built(scheduler, step)
    hooks.update_states(runner, step)
    wanted = [
        "request_added",
        "limit_new_tokens",
        "before_allocation",
        "build_metadata",
        "update_states",
        METADATA_RECEIVED,
    ]
    assert fired(only_report(tmp_path)) == dict.fromkeys(wanted, 1)


def test_a_forked_child_counts_in_a_file_of_its_own(tmp_path: Path) -> None:
    done = run(FORKED, tmp_path)
    assert done.returncode == 0, done.stderr
    child_pid, exit_code = map(int, done.stdout.split())
    assert exit_code == 0
    reports = {report.pid == child_pid: report for report in read_reports(tmp_path)}
    parent, child = reports[False], reports[True]
    assert (parent.process, parent.roles) == ("MainProcess", (Role.SCHEDULER,))
    assert fired(parent) == {"request_added": 2}
    assert (child.process, child.roles) == ("Worker-0", (Role.SCHEDULER, Role.WORKER))
    assert fired(child) == {"request_freed": 1, "execute_begin": 1}


def test_a_killed_process_leaves_its_counts(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path).returncode == -signal.SIGKILL
    report = only_report(tmp_path)
    assert report.roles == (Role.WORKER,)
    assert fired(report) == {"execute_begin": 1000}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_directory_is_made(tmp_path: Path) -> None:
    probe(tmp_path / "new" / "reports").requests_finished(None, ["r1"])
    assert fired(only_report(tmp_path / "new" / "reports")) == {"requests_finished": 1}


def test_an_empty_directory_has_no_reports(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert read_reports(tmp_path) == []


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UcmError, match="there is no such report directory") as caught:
        read_reports(tmp_path / "missing")
    assert caught.value.where == str(tmp_path / "missing")


@pytest.mark.parametrize(
    "options", [{}, {"report_dir": ""}, {"report_dir": 3}, {"report_dir": "reports", "report_file": "x"}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the Probe has one option") as caught:
        Probe(None, Role.WORKER, options)
    assert caught.value.where.startswith("ucm_sparse_config.Probe")
    assert "report_dir" in caught.value.fix


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no report can be written") as caught:
        probe(tmp_path / "file" / "below")
    assert str(tmp_path / "file" / "below") in caught.value.where


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigError, match="no report can be written"):
        probe(tmp_path)


GOOD = f"7\tEngineCore\tworker\t{CREATED}\n7\tEngineCore\tworker\trequest_added\n".encode()


def test_the_format_of_a_report(tmp_path: Path) -> None:
    """A last line without an end is still being written."""
    (tmp_path / FILE).write_bytes(GOOD + GOOD + b"7\tEngineCore\tworker\texecute_")
    report = only_report(tmp_path)
    assert (report.pid, report.process, report.roles) == (7, "EngineCore", (Role.WORKER,))
    assert fired(report) == {"request_added": 2}


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF" + bytes(60) + b"\n",
        b"\xff\xff\n",
        b"7\tEngineCore\n",
        GOOD.replace(b"7", b"seven"),
        GOOD.replace(b"worker", b"nobody"),
    ],
)
def test_a_damaged_or_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(UcmError, match="reports cannot be read") as caught:
        read_reports(tmp_path)
    assert caught.value.where == str(path)
    assert caught.value.fix


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(UcmError, match="cannot be read") as caught:
        read_reports(tmp_path)
    assert caught.value.where == str(tmp_path / FILE)
