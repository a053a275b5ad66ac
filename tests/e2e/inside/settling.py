"""When all that UCM's connectors of an engine have saved is visible in their stores."""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds between two steps, in which the threads that save have the processor.
PAUSE = 0.02


def settle(llm: Any, step: Callable[[], object]) -> None:
    """Make steps until each worker has made visible all that it saved, which takes a step after the last save.

    An engine of several processes needs ``VLLM_ALLOW_INSECURE_SERIALIZATION``.

    Args:
        llm: The engine.
        step: Answers a request of which nothing is saved.
    """
    while True:
        step()
        if not any(llm.collective_rpc(saves)):
            return
        time.sleep(PAUSE)


def saves(worker: Any) -> bool:
    """Whether a worker's connector still saves, or waits for a step to make visible what it saved."""
    del worker
    transfer = import_module("vllm.distributed.kv_transfer")
    if not transfer.has_kv_transfer_group():
        return False
    connector = transfer.get_kv_transfer_group()
    sides = (vars(one).get("_worker") for one in vars(connector).get("_connectors", [connector]))
    begun = [side.worker for side in sides if side is not None]
    return any(one._left() or one._unconfirmed for one in begun)
