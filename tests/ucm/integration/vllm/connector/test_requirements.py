"""Reading the engine's configuration in the forms of all releases."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ucm.compat import (
    LoadPolicy,
    batches_in_flight,
    drafts_look_ahead,
    load_policy,
    outer_transfer,
    ranks,
    runs_micro_batches,
)
from ucm.errors import SparseMethodError
from ucm.integration.vllm.connector import failures
from ucm.integration.vllm.connector.failures import (
    UnsupportedModelError,
    refuse_method_without_hooks,
    refuse_what_cannot_work,
    refuse_wrong_rotation,
)


def config(
    *, tensor: int = 1, pipeline: int = 1, parallel: dict[str, int] | None = None, scheduler: Any = None, **more: Any
) -> Any:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **(parallel or {})}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), scheduler_config=SimpleNamespace(**(scheduler or {})), **more
    )


@pytest.mark.parametrize(
    ("given_config", "expected"),
    [
        (config(), 1),  # until 0.9.2 there is no asynchronous scheduling
        (config(scheduler={"async_scheduling": False}), 1),
        (config(scheduler={"async_scheduling": True}), 2),
        (config(scheduler={"async_scheduling": None}), 1),  # not decided yet
        (config(pipeline=4), 4),
        (config(pipeline=4, scheduler={"async_scheduling": True}), 5),
        (config(pipeline=4, max_concurrent_batches=4), 4),
        (config(max_concurrent_batches=2), 2),  # the engine's own figure counts, too
        (config(max_concurrent_batches=None), 1),
    ],
)
def test_batches_in_flight(given_config: Any, expected: int) -> None:
    assert batches_in_flight(given_config) == expected


def test_ranks() -> None:
    assert ranks(config()) == 1
    assert ranks(config(tensor=4, pipeline=2)) == 8


class Old:
    """The connector's interface until 0.11.0."""


class Reports(Old):
    """Since 0.11.1."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class Piecewise(Reports):
    """Since 0.17.1."""

    def requires_piecewise_for_cudagraph(self) -> bool:
        return False


class Reaches(Piecewise):
    """Since 0.19.1."""

    def bind_gpu_block_pool(self, pool: object) -> None:
        raise NotImplementedError(pool)


class Transfers(Reaches):
    """Since 0.30.0."""

    def get_transfer_results(self, finished: set[str]) -> object:
        raise NotImplementedError(finished)


WITHIN = LoadPolicy(between_steps=False)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (Old, WITHIN),
        (Reports, LoadPolicy(between_steps=True, reloads_preempted=False)),
        (Piecewise, LoadPolicy(between_steps=True, background=True, reloads_preempted=False)),
        (Reaches, LoadPolicy(between_steps=True, background=True)),
        (Transfers, LoadPolicy(between_steps=True, background=True)),
    ],
)
def test_loads_are_made_between_steps_where_vllm_mends_those(base: type, expected: LoadPolicy) -> None:
    assert load_policy(base, [None], "direct") == expected
    assert load_policy(base, [None], "layerwise") == WITHIN


@pytest.mark.parametrize("windows", [(64,), (64, 32), (None, 64), (None, None)])
def test_loads_of_windows_and_of_several_groups_fail_as_a_whole_or_must_not_fail(
    windows: tuple[int | None, ...],
) -> None:
    """vLLM would compute the tokens from a failed block on, from blocks before it that were never loaded.

    With several groups it ends if a connector names failed blocks.
    """
    for older in (Old, Reports, Piecewise, Reaches):
        assert load_policy(older, windows, "direct") == WITHIN
    whole = LoadPolicy(between_steps=True, background=True, fails_whole=True)
    assert load_policy(Transfers, windows, "direct") == whole
    assert load_policy(Transfers, windows, "layerwise") == WITHIN


def test_a_state_is_loaded_between_steps_whatever_the_connector() -> None:
    """Within a step vLLM copies the state that it continues from before it starts the step's loads."""
    whole = LoadPolicy(between_steps=True, background=True, fails_whole=True)
    for kind in ("direct", "layerwise"):
        assert load_policy(Transfers, [None, None], kind, has_states=True) == whole


def test_micro_batches() -> None:
    assert not runs_micro_batches(config())
    assert not runs_micro_batches(config(parallel={"enable_dbo": False, "ubatch_size": 0}))
    assert not runs_micro_batches(config(parallel={"ubatch_size": 1}))
    assert runs_micro_batches(config(parallel={"enable_dbo": True}))
    assert runs_micro_batches(config(parallel={"enable_dbo": False, "ubatch_size": 2}))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    refuse_what_cannot_work(config(parallel={name: 1}), None)
    with pytest.raises(UnsupportedModelError) as refused:
        refuse_what_cannot_work(config(parallel={name: 2}), None)
    assert refused.value.where == f"parallel_config.{name} = 2"


def test_a_release_without_context_parallelism_is_taken() -> None:
    refuse_what_cannot_work(config(), None)


def caches(*modes: str | None) -> Any:
    specs = [SimpleNamespace() if mode is None else SimpleNamespace(mamba_cache_mode=mode) for mode in modes]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_recurrent_layers_are_refused_where_their_states_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(model="hybrid")
    refuse_what_cannot_work(config(), caches(None, None))
    with pytest.raises(UnsupportedModelError, match="which blocks hold the states") as refused:
        refuse_what_cannot_work(config(model_config=model), caches(None, "align"))
    assert refused.value.fix.startswith("use vLLM 0.30.0 or newer")
    monkeypatch.setattr(failures, "hands_over_states", lambda: True)
    refuse_what_cannot_work(config(), caches(None, "align", "align"))
    for modes in ((None, "none"), ("align", "all")):
        with pytest.raises(UnsupportedModelError, match="only where vLLM keeps them at the ends of blocks") as refused:
            refuse_what_cannot_work(config(), caches(*modes))
        assert refused.value.where == f"cache_config.mamba_cache_mode = {modes[1]}"


def test_drafts_beside_states_are_served_where_the_states_are_in_place_when_they_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drafting(method: str | None, stages: int = 1) -> Any:
        return config(speculative_config=SimpleNamespace(method=method), pipeline=stages)

    monkeypatch.setattr(failures, "hands_over_states", lambda: True)
    for method in ("ngram", "suffix", "custom_class"):
        refuse_what_cannot_work(drafting(method), caches("align"))
        refuse_what_cannot_work(drafting(method, 2), caches(None))
        with pytest.raises(UnsupportedModelError, match="stages of a pipeline but the last") as refused:
            refuse_what_cannot_work(drafting(method, 2), caches("align"))
        assert refused.value.where == "speculative_config"
    with pytest.raises(UnsupportedModelError, match=r"only drafts without a model .*, not those of 'mtp'") as refused:
        refuse_what_cannot_work(drafting("mtp"), caches("align"))
    assert refused.value.where == "speculative_config.method"


@pytest.mark.parametrize("device", [{"device_type": "cuda"}, {"device_type": None, "device": "npu"}, {}])
def test_sleep_mode_is_refused_where_it_takes_memory_away(device: dict[str, Any]) -> None:
    def engine(enabled: object, device: dict[str, Any]) -> Any:
        model = SimpleNamespace(enable_sleep_mode=enabled)
        return config(model_config=model, device_config=SimpleNamespace(**device))

    refuse_what_cannot_work(engine(False, device), None)
    refuse_what_cannot_work(engine(True, {"device_type": "cpu"}), None)
    refuse_what_cannot_work(config(model_config=None), None)
    refuse_what_cannot_work(config(model_config=SimpleNamespace()), None)
    with pytest.raises(UnsupportedModelError, match="sleep mode frees the KV cache's memory") as refused:
        refuse_what_cannot_work(engine(True, device), None)
    assert refused.value.where == "model_config.enable_sleep_mode"
    assert "leave out --enable-sleep-mode" in refused.value.fix


def speculative(*, model: object, eagle: bool) -> Any:
    return config(speculative_config=SimpleNamespace(draft_model_config=model, use_eagle=lambda: eagle))


def test_drafts_that_look_ahead() -> None:
    assert not drafts_look_ahead(config())
    assert not drafts_look_ahead(config(speculative_config=None))
    assert not drafts_look_ahead(speculative(model=None, eagle=False))
    assert drafts_look_ahead(speculative(model=object(), eagle=True))


def test_a_draft_model_needs_a_release_that_saves_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.worker.kv_connector_model_runner_mixin"
    runner = ModuleType(name)
    for parent in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, runner)
    runner.KVConnectorModelRunnerMixin = type("Mixin", (), {})  # type: ignore[attr-defined]
    refuse_what_cannot_work(speculative(model=None, eagle=False), None)  # n-gram drafts have no KV
    with pytest.raises(UnsupportedModelError, match="before the draft model has run"):
        refuse_what_cannot_work(speculative(model=object(), eagle=True), None)
    runner.KVConnectorModelRunnerMixin = type("Mixin", (), {"finalize_kv_connector": None})  # type: ignore[attr-defined]
    refuse_what_cannot_work(speculative(model=object(), eagle=True), None)


def test_a_sparse_method_without_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    name = "vllm.v1.core.sched.scheduler"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    sparse = config(additional_config={"ucm_sparse_config": {"BlockTopK": {}}})
    refuse_method_without_hooks(config())
    with pytest.raises(SparseMethodError, match="the sparse method BlockTopK is configured, but vLLM has no hooks"):
        refuse_method_without_hooks(sparse)
    module._ucm_hooks = object()  # type: ignore[attr-defined] # what a rewritten module has
    refuse_method_without_hooks(sparse)


def test_a_connector_among_several_knows_the_engines_own_configuration() -> None:
    """vLLM gives each of them its own configuration."""
    alone, again, inner = (
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=name))
        for name in ("MultiConnector", "MultiConnector", "UCMConnector")
    )

    def create(vllm_config: Any) -> Any:
        return outer_transfer(vllm_config)

    def create_several(vllm_config: Any, one: Any) -> Any:
        assert vllm_config is not one
        return create(one)

    assert create(alone) is None
    assert create_several(alone, again) is None
    assert create_several(alone, inner) is alone.kv_transfer_config


@pytest.mark.parametrize(
    ("device", "latent", "operators", "misreads", "refused"),
    [
        ("cpu", True, ["all"], True, True),  # --enforce-eager
        ("cpu", True, [], True, True),
        ("cpu", True, ["none", "+rotary_embedding"], True, True),
        ("cpu", True, ["all"], False, False),
        ("cpu", True, ["none"], True, False),  # compiled
        ("cpu", True, ["all", "-rotary_embedding"], True, False),
        ("cpu", False, ["all"], True, False),
        ("cuda", True, ["all"], True, False),
    ],
)
def test_latent_attention_that_is_rotated_by_other_positions_is_refused(
    device: str,
    operators: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    latent: bool,
    misreads: bool,
    refused: bool,
) -> None:
    monkeypatch.setattr(failures, "takes_heads_for_tokens", lambda: misreads)
    engine = config(
        model_config=SimpleNamespace(use_mla=latent),
        compilation_config=SimpleNamespace(custom_ops=operators),
        device_config=SimpleNamespace(device_type=device),
    )
    if not refused:
        refuse_wrong_rotation(engine)
        return
    with pytest.raises(UnsupportedModelError, match="by the positions of other tokens") as caught:
        refuse_wrong_rotation(engine)
    assert """'{"custom_ops": ["all", "-rotary_embedding"]}'""" in caught.value.fix
