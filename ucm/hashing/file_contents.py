"""Compute whole-content digests of files, and detect whether a file may have changed since a given time.

The digest of a file is the SHA-256 of all its bytes. Each file is read once; a cache keeps its digest by device, inode,
size and times of change, so that a restart reads nothing. A blob of the hub's cache is named by this very digest and is
not read either, unless it changed after the link to it was made.

The bytes that we read must be those that the engine loaded, and the engine reads the files itself, at another time. So
a file is accepted only if its last change, by the file system's times, lies before the engine may have begun to read
it, and if nothing changes while we read: neither the file, nor a link, nor the name of a directory on its path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, NamedTuple

from ucm.background import call_all, process_cores
from ucm.clock import SYSTEM, system_started
from ucm.errors import UcmError
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucm.clock import Clock

_CHUNK = 4 << 20
_THREADS = 8
_NICE = 10
_LINKS = 40
#: The largest file, in bytes, that a hub repository stores in git itself.
_SMALL = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
#: Two changes within one tick of a file system's clock have the same time. Seconds until a further change is visible.
_TICK, _COARSE_TICK = 0.1, 2.5
_BILLION = 10**9
_FORMAT = "ucm.digests/1"
#: The number of digests kept; a model has some hundred files at most.
_KEPT = 20_000


class FileChangedError(UcmError):
    """A file may differ from the one that the engine has read."""


class FileState(NamedTuple):
    """The state of a file: as long as it is equal, the content is the same; otherwise the content may differ.

    Args:
        device: The file system's device number.
        inode: The file's inode.
        size: The size in bytes.
        mtime_ns: The time of the content's last change, which any user of the file may set.
        ctime_ns: The time of the file's last change, set by the kernel.
        path_ns: The newest change of a link or of a directory's name on the path.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    path_ns: int = 0

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of a regular file.

        Raises:
            OSError: There is no such file.
        """
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(f"{path} is not a regular file")
        return cls._from(found, _newest_step(path))

    @classmethod
    def of_open(cls, descriptor: int) -> FileState:
        """Return the state of an open file."""
        return cls._from(os.fstat(descriptor), 0)

    @classmethod
    def _from(cls, found: os.stat_result, path_ns: int) -> FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, path_ns)

    @property
    def changed(self) -> float:
        """The time of the last change, in seconds since the epoch."""
        return max(self.ctime_ns, self.path_ns) / _BILLION

    @property
    def content(self) -> tuple[int, ...]:
        """The part of the state that identifies the content, without the path."""
        return self[:-1]

    @property
    def is_coarse(self) -> bool:
        """Whether the file system keeps whole seconds, as images and object stores do.

        Such times may come from whoever made the image: two images may hold different files of one inode, size and
        time, so their digests must not be kept.
        """
        return self.ctime_ns % _BILLION == 0

    @property
    def settles(self) -> float:
        """The time from which a further change is visible in the times, in seconds since the epoch."""
        return self.ctime_ns / _BILLION + (_COARSE_TICK if self.is_coarse else _TICK)


def process_started() -> float:
    """Return this process's start in seconds since the epoch; where it is unknown (not Linux), the time of import."""
    return _started("self")


def _started(process: int | str) -> float:
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return system_started() + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED


_IMPORTED = SYSTEM.time()


def configuration_since() -> float:
    """Return when the model's configuration may have been read, in seconds since the epoch.

    vLLM reads it in the process that starts EngineCore's, which may be long before that.
    """
    parent = multiprocessing.parent_process()
    return process_started() if parent is None else min(process_started(), _started(parent.pid or "self"))


def changed_since(path: Path, since: float) -> bool:
    """Return whether a file may have changed since a time; a file in the hub's cache only changes with its name."""
    try:
        return FileState.of(path).changed > since and _named_by_the_hub(path) is None
    except OSError:
        return True


@dataclass(slots=True)
class Digests:
    """The result of digesting files.

    Args:
        of: The SHA-256 of each file, 64 hexadecimal digits.
        unread: Files that still have to be read.
        read_bytes: Bytes that were read.
        known_bytes: Bytes of files whose digest was known.
        seconds: The duration.
    """

    of: dict[Path, str] = field(default_factory=dict)
    unread: list[Path] = field(default_factory=list)
    read_bytes: int = 0
    known_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """For the log."""
        known = f"{self.known_bytes / 1e9:.2f} GB were known"
        if not self.read_bytes:
            return known
        speed = f" ({self.read_bytes / 1e9 / self.seconds:.2f} GB/s)" if self.seconds else ""
        return f"{self.read_bytes / 1e9:.2f} GB read{speed}, {known}"


class FileContents:
    """Identifies files by content.

    Args:
        since: When the engine may have begun to read the files, in seconds since the epoch.
        cache: The cache of digests; None for none.
        clock: Time and threads.
    """

    def __init__(self, since: float, cache: DigestCache | None = None, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._since = since
        self._cache = cache
        self._states: dict[Path, FileState] = {}
        self._closed = clock.event()

    def look_up(self, paths: Iterable[Path]) -> Digests:
        """Record the files' states, and return the digests that are known without reading.

        Raises:
            FileChangedError: A file has changed since the engine may have read it.
            OSError: A file cannot be found.
        """
        begun, found, kept = self._clock.monotonic(), Digests(), self._cache.load() if self._cache is not None else {}
        for path in paths:
            state = self._states[path] = FileState.of(path)
            known = _named_by_the_hub(path)
            if known is None and state.changed > self._since:
                raise _changed(path, "was written or moved after this process started", state)
            known = known or (None if state.is_coarse else kept.get(_key(state)))
            if known is None:
                found.unread.append(path)
            else:
                found.of[path] = known
                found.known_bytes += state.size
        found.seconds = self._clock.monotonic() - begun
        return found

    def read(self, found: Digests) -> Digests:
        """Read the files whose digest is unknown, in several threads, and cache their digests.

        Args:
            found: The result of ``look_up``; completed and returned.

        Raises:
            FileChangedError: A file changed meanwhile.
            OSError: A file cannot be read.
        """
        if not found.unread:
            self.confirm()
            return found
        begun = self._clock.monotonic()
        threads = max(1, min(_THREADS, len(process_cores()) or os.cpu_count() or 1, len(found.unread)))
        largest_first = sorted(found.unread, key=lambda path: -self._states[path].size)
        calls = [partial(self._digest, path) for path in largest_first]
        reads = call_all(calls, "ucm-weights", threads, _NICE, clock=self._clock)
        try:
            digests = [digest.result() for digest in reads]
        except BaseException:
            self.close()
            for digest in reads:
                digest.wait()
            raise
        found.of |= dict(zip(largest_first, digests, strict=True))
        found.read_bytes += sum(self._states[path].size for path in found.unread)
        if self._cache is not None:
            states = {path: self._states[path] for path in found.unread}
            self._cache.add({_key(state): found.of[path] for path, state in states.items() if not state.is_coarse})
        found.unread = []
        self.confirm()
        found.seconds += self._clock.monotonic() - begun
        return found

    def confirm(self) -> None:
        """Check that nothing has changed since the states were recorded.

        Raises:
            FileChangedError: A file or its path has changed.
        """
        for path, before in self._states.items():
            try:
                now = FileState.of(path)
            except OSError as error:
                raise _changed(path, f"is gone ({error.strerror})", before) from error
            if now.content != before.content or now.path_ns > max(before.path_ns, self._since * _BILLION):
                raise _changed(path, "changed while UCM read it", now)

    def close(self) -> None:
        """Make a read in progress stop early and raise."""
        self._closed.set()

    def _digest(self, path: Path) -> str:
        state = self._states[path]
        # A file that was just written may change again within the same tick of the clock.
        while (wait := state.settles - self._clock.time()) > 0 and not self._closed.is_set():
            self._closed.wait(min(wait, _COARSE_TICK))
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            if FileState.of_open(file.fileno()).content != state.content:
                raise _changed(path, "was replaced before UCM read it", state)
            while not self._closed.is_set() and (count := file.readinto(buffer)):
                digest.update(buffer[:count])
            if self._closed.is_set():
                raise FileChangedError("reading was stopped early", where=str(path))
            if FileState.of_open(file.fileno()).content != state.content:
                raise _changed(path, "changed while UCM read it", state)
        return digest.hexdigest()


class DigestCache:
    """A cache of digests by file state, in one file; if it is unusable, files are read again.

    It is trusted only if nobody else can have written it: a regular file of this process's user that neither its group
    nor others may write, in a directory for which the same holds.

    Args:
        path: The cache file; its directory is made. By default it is in the user's cache directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - home may be unknown
        self.path = path if path is not None else Path(home) / "ucm" / "digests.json"

    def load(self) -> dict[str, str]:
        """Return all cached digests."""
        try:
            if not _only_ours(self.path.parent.stat()):
                return {}
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, encoding="ascii") as file:  # noqa: PTH123 - by its descriptor
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or not _only_ours(found):
                    return {}
                kept = json.load(file)
        except (OSError, ValueError):
            return {}
        if not isinstance(kept, dict) or kept.get("format") != _FORMAT or not isinstance(kept.get("digests"), dict):
            return {}
        return {
            key: value
            for key, value in kept["digests"].items()
            if isinstance(key, str) and isinstance(value, str) and _SHA256.fullmatch(value)
        }

    def add(self, digests: dict[str, str]) -> None:
        """Add digests; those that another process adds at the same time may be lost and are then computed again."""
        kept = self.load()
        kept = {key: value for key, value in kept.items() if key not in digests} | digests
        kept = dict(list(kept.items())[-_KEPT:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, draft = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - by its descriptor
                    json.dump({"format": _FORMAT, "digests": kept}, file, indent=0)
                Path(draft).replace(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(draft).unlink()
                raise
        except OSError as error:
            get_logger(__name__).info(
                "[UCM.Hasher] digests of weights cannot be cached; they will be computed again next time: %s", error
            )


def _only_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(state: FileState) -> str:
    return ":".join(map(str, state.content))


def _newest_step(path: Path) -> int:
    """Return the newest change of a link, or of a directory's own name, on a file's path; in nanoseconds.

    When an entry is added or removed, both times of a directory's inode change and are equal; when the directory itself
    is moved, only its ctime changes.
    """
    newest = 0
    for step in _steps(Path(os.path.abspath(path)), _LINKS):  # noqa: PTH100 - resolve() would follow the links
        found = os.lstat(step)
        if stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and found.st_ctime_ns > found.st_mtime_ns):
            newest = max(newest, found.st_ctime_ns)
    return newest


def _steps(path: Path, links: int) -> Iterator[Path]:
    """Yield every directory and link from the root to a file, and the targets of the links."""
    for step in (*reversed(path.parents), path):
        yield step
        if links and step.is_symlink():
            target = step.parent / step.readlink()
            yield from _steps(Path(os.path.normpath(target)), links - 1)


def _named_by_the_hub(path: Path) -> str | None:
    """Return the SHA-256 of a file in the hub's cache: ``snapshots/<commit>/<file>`` links to ``blobs/<digest>``.

    A large file's blob is named by its SHA-256, which is trusted unless the blob changed after the link was made, as
    happens when a model is saved through the link. A small one is named by git's hash, which is compared with it.
    """
    try:
        if not path.is_symlink():
            return None
        blob = Path(os.path.normpath(path.parent / path.readlink()))
        if blob.parent.name != "blobs" or "snapshots" not in path.parts:
            return None
        link, found = os.lstat(path), os.lstat(blob)
        if not stat.S_ISREG(found.st_mode):
            return None
        if _SHA256.fullmatch(blob.name):
            return blob.name if max(found.st_ctime_ns, found.st_mtime_ns) <= link.st_ctime_ns else None
        if _SHA1.fullmatch(blob.name) and found.st_size <= _SMALL:
            content = blob.read_bytes()
            named = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
            return hashlib.sha256(content).hexdigest() if named == blob.name else None
    except OSError:
        return None
    return None


def _changed(path: Path, how: str, state: FileState) -> FileChangedError:
    return FileChangedError(
        f"the file {how}, so it may not be what the engine has loaded (last change "
        f"{strftime('%Y-%m-%d %H:%M:%S', localtime(state.changed))})",
        where=str(path),
        fix="restart the engine when nothing writes to the model's files any more, or name the weights with "
        "`weights_id`",
    )
