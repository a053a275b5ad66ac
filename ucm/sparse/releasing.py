"""What methods that give blocks of running requests back have in common on the scheduler's side."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ucm.errors import SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.base import SparseMethod
from ucm.sparse.released_blocks import ReleasedBlocks

#: The groups of rewritten modules whose hooks this method needs on both sides: with one side alone, what is released
#: would be read, or nothing would be released.
NEEDED = ("ATTENTION", "SCHEDULER", "KV_CACHE_MANAGER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")
#: Connectors of ours; others may send, or offload, the blocks of a whole request when it ends.
OUR_CONNECTORS = "ucm."

Releases = TypeVar("Releases", bound=ReleasedBlocks)


class ReleasingMethod(SparseMethod, Generic[Releases]):
    """Releases blocks in ``before_allocation``, and has a request computed anew whose blocks are gone.

    Attributes:
        releases: Set in ``scheduler_started``.
    """

    needed_hooks = NEEDED
    releases: Releases | None = None

    def before_allocation(self, request: Any) -> bool:
        """Release blocks; a request whose blocks are gone is the first that vLLM preempts."""
        if self._blocks.release(request):
            return True
        self.tell_lost(request)
        self._blocks.give_way(request)
        return False

    def tell_lost(self, request: Any) -> None:
        """Log that a request is computed anew."""
        get_logger(__name__).warning(
            "[UCM.Sparse] request %s was taken back to token %d, where its blocks are released: it is computed anew",
            request.request_id,
            request.num_computed_tokens,
        )

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
