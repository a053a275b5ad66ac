"""The seam: the functions that the inserted calls run. They do nothing unless a connector has a method for them."""

from __future__ import annotations

from typing import Any


def request_admitted(connector: Any, request: Any) -> None:
    """Notify the scheduler's connectors of a new request, so that its lookup can run before its first step.

    Args:
        connector: The scheduler's connector, or None.
        request: vLLM's ``Request``.
    """
    for one in _each(connector):
        told = getattr(one, "request_admitted", None)
        if told is not None:
            told(request)


def before_update_states(scheduler_output: Any) -> Any:
    """Make the worker's connectors fetch KV, and remove the fetched tokens from the step.

    Args:
        scheduler_output: vLLM's ``SchedulerOutput``. With some executors it is the scheduler's own object, so a
            connector must return a copy instead of changing it.

    Returns:
        The step to run.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: PLC0415

    for one in _each(get_kv_transfer_group() if has_kv_transfer_group() else None):
        told = getattr(one, "before_update_states", None)
        if told is not None:
            scheduler_output = told(scheduler_output)
    return scheduler_output


def _each(connector: Any) -> list[Any]:
    """Return the connectors in vLLM's MultiConnector, or the only one."""
    return [] if connector is None else list(getattr(connector, "_connectors", [connector]))
