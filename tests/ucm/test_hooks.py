"""The seam: inert without a method, and with one a faithful messenger."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import ucm
from ucm.integration.vllm import block_table, hooks
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.sparse import base
from ucm.sparse.base import INVALID_SLOT, Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable

#: What a side calls once, when it starts: these have tests of their own and are not among a recorder's calls.
STARTS = ("scheduler_started", "worker_started")
METHODS = [
    name
    for name, member in vars(SparseMethod).items()
    if callable(member) and not name.startswith("_") and name not in STARTS
]
ANSWERS: dict[str, Any] = {name: object() for name in METHODS} | {"num_slots": 48}


class Recorder(SparseMethod):
    """Keeps every call in the list that it got as an option, and answers with an object of its own."""


def _recorded(name: str) -> Callable[..., Any]:
    def method(self: Recorder, *arguments: Any) -> Any:
        self.options["calls"].append((self, name, arguments))
        return ANSWERS[name]

    return method


for _name in METHODS:
    setattr(Recorder, _name, _recorded(_name))


@dataclass
class VllmConfig:
    additional_config: dict[str, Any] = field(default_factory=dict)
    kv_transfer_config: object = None


class CountedConfig:
    """Has nothing configured and notes each look."""

    def __init__(self) -> None:
        self.looks: list[str] = []

    def __getattr__(self, name: str) -> None:
        self.looks.append(name)


class Manager:
    pass


@dataclass
class Scheduler:
    vllm_config: object = field(default_factory=VllmConfig)
    kv_cache_manager: Manager = field(default_factory=Manager)


@dataclass
class Request:
    request_id: str = "r1"


@dataclass
class Step:
    """The part of vLLM's SchedulerOutput that the hooks touch."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    ucm_sparse_metadata: object = None
    ucm_sparsed_slots: object = None
    ucm_external_computed_tokens: object = None


@dataclass
class Runner:
    input_batch: object


def recording(calls: list[Any]) -> VllmConfig:
    return VllmConfig({"ucm_sparse_config": {f"{__name__}:Recorder": {"calls": calls}}})


@dataclass(frozen=True)
class Case:
    """One hook: what it is called with, what it hands back unasked, and the calls that a method gets.

    All are written as names of the things of `_things`.
    """

    hook: str
    arguments: str
    unchanged: str
    calls: tuple[str, ...]
    answered: bool = False


CASES = (
    Case("request_added", "scheduler request", "none", ("request_added request",)),
    Case(
        "num_slots_sparsed",
        "scheduler request tokens external",
        "invalid",
        ("num_slots request tokens external",),
        answered=True,
    ),
    Case("scheduler_output_built", "scheduler step", "none", ("build_metadata step",)),
    Case("request_preempted", "scheduler request", "none", ("request_preempted request",)),
    Case("request_freed", "scheduler request", "none", ("request_freed request",)),
    Case("update_states", "runner step", "none", ("update_states runner step",)),
    Case("worker_requests_finished", "runner finished", "none", ("requests_finished runner finished",)),
    Case("blocks_updated", "runner id row step", "none", ("blocks_updated runner id row step",)),
    Case("execute_begin", "runner step", "none", ("execute_begin runner step batch",)),
    Case("execute_finished", "runner step output", "none", ("execute_finished runner step output",)),
    Case(
        "v2_requests_finished",
        "runner step",
        "none",
        ("update_states runner step", "requests_finished runner finished"),
    ),
    Case("v2_requests_added", "runner step", "none", ("requests_added runner step",)),
    Case("v2_requests_updated", "runner step", "none", ("requests_updated runner step",)),
    Case(
        "v2_append_block_ids",
        "tables row blocks yes",
        "blocks yes",
        ("append_block_ids tables row blocks yes",),
        answered=True,
    ),
    Case("v2_execute_begin", "runner step v2_batch no", "none", ("execute_begin runner step v2_batch",)),
    Case("v2_execute_finished", "runner step no", "none", ("execute_finished runner step none",)),
    Case(
        "kv_write_begin",
        "name key value cache mapping",
        "mapping",
        ("kv_write_begin name key value cache mapping",),
        answered=True,
    ),
    Case("kv_write_finished", "name cache mapping", "none", ("kv_write_finished name cache mapping",)),
    Case(
        "attention_begin",
        "name query key value cache metadata",
        "query key value metadata",
        ("attention_begin name query key value cache metadata",),
        answered=True,
    ),
    Case(
        "attention_finished",
        "name query cache metadata output",
        "none",
        ("attention_finished name query cache metadata output",),
    ),
    Case(
        "mla_begin",
        "layer id query cache metadata",
        "metadata",
        ("mla_begin layer id query cache metadata",),
        answered=True,
    ),
    Case("mla_finished", "layer id output", "none", ("mla_finished layer id output",)),
    *(
        Case(
            hook,
            "layer positions hidden residual",
            "hidden residual",
            (f"{hook} layer positions hidden residual",),
            answered=True,
        )
        for hook in ("layer_begin", "layer_finished")
    ),
    *(
        Case(hook, "layer hidden residual", "hidden residual", (f"{hook} layer hidden residual",), answered=True)
        for hook in ("ffn_begin", "ffn_finished")
    ),
)
by_hook = pytest.mark.parametrize("case", CASES, ids=lambda case: case.hook)


def _things(config: object) -> dict[str, Any]:
    """One object per name that the cases use, with both sides of the engine started."""
    scheduler = Scheduler(config)
    hooks.scheduler_init(scheduler)
    hooks.worker_init(config)
    batch, finished = object(), {"r0"}
    opaque = "v2_batch output tables blocks key value cache mapping query metadata layer positions hidden residual"
    return {name: object() for name in opaque.split()} | {
        "batch": batch,
        "external": 3,
        "finished": finished,
        "id": "r1",
        "invalid": INVALID_SLOT,
        "name": "model.layers.0.attn",
        "no": False,
        "none": None,
        "request": Request(),
        "row": 5,
        "runner": Runner(batch),
        "scheduler": scheduler,
        "step": Step({"r1": 7}, finished),
        "tokens": 7,
        "yes": True,
    }


def _are_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether these are the wanted objects themselves, not their likes."""
    return len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture(autouse=True)
def _no_worker_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_worker", None)
    monkeypatch.setattr(hooks, "_schedules_sparsely", False)


@by_hook
def test_without_a_method_a_hook_hands_back_what_it_was_given(case: Case) -> None:
    things = _things(VllmConfig())
    found = getattr(hooks, case.hook)(*(things[name] for name in case.arguments.split()))
    assert _are_same(_as_tuple(found), tuple(things[name] for name in case.unchanged.split()))


def test_without_a_method_nothing_is_attached_and_no_config_is_read_twice() -> None:
    config = CountedConfig()
    things = _things(config)
    before = list(config.looks)
    assert before == ["kv_transfer_config", "additional_config"] * 2
    for case in CASES:
        getattr(hooks, case.hook)(*(things[name] for name in case.arguments.split()))
    assert config.looks == before
    assert vars(things["scheduler"]).keys() == {"vllm_config", "kv_cache_manager"}
    assert vars(things["scheduler"].kv_cache_manager) == {}
    assert things["step"] == Step({"r1": 7}, {"r0"})


@by_hook
def test_a_hook_reaches_its_method_with_its_arguments(case: Case) -> None:
    calls: list[Any] = []
    things = _things(recording(calls))
    found = getattr(hooks, case.hook)(*(things[name] for name in case.arguments.split()))
    assert len(calls) == len(case.calls)
    for (_, name, arguments), wanted in zip(calls, case.calls, strict=True):
        method, *names = wanted.split()
        assert name == method
        assert _are_same(arguments, tuple(things[n] for n in names))
    assert found is (ANSWERS[calls[-1][1]] if case.answered else None)


def test_each_side_gets_its_own_instance() -> None:
    calls: list[Any] = []
    config = recording(calls)
    things = _things(config)
    hooks.request_added(things["scheduler"], things["request"])
    hooks.update_states(things["runner"], things["step"])
    (scheduler_side, _, _), (worker_side, _, _) = calls
    assert scheduler_side.role is Role.SCHEDULER
    assert worker_side.role is Role.WORKER
    assert scheduler_side.vllm_config is worker_side.vllm_config is config


def test_a_worker_that_starts_anew_without_a_method_is_inert() -> None:
    calls: list[Any] = []
    hooks.worker_init(recording(calls))
    hooks.worker_init(VllmConfig())
    hooks.update_states(Runner(None), Step())
    assert calls == []


def test_allocation_goes_to_the_method_of_the_scheduler() -> None:
    calls: list[Any] = []
    scheduler, request, blocks = Scheduler(recording(calls)), Request(), object()
    hooks.scheduler_init(scheduler)
    found = hooks.allocate_slots(scheduler.kv_cache_manager, request, 7, 48, blocks)
    assert found is ANSWERS["allocate_slots"]
    ((_, name, arguments),) = calls
    assert (name, arguments) == ("allocate_slots", (scheduler.kv_cache_manager, request, 7, 48, blocks))


def test_a_running_request_has_no_external_tokens() -> None:
    calls: list[Any] = []
    scheduler, request = Scheduler(recording(calls)), Request()
    hooks.scheduler_init(scheduler)
    assert hooks.num_slots_sparsed(scheduler, request, 1) == 48
    assert calls[0][2] == (request, 1, 0)


def test_a_step_carries_slots_external_tokens_and_metadata_of_scheduled_requests_only() -> None:
    scheduler = Scheduler(recording([]))
    hooks.scheduler_init(scheduler)
    for name in ("scheduled", "not scheduled", "preempted"):
        hooks.num_slots_sparsed(scheduler, Request(name), 7, 3)
    hooks.num_slots_sparsed(scheduler, Request("running"), 1)
    hooks.request_preempted(scheduler, Request("preempted"))
    step = Step({"scheduled": 7, "running": 1})
    hooks.scheduler_output_built(scheduler, step)
    assert step.ucm_sparsed_slots == {"scheduled": 48, "running": 48}
    assert step.ucm_external_computed_tokens == {"scheduled": 3}
    assert step.ucm_sparse_metadata is ANSWERS["build_metadata"]


def test_an_estimate_does_not_outlive_its_step_but_loaded_tokens_wait_for_theirs() -> None:
    scheduler = Scheduler(recording([]))
    hooks.scheduler_init(scheduler)
    hooks.num_slots_sparsed(scheduler, Request(), 7, 3)
    hooks.scheduler_output_built(scheduler, Step())
    steps = [Step({"r1": 7}), Step({"r1": 1})]
    for step in steps:
        hooks.scheduler_output_built(scheduler, step)
    assert [step.ucm_sparsed_slots for step in steps] == [{}, {}]
    assert [step.ucm_external_computed_tokens for step in steps] == [{"r1": 3}, {}]


@pytest.mark.parametrize("event", [hooks.request_preempted, hooks.request_freed])
def test_what_was_noted_of_a_request_goes_with_it(event: Callable[[Any, Any], None]) -> None:
    scheduler = Scheduler(recording([]))
    hooks.scheduler_init(scheduler)
    hooks.num_slots_sparsed(scheduler, Request(), 7, 3)
    event(scheduler, Request())
    step = Step({"r1": 7})
    hooks.scheduler_output_built(scheduler, step)
    assert step.ucm_sparsed_slots == step.ucm_external_computed_tokens == {}


def test_the_compile_cache_sees_a_method_that_the_connector_settings_name() -> None:
    settings: dict[str, Any] = {"ucm_sparse_config": {f"{__name__}:Recorder": {"calls": []}}}
    config = VllmConfig({})
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=settings)
    hooks.worker_init(config)
    assert config.additional_config == settings


def test_a_preempted_request_that_is_scheduled_again_needs_a_new_estimate() -> None:
    scheduler = Scheduler(recording([]))
    hooks.scheduler_init(scheduler)
    hooks.num_slots_sparsed(scheduler, Request(), 1)
    hooks.request_preempted(scheduler, Request())
    step = Step({"r1": 1})
    hooks.scheduler_output_built(scheduler, step)
    assert step.ucm_sparsed_slots == {}


def test_the_last_estimate_of_a_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(recording([]))
    hooks.scheduler_init(scheduler)
    hooks.num_slots_sparsed(scheduler, Request(), 1)
    monkeypatch.setitem(ANSWERS, "num_slots", INVALID_SLOT)
    assert hooks.num_slots_sparsed(scheduler, Request(), 1) == INVALID_SLOT
    step = Step({"r1": 1})
    hooks.scheduler_output_built(scheduler, step)
    assert step.ucm_sparsed_slots == {}


def test_two_schedulers_in_one_process_do_not_mix() -> None:
    first_calls: list[Any] = []
    first, second, dense = Scheduler(recording(first_calls)), Scheduler(recording([])), Scheduler()
    for scheduler in (first, second, dense):
        hooks.scheduler_init(scheduler)
    hooks.num_slots_sparsed(first, Request("a"), 7, 3)
    hooks.num_slots_sparsed(second, Request("b"), 7, 4)
    hooks.num_slots_sparsed(dense, Request("c"), 7, 5)
    steps = [Step({"a": 7, "b": 7, "c": 7}) for _ in range(3)]
    for scheduler, step in zip((first, second, dense), steps, strict=True):
        hooks.scheduler_output_built(scheduler, step)
    assert [step.ucm_sparsed_slots for step in steps] == [{"a": 48}, {"b": 48}, None]
    assert [step.ucm_external_computed_tokens for step in steps] == [{"a": 3}, {"b": 4}, None]
    assert [name for _, name, _ in first_calls] == ["num_slots", "build_metadata"]


def test_steps_without_finished_requests_do_not_report_any() -> None:
    calls: list[Any] = []
    things = _things(recording(calls))
    hooks.worker_requests_finished(things["runner"], set())
    hooks.v2_requests_finished(things["runner"], Step())
    assert [name for _, name, _ in calls] == ["update_states"]


def test_of_warm_up_and_profiling_a_method_only_sees_the_layers() -> None:
    calls: list[Any] = []
    hooks.worker_init(recording(calls))
    query, key, value = object(), object(), object()
    hooks.v2_execute_begin(Runner(None), Step(), None, dummy_run=True)
    hooks.v2_execute_finished(Runner(None), Step(), dummy_run=True)
    found = hooks.attention_begin("layer", query, key, value, None, None)
    hooks.attention_finished("layer", query, None, None, None)
    assert _are_same(found, (query, key, value, None))
    assert [call[1:] for call in calls] == [("layer_seen", ("layer",))]


class Starting(SparseMethod):
    """Notes what it has when its side starts."""

    def scheduler_started(self, scheduler: Any) -> None:
        self.options["seen"].append((self.role, scheduler, scheduler._ucm_sparse_method))

    def worker_started(self) -> None:
        self.options["seen"].append((self.role, type(self.attention), None))


def test_a_side_that_starts_has_what_its_method_needs() -> None:
    seen: list[Any] = []
    scheduler = Scheduler(VllmConfig({"ucm_sparse_config": {f"{__name__}:Starting": {"seen": seen}}}))
    hooks.scheduler_init(scheduler)
    hooks.worker_init(scheduler.vllm_config)
    assert [entry[:2] for entry in seen] == [(Role.SCHEDULER, scheduler), (Role.WORKER, AttentionLayers)]
    assert type(seen[0][2]) is Starting


def test_names_that_are_handed_on_are_the_originals() -> None:
    assert hooks.INVALID_SLOT is base.INVALID_SLOT
    assert hooks.clear_row is block_table.clear_row


#: The hooks that no case of the table covers, each with the test that does.
OWN_TESTS: dict[str, Callable[[], None]] = {
    "INVALID_SLOT": test_names_that_are_handed_on_are_the_originals,
    "allocate_slots": test_allocation_goes_to_the_method_of_the_scheduler,
    "clear_row": test_names_that_are_handed_on_are_the_originals,
    "scheduler_init": test_each_side_gets_its_own_instance,
    "worker_init": test_each_side_gets_its_own_instance,
}


def test_every_hook_has_a_test_and_every_method_a_hook() -> None:
    assert sorted([case.hook for case in CASES] + list(OWN_TESTS)) == sorted(hooks.__all__)
    others = {"allocate_slots", "layer_seen"}
    assert {call.split()[0] for case in CASES for call in case.calls} | others == set(METHODS)


def test_the_hooks_import_nothing_heavy() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ucm.integration.vllm.hooks; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(ucm.__file__).parents[1])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert "ucm.integration.vllm.hooks" in modules
    assert modules.isdisjoint({"vllm", "torch", "numpy", "logging", "json", "dataclasses", "importlib.metadata"})


@by_hook
def test_the_base_class_changes_nothing(case: Case) -> None:
    things = _things(VllmConfig({"ucm_sparse_config": {"ucm.sparse.base:SparseMethod": {}}}))
    found = getattr(hooks, case.hook)(*(things[name] for name in case.arguments.split()))
    assert _are_same(_as_tuple(found), tuple(things[name] for name in case.unchanged.split()))
