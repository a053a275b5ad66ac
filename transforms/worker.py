"""The worker: the one early moment, known in every release, at which UCM starts in that process."""

from __future__ import annotations

from transforms.engine.edits import after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

MODULE = Module(id="worker", group="worker", paths=(ModulePath("vllm/v1/worker/gpu_worker.py"),))

GIVEN = """\
def init_worker_distributed_environment(vllm_config):
    ensure_model_parallel_initialized(1, 1)
"""

TRANSFORM = Transform(
    id="worker",
    module=MODULE,
    governance=Governance(
        why="Every worker has to create the sparse method before its model is loaded and compiled, with its ranks "
        "known; a general plugin runs too early, before either exists.",
        how="One call after the parallel groups are set up, the one statement of this function that all releases "
        "share. The CPU and XPU workers call the same function.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "vLLM's plugin groups have none that runs in a worker after its groups exist; nobody has asked yet",
        ),
        removal="vLLM calls a plugin group in each worker after distributed set-up and before the model is loaded.",
    ),
    rules=(
        rule(
            "worker.init",
            Scope("init_worker_distributed_environment"),
            after("ensure_model_parallel_initialized(...)", "_ucm_hooks.worker_init(vllm_config)"),
        ),
    ),
    cases=(
        Case("worker.init", GIVEN, GIVEN + "    _ucm_hooks.worker_init(vllm_config)  # ucm: worker.init\n", "0.32.0"),
    ),
)
