"""The scheduler side of ESA: free the offloaded context of requests, and tell the workers which blocks.

A request's *offloaded context* is its blocks between the sinks and the window. Their places are counted from the
request's start, like those of all blocks. An *admission* is a number: a preempted request resumes under a new one,
so its earlier blocks are not used for it.
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
from ucm.sparse.blocks import ReleasedBlocks
from ucm.store.base import BlockKey
from ucm.store.posix.layout import owner_name

if TYPE_CHECKING:
    from ucm.sparse.blocks import SinksAndWindow


@dataclass(frozen=True, slots=True)
class Released:
    """Blocks of one request that this step frees.

    A worker copies them out before the rest of the step: from then on they may belong to another request, or be
    among this one's resident blocks.

    Attributes:
        request_id: The request.
        admission: The request's admission.
        first: The place of the first block in the request.
        block_ids: The blocks, in order.
        resident: Further resident blocks for the request's offloaded context.
    """

    request_id: str
    admission: int
    first: int
    block_ids: tuple[int, ...]
    resident: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadedNews:
    """A step's metadata for the workers, sent as ``scheduler_output.ucm_sparse_meta``.

    Attributes:
        dropped: Admissions that have ended.
        released: The freed blocks, in order.
    """

    dropped: tuple[int, ...]
    released: tuple[Released, ...]

    @property
    def taken_blocks(self) -> list[int]:
        """Return the blocks that this step may write; pending reads of them must finish first."""
        return [block_id for released in self.released for block_id in released.resident]


def block_key(engine: str, admission: int, place: int) -> BlockKey:
    """Return the unique key of a block in a worker's own namespace."""
    return BlockKey(hashlib.blake2b(f"{engine} {admission} {place}".encode(), digest_size=32).digest())


@dataclass(slots=True)
class _Offloaded:
    """A request with a freed offloaded context.

    Attributes:
        admission: Its number.
        resident: Its resident blocks, into which the offloaded context is loaded.
    """

    admission: int
    resident: list[Any] = field(default_factory=list)


class OffloadedReleases(ReleasedBlocks):
    """The offloaded contexts of one scheduler's requests.

    A request keeps its blocks until this context is longer than what it may load back: until then all is read in
    place. Then all of it is freed, and the resident blocks are allocated from the pool at the same
    time, usually the same blocks, so the request never holds more. A step frees at most twice the tokens that
    a step can compute, or just more than may be loaded back, so a long cache hit is freed in portions.

    Args:
        scheduler: vLLM's ``Scheduler``.
        window: The sinks and the window.
        resident_blocks: The number of resident blocks per request.

    Raises:
        SparseMethodError: If this engine's blocks cannot be freed.
    """

    def __init__(self, scheduler: Any, window: SinksAndWindow, resident_blocks: int) -> None:
        self._limit = resident_blocks
        #: The longest offloaded context that is read in place.
        self._in_place = resident_blocks
        self._offloaded: dict[str, _Offloaded] = {}
        self._admissions = count()
        #: The name of this engine start, valid in a store's namespace.
        self.engine = owner_name()
        self.losses = Losses()
        self._lost: set[int] = set()
        self._dropped: list[int] = []
        self._news: list[Released] = []
        super().__init__(scheduler, window)
        tokens_per_step = int(scheduler.scheduler_config.max_num_batched_tokens)
        #: Limits how much of a long hit a worker has to copy out within a step.
        self._at_most = max(resident_blocks + 1, 2 * tokens_per_step // self.block_size)

    def reads_all(self, position: int, num_prompt_tokens: int) -> bool:
        """Return whether a token and all before it read everything in place: nothing before them is freed yet."""
        return self._window.skipped(position, num_prompt_tokens, self.block_size) <= self._in_place

    def news(self) -> OffloadedNews | None:
        """Return the changes since the last step, once the step is decided."""
        self.step_planned()
        self._lost = self.losses.admissions()
        if not self._dropped and not self._news:
            return None
        news = OffloadedNews(tuple(self._dropped), tuple(self._news))
        self._dropped.clear()
        self._news.clear()
        return news

    def release(self, request: Any) -> bool:
        """See `ReleasedBlocks.release`; nor is there what the step will read if a worker has lost some of it."""
        offloaded = self._offloaded.get(request.request_id)
        return super().release(request) and (offloaded is None or offloaded.admission not in self._lost)

    def forget(self, request_id: str) -> None:
        """Drop a request that has lost or is about to lose its blocks, and free its resident blocks."""
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
        if end <= begin or (offloaded is None and end - self._sinks <= self._in_place):
            return
        blocks = self._manager.req_to_blocks[request_id][begin:end]
        more = min(self._limit, end - self._sinks) - (len(offloaded.resident) if offloaded else 0)
        # Freeing shared blocks does not make them available.
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


class Losses:
    """The scheduler's end of the channel in which workers report blocks that they cannot load back.

    vLLM has no such channel: the model runner's output comes from one rank, and reports of all ranks are only
    collected for a KV connector. So the scheduler side creates an empty private file and sends its path;
    a worker appends a line. In each step the scheduler checks the file, and reads it only if it has changed. Before
    the first request every worker has confirmed access to the file: one on another node has none unless the directory
    is shared. The file is deleted when the process ends.
    """

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="ucm-sparse-", suffix=".losses")
        os.close(descriptor)
        self._seen = (0, 0)
        self._admissions: set[int] = set()
        self._end = Finalize(self, _remove, (self.path,), exitpriority=10)

    def admissions(self) -> set[int]:
        """Return the admissions with losses."""
        with suppress(OSError):
            now = os.stat(self.path)  # noqa: PTH116 - once per step: a Path costs as much as the call
            if (now.st_ino, now.st_size) != self._seen and now.st_size:
                content = Path(self.path).read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                self._seen = (now.st_ino, len(whole))
                self._admissions |= {int(line) for line in whole.split()}
        return self._admissions


def tell_loss(path: str, admission: int) -> None:
    """Report, from a worker, that an admission has lost blocks.

    If a cleaner of temporary files has deleted the scheduler's file, it is created again.
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
            "[UCM.Sparse] a request goes on without its lost blocks, because they cannot be reported to the "
            "scheduler: %s",
            error,
        )


def _remove(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
