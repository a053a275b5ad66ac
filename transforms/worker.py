"""The worker: a hook after its device set-up, the same in every release and on every platform."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(
    id="worker",
    group="worker",
    paths=(
        ModulePath("vllm/v1/worker/worker_base.py", Releases(since="0.11.1")),
        ModulePath("vllm/worker/worker_base.py", Releases(before="0.11.1")),
    ),
)

CENSUS = (
    Census(
        "worker.starts",
        "calls that initialize a worker's device",
        ("_.init_device(...)",),
        rules=("worker.init",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/executor/*:*",),
                Consequence.REACHES,
                "the executor calls the wrapper around its worker, and the wrapper's init_device is hooked",
            ),
            Elsewhere(
                ("vllm/spec_decode/*:*", "vllm/worker/worker_base.py:DelegateWorkerBase.init_device"),
                Consequence.REACHES,
                "a V0 worker that initializes the workers inside it; the wrapper around it is hooked",
                releases=Releases(before="0.11.0"),
            ),
        ),
    ),
    Census(
        "worker.workers",
        "workers with their own init_device",
        ("def init_device",),
        rules=("worker.init",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/worker/*:*.init_device", "vllm/worker/*:*.init_device", "vllm/spec_decode/*:*.init_device"),
                Consequence.REACHES,
                "every executor wraps its worker in WorkerWrapperBase, whose hook follows the call of this function",
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="worker",
    module=MODULE,
    governance=Governance(
        why="Every worker has to create the sparse method before it loads and compiles its model, but after it knows "
        "its ranks and its model runner. A general plugin runs before either exists.",
        how="One call after the worker has set up its device. It is in the wrapper that every executor puts around a "
        "worker, on every platform, in vLLM or outside. Up to 0.11.0 the V0 engine also uses the wrapper; there the "
        "runtime refuses runners without hooks.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "vLLM runs no plugin in a worker after its process groups exist; none has been requested",
        ),
        removal="vLLM calls a plugin group in each worker between distributed set-up and model loading.",
    ),
    rules=(
        rule(
            "worker.init",
            Scope("WorkerWrapperBase.init_device"),
            after("self.worker.init_device()", "_ucm_hooks.worker_init(self)"),
        ),
    ),
    census=CENSUS,
    cases=cases_beside(__file__, "worker"),
    engine_tests=(EngineTest("tests/e2e/test_hooks.py::test_each_side_runs_in_its_process"),),
)
