"""Releasing the middle of a request's context, and taking a bounded number of blocks to bring it back into."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from ucm.sparse.losses import Losses
from ucm.sparse.middle import MiddleNews, Released
from ucm.sparse.released_blocks import CAPS, ReleasedBlocks
from ucm.store.posix.layout import owner_name

if TYPE_CHECKING:
    from ucm.sparse.window import SinksAndWindow


@dataclass(slots=True)
class _Middle:
    """A request whose middle is released.

    Attributes:
        admission: Its number.
        resident: The blocks that it was given to bring the middle back into.
    """

    admission: int
    resident: list[Any] = field(default_factory=list)


class MiddleReleases(ReleasedBlocks):
    """The middles of one scheduler's requests.

    A request is left alone until its middle is longer than what it may bring back: so far it is read whole, where it
    lies. Then all of it is released, and as many blocks as may be brought back are taken from the pool in the same
    moment, most often the same ones: what is held never rises by it. A step releases of a request twice the tokens that
    a step can compute, or just more than what may be brought back: what was found in a cache goes in portions.

    Args:
        scheduler: vLLM's ``Scheduler``.
        window: What is always read.
        resident_blocks: How many blocks of its middle a request may bring back.
        at_once: Release what is shorter, too, with as many blocks to bring it back into.

    Raises:
        SparseMethodError: If this engine's blocks cannot be released.
    """

    def __init__(self, scheduler: Any, window: SinksAndWindow, resident_blocks: int, *, at_once: bool = False) -> None:
        self._limit = resident_blocks
        self._at_once = at_once
        self._middles: dict[str, _Middle] = {}
        self._admissions = count()
        self._engine = owner_name()
        self._losses = Losses()
        self._lost: set[int] = set()
        self._dropped: list[int] = []
        self._news: list[Released] = []
        super().__init__(scheduler, window)
        tokens_per_step = int(scheduler.scheduler_config.max_num_batched_tokens)
        #: After a long hit, a worker would have to copy out all of it at once, within a step.
        self._at_most = max(resident_blocks + 1, 2 * tokens_per_step // self.block_size)

    @property
    def losses(self) -> str:
        """Where workers say what they have lost."""
        return self._losses.path

    def reads_all(self, position: int, num_prompt_tokens: int) -> bool:
        """Whether a token, and each before it, reads everything: the middle is no longer than what can come back."""
        return self._window.skipped_by(position, num_prompt_tokens, self.block_size) <= self._limit

    def news(self) -> MiddleNews | None:
        """What has happened since the last step; the step is decided."""
        self.step_planned()
        self._lost = self._losses.admissions()
        if not self._dropped and not self._news:
            return None
        news = MiddleNews(self._engine, self._losses.path, tuple(self._dropped), tuple(self._news))
        self._dropped.clear()
        self._news.clear()
        return news

    def release(self, request: Any) -> bool:
        """See `ReleasedBlocks.release`; nor is there what the step will read if a worker has lost some of it.

        A streaming session waits for its next turn with its blocks. It begins that turn first, for only what runs can
        be preempted.
        """
        middle = self._middles.get(request.request_id)
        lost = middle is not None and middle.admission in self._lost and request.status.name == "RUNNING"
        return super().release(request) and not lost

    def forget(self, request_id: str) -> None:
        """A request has lost its blocks, or is about to: those of its middle, too."""
        super().forget(request_id)
        middle = self._middles.pop(request_id, None)
        if middle is not None:
            self._dropped.append(middle.admission)
            self._news = [told for told in self._news if told.admission != middle.admission]
            self._pool.free_blocks(reversed(middle.resident))

    def _release(self, request_id: str, begin: int, end: int) -> None:
        if self._pool.enable_caching:
            end = min(end, self._manager.num_cached_block.get(request_id, 0) - 1)
        end = min(end, begin + self._at_most)
        middle = self._middles.get(request_id)
        if end <= begin or (middle is None and not self._at_once and end - self._sinks <= self._limit):
            return
        blocks = self._manager.req_to_blocks[request_id][begin:end]
        more = min(self._limit, end - self._sinks) - (len(middle.resident) if middle else 0)
        # What others share is not free by our giving it back.
        if more > self._pool.get_num_free_blocks() + sum(block.ref_cnt == 1 for block in blocks):
            return
        super()._release(request_id, begin, end)
        if middle is None:
            middle = self._middles[request_id] = _Middle(next(self._admissions))
        taken = self._pool.get_new_blocks(more) if more > 0 else []
        middle.resident += taken
        self._news.append(
            Released(
                request_id,
                middle.admission,
                begin,
                tuple(block.block_id for block in blocks),
                tuple(block.block_id for block in taken),
            )
        )

    def _cap_admission(self, tokens_per_step: int) -> None:
        most = self._window.most_blocks(self._batches * tokens_per_step, self.block_size) + self._limit
        for name in CAPS:
            if hasattr(self._manager, name):
                setattr(self._manager, name, most)
