"""Check that a sparse method's hooks are the overlay's, and that all workers run the scheduler side's method.

A worker whose hooks never fired (another platform's class, another node without the overlay, a switch set only
there) would silently read blocks that the scheduler side frees. So EngineCore asks every worker what
it runs, through the executor's ``collective_rpc``, and refuses a missing or different answer.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
from typing import TYPE_CHECKING, Any

import ucm
from ucm.clock import SYSTEM
from ucm.compat import optional, requests_have_hashers, v1_runner
from ucm.errors import SparseMethodError, UcmError
from ucm.integration.vllm.connector.failures import refusals_logged
from ucm.integration.vllm.hooks import method_of
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.integration.vllm.sparse.requirements import attention_layers
from ucm.integration.vllm.sparse.sharing import block_hash_seed, needed_groups, shares_kv
from ucm.logger import get_logger
from ucm.overlay.activation import check_feature
from ucm.overlay.manifest import DEFAULT_SEAM
from ucm.sparse.base import SparseMethod
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ucm.overlay.manifest import Manifest

#: The time limit for all workers together, in seconds; a method may compile its kernels meanwhile.
DEADLINE = 180.0
WORKER, MODEL_RUNNER = "WORKER", "MODEL_RUNNER"
#: The hook that changes vLLM's block hashes, and the package whose overlays call it.
SEED, VLLM = "block_hash_function", "vllm"
SAME = "install the same runtime and overlay on every node, and give all of vLLM's processes the same environment"


@refusals_logged("UCM.Sparse")
def require_same_in_workers(engine_core: Any) -> None:
    """Refuse an engine whose workers do not run the scheduler side's method.

    Raises:
        SparseMethodError: Naming each worker and its differences, or the side that is missing here.
    """
    config, scheduler = engine_core.vllm_config, engine_core.scheduler
    configured = sparse_method_config(config)
    if configured is None:
        return
    name, options = configured
    wanted = method_class(name)
    scheduler_method = method_of(scheduler)
    needed = needed_groups(wanted, config)
    if "SCHEDULER" in needed and scheduler_method is None:
        raise SparseMethodError(
            f"the scheduler side of {name} does not run",
            where=f"{type(scheduler).__module__}.{type(scheduler).__qualname__} calls none of the overlay's hooks",
            fix="serve with vLLM's own scheduler (no --scheduler-cls), or without ucm_sparse_config",
        )
    require_hooked(name, needed, scheduler)  # plug-ins may have come since the scheduler was made
    mine = _half(wanted, options)
    question = scheduler_method.asks_workers() if scheduler_method else None
    _require_one_scheduler(name, question, config.parallel_config)
    began = SYSTEM.monotonic()
    answers = _answers(engine_core.model_executor, question)
    took = 1000 * (SYSTEM.monotonic() - began)
    wrong = [line for answer in answers for line in _differences(mine, answer)]
    layers = [(answer["place"], *answer["layer"]) for answer in answers if answer.get("layer")]
    if layers and not wrong:
        place, what, where, fix = layers[0]
        raise SparseMethodError(what, where=f"{where}; {place}", fix=fix)
    refused = [f"{answer['place']}: {answer['refuses']}" for answer in answers if answer.get("refuses")]
    if refused and not wrong:
        raise SparseMethodError(
            f"not all of these workers can run {name}",
            where="; ".join(refused),
            fix="run all workers of an engine on one node, with one directory for temporary files (TMPDIR), or serve "
            "without ucm_sparse_config",
        )
    expected = 1 if _external(config.parallel_config) else int(config.parallel_config.world_size)
    if len(answers) < expected:
        wrong.append(f"{len(answers)} of {expected} workers answered")
    if wrong:
        raise SparseMethodError(
            f"not all workers run {name} as the scheduler side does", where="; ".join(wrong), fix=SAME
        )
    get_logger(__name__).info(
        "[UCM.Sparse] %d worker(s) run %s as the scheduler does (asked in %.1f ms)", len(answers), name, took
    )


def answer(wrapper: Any, question: Any = None) -> dict[str, Any]:
    """Return what one worker runs; called in its process.

    Args:
        wrapper: vLLM's ``WorkerWrapperBase``, or the worker itself.
        question: The question of the method's scheduler side, or None.

    Returns:
        ``place`` and ``runner`` for messages; ``refuses``, the answer to the question; ``layer``, the refusal of the
        first unsupported layer; and what must be the same everywhere, see `_half`.
    """
    worker = optional(wrapper, "worker", wrapper)
    runner = optional(worker, "model_runner")
    method = method_of(runner)
    place = f"rank {optional(worker, 'rank', '?')} on {socket.gethostname()}, process {os.getpid()}"
    told = {
        "place": place,
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "refuses": method.confirms(question) if method and question is not None else "",
        "layer": _refused_layer(runner, method) if method else None,
    }
    return told | _half(type(method) if method else None, method.options if method else {})


def _refused_layer(runner: Any, method: SparseMethod) -> tuple[str, str, str] | None:
    """Return the refusal of the first unsupported layer with a KV cache, or of all; memory profiling runs not all."""
    layers = method.vllm_config.compilation_config.static_forward_context
    groups = optional(runner, "kv_cache_config.kv_cache_groups", ())
    try:
        for name in attention_layers(groups, layers):
            method.layer_seen(name)
        method.layers_seen()
    except UcmError as error:  # an option may be ruled out by the caches
        return error.what, error.where, error.fix
    return None


def model_runner(wrapper: Any, method: SparseMethod) -> Any:
    """Return the worker's model runner, which owns its method.

    Args:
        wrapper: vLLM's ``WorkerWrapperBase``, whose worker has its device.
        method: The worker's method.

    Raises:
        SparseMethodError: If there is none, or it calls no hooks although the method needs them.
    """
    runner = optional(wrapper.worker, "model_runner")
    hooked = "_ucm_hooks" in optional(inspect.unwrap(optional(runner, "execute_model", bool)), "__globals__", {})
    if runner is None or (MODEL_RUNNER in method.needed_hooks and not hooked):
        raise SparseMethodError(
            f"{type(method).__name__} needs hooks in the model runner, and this one calls none",
            where=f"{type(wrapper.worker).__qualname__} runs {type(runner).__module__}.{type(runner).__qualname__}",
            fix=f"start vLLM with its V1 runner{v1_runner(runner)} and its V1 engine; `ucm doctor` says which modules "
            "the overlay has; or serve without ucm_sparse_config",
        )
    return runner


def require_hooked(name: str, groups: Iterable[str], owner: Any) -> None:
    """Refuse a method whose hooks another package has replaced in this process.

    Args:
        name: The method's name.
        groups: The groups of rewritten modules that it needs, as their switches name them.
        owner: vLLM's object that starts the method; a derived class may override hooked functions.

    Raises:
        SparseMethodError: Naming each replaced function, and its replacement.
        OverlayImportError: If the overlay is inactive, or another finder takes its modules.
    """
    found = check_feature([group.lower() for group in groups], type(owner))
    if found:
        raise SparseMethodError(
            f"{name} needs hooks that another package has taken out",
            where="; ".join(map(str, found)),
            fix="do without that package or its feature, install an overlay that covers it, or serve without "
            "ucm_sparse_config",
        )


def require_built_hooks(method: type[SparseMethod]) -> None:
    """Refuse a method that implements hooks that are missing in this process's overlays.

    A hook missing in one overlay may be in another: a platform's own operators or vLLM's may call it.

    Raises:
        SparseMethodError: Naming the missing hooks.
    """
    if not method.optional_hooks:
        implemented = [name for name in dir(method) if getattr(method, name) is not getattr(SparseMethod, name, None)]
        _require_built(f"{method.__name__} implements hooks", implemented)


def require_latent_hooks(manifests: Sequence[Manifest] | None = None) -> None:
    """Refuse an engine with latent attention if its overlay does not hook it, which is opt-in.

    Args:
        manifests: The manifests of its overlays; None for those of this process.

    Raises:
        SparseMethodError: Naming a missing hook, and the command that builds an overlay with it.
    """
    _require_built("latent attention needs hooks", ["mla_begin"], manifests)


def require_seeding(method: SparseMethod) -> None:
    """Refuse an older overlay, which leaves the method out of block hashes by which others find KV.

    Up to 0.10.0 no overlay has that hook: the scheduler's managers hash blocks, and the runtime changes their function.

    Raises:
        SparseMethodError: If an overlay of this process does not call the hook, and the method needs it.
    """
    config = method.vllm_config
    if not shares_kv(config) or not requests_have_hashers() or not block_hash_seed(config):
        return
    manifests = [manifest for manifest in _manifests() if manifest.upstream_package == VLLM]
    if manifests and not any(SEED in manifest.seams[DEFAULT_SEAM] for manifest in manifests):
        raise SparseMethodError(
            f"{type(method).__name__} changes KV, and an older overlay does not tell vLLM's block hashes, by which a "
            "connector or a reader of KV events finds it",
            where=f"overlay {manifests[0].version} of {manifests[0].title}",
            fix=f"build and install it again: {manifests[0].command('build-overlay', manifests[0].named)}",
        )


def _require_built(what: str, wanted: Collection[str], manifests: Sequence[Manifest] | None = None) -> None:
    """Refuse hooks that are missing in overlays; by default, in this process's."""
    if manifests is None:
        manifests = _manifests()
    called = {hook for manifest in manifests for module in manifest.modules.values() for hook in module.hooks}
    for manifest in manifests:
        missing = [
            name
            for name in (hook.removeprefix("v2_") for hook in manifest.left_out if hook not in called)
            if name in wanted
        ]
        if missing:
            whole = f"{manifest.named} --hooks all"
            raise SparseMethodError(
                f"{what} that this overlay was built without",
                where=f"{', '.join(missing)}; overlay {manifest.version} of {manifest.title}",
                fix=f"build one with them: {manifest.command('build-overlay', whole)}",
            )


def _half(method: type[SparseMethod] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on both sides, as plain data, because the builds may differ."""
    version, groups = _overlay()
    return {
        "method": f"{method.__module__}.{method.__qualname__}" if method else None,
        "options": _parsed(method, options) if method else None,
        "runtime": ucm.__version__,
        "overlay": version,
        "groups": groups,
    }


def _parsed(method: type[SparseMethod], options: Mapping[str, Any]) -> str:
    """Return the options with the defaults of this build."""
    declared = method.options_type
    known = dict(options)
    if declared is not None:
        from ucm.sparse.options import parse_options  # noqa: PLC0415 - it needs pydantic

        known = parse_options(declared, method.__name__, options).model_dump()
    return json.dumps(known, sort_keys=True, default=str)


def _overlay() -> tuple[str | None, list[str]]:
    """Return the versions of this process's overlays, or None, and the groups that are on."""
    known = _manifests()
    if not known:
        return None, []
    groups = {m.group for one in known for m in one.modules.values() if m.group not in one.disabled}
    return ", ".join(one.version for one in known), sorted(groups)


def _manifests() -> list[Manifest]:
    """Return the manifest of each overlay in this process that calls UCM's hooks."""
    from ucm.overlay.finder import boots, manifest_of  # noqa: PLC0415 - only where a method is asked for

    return [manifest for boot in boots() if DEFAULT_SEAM in (manifest := manifest_of(boot.DIRECTORY)).seams]


def _require_one_scheduler(name: str, question: Any, parallel: Any) -> None:
    """Refuse a method whose workers report to its scheduler if each worker has its own scheduler.

    Raises:
        SparseMethodError: In that case, because the schedulers would decide differently.
    """
    if question is not None and _external(parallel) and int(parallel.world_size) > 1:
        raise SparseMethodError(
            f"what a worker reports to {name} does not reach the schedulers of the other workers",
            where=f"distributed_executor_backend = 'external_launcher' with {parallel.world_size} ranks",
            fix="let vLLM start its workers itself, or serve without ucm_sparse_config",
        )


def _answers(executor: Any, question: Any) -> list[dict[str, Any]]:
    try:
        return list(executor.collective_rpc(answer, timeout=DEADLINE, args=(question,)))
    except Exception as error:
        raise SparseMethodError(
            f"the workers could not say what they run: {error}", where=f"{type(executor).__qualname__}", fix=SAME
        ) from error


def _external(parallel: Any) -> bool:
    """Return whether each worker's process has its own engine, started by an external launcher."""
    return bool(optional(parallel, "distributed_executor_backend") == "external_launcher")


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Describe what a worker runs differently."""
    place = f"{theirs.get('place')} ({theirs.get('runner')})"
    ignored = {"place", "runner"}
    if theirs.get("method") is None:
        if mine["overlay"] is not None and WORKER.lower() not in mine["groups"] == theirs.get("groups"):
            return []  # switched off here as well: what a method cannot do without, it refuses by itself
        ignored |= {"options"}
    return [
        f"{place} runs {key} {theirs.get(key)!r}, the scheduler {value!r}"
        for key, value in mine.items()
        if key not in ignored and theirs.get(key) != value
    ]
