"""Which hooks must fire in a run: those in the overlay's manifest, except those for which this run had no occasion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.sparse.base import Role
from ucm.sparse.probe import METADATA_RECEIVED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.overlay.manifest import Manifest

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
V2_PACKAGE = "vllm.v1.worker.gpu."
MODELS = "vllm.model_executor.models."
OUTPUT = "vllm.v1.core.sched.output"
FIELDS = "scheduler_output fields"
#: The hooks around the forward call; a sparse method cannot work in a runner that has none of them.
FORWARD = {"execute_begin", "v2_execute_begin"}


@dataclass(frozen=True)
class Hook:
    """A hook, and how the probe shows that it fired.

    Attributes:
        name: Its name in `ucm.integration.vllm.hooks`.
        role: The side of the engine that it fires on.
        counters: The probe's counters for it; if empty, the process only has to have the role.
    """

    name: str
    role: Role
    counters: tuple[str, ...] = ()


HOOKS = (
    Hook("scheduler_init", Role.SCHEDULER),
    Hook("engine_core_started", Role.SCHEDULER),
    Hook("request_added", Role.SCHEDULER, ("request_added",)),
    Hook("limit_new_tokens", Role.SCHEDULER, ("limit_new_tokens",)),
    Hook("before_allocation", Role.SCHEDULER, ("before_allocation",)),
    Hook("scheduler_output_built", Role.SCHEDULER, ("build_metadata",)),
    Hook("request_preempted", Role.SCHEDULER, ("request_preempted",)),
    Hook("request_freed", Role.SCHEDULER, ("request_freed",)),
    Hook("worker_init", Role.WORKER),
    Hook(FIELDS, Role.WORKER, (METADATA_RECEIVED,)),
    Hook("update_states", Role.WORKER, ("update_states",)),
    Hook("worker_requests_finished", Role.WORKER, ("requests_finished",)),
    Hook("blocks_updated", Role.WORKER, ("blocks_updated",)),
    Hook("clear_row", Role.WORKER),
    Hook("execute_begin", Role.WORKER, ("execute_begin",)),
    Hook("execute_finished", Role.WORKER, ("execute_finished",)),
    Hook("v2_requests_finished", Role.WORKER, ("update_states", "requests_finished")),
    Hook("v2_requests_added", Role.WORKER, ("requests_added",)),
    Hook("v2_requests_updated", Role.WORKER, ("requests_updated",)),
    Hook("v2_append_block_ids", Role.WORKER, ("append_block_ids",)),
    Hook("v2_execute_begin", Role.WORKER, ("execute_begin",)),
    Hook("v2_execute_finished", Role.WORKER, ("execute_finished",)),
    Hook("kv_write_begin", Role.WORKER, ("kv_write_begin",)),
    Hook("kv_write_finished", Role.WORKER, ("kv_write_finished",)),
    Hook("attention_begin", Role.WORKER, ("attention_begin",)),
    Hook("attention_finished", Role.WORKER, ("attention_finished",)),
    Hook("mla_begin", Role.WORKER, ("mla_begin",)),
    Hook("mla_finished", Role.WORKER, ("mla_finished",)),
    Hook("layer_begin", Role.WORKER, ("layer_begin",)),
    Hook("layer_finished", Role.WORKER, ("layer_finished",)),
    Hook("ffn_begin", Role.WORKER, ("ffn_begin",)),
    Hook("ffn_finished", Role.WORKER, ("ffn_finished",)),
)


@dataclass(frozen=True)
class Facts:
    """The facts of a run.

    Attributes:
        requests: How many requests were served.
        preemptions: How many preemptions the engine counted; None if it does not report them.
        runner: The modules of the workers' model runners.
        model: The modules of the model's classes.
        mla: Whether there are MLA layers.
        plain: Whether there are other attention layers.
        separate_kv_write: Whether any of these writes keys and values with a separate operator.
    """

    requests: int
    preemptions: int | None
    runner: frozenset[str]
    model: frozenset[str]
    mla: bool
    plain: bool
    separate_kv_write: bool

    @classmethod
    def of(cls, saw: Mapping[str, Any]) -> Facts:
        """Return the facts from the result of the engine's child process."""
        kinds = [kind for worker in saw["workers"] for kind in worker["attention"]]
        return cls(
            saw["requests"],
            saw["preemptions"],
            frozenset(name for worker in saw["workers"] for name in worker["runner"]),
            frozenset(name for worker in saw["workers"] for name in worker["model"]),
            any(kind["mla"] for kind in kinds),
            any(not kind["mla"] for kind in kinds),
            any(kind["separate_kv_write"] and not kind["mla"] for kind in kinds),
        )


@dataclass(frozen=True)
class Expectation:
    """Whether a hook must fire.

    Attributes:
        hook: The hook.
        at_least: How often it must fire in each process of its role; 0 if it need not.
        reason: Why it need not fire.
    """

    hook: Hook
    at_least: int
    reason: str = ""


def expectations(manifest: Manifest, disabled: Mapping[str, str], facts: Facts) -> list[Expectation]:
    """Return, for every hook of the seam, whether it must have fired.

    Args:
        manifest: The overlay's manifest, which lists the hooks that each module calls.
        disabled: The groups that are off, with the reasons.
        facts: The facts of the run.
    """
    return [_expectation(hook, manifest, disabled, facts) for hook in HOOKS]


def unhooked_runners(manifest: Manifest, facts: Facts) -> list[str]:
    """Return the model runners that ran, if the overlay of this release has hooks in none of them.

    Up to 0.15.1, for instance, it has none in the V2 runner; then no runner's hook would be expected to fire.
    """
    hooked = {m.name for m in manifest.modules.values() if FORWARD & set(m.hooks)}
    return [] if hooked & facts.runner else sorted(name for name in facts.runner if name.endswith("model_runner"))


def _expectation(hook: Hook, manifest: Manifest, disabled: Mapping[str, str], facts: Facts) -> Expectation:
    modules = [m for m in manifest.modules.values() if hook.name in m.hooks or (hook.name, m.name) == (FIELDS, OUTPUT)]
    if hook.name in manifest.left_out:
        what = f"the overlay was built without it: `nox -s build-overlay -- {manifest.release} --hooks all` has it"
        return Expectation(hook, 0, what)
    if not modules:
        return Expectation(hook, 0, f"vLLM {manifest.release} has no place for it")
    on = [m for m in modules if m.group not in disabled]
    if not on:
        return Expectation(hook, 0, f"group {modules[0].group} is off: {disabled[modules[0].group]}")
    reasons = [_unused(module.name, facts) for module in on]
    reason = reasons[0] if all(reasons) else _no_occasion(hook.name, disabled, facts)
    return Expectation(hook, 0, reason) if reason else Expectation(hook, _at_least(hook.name, facts))


def _unused(module: str, facts: Facts) -> str:
    """Return why the run did not execute a module; empty if it did."""
    v2 = V2_RUNNER in facts.runner
    if module == V1_RUNNER and v2:
        return "the V2 model runner ran"
    if module.startswith(V2_PACKAGE) and not v2:
        return "the V1 model runner ran"
    if module.startswith(MODELS) and module not in facts.model:
        return "the overlay does not rewrite this model's layers"
    if ".mla" in module and not facts.mla:
        return "the model has no MLA layers"
    if module.endswith(".attention.attention") and not facts.plain:
        return "the model has MLA layers only"
    return ""


def _no_occasion(hook: str, disabled: Mapping[str, str], facts: Facts) -> str:
    """Return why a hook in an executed module had no occasion to fire; empty if it had one."""
    if hook == "clear_row":
        return "called only by a sparse method that replaces blocks"
    if hook == FIELDS and "model_runner" in disabled:
        return f"group model_runner is off: {disabled['model_runner']}"
    if hook == "request_preempted" and facts.preemptions == 0:
        return "no request had to be preempted"
    if hook.startswith("kv_write_") and not facts.separate_kv_write:
        return "this backend writes keys and values inside its attention"
    return ""


def _at_least(hook: str, facts: Facts) -> int:
    """Return how often a hook must fire: the engine's own count, if it has one."""
    if hook in ("request_added", "request_freed"):
        return facts.requests
    if hook == "request_preempted":
        return facts.preemptions or 1
    return 1
