"""The hooks: inert without a method, and with one they pass on every call unchanged."""

from __future__ import annotations

import functools
import gc
import pickle
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import ucm
from ucm import compat
from ucm.errors import SparseMethodError
from ucm.integration.vllm import hooks
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable

#: Methods called once, when a side starts; a recorder ignores them, and other tests cover them.
STARTS = ("scheduler_started", "worker_started", "asks_workers", "confirms")
METHODS = [
    name
    for name, member in vars(SparseMethod).items()
    if callable(member) and not name.startswith("_") and name not in STARTS
]
ANSWERS: dict[str, Any] = {name: object() for name in METHODS}


class Recorder(SparseMethod):
    """Records every call in the list given as an option, and returns a new object."""


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
    compilation_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(static_forward_context={}))
    parallel_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(world_size=1))
    cache_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(block_size=16))


class CountedConfig:
    """Has no configuration, and counts accesses."""

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
    num_computed_tokens: int = 0


@dataclass
class Step:
    """The part of vLLM's SchedulerOutput that the hooks touch."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    ucm_sparse_meta: object = None


class Runner:
    def __init__(self, input_batch: object = None) -> None:
        self.input_batch, self.block_tables = input_batch, SimpleNamespace()


def started(config: Any, runner: Any = None) -> Any:
    """Start the worker of a model runner, new or given, with a configuration; return the runner."""
    runner = runner or Runner()
    hooks.worker_init(SimpleNamespace(vllm_config=config, worker=SimpleNamespace(model_runner=runner)))
    return runner


def recording(calls: list[Any]) -> VllmConfig:
    return VllmConfig({"ucm_sparse_config": {f"{__name__}:Recorder": {"calls": calls}}})


@dataclass(frozen=True)
class Case:
    """One hook: its arguments, its result without a method, and the calls that a method receives.

    All are names of objects in `_things`.
    """

    hook: str
    arguments: str
    unchanged: str
    calls: tuple[str, ...]
    answered: bool = False


CASES = (
    Case("request_added", "scheduler request", "none", ("request_added request",)),
    Case(
        "limit_new_tokens",
        "scheduler request count count",
        "count",
        ("limit_new_tokens request count count",),
        answered=True,
    ),
    Case("before_allocation", "manager request", "yes", ("before_allocation request",), answered=True),
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
#: Stands for vLLM's forward context.
running = SimpleNamespace(layers={})
by_hook = pytest.mark.parametrize("case", CASES, ids=lambda case: case.hook)


def _things(config: object) -> dict[str, Any]:
    """Return one object per name that the cases use, with both sides of the engine started."""
    scheduler, batch, finished = Scheduler(config), object(), {"r0"}
    hooks.scheduler_init(scheduler)
    runner = started(config, Runner(batch))
    running.layers = config.compilation_config.static_forward_context if isinstance(config, VllmConfig) else {}
    if hasattr(runner, hooks.METHOD):
        setattr(runner.block_tables, hooks.METHOD, getattr(runner, hooks.METHOD))
    opaque = "v2_batch output blocks key value cache mapping query metadata layer positions hidden residual"
    return {name: object() for name in opaque.split()} | {
        "batch": batch,
        "count": 7,
        "finished": finished,
        "id": "r1",
        "manager": scheduler.kv_cache_manager,
        "name": "model.layers.0.attn",
        "no": False,
        "none": None,
        "request": Request(),
        "row": 5,
        "runner": runner,
        "scheduler": scheduler,
        "step": Step({"r1": 7}, finished),
        "tables": runner.block_tables,
        "yes": True,
    }


def _are_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Return whether these are the wanted objects themselves, not equal ones."""
    return len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture(autouse=True)
def _nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_works_sparsely", False)
    monkeypatch.setattr(hooks, "_running_layers", lambda: id(running.layers))
    monkeypatch.setattr(hooks, "_by_layers", {})


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
    hooks.engine_core_started(SimpleNamespace(vllm_config=config))
    assert config.looks == ["kv_transfer_config", "additional_config"] * 3
    before = list(config.looks)
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


def test_a_connector_finds_the_method_of_its_worker() -> None:
    config, dense = recording([]), VllmConfig({})
    assert hooks.worker_method(config) is None
    things = _things(config)
    assert hooks.worker_method(config) is getattr(things["runner"], hooks.METHOD)
    assert hooks.worker_method(dense) is None


def test_a_step_carries_what_the_method_built() -> None:
    scheduler, step = Scheduler(recording([])), Step({"r1": 7})
    hooks.scheduler_init(scheduler)
    hooks.scheduler_output_built(scheduler, step)
    assert step.ucm_sparse_meta is ANSWERS["build_metadata"]


def test_the_compile_cache_sees_a_method_that_the_connector_settings_name() -> None:
    settings: dict[str, Any] = {"ucm_sparse_config": {f"{__name__}:Recorder": {"calls": []}}}
    config = VllmConfig({})
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=settings)
    started(config)
    assert config.additional_config == settings


def test_two_schedulers_in_one_process_do_not_mix() -> None:
    calls: tuple[list[Any], list[Any]] = ([], [])
    first, second, dense = Scheduler(recording(calls[0])), Scheduler(recording(calls[1])), Scheduler()
    for scheduler in (first, second, dense):
        hooks.scheduler_init(scheduler)
    assert hooks.before_allocation(dense.kv_cache_manager, Request())
    hooks.before_allocation(second.kv_cache_manager, Request())
    step = Step()
    hooks.scheduler_output_built(dense, step)
    assert step == Step()
    assert [[name for _, name, _ in told] for told in calls] == [[], ["before_allocation"]]


def _forward(runner: Any, config: VllmConfig) -> None:
    """Call the hooks of one step, as a model runner and its layers do."""
    running.layers = config.compilation_config.static_forward_context
    hooks.update_states(runner, Step())
    hooks.execute_begin(runner, Step())
    hooks.attention_begin("layer", None, None, None, None, object())
    hooks.execute_finished(runner, Step(), None)


def test_engines_in_one_process_keep_to_their_own_method() -> None:
    calls: tuple[list[Any], list[Any]] = ([], [])
    first, second, dense = recording(calls[0]), recording(calls[1]), VllmConfig()
    runners = [(started(config), config) for config in (first, second, dense)]
    for runner, config in (*runners, runners[0]):
        _forward(runner, config)
    step = ["update_states", "execute_begin", "attention_begin", "execute_finished"]
    assert [[name for _, name, _ in told] for told in calls] == [step * 2, step]
    assert len({id(method) for told in calls for method, _, _ in told}) == 2


def test_a_forward_that_failed_leaves_nothing_to_the_next_engine() -> None:
    calls: list[Any] = []
    config, dense = recording(calls), VllmConfig()
    runner, other = started(config), started(dense)
    hooks.execute_begin(runner, Step())  # its forward then raises
    calls.clear()
    running.layers = dense.compilation_config.static_forward_context
    hooks.attention_begin("layer", None, None, None, None, None)  # the other measures its memory
    _forward(other, dense)
    assert calls == []


def test_the_method_of_an_engine_that_is_gone_acts_no_more() -> None:
    calls: list[Any] = []
    config = recording(calls)
    runner = started(config)
    method = weakref.ref(getattr(runner, hooks.METHOD))
    running.layers = {}
    del runner, config
    gc.collect()
    assert method() is None
    next_runner, dense = started(VllmConfig()), VllmConfig()
    _forward(next_runner, dense)
    assert calls == []


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_method_that_needs_its_runner_refuses_one_without_hooks(version: str) -> None:
    bare = type("Bare", (), {"execute_model": lambda self: self, "input_batch": None})()
    config = VllmConfig({"ucm_sparse_config": {f"{__name__}:Needing": {}}})
    with pytest.raises(SparseMethodError, match="this one calls none") as caught:
        started(config, bare)
    assert "tests.ucm.test_hooks.Bare" in caught.value.where
    assert not hasattr(bare, hooks.METHOD)
    space: dict[str, Any] = {"_ucm_hooks": hooks}
    exec("def execute_model(self): ...", space)  # noqa: S102 - a function of a module that was rewritten
    hooked = type(version, (), {"execute_model": functools.wraps(space["execute_model"])(lambda self: self)})()
    started(config, hooked)
    assert type(getattr(hooked, hooks.METHOD)) is Needing


def test_a_worker_without_a_runner_is_refused() -> None:
    with pytest.raises(SparseMethodError, match="this one calls none"):
        hooks.worker_init(SimpleNamespace(vllm_config=recording([]), worker=SimpleNamespace()))


def test_block_tables_are_asked_for_their_runner() -> None:
    calls: list[Any] = []
    runner, blocks = started(recording(calls)), ([1],)
    other = Runner()
    for one in (runner, other):
        hooks.v2_requests_finished(one, Step())
        hooks.v2_append_block_ids(one.block_tables, 0, blocks, overwrite=False)
    assert [name for _, name, _ in calls] == ["update_states", "append_block_ids"]


def test_steps_without_finished_requests_do_not_report_any() -> None:
    calls: list[Any] = []
    things = _things(recording(calls))
    hooks.worker_requests_finished(things["runner"], set())
    hooks.v2_requests_finished(things["runner"], Step())
    assert [name for _, name, _ in calls] == ["update_states"]


def test_of_warm_up_and_profiling_a_method_only_sees_the_layers() -> None:
    calls: list[Any] = []
    config = recording(calls)
    runner = started(config)
    running.layers = config.compilation_config.static_forward_context
    query, key, value = object(), object(), object()
    hooks.v2_execute_begin(runner, Step(), None, dummy_run=True)
    hooks.v2_execute_finished(runner, Step(), dummy_run=True)
    found = hooks.attention_begin("layer", query, key, value, None, None)
    hooks.attention_finished("layer", query, None, None, None)
    assert _are_same(found, (query, key, value, None))
    assert [call[1:] for call in calls] == [("layer_seen", ("layer",))]


class Asked(SparseMethod):
    """Needs the attention hooks."""

    needed_hooks = ("ATTENTION",)


def _engine_of(*layers: str) -> tuple[VllmConfig, Any]:
    """Return a worker's configuration and runner with a KV cache of these layers, and one of another pipeline stage."""
    config = VllmConfig({"ucm_sparse_config": {f"{__name__}:Asked": {}}})
    runner = started(config)
    running.layers = config.compilation_config.static_forward_context
    running.layers |= {layer: SimpleNamespace() for layer in layers}
    groups = [SimpleNamespace(kv_cache_spec=None, layer_names=[layer]) for layer in (*layers, "another.stage")]
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    return config, runner


def _step(version: str, runner: Any, *layers: str) -> None:
    for layer in layers:
        hooks.attention_begin(layer, None, None, None, None, object())
    if version == "V1":
        hooks.execute_finished(runner, Step(), None)
    else:
        hooks.v2_execute_finished(runner, Step(), dummy_run=False)


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("asking", [(), ("dense.0",)])
def test_a_layer_with_a_kv_cache_that_does_not_ask_ends_the_engine(version: str, asking: tuple[str, ...]) -> None:
    _, runner = _engine_of("dense.0", "own.1")
    for layer in ("dense.0", "own.1"):  # a call while memory is profiled is not one in a step
        hooks.attention_begin(layer, None, None, None, None, None)
    with pytest.raises(SparseMethodError, match=f"{2 - len(asking)} of the 2 layers") as caught:
        _step(version, runner, *asking)
    assert "own.1 (SimpleNamespace)" in str(caught.value.where)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_once_all_layers_have_asked_nothing_is_counted_any_more(version: str) -> None:
    _, runner = _engine_of("a.0", "a.1")
    _step(version, runner, "a.0", "a.1")
    assert getattr(runner, hooks.METHOD).asked is None
    _step(version, runner)


def _arrive(version: str, runner: Any, step: Step) -> None:
    (hooks.update_states if version == "V1" else hooks.v2_requests_finished)(runner, step)


def _begin(version: str, runner: Any, step: Step) -> None:
    if version == "V1":
        hooks.execute_begin(runner, step)
    else:
        hooks.v2_execute_begin(runner, step, None, dummy_run=False)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_layer_of_a_step_that_was_not_begun_ends_the_engine(version: str) -> None:
    """This happens when another package replaces ``execute_model`` while the engine runs."""
    _, runner = _engine_of("a.0")
    step = Step(num_scheduled_tokens={"r1": 1})
    _arrive(version, runner, step)
    _begin(version, runner, step)
    _step(version, runner, "a.0")
    _arrive(version, runner, step)
    with pytest.raises(SparseMethodError, match="Asked was not told") as caught:
        _step(version, runner, "a.0")
    assert "layer a.0" in str(caught.value.where)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_step_that_has_not_arrived_ends_the_engine(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens when another package replaces ``_update_states``: freed blocks would not be copied out."""
    _, runner = _engine_of("a.0")
    monkeypatch.setattr(Asked, "needed_hooks", ("ATTENTION", "MODEL_RUNNER"))
    step = Step(num_scheduled_tokens={"r1": 1})
    _arrive(version, runner, step)
    _begin(version, runner, step)
    _step(version, runner, "a.0")
    with pytest.raises(SparseMethodError, match="Asked was not told") as caught:
        _begin(version, runner, step)
    assert "update_states" in str(caught.value.where)


class Halves(SparseMethod):
    """Needs both rewritten modules of the scheduler side."""

    needed_hooks = ("SCHEDULER", "KV_CACHE_MANAGER")


def _scheduler_with_halves() -> Scheduler:
    scheduler = Scheduler(VllmConfig({"ucm_sparse_config": {f"{__name__}:Halves": {}}}))
    hooks.scheduler_init(scheduler)
    return scheduler


def _schedule(scheduler: Scheduler, *requests: Request, asks: bool = True, decides: bool = True) -> None:
    """Run one step of these requests, a token each, without the calls that another package has replaced."""
    for request in requests:
        for _ in range(2 if asks else 0):  # twice, as after preempting another request
            hooks.before_allocation(scheduler.kv_cache_manager, request)
    if decides:
        hooks.scheduler_output_built(scheduler, Step({request.request_id: 1 for request in requests}))
    for request in requests:
        request.num_computed_tokens += 1


def test_blocks_that_nobody_asked_for_end_the_engine() -> None:
    """This happens when another package replaces ``allocate_slots``: no blocks would be freed any more."""
    scheduler, requests = _scheduler_with_halves(), [Request("r1"), Request("r2")]
    for _ in range(3):
        _schedule(scheduler, *requests)
        _schedule(scheduler, asks=False)  # a step without requests
    with pytest.raises(SparseMethodError, match=r"Halves was not told.*KV-cache manager") as caught:
        _schedule(scheduler, *requests, asks=False)
    assert caught.value.where == "a step of 2 requests runs, and the hook before_allocation did not fire before it"


@pytest.mark.parametrize("ended", ["", "r1", "r2"])
def test_a_step_that_was_not_told_ends_the_engine(ended: str) -> None:
    """This happens when another package replaces ``schedule``; a finished request does not hide it."""
    scheduler, requests = _scheduler_with_halves(), [Request("r1"), Request("r2")]
    for _ in range(3):
        _schedule(scheduler, *requests)
    _schedule(scheduler, *requests, decides=False)
    if ended:
        hooks.request_freed(scheduler, Request(ended))
        requests = [request for request in requests if request.request_id != ended]
        _schedule(scheduler, *requests[ended == "r2" :], decides=False)
    with pytest.raises(SparseMethodError, match=r"Halves was not told.*of the scheduler") as caught:
        _schedule(scheduler, *requests, decides=False)
    assert f"another step of request {requests[0].request_id} runs" in str(caught.value.where)
    assert "scheduler_output_built" in str(caught.value.where)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_step_of_which_neither_hook_told_ends_the_engine(version: str) -> None:
    """As it is when another package replaces ``schedule`` and ``allocate_slots`` at once: the workers notice it."""
    scheduler = _scheduler_with_halves()
    runner = started(scheduler.vllm_config)
    _arrive(version, runner, Step({"warm-up": 1}))
    for _ in range(3):
        step = Step({"r1": 1})
        hooks.before_allocation(scheduler.kv_cache_manager, Request("r1"))
        hooks.scheduler_output_built(scheduler, step)
        sent = pickle.loads(pickle.dumps(step))  # noqa: S301 - ours
        _arrive(version, runner, sent)
        assert sent.ucm_sparse_meta is None
        # With Ray and pipeline parallelism, one worker hands the step on to the next.
        _arrive(version, runner, pickle.loads(pickle.dumps(sent)))  # noqa: S301 - ours
        _arrive(version, runner, Step())
    with pytest.raises(SparseMethodError, match=r"Halves was not told.*of the scheduler") as caught:
        _arrive(version, runner, Step({"r1": 1}))
    assert caught.value.where == "a step of 1 requests runs, and the hook scheduler_output_built did not fire before it"


def test_blocks_may_be_asked_for_and_not_used() -> None:
    """For instance for a request whose KV is being loaded, one that is preempted and resumed, and one that ends."""
    scheduler, loading, other = _scheduler_with_halves(), Request("r1"), Request("r2")
    hooks.before_allocation(scheduler.kv_cache_manager, loading)
    loading.num_computed_tokens = 32
    hooks.scheduler_output_built(scheduler, Step())
    _schedule(scheduler, loading, other)
    hooks.before_allocation(scheduler.kv_cache_manager, other)
    other.num_computed_tokens = 0  # preempted
    hooks.before_allocation(scheduler.kv_cache_manager, other)
    hooks.before_allocation(scheduler.kv_cache_manager, loading)
    hooks.request_freed(scheduler, other)
    hooks.scheduler_output_built(scheduler, Step({"r1": 1}))


@pytest.mark.parametrize("needed", [("SCHEDULER",), ("KV_CACHE_MANAGER",)])
def test_a_hook_that_a_method_does_not_need_may_be_gone(needed: tuple[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, request = _scheduler_with_halves(), Request("r1")
    monkeypatch.setattr(Halves, "needed_hooks", needed)
    for _ in range(3):
        _schedule(scheduler, request, asks="KV_CACHE_MANAGER" in needed, decides="SCHEDULER" in needed)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_layers_may_run_outside_of_steps(version: str) -> None:
    """vLLM runs them so during warm-up, and between steps, some of which compute nothing."""
    _, runner = _engine_of("a.0")
    step = Step(num_scheduled_tokens={"r1": 1})
    hooks.attention_begin("a.0", None, None, None, None, object())
    _arrive(version, runner, step)
    _begin(version, runner, step)
    _step(version, runner, "a.0")
    _arrive(version, runner, Step())
    hooks.attention_begin("a.0", None, None, None, None, object())


class Needing(SparseMethod):
    """Needs the hooks of its model runner."""

    needed_hooks = ("MODEL_RUNNER",)


class Starting(SparseMethod):
    """Records its attributes when its side starts."""

    def scheduler_started(self, scheduler: Any) -> None:
        self.options["seen"].append((self.role, scheduler, scheduler._ucm_sparse_method))

    def worker_started(self) -> None:
        self.options["seen"].append((self.role, type(self.attention), None))


def test_a_side_that_starts_has_what_its_method_needs() -> None:
    seen: list[Any] = []
    scheduler = Scheduler(VllmConfig({"ucm_sparse_config": {f"{__name__}:Starting": {"seen": seen}}}))
    hooks.scheduler_init(scheduler)
    started(scheduler.vllm_config)
    assert [entry[:2] for entry in seen] == [(Role.SCHEDULER, scheduler), (Role.WORKER, AttentionLayers)]
    assert type(seen[0][2]) is Starting


def test_names_that_are_handed_on_are_the_originals() -> None:
    assert hooks.clear_row is compat.clear_row


class Keeping(SparseMethod):
    """Keeps 24 bytes of each block."""

    def bytes_beside_block(self, workers: Any) -> list[int]:
        return [8 * len(layers) for layers in workers]


def test_memory_of_kv_caches_is_left_to_a_method() -> None:
    """By worker; one without layers has no caches. A block of three layers of 1000 bytes leaves 3000 of 3024 bytes."""
    specs = [{f"layer {n}": SimpleNamespace(page_size_bytes=1000) for n in range(3)}, {}]
    available = [3024 * 7 + 5, 100]
    assert hooks.kv_cache_memory(VllmConfig(), specs, available) is available
    config = VllmConfig({"ucm_sparse_config": {f"{__name__}:Keeping": {}}})
    left = hooks.kv_cache_memory(config, specs, available)
    assert left == [21004, 100]
    assert left[0] // 3000 == 7
    config = VllmConfig({"ucm_sparse_config": {"ucm.sparse.base:SparseMethod": {}}})
    assert hooks.kv_cache_memory(config, specs, available) == available


def test_the_hash_function_is_vllms_own_without_a_method() -> None:
    """`tests/ucm/integration/vllm/sparse/test_sharing.py` tests it with methods."""
    config = CountedConfig()
    assert hooks.block_hash_function(config, hash) is hash
    assert config.looks == ["kv_transfer_config", "additional_config"]


#: The hooks that the table does not cover, each with its test.
OWN_TESTS: dict[str, Callable[[], None]] = {
    "clear_row": test_names_that_are_handed_on_are_the_originals,
    "block_hash_function": test_the_hash_function_is_vllms_own_without_a_method,
    "engine_core_started": test_without_a_method_nothing_is_attached_and_no_config_is_read_twice,
    "kv_cache_memory": test_memory_of_kv_caches_is_left_to_a_method,
    "scheduler_init": test_each_side_gets_its_own_instance,
    "worker_init": test_each_side_gets_its_own_instance,
}


def test_every_hook_has_a_test_and_every_method_a_hook() -> None:
    assert sorted([case.hook for case in CASES] + list(OWN_TESTS)) == sorted(hooks.__all__)
    others = {"layer_seen", "layers_seen", "figures", "bytes_beside_block"}
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
