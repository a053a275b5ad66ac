"""Where the files of a directory are, and what they are called.

::

    <root>/<namespace>/NAMESPACE         says that this is ours, and the namespace
    <root>/<namespace>/identity.json     what its blocks depend on; see ``identity_file``
    <root>/<namespace>/REMOVED           which blocks were taken out; see ``posix_removals``
    <root>/<namespace>/<2 hex>/<hex>     a block; the two parts are its key
    <root>/<namespace>/tmp/              blocks being written, named by their writers
    <root>/<namespace>/aside/            damaged blocks
    <root>/<namespace>/leases/<reader>/  hard links to blocks that a reader was promised

A ``/`` in a namespace is a ``+`` in its directory's name, so that no namespace lies within another. Every name is
relative to a root that the operator made; nothing outside these patterns is ever touched.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.store.base import BlockKey
from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = "NAMESPACE"
#: The file in which an engine tells what the blocks depend on, and as much as is read of one.
IDENTITY, MAX_IDENTITY_BYTES = "identity.json", 1 << 22
TEMPORARY, ASIDE, LEASES = "tmp", "aside", "leases"
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
MAX_NAMESPACE = 200

_NAMESPACE = re.compile(r"[a-z0-9_-][a-z0-9._-]*(/[a-z0-9_-][a-z0-9._-]*)*")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_REST = re.compile(rf"[0-9a-f]{{{2 * MIN_KEY_BYTES - 2},{2 * MAX_KEY_BYTES - 2}}}")
_OWNER = re.compile(r"(?P<host>[0-9a-f]{16})-(?P<process>\d+)-(?P<started>\d+)-\S+")
_numbers = count()


def check_namespace(namespace: str) -> str:
    """The namespace, if it can be one.

    Raises:
        ConfigError: It cannot.
    """
    if len(namespace) > MAX_NAMESPACE or not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"{namespace!r} cannot be a namespace",
            where="store: namespace",
            fix=f"use a-z 0-9 . _ / - only, no part beginning with a dot or empty, at most {MAX_NAMESPACE} characters",
        )
    return namespace


class Layout:
    """The paths of one namespace in one root.

    Args:
        root: The configured directory.
        namespace: As ``check_namespace`` accepts it.
    """

    def __init__(self, root: str, namespace: str) -> None:
        self.root = root
        self.namespace = namespace
        self.base = f"{root}/{namespace.replace('/', '+')}"
        self.temporary = f"{self.base}/{TEMPORARY}"
        self.aside = f"{self.base}/{ASIDE}"
        self.leases = f"{self.base}/{LEASES}"
        self.identity: bytes | None = None  #: what to write into that file where it is missing
        self._prefix = f"{self.base}/"

    def block(self, key: BlockKey) -> str:
        """The path of a block."""
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name[2:]}"

    def make(self) -> None:
        """Make the namespace's directories below an existing root.

        Writers call it where they miss the one for temporary files. It comes last, so that a process that dies in here
        leaves no namespace behind that takes blocks and is never looked after for want of its marker.

        Raises:
            OSError: It cannot be done.
        """
        for path in (self.base, self.aside, self.leases):
            make_directory(path)
        self._write(MARKER, f"{self.namespace}\n".encode())
        if self.identity is not None:
            self._write(IDENTITY, self.identity)
        make_directory(self.temporary)

    def keep_identity(self) -> None:
        """Remember what lies there about the blocks, if anything does, so that ``make`` writes it again."""
        with suppress(OSError), Path(self.base, IDENTITY).open("rb") as file:
            self.identity = file.read(MAX_IDENTITY_BYTES)

    def mend(self) -> None:
        """Make again what a namespace has lost that is there: somebody may have deleted it beside a running engine.

        Raises:
            OSError: It cannot be done.
        """
        if Path(self.base).is_dir():
            self.make()

    def _write(self, name: str, content: bytes) -> None:
        """Write one of the namespace's own files, whole at once, unless it is there."""
        path = f"{self.base}/{name}"
        if Path(path).exists():
            return
        private = f"{self.leases}/{owner_name()}"
        descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(private).rename(path)
        except OSError:
            unlink_private(private)
            raise


def make_directory(path: str) -> None:
    """Make one directory, for its owner only, unless it is there."""
    try:
        Path(path).mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not Path(path).is_dir():
            raise


def unlink_private(path: str) -> None:
    """Delete a file of this process's own that came to nothing: nobody else will, as long as the process lives."""
    with suppress(OSError):
        Path(path).unlink()


def namespaces(root: str) -> Iterator[Layout]:
    """Every namespace of a root, known by its marker."""
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        try:
            namespace = Path(root, name, MARKER).read_text(encoding="utf-8").strip()
            layout = Layout(root, check_namespace(namespace))
        except (OSError, ConfigError, UnicodeDecodeError):
            continue
        if layout.base == f"{root}/{name}":
            yield layout


def buckets(layout: Layout) -> list[str]:
    """The paths of a namespace's directories of blocks that are there."""
    try:
        with os.scandir(layout.base) as entries:
            return sorted(entry.path for entry in entries if _BUCKET.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def key_of(bucket: str, name: str) -> BlockKey | None:
    """The key of the block of this name in a directory; None if it is no block's name."""
    if len(name) % 2 or not _REST.fullmatch(name):
        return None
    return BlockKey(bytes.fromhex(bucket[-2:] + name))


def owner_name() -> str:
    """A name for a file or directory of this process, never given before."""
    return f"{_owner(os.getpid())}-{next(_numbers)}"


@cache
def _owner(process: int) -> str:
    return f"{_host()}-{process}-{_started(process)}-{os.urandom(4).hex()}"


def is_stale(name: str, age: float, stale_seconds: float) -> bool:
    """Whether a file's owner is gone.

    A process of this host can be seen: what it began stays as long as it lives, however old, for an engine that idles
    over night has blocks that wait for their commit.

    Args:
        name: As ``owner_name`` made it, here or elsewhere.
        age: The seconds since it was last written.
        stale_seconds: The age from which on it is stale if its owner cannot be seen: on another host, or not known.
    """
    owner = _OWNER.fullmatch(name)
    if owner is None or owner["host"] != _host():
        return age > stale_seconds
    return _started(int(owner["process"])) != int(owner["started"])


@cache
def _host() -> str:
    """This host's boot and its space of process ids, and nothing that tells who it is."""
    parts = [socket.gethostname()]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: p.read_text(encoding="utf-8")),
        ("/proc/self/ns/pid", lambda p: str(p.readlink())),
    ):
        try:
            parts.append(read(Path(path)))
        except OSError:
            # Without them two containers could take each other's writers for dead: then only age tells.
            parts.append(f"{time.time_ns()}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _started(process: int) -> int:
    """When a process began, in clock ticks since the boot, so that a process id used again is told apart; -1: gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return -1
    return int(status.rpartition(b")")[2].split()[19])
