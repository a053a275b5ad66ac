"""Before the first request, every worker reports its method, which must be the scheduler side's."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import Field

import ucm
from tests.ucm.test_hooks import Runner, Scheduler, VllmConfig
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm import handshake, hooks
from ucm.logger import get_logger
from ucm.overlay.manifest import Manifest, ShadowedModule
from ucm.sparse.base import SparseMethod
from ucm.sparse.options import MethodOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OVERLAY = ("0.32.0.post2", ["attention", "scheduler", "worker"])


class Options(MethodOptions):
    tokens: int = Field(default=7)


class Windowed(SparseMethod):
    options_type = Options
    needed_hooks = ("SCHEDULER", "WORKER")


class Renamed(Windowed):
    """Another class with the same behaviour."""


class Free(SparseMethod):
    """Needs no hooks."""


class Choosy(Windowed):
    """Refuses all later layers."""

    def layer_seen(self, layer_name: str) -> None:
        if layer_name != "first":
            raise SparseMethodError("this layer is not served", where=layer_name, fix="use another model")


class Frugal(Windowed):
    """Finds its budget too small for the blocks of the caches."""

    def layers_seen(self) -> None:
        raise ConfigError("a budget of 512 tokens leaves no block of 784", where="token_budget", fix="raise it")


class Executor:
    """Calls each worker as vLLM's executors do: with a pickled function and the worker's wrapper."""

    def __init__(self, *wrappers: Any) -> None:
        self.wrappers = wrappers

    def collective_rpc(
        self, method: Callable[..., Any], timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        assert timeout
        sent = pickle.dumps((method, args))
        calls = [pickle.loads(sent) for _ in self.wrappers]  # noqa: S301 - ours
        return [called(wrapper, *given) for wrapper, (called, given) in zip(self.wrappers, calls, strict=True)]


def settings(method: type[SparseMethod] = Windowed, **options: Any) -> VllmConfig:
    config = VllmConfig({"ucm_sparse_config": {f"{__name__}:{method.__name__}": options}})
    config.parallel_config.world_size = 2
    return config


def worker(config: VllmConfig, rank: int = 0, *, started: bool = True) -> Any:
    wrapper = SimpleNamespace(vllm_config=config, worker=SimpleNamespace(rank=rank, model_runner=Runner()))
    if started:
        hooks.worker_init(wrapper)
    return wrapper


def core(config: VllmConfig, *wrappers: Any) -> Any:
    scheduler = Scheduler(config)
    hooks.scheduler_init(scheduler)
    return SimpleNamespace(vllm_config=config, scheduler=scheduler, model_executor=Executor(*wrappers))


def refusal(engine_core: Any) -> SparseMethodError:
    with pytest.raises(SparseMethodError) as caught:
        hooks.engine_core_started(engine_core)
    return caught.value


@pytest.fixture(autouse=True)
def _overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_overlay", lambda: OVERLAY)


def test_workers_that_run_the_same_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    config = settings()
    engine_core = core(config, worker(config), worker(settings(tokens=7), 1))  # a default, given explicitly
    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=get_logger().name):
        hooks.engine_core_started(engine_core)
    get_logger().removeHandler(caplog.handler)
    told = {record.getMessage().partition(" (asked in ")[0] for record in caplog.records if "worker(s)" in record.msg}
    assert told == {f"[UCM.Sparse] 2 worker(s) run {__name__}:Windowed as the scheduler does"}


def test_a_layer_that_is_refused_is_named_before_the_first_request() -> None:
    """Only layers with a KV cache in this worker count: on a CPU, vLLM may measure nothing."""
    config = settings(Choosy)
    wrapper = worker(config)
    groups = [SimpleNamespace(kv_cache_spec=None, layer_names=["first", "of another stage", "second"])]
    wrapper.worker.model_runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    layers = config.compilation_config.static_forward_context
    layers |= {"first": object(), "without a cache": object()}
    hooks.engine_core_started(core(config, wrapper, worker(config, 1)))
    layers["second"] = object()
    found = refusal(core(config, wrapper, worker(config, 1)))
    assert (found.what, found.fix) == ("this layer is not served", "use another model")
    assert found.where.startswith("second; rank 0 on ")


def test_an_option_that_the_caches_rule_out_is_refused_by_its_name() -> None:
    config = settings(Frugal)
    assert refusal(core(config, worker(config), worker(config, 1))).fix == "raise it"


def test_hooks_that_were_taken_out_since_the_scheduler_started_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    engine_core, asked = core(config, worker(config), worker(config, 1)), []

    def taken_out(groups: Iterable[str], kind: type | None = None) -> list[Any]:
        asked.append((list(groups), kind))
        return ["Scheduler.schedule is replaced by intruder.mine"]

    monkeypatch.setattr("ucm.integration.vllm.handshake.check_feature", taken_out)
    assert refusal(engine_core).where == "Scheduler.schedule is replaced by intruder.mine"
    assert asked == [([group.lower() for group in Windowed.needed_hooks], Scheduler)]


def test_a_worker_whose_hooks_never_fired_is_named() -> None:
    config = settings()
    found = refusal(core(config, worker(config), worker(config, 1, started=False)))
    assert "not all workers run" in found.what
    assert found.where.startswith("rank 1 on ")
    assert "(tests.ucm.test_hooks.Runner) runs method None, the scheduler 'tests.ucm.test_handshake.Windowed'" in (
        found.where
    )


def test_an_answer_that_is_missing_is_counted() -> None:
    config = settings()
    assert refusal(core(config, worker(config))).where == "1 of 2 workers answered"
    config.parallel_config.distributed_executor_backend = "external_launcher"  # one engine per process
    hooks.engine_core_started(core(config, worker(config)))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (settings(Renamed), "runs method 'tests.ucm.test_handshake.Renamed'"),
        (settings(tokens=8), """runs options '{"tokens": 8}', the scheduler '{"tokens": 7}'"""),
    ],
    ids=["method", "options"],
)
def test_another_method_or_other_options_are_named(other: VllmConfig, told: str) -> None:
    config = settings()
    found = refusal(core(config, worker(config), worker(other, 1)))
    assert told in found.where
    assert found.where.count("rank ") == 1


@pytest.mark.parametrize(
    ("what", "there", "told"),
    [
        ("runtime", "0.0.9", f"runs runtime '0.0.9', the scheduler '{ucm.__version__}'"),
        ("overlay", "0.32.0.post1", "runs overlay '0.32.0.post1', the scheduler '0.32.0.post2'"),
        ("overlay", None, "runs overlay None, the scheduler '0.32.0.post2'"),
        ("groups", ["scheduler", "worker"], "runs groups ['scheduler', 'worker'], the scheduler ['attention',"),
    ],
)
def test_another_build_on_a_worker_s_node_is_named(
    monkeypatch: pytest.MonkeyPatch, what: str, there: Any, told: str
) -> None:
    config = settings()
    answer = handshake.answer

    def other(wrapper: Any) -> dict[str, Any]:
        return answer(wrapper) | ({what: there} if wrapper.worker.rank else {})

    def collective_rpc(
        self: Executor, method: Callable[..., Any], timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        assert method is answer
        assert timeout
        assert args == (None,)
        return [other(wrapper) for wrapper in self.wrappers]

    monkeypatch.setattr(Executor, "collective_rpc", collective_rpc)

    found = refusal(core(config, worker(config), worker(config, 1)))
    assert told in found.where
    assert found.where.count("rank ") == 1


def test_workers_that_cannot_answer_are_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(
        self: Executor, method: Callable[..., Any], timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        raise RuntimeError(
            f"{len(self.wrappers)}: {method.__name__} failed with error 'No module named ucm' ({timeout}, {args})"
        )

    monkeypatch.setattr(Executor, "collective_rpc", fail)
    found = refusal(core(settings()))
    assert "the workers could not say what they run: 0: answer failed with error 'No module named ucm'" in found.what
    assert "same runtime and overlay on every node" in found.fix


def test_a_scheduler_without_hooks_is_refused() -> None:
    config = settings()
    engine_core = core(config, worker(config), worker(config, 1))
    engine_core.scheduler = Scheduler(config)
    found = refusal(engine_core)
    assert "the scheduler side of" in found.what
    assert found.where == "tests.ucm.test_hooks.Scheduler calls none of the overlay's hooks"


def test_what_is_switched_off_on_both_sides_is_the_method_s_own_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Probe can then report which hooks are left."""
    config = settings(Free)
    engine_core = core(config, worker(config, started=False), worker(config, 1, started=False))
    assert "runs method None" in refusal(engine_core).where
    monkeypatch.setattr(handshake, "_overlay", lambda: ("0.32.0.post2", ["scheduler"]))
    hooks.engine_core_started(engine_core)


class Layered(SparseMethod):
    def layer_begin(self, layer: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        del layer, positions
        return hidden_states, residual

    def append_block_ids(self, block_tables: Any, request_index: int, block_ids: Any, overwrite: bool) -> Any:
        del block_tables, request_index
        return block_ids, overwrite


class LayeredIfPossible(Layered):
    optional_hooks = True


def overlay(title: str, named: str, called: tuple[str, ...], left_out: tuple[str, ...]) -> Manifest:
    module = ShadowedModule("a.module", "a/module.py", "scheduler", "0", "0", called, ("worker",), {})
    modules = {module.name: module}
    return Manifest(Path(), "0.32.0", "0.32.0.post2", modules, {}, left_out=left_out, title=title, named=named)


def test_a_method_is_refused_whose_hooks_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = ("clear_row", "ffn_begin", "layer_begin", "v2_append_block_ids")
    monkeypatch.setattr(handshake, "_manifests", lambda: [overlay("vLLM", "0.32.0", (), left_out)])
    with pytest.raises(
        SparseMethodError, match="Layered implements hooks that this overlay was built without"
    ) as caught:
        worker(settings(Layered))
    assert caught.value.where == "layer_begin, append_block_ids; overlay 0.32.0.post2 of vLLM"
    assert "build-overlay -- 0.32.0 --hooks all" in caught.value.fix
    for method in (LayeredIfPossible, Windowed):
        worker(settings(method))


def test_latent_attention_is_refused_if_its_hooks_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_manifests", lambda: [overlay("vLLM", "0.32.0", (), ("layer_begin", "mla_begin"))])
    with pytest.raises(SparseMethodError, match="latent attention needs hooks") as caught:
        handshake.require_latent_hooks()
    assert caught.value.where == "mla_begin; overlay 0.32.0.post2 of vLLM"
    assert "build-overlay -- 0.32.0 --hooks all" in caught.value.fix
    monkeypatch.setattr(handshake, "_manifests", lambda: [overlay("vLLM", "0.32.0", ("mla_begin",), ())])
    handshake.require_latent_hooks()


def test_a_hook_that_another_overlay_calls_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform's overlay omits hooks in its own operators if vLLM's operators call them."""
    vllm = overlay("vLLM", "0.32.0", ("layer_begin",), ())
    platform = overlay("vLLM Ascend", "ascend-0.32.0", (), ("append_block_ids", "layer_begin"))
    monkeypatch.setattr(handshake, "_manifests", lambda: [vllm, platform])
    with pytest.raises(SparseMethodError) as caught:
        worker(settings(Layered))
    assert caught.value.where == "append_block_ids; overlay 0.32.0.post2 of vLLM Ascend"


def test_without_a_method_nobody_is_asked() -> None:
    hooks.engine_core_started(SimpleNamespace(vllm_config=VllmConfig()))


class Telling(Windowed):
    """Its workers send data to its scheduler through a file, if they can access it."""

    def asks_workers(self) -> str:
        return "/where/the/scheduler/reads"

    def confirms(self, question: str) -> str:
        return f"it does not reach {question}" if self.vllm_config.parallel_config.rank else ""


def test_what_a_worker_cannot_confirm_is_named() -> None:
    config, elsewhere = settings(Telling), settings(Telling)
    config.parallel_config.rank, elsewhere.parallel_config.rank = 0, 1
    hooks.engine_core_started(core(config, worker(config), worker(config, 1)))
    found = refusal(core(config, worker(config), worker(elsewhere, 1)))
    assert found.what.startswith("not all of these workers can run ")
    assert found.what.endswith("Telling")
    assert found.where.startswith("rank 1 on ")
    assert found.where.endswith(": it does not reach /where/the/scheduler/reads")
    assert "on one node" in found.fix


def test_a_method_whose_workers_tell_it_something_where_each_has_a_scheduler_of_its_own() -> None:
    config = settings(Telling)
    config.parallel_config.rank = 0
    config.parallel_config.distributed_executor_backend = "external_launcher"
    found = refusal(core(config, worker(config)))
    assert found.where == "distributed_executor_backend = 'external_launcher' with 2 ranks"
    config.parallel_config.world_size = 1
    hooks.engine_core_started(core(config, worker(config)))
