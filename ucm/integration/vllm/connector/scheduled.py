"""Read vLLM's scheduling decisions, whose format differs between releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


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
