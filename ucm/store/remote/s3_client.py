"""Talk to S3 through obstore: requests in parallel, each batch with one deadline, and nothing is retried.

obstore's own time-outs count from the beginning of one request. A batch of requests is therefore awaited on an event
loop in a thread of its own, and what has not come by the deadline is cancelled. The loop's timers decide; whoever asked
waits a little longer, and then no more, because the thread may not run.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from ucm.clock import SYSTEM
from ucm.errors import ConfigError
from ucm.store.base import BlockMissingError, StoreError, StoreFullError, StoreTimeoutError, StoreUnavailableError
from ucm.store.format import joined, scatter
from ucm.store.health import Breaker
from ucm.store.remote.tiers import Client, misfit, too_long

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from ucm.clock import Clock
    from ucm.store.base import Buffer
    from ucm.store.remote.tiers import S3Options

Answer = TypeVar("Answer")
#: Codes with which servers say that there is no room.
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
_CODE = re.compile(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]{0,200}))?")
_STATUS = re.compile(r"status code: (\d{3}[\w ]{0,40})")
#: What obstore's errors end with, and what in it is worth saying.
_DEBUG = "\n\nDebug source:"
_INNERMOST = re.compile(
    r'message: "([^"]+)"|(InvalidCertificate\(\s*\w+)|(InvalidMessage\(\s*\w+)|(dns error)|error: "([^"]+)"'
)
_MOST_SAID = 300
#: Seconds without use after which a connection is closed: balancers forget idle ones without a word, after 50 s and
#: more, and a request through such a connection costs a time-out. obstore itself sends keep-alive packets every 15 s.
_MOST_IDLE = 20.0
#: Seconds after a deadline in which the thread of the requests says what has come; then nobody waits for it any more.
_GRACE = 1.0


class S3Client(Client):
    """One bucket, reached with one account.

    Args:
        options: The bucket and how to reach it.
        secret: The secret access key; empty: obstore looks for an account in the environment.
        failures: The number of consecutive failures after which the bucket rests.
        rest: The length of a rest in seconds.
        clock: What rests and deadlines pass by; the event loop runs in one of its threads.
        loop: The event loop, whose time passes like the clock's; None: a new one of asyncio.
        requests: Makes the requests: the module obstore, or an object with its functions.
    """

    separator = "/"

    def __init__(
        self,
        options: S3Options,
        secret: str,
        failures: int,
        rest: float,
        *,
        clock: Clock = SYSTEM,
        loop: asyncio.AbstractEventLoop | None = None,
        requests: Any = obstore,
    ) -> None:
        if clock is not SYSTEM and loop is None:
            raise ValueError("asyncio's own loop waits in real time: another clock needs a loop of its time")
        self._clock = clock
        self._requests = requests
        self._where = f"{options.bucket} at {options.endpoint or 'AWS'}"
        self.breaker = Breaker(f"the bucket {self._where}", failures, rest, clock=clock)
        secure = options.endpoint is None or options.endpoint.startswith("https:")
        config: dict[str, Any] = {
            "region": options.region,
            "virtual_hosted_style_request": options.virtual_hosted,
            "disable_bulk_delete": True,  # not every server has it
            "unsigned_payload": secure,  # TLS protects the bytes on their way, and blocks have checksums
            "skip_signature": options.anonymous,
        }
        if options.endpoint is not None:
            # Without the second one, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL would take the first one's place.
            config |= {"endpoint": options.endpoint, "aws_endpoint_url_s3": options.endpoint}
        if options.access_key is not None:
            account = {"access_key_id": options.access_key, "secret_access_key": secret, "expires_at": None}
            # As settings, they would be sent together with AWS_SESSION_TOKEN.
            config["credential_provider"] = lambda: account
        connection: dict[str, Any] = {
            "allow_http": not secure,
            "pool_idle_timeout": timedelta(seconds=_MOST_IDLE),
            "connect_timeout": timedelta(seconds=options.timeout),
            "timeout": timedelta(seconds=max(options.timeout, options.transfer_timeout)),
        }
        if options.tls_ca is not None:
            connection["root_certificate"] = Path(options.tls_ca).read_bytes()
        try:
            self._store: Any = S3Store(
                options.bucket,
                prefix=options.prefix or None,
                client_options=connection,  # type: ignore[arg-type] # built above
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=options.transfer_timeout)},
                **config,
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(str(error).partition("\n")[0], where="store: tiers: S3") from None
        self._timeout = options.timeout
        self._loop = loop or asyncio.new_event_loop()
        # Values must not keep lookups waiting.
        self._lookups, self._transfers = (asyncio.Semaphore(options.parallel) for _ in range(2))
        self._thread = clock.thread(self._serve, "ucm-s3")
        self._thread.start()

    def exists(self, names: Sequence[str], deadline: float) -> list[bool | StoreError]:
        """Return whether each object exists, by one HEAD each."""
        jobs = [partial(self._requests.head_async, self._store, name) for name in names]
        found = self._run(jobs, deadline, self._lookups)
        return [
            False if isinstance(one, BlockMissingError) else one if isinstance(one, StoreError) else True
            for one in found
        ]

    def read(
        self, names: Sequence[str], memory: Sequence[Sequence[Buffer]], nbytes: int, deadline: float
    ) -> list[StoreError | None]:
        """Receive objects by one GET each, and copy them into place."""
        found: list[StoreError | None] = []
        for content, into in zip(self.fetch(names, nbytes, deadline), memory, strict=True):
            if isinstance(content, StoreError):
                found.append(content)
                continue
            refusal = misfit(content.nbytes, nbytes)
            if refusal is None:
                scatter(content, into)
            found.append(refusal)
        return found

    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return objects by one GET each."""
        return self._run([partial(self._get, name, nbytes) for name in names], deadline, self._transfers)

    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store an object by one PUT."""
        try:
            self._one(
                partial(self._requests.put_async, self._store, name, joined(buffers), use_multipart=False), deadline
            )
        except BlockMissingError as error:  # of the bucket, as some servers say it
            raise StoreUnavailableError(error.what, where=self._where) from error

    def remove(self, name: str, deadline: float) -> None:
        """Delete an object by one DELETE."""
        with suppress(BlockMissingError):
            self._one(partial(self._requests.delete_async, self._store, name), deadline)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and lengths, by one request for a thousand."""
        try:
            for page in self._requests.list(self._store, prefix.rstrip("/"), chunk_size=1000):
                for meta in page:
                    yield meta["path"], meta["size"]
        except (BaseError, OSError, ValueError) as error:
            raise failure_of(error, self._where) from error

    def close(self) -> None:
        """Cancel requests in progress and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout)

    async def _get(self, name: str, nbytes: int | None) -> Buffer:
        """Return an object of at most ``nbytes``.

        Raises:
            BlockCorruptError: It is longer.
        """
        result = await self._requests.get_async(self._store, name)
        size = result.meta["size"]
        if nbytes is not None and size > nbytes:
            raise too_long(size, nbytes)
        return memoryview(await result.bytes_async())

    def _one(self, job: Callable[[], Awaitable[Answer]], deadline: float) -> Answer:
        (found,) = self._run([job], deadline, self._transfers)
        if isinstance(found, StoreError):
            raise found
        return found

    def _run(
        self, jobs: Sequence[Callable[[], Awaitable[Answer]]], deadline: float, limit: asyncio.Semaphore
    ) -> list[Answer | StoreError]:
        """Run requests in parallel and return an answer for each by the deadline."""
        if not jobs:
            return []
        ended = self._clock.event()
        answers = asyncio.run_coroutine_threadsafe(self._all(jobs, deadline, limit), self._loop)
        answers.add_done_callback(lambda _: ended.set())
        if not ended.wait(max(0.0, deadline - self._clock.monotonic()) + _GRACE):
            answers.cancel()
            return [self._silent()] * len(jobs)
        return answers.result()

    async def _all(
        self, jobs: Sequence[Callable[[], Awaitable[Answer]]], deadline: float, limit: asyncio.Semaphore
    ) -> list[Answer | StoreError]:
        async def run(job: Callable[[], Awaitable[Answer]]) -> Answer | StoreError:
            async with limit:
                try:
                    return await job()
                except StoreError as error:
                    return error
                except (BaseError, OSError, ValueError) as error:
                    return failure_of(error, self._where)

        tasks = [asyncio.ensure_future(run(job)) for job in jobs]
        _, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - self._clock.monotonic()))
        for task in late:
            task.cancel()
        silent = self._silent()
        return [silent if task in late else task.result() for task in tasks]

    def _silent(self) -> StoreError:
        return StoreTimeoutError("S3 does not answer in time", where=self._where)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


CLIENT = S3Client


def failure_of(error: Exception, where: str) -> StoreError:
    """Return the StoreError for an error of obstore."""
    said, _, debug = str(error).partition(_DEBUG)
    code, status = _CODE.search(said), _STATUS.search(said)
    if code is not None:
        said = f"{code[1]}: {code[2] or ''}".rstrip(": ")
    elif status is not None:
        said = f"the server answers {status[1]}"  # without the path, so that each reason is logged once
    else:
        reason = _INNERMOST.search(debug)
        said = re.sub(r"\(\s*", ": ", next(filter(None, reason.groups()))) if reason else said.rpartition(" - ")[2]
        said = " ".join(said.split())[:_MOST_SAID]
    if isinstance(error, FileNotFoundError) and (code is None or code[1] != "NoSuchBucket"):
        return BlockMissingError(said, where=where)
    if "TimedOut" in debug or "kind: Timeout" in debug:
        return StoreTimeoutError(f"S3 does not answer in time: {said}", where=where)
    if (code is not None and code[1] in _FULL) or "status: 507" in debug:
        return StoreFullError(f"S3 has no room left: {said}", where=where, fix="raise the bucket's quota")
    silent = status is not None and code is None  # the answer to a HEAD has no text
    fix = "ask `ucm doctor --config` with the same file: it makes the server say why" if silent else ""
    return StoreUnavailableError(f"S3: {said}", where=where, fix=fix)
