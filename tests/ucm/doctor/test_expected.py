"""Which hooks must fire in a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ucm.doctor.run import (
    FIELDS,
    HOOKS,
    MODELS,
    OUTPUT,
    SCHEDULER_HOOKS,
    V1_RUNNER,
    V2_RUNNER,
    counters_of,
    expectations,
    unhooked_runners,
)
from ucm.integration.vllm import hooks
from ucm.overlay.manifest import Manifest, ShadowedModule
from ucm.sparse import probe

PLAIN = {"mla": False, "backend": "A", "separate_kv_write": True}


def saw(
    runner: str = V1_RUNNER,
    kinds: tuple[dict[str, Any], ...] = (PLAIN,),
    model: tuple[str, ...] = (f"{MODELS}llama",),
    preemptions: int | None = 2,
) -> dict[str, Any]:
    """Return what an engine of two workers reports."""
    workers = [{"runner": [runner, "vllm.v1.worker.lora_mixin"], "model": model, "attention": [kind]} for kind in kinds]
    return {"requests": 7, "preemptions": preemptions, "workers": workers}


V1_CPU = saw()
SCHEDULER = ("limit_new_tokens", "request_added", "request_freed", "request_preempted", "scheduler_init")
V1 = ("blocks_updated", "execute_begin", "execute_finished", "update_states", "worker_requests_finished")
V2 = ("v2_execute_begin", "v2_execute_finished", "v2_requests_added", "v2_requests_finished", "v2_requests_updated")
ATTENTION = ("attention_begin", "attention_finished")
KV_WRITE = ("kv_write_begin", "kv_write_finished")
LAYERS = ("ffn_begin", "ffn_finished", "layer_begin", "layer_finished")
ALL = {
    "vllm.v1.core.sched.scheduler": ("scheduler", (*SCHEDULER, "scheduler_output_built")),
    OUTPUT: ("scheduler", ()),
    "vllm.v1.engine.core": ("scheduler", ("block_hash_function", "engine_core_started", "kv_cache_memory")),
    "vllm.v1.core.kv_cache_manager": ("kv_cache_manager", ("before_allocation",)),
    "vllm.model_executor.layers.attention.attention": ("attention", (*ATTENTION, *KV_WRITE)),
    "vllm.model_executor.layers.attention.mla_attention": ("attention", (*ATTENTION, "mla_begin", "mla_finished")),
    "vllm.v1.worker.worker_base": ("worker", ("worker_init",)),
    V1_RUNNER: ("model_runner", V1),
    V2_RUNNER: ("model_runner_v2", V2),
    "vllm.v1.worker.gpu.block_table": ("model_runner_v2", ("v2_append_block_ids",)),
    "vllm.v1.worker.block_table": ("model_runner", ("clear_row",)),
    f"{MODELS}llama": ("models", LAYERS),
    f"{MODELS}qwen2": ("models", LAYERS),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "scheduler": (),
    "kv_cache_manager": ("scheduler",),
    "worker": (),
    **dict.fromkeys(("attention", "model_runner", "model_runner_v2", "models"), ("worker",)),
}


def manifest(modules: dict[str, Any]) -> Manifest:
    made = {
        name: ShadowedModule(name, name.replace(".", "/"), group, "", "", called, (), {})
        for name, (group, called) in modules.items()
    }
    return Manifest(Path(), "0.32.0", "0.32.0.post1", made, NEEDS)


def unexpected(told: dict[str, Any], modules: dict[str, Any] = ALL, **environ: str) -> dict[str, str]:
    """Return the hooks that need not fire, with the reasons."""
    with patch.dict(os.environ, environ):
        found = expectations(manifest(modules), told)
    return {e.hook: str(e.reason) for e in found if not e.expected}


V2_OFF = dict.fromkeys((*V2, "v2_append_block_ids"), "the V1 model runner ran")
MLA_OFF = dict.fromkeys(("mla_begin", "mla_finished"), "the model has no MLA layers")
NEVER = {
    "clear_row": "called only by a sparse method that replaces blocks",
}
V1_OFF = dict.fromkeys(V1, "the V2 model runner ran")


def test_it_knows_every_hook_of_the_seam() -> None:
    assert set(HOOKS) - {FIELDS} == set(hooks.__all__) > SCHEDULER_HOOKS


def test_it_reads_what_the_probe_counts() -> None:
    assert {counter for hook in HOOKS for counter in counters_of(hook)} == {*probe.HOOKS, probe.METADATA_RECEIVED}


def test_the_v1_runner_on_a_cpu() -> None:
    assert unexpected(V1_CPU) == NEVER | V2_OFF | MLA_OFF


def test_the_v2_runner() -> None:
    assert unexpected(saw(V2_RUNNER)) == {**NEVER, **V1_OFF, **MLA_OFF}


def test_a_runner_that_the_overlay_has_no_hooks_in() -> None:
    """Up to 0.15.1 the V2 runner has none; then no hook would be expected to fire."""
    without = manifest({name: about for name, about in ALL.items() if not name.startswith("vllm.v1.worker.gpu.")})
    v2 = saw(V2_RUNNER)
    assert unhooked_runners(without, v2) == [V2_RUNNER]
    assert unhooked_runners(without, V1_CPU) == unhooked_runners(manifest(ALL), v2) == []


def test_an_mla_model() -> None:
    found = unexpected(saw(kinds=({**PLAIN, "mla": True},), model=()))
    assert set(found) == {*NEVER, *V2_OFF, *KV_WRITE, *LAYERS}
    assert found["kv_write_begin"] == "the model has MLA layers only"
    assert found["ffn_begin"] == "the overlay does not rewrite this model's layers"


def test_a_backend_that_writes_inside_its_attention() -> None:
    found = unexpected(saw(kinds=({**PLAIN, "separate_kv_write": False},)))
    assert set(found) == {*NEVER, *V2_OFF, *MLA_OFF, *KV_WRITE}
    assert found["kv_write_begin"] == "this backend writes keys and values inside its attention"


@pytest.mark.parametrize(("preemptions", "at_least"), [(0, 0), (3, 3), (None, 1)])
def test_preemption(preemptions: int | None, at_least: int) -> None:
    found = expectations(manifest(ALL), saw(preemptions=preemptions))
    assert {e.hook: e.at_least for e in found}["request_preempted"] == at_least


def test_every_request_counts() -> None:
    found = {e.hook: e.at_least for e in expectations(manifest(ALL), V1_CPU)}
    assert (found["request_added"], found["request_freed"], found["worker_init"]) == (7, 7, 1)


def test_a_release_without_a_place() -> None:
    without = {name: about for name, about in ALL.items() if "attention" not in name}
    found = unexpected(V1_CPU, without)
    assert found["attention_begin"] == found["mla_begin"] == "vLLM 0.32.0 has no place for it"


def test_a_group_that_is_off() -> None:
    found = unexpected(V1_CPU, UCM_DISABLE_MODEL_RUNNER_PATCH="1")
    reason = "group model_runner is off: UCM_DISABLE_MODEL_RUNNER_PATCH is set"
    assert found["execute_begin"] == found[FIELDS] == reason
    assert "scheduler_output_built" not in found


def test_everything_hangs_on_the_worker() -> None:
    found = unexpected(V1_CPU, UCM_DISABLE_WORKER_PATCH="1")
    assert set(found) == set(HOOKS) - {
        *SCHEDULER,
        "before_allocation",
        "block_hash_function",
        "engine_core_started",
        "kv_cache_memory",
        "scheduler_output_built",
    }


def test_hooks_that_the_overlay_was_built_without() -> None:
    smaller = replace(manifest({}), hooks="default", left_out=("ffn_begin",))
    found = {e.hook: e for e in expectations(smaller, V1_CPU)}
    assert found["ffn_begin"].at_least == 0
    assert found["ffn_begin"].reason == (
        "the overlay was built without it; one that has it: `nox -s build-overlay -- 0.32.0 --hooks all`"
    )
    assert found["layer_begin"].reason == "vLLM 0.32.0 has no place for it"


def test_a_model_with_layers_of_both_kinds() -> None:
    """Those with MLA always write keys and values in an operator of their own."""
    kinds = ({**PLAIN, "separate_kv_write": False}, {**PLAIN, "mla": True})
    assert set(unexpected(saw(kinds=kinds))) == {*NEVER, *V2_OFF, *KV_WRITE}
