"""Read vLLM's scheduling decisions, whose format differs between releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def block_ids_by_group(blocks: Any) -> list[list[int]]:
    """Return the block ids of a ``KVCacheBlocks``, one list per group.

    Releases give a list of ids (0.9.0, one group), a list of lists or a tuple of lists.
    """
    ids = blocks.get_block_ids()
    if ids and isinstance(ids[0], int):
        return [list(ids)]
    return [list(group) for group in ids]


def admitted_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]], int]]:
    """Yield requests that a step starts or resumes: id, all block ids per group, tokens computed or loaded before."""
    for data in scheduler_output.scheduled_new_reqs:
        yield data.req_id, _by_group(data.block_ids), data.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    if isinstance(cached, list):
        for data in cached:
            if data.resumed_from_preemption:
                yield data.req_id, _by_group(data.new_block_ids), data.num_computed_tokens
        return
    resumed = _resumed(cached)
    for request_id, new_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if request_id in resumed:
            yield request_id, _by_group(new_ids), computed


def grown_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield running requests that got further blocks, with the new ids per group.

    Requests that resume after a preemption are excluded: like new ones, they get all their blocks at admission.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if isinstance(cached, list):  # until 0.9.1 one object per request
        for data in cached:
            if not data.resumed_from_preemption and data.new_block_ids:
                yield data.req_id, _by_group(data.new_block_ids)
        return
    resumed = _resumed(cached)
    for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if new_ids and request_id not in resumed:
            yield request_id, _by_group(new_ids)


def _resumed(cached: Any) -> set[str]:
    resumed: set[str] | None = getattr(cached, "resumed_req_ids", None)
    if resumed is None:  # until 0.11.0 a list of flags
        return {i for i, flag in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if flag}
    return resumed


def _by_group(new_ids: Any) -> list[list[int]]:
    if new_ids and isinstance(new_ids[0], int):
        return [list(new_ids)]
    return [list(group) for group in new_ids]


#: The most loads that are remembered; beyond that, any block of vLLM's own prefix cache may be one of theirs.
MOST = 100_000


class OtherLoads:
    """Tracks blocks that another connector loaded, where vLLM's ``MultiConnector`` has several.

    The content of such blocks is unknown: it may come from other weights, or be approximate. vLLM keeps them in its own
    prefix cache like blocks that it computed, so other requests find them there. Where a load began is remembered by
    the block's key, which identifies its whole prefix.
    """

    def __init__(self) -> None:
        self._first: set[bytes] = set()
        self._any = False

    def add(self, keys: Sequence[bytes], block: int) -> None:
        """Note that another connector loaded blocks of a request.

        Args:
            keys: The keys of the request's full blocks.
            block: The index of the first block that is not entirely ours. A block that is not full yet has no key, so
                the block before is recorded instead.
        """
        begins = keys[block : block + 1] or keys[max(block - 1, 0) : block]
        self._first.update(begins)
        self._any |= not begins or len(self._first) > MOST

    def may_be_in(self, keys: Sequence[bytes]) -> bool:
        """Return whether another connector may have loaded some of these blocks, found in vLLM's prefix cache."""
        return bool(keys) and (self._any or not self._first.isdisjoint(keys))

    def rename(self) -> None:
        """Note that blocks get other keys from now on."""
        self._any |= bool(self._first)
        self._first.clear()

    def forget(self) -> None:
        """Note that vLLM's own prefix cache is empty."""
        self._first.clear()
        self._any = False
