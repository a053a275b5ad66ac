"""UCM's own transforms of vLLM, in the order in which the lock and the review page list them."""

from __future__ import annotations

from transforms import (
    attention,
    block_table,
    block_table_v2,
    engine_core,
    kv_cache_manager,
    mla,
    model_runner,
    model_runner_v2,
    models,
    names,
    scheduler,
    scheduler_output,
    worker,
)
from transforms.engine.registry import Package, Registry
from transforms.place import ROOT

#: The seam's source.
HOOKS = ROOT / "ucm" / "integration" / "vllm" / "hooks.py"

VLLM = Package("vllm", "vllm", "vLLM", "contributors to the vLLM project")

TRANSFORMS = (
    scheduler.TRANSFORM,
    scheduler_output.TRANSFORM,
    kv_cache_manager.TRANSFORM,
    engine_core.TRANSFORM,
    attention.TRANSFORM,
    mla.TRANSFORM,
    worker.TRANSFORM,
    model_runner.TRANSFORM,
    block_table.TRANSFORM,
    model_runner_v2.TRANSFORM,
    block_table_v2.TRANSFORM,
    *models.TRANSFORMS,
)

REGISTRY = Registry(
    "ucm",
    "UCM",
    VLLM,
    TRANSFORMS,
    hooks=HOOKS,
    overlays=ROOT / "overlays",
    distribution="ucm-vllm-overlay",
    has_bare_ids=True,
    census=names.CENSUSES,
)
