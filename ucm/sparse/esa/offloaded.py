"""The scheduler's side of ESA: it releases the offloaded context of requests, and tells the workers which blocks.

A request's *offloaded context* is its blocks between the sinks and the window. They are counted from the request's
start, as all of its blocks are. An *admission* is a number: a request that was preempted comes back under another one,
so nothing of before is taken for it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.logger import get_logger
from ucm.sparse.released_blocks import CAPS, ReleasedBlocks
from ucm.store.base import BlockKey
from ucm.store.posix.layout import owner_name

if TYPE_CHECKING:
    from ucm.sparse.window import SinksAndWindow


@dataclass(frozen=True, slots=True)
class Released:
    """Blocks of one request that are given back with this step.

    A worker copies them out before anything of the step is done: they may be another request's from then on, or be
    among this one's resident blocks.

    Attributes:
        request_id: The request.
        admission: Of the request.
        first: The place of the first of these blocks in the request.
        block_ids: The blocks, in order.
        resident: Further blocks that the request may bring its offloaded context back into.
    """

    request_id: str
    admission: int
    first: int
    block_ids: tuple[int, ...]
    resident: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadedNews:
    """What a step brings; it travels as ``scheduler_output.ucm_sparse_meta``.

    Attributes:
        engine: Names this start of the engine; of the characters of a store's namespace.
        losses: Where to say that blocks are lost; see `ucm.sparse.esa.offloaded`.
        dropped: Admissions that have ended.
        released: In the order in which it was done.
    """

    engine: str
    losses: str
    dropped: tuple[int, ...]
    released: tuple[Released, ...]

    @property
    def taken_blocks(self) -> list[int]:
        """Blocks that this step takes into use, and may write: what still reads them must finish first."""
        return [block_id for released in self.released for block_id in released.resident]


def block_key(engine: str, admission: int, place: int) -> BlockKey:
    """The name of a block in a worker's own namespace: no two blocks ever share one, so none is found for another."""
    return BlockKey(hashlib.blake2b(f"{engine} {admission} {place}".encode(), digest_size=32).digest())


@dataclass(slots=True)
class _Offloaded:
    """A request whose offloaded context is released.

    Attributes:
        admission: Its number.
        resident: The blocks that it was given to bring the offloaded context back into.
    """

    admission: int
    resident: list[Any] = field(default_factory=list)


class OffloadedReleases(ReleasedBlocks):
    """The offloaded contexts of one scheduler's requests.

    A request is left alone until this context is longer than what it may bring back: until then it is read whole, where
    it lies. Then all of it is released, and as many blocks as may be brought back are taken from the pool in the same
    moment, most often the same ones: what is held never rises by it. A step releases of a request twice the tokens that
    a step can compute, or just more than what may be brought back: what was found in a cache goes in portions.

    Args:
        scheduler: vLLM's ``Scheduler``.
        window: What is always read.
        resident_blocks: How many blocks of its offloaded context a request may bring back.
        at_once: Release what is shorter, too, with as many blocks to bring it back into.

    Raises:
        SparseMethodError: If this engine's blocks cannot be released.
    """

    def __init__(self, scheduler: Any, window: SinksAndWindow, resident_blocks: int, *, at_once: bool = False) -> None:
        self._limit = resident_blocks
        self._at_once = at_once
        self._offloaded: dict[str, _Offloaded] = {}
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
        """Whether a token, and each before it, reads everything: no more is offloaded than can come back."""
        return self._window.skipped_by(position, num_prompt_tokens, self.block_size) <= self._limit

    def news(self) -> OffloadedNews | None:
        """What has happened since the last step; the step is decided."""
        self.step_planned()
        self._lost = self._losses.admissions()
        if not self._dropped and not self._news:
            return None
        news = OffloadedNews(self._engine, self._losses.path, tuple(self._dropped), tuple(self._news))
        self._dropped.clear()
        self._news.clear()
        return news

    def release(self, request: Any) -> bool:
        """See `ReleasedBlocks.release`; nor is there what the step will read if a worker has lost some of it.

        A streaming session waits for its next turn with its blocks. It begins that turn first, for only what runs can
        be preempted.
        """
        offloaded = self._offloaded.get(request.request_id)
        lost = offloaded is not None and offloaded.admission in self._lost and request.status.name == "RUNNING"
        return super().release(request) and not lost

    def forget(self, request_id: str) -> None:
        """A request has lost its blocks, or is about to: those of its offloaded context, too."""
        super().forget(request_id)
        offloaded = self._offloaded.pop(request_id, None)
        if offloaded is not None:
            self._dropped.append(offloaded.admission)
            self._news = [told for told in self._news if told.admission != offloaded.admission]
            self._pool.free_blocks(reversed(offloaded.resident))

    def _release(self, request_id: str, begin: int, end: int) -> None:
        if self._pool.enable_caching:
            end = min(end, self._manager.num_cached_block.get(request_id, 0) - 1)
        end = min(end, begin + self._at_most)
        offloaded = self._offloaded.get(request_id)
        if end <= begin or (offloaded is None and not self._at_once and end - self._sinks <= self._limit):
            return
        blocks = self._manager.req_to_blocks[request_id][begin:end]
        more = min(self._limit, end - self._sinks) - (len(offloaded.resident) if offloaded else 0)
        # What others share is not free by our giving it back.
        if more > self._pool.get_num_free_blocks() + sum(block.ref_cnt == 1 for block in blocks):
            return
        super()._release(request_id, begin, end)
        if offloaded is None:
            offloaded = self._offloaded[request_id] = _Offloaded(next(self._admissions))
        taken = self._pool.get_new_blocks(more) if more > 0 else []
        offloaded.resident += taken
        self._news.append(
            Released(
                request_id,
                offloaded.admission,
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


class Losses:
    """The scheduler's end of the way in which workers report that they cannot bring back a request's blocks.

    vLLM has no way for that: the model runner's output comes from one rank, and what all ranks say of a step is only
    gathered for a KV connector. So the scheduler's side makes an empty file, the user's own, and sends its path along;
    a worker appends a line. Each step the scheduler looks at the file, and reads it only when that has changed. Before
    the first request every worker has said that it reaches the file: one on another node does not, unless the directory
    is shared. The file goes with the process.
    """

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="ucm-sparse-", suffix=".losses")
        os.close(descriptor)
        self._seen = (0, 0)
        self._admissions: set[int] = set()
        self._end = Finalize(self, _remove, (self.path,), exitpriority=10)

    def admissions(self) -> set[int]:
        """Those that have lost something."""
        with suppress(OSError):
            now = os.stat(self.path)  # noqa: PTH116 - once per step: a Path costs as much as the call
            if (now.st_ino, now.st_size) != self._seen and now.st_size:
                content = Path(self.path).read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                self._seen = (now.st_ino, len(whole))
                self._admissions |= {int(line) for line in whole.split()}
        return self._admissions


def out_of_reach(path: str) -> str:
    """Why a worker cannot tell a loss; empty if it can.

    Args:
        path: The file that the scheduler has made.
    """
    if os.access(path, os.W_OK):
        return ""
    return f"it does not reach the scheduler's {path}, through which it says what it loses"


def tell_loss(path: str, admission: int) -> None:
    """A worker's end: say that something of an admission is lost.

    What cleans up a directory for temporary files may have taken the scheduler's file away: then it is made again.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, b"%d\n" % admission)
        finally:
            os.close(descriptor)
    except OSError as error:
        get_logger(__name__).error(
            "[UCM.Sparse] a request goes on without its lost blocks: no word to the scheduler: %s", error
        )


def _remove(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
