"""All transforms, in the order in which the lock and the review page list them."""

from __future__ import annotations

from transforms import (
    attention,
    block_table,
    block_table_v2,
    kv_cache_manager,
    mla,
    model_runner,
    model_runner_v2,
    models,
    scheduler,
    scheduler_output,
    worker,
)

TRANSFORMS = (
    scheduler.TRANSFORM,
    scheduler_output.TRANSFORM,
    kv_cache_manager.TRANSFORM,
    attention.TRANSFORM,
    mla.TRANSFORM,
    worker.TRANSFORM,
    model_runner.TRANSFORM,
    block_table.TRANSFORM,
    model_runner_v2.TRANSFORM,
    block_table_v2.TRANSFORM,
    *models.TRANSFORMS,
)
