"""What methods that give blocks of running requests back have in common on the scheduler's side."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ucm.errors import SparseMethodError
from ucm.sparse.base import SparseMethod
from ucm.sparse.released_blocks import ReleasedBlocks

#: A slot count that has vLLM come to `ReleasingMethod.allocate_slots`: for a request whose blocks are gone.
LOST = 0
#: The groups of rewritten modules whose hooks this method needs on both sides: with one side alone, what is released
#: would be read, or nothing would be released.
NEEDED = ("ATTENTION", "SCHEDULER", "KV_CACHE_MANAGER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")
#: Connectors of ours; others may send, or offload, the blocks of a whole request when it ends.
OUR_CONNECTORS = "ucm."

Releases = TypeVar("Releases", bound=ReleasedBlocks)


class ReleasingMethod(SparseMethod, Generic[Releases]):
    """Releases blocks in ``num_slots``, and has a request computed anew whose blocks are gone.

    Attributes:
        releases: Set in ``scheduler_started``.
    """

    needed_hooks = NEEDED
    releases: Releases | None = None

    def allocate_slots(
        self, kv_cache_manager: Any, request: Any, num_new_tokens: int, num_slots: int, new_computed_blocks: Any
    ) -> None:
        """None: vLLM preempts the request, the first of all that it would, and computes it from its prompt."""
        del kv_cache_manager, num_new_tokens, num_slots, new_computed_blocks
        self._blocks.give_way(request)

    def request_preempted(self, request: Any) -> None:
        """It starts again with nothing."""
        self._blocks.gave_way(request)
        self._blocks.forget(request.request_id)

    def request_freed(self, request: Any) -> None:
        """It has ended."""
        self._blocks.forget(request.request_id)

    @property
    def _blocks(self) -> Releases:
        if self.releases is None:
            raise RuntimeError("a scheduler's method was asked before its scheduler was there")
        return self.releases


def require_own_connector(connector: Any, name: str) -> None:
    """Refuse a KV connector that needs blocks which are released.

    Args:
        connector: The scheduler's, or None.
        name: The method's.

    Raises:
        SparseMethodError: If it does, or may.
    """
    if connector is None:
        return
    fix = "serve without ucm_sparse_config, or without this connector"
    if not type(connector).__module__.startswith(OUR_CONNECTORS):
        raise SparseMethodError(
            f"a KV connector that is not UCM's may still want blocks that {name} gives back",
            where=f"kv_transfer_config: {type(connector).__name__}",
            fix=fix,
        )
    policy = getattr(getattr(connector, "_scheduler", None), "policy", None)
    if policy is not None and policy.recovers and not policy.between_steps:
        raise SparseMethodError(
            "a layer that failed to load within a step may be told of when the blocks behind it are released",
            where="connector: layerwise",
            fix="set `connector: direct`, or serve without ucm_sparse_config",
        )
