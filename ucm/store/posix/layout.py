"""Define the paths and file names in a store's directory.

::

    <root>/USED                          how much the root holds; see ``space``
    <root>/<namespace>/NAMESPACE         marks the directory as ours, and names the namespace
    <root>/<namespace>/identity.json     the facts that its blocks depend on; see ``write_identity``
    <root>/<namespace>/<2 hex>/<hex>     a block; the two parts are its key
    <root>/<namespace>/tmp/              blocks being written, named by their writers
    <root>/<namespace>/aside/            damaged blocks in quarantine

A ``/`` in a namespace becomes a ``+`` in its directory's name, so that no namespace lies within another. All paths are
relative to a root that the operator made; nothing outside these patterns is ever touched, and no symbolic link below
the root is followed; see ``paths``.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import time
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.store.base import BlockKey
from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES
from ucm.store.posix.paths import (
    FILE_MODE,
    SHARED_FILE_MODE,
    distrust,
    list_directory,
    make_directory,
    open_file,
    read_file,
    rename,
    shared_group,
    status_of,
    unlink,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.store.config import StoreConfig

MARKER = "NAMESPACE"
#: The file in which an engine describes what the blocks depend on, and the most bytes read from it.
IDENTITY, MAX_IDENTITY_BYTES = "identity.json", 1 << 22
TEMPORARY = "tmp"
#: The quarantine's directory; its name is part of the format on the medium.
QUARANTINE = "aside"
#: The first part of namespaces whose blocks belong to one process: to a request, while it runs. Like `QUARANTINE` a
#: part of the format on the medium.
PRIVATE = "offloaded"
MAX_NAMESPACE = 200
_MAX_MARKER_BYTES = 4096
_NAMESPACE = re.compile(r"[a-z0-9_-][a-z0-9._-]*(/[a-z0-9_-][a-z0-9._-]*)*")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_REST = re.compile(rf"[0-9a-f]{{{2 * MIN_KEY_BYTES - 2},{2 * MAX_KEY_BYTES - 2}}}")
_OWNER = re.compile(r"(?P<host>[0-9a-f]{16})-(?P<process>\d+)-(?P<started>\d+)-\S+")
_QUARANTINED = re.compile(r"\d+-(?P<key>[0-9a-f]+)-[a-z]+")
_numbers = count()


def check_namespace(namespace: str) -> str:
    """Return the namespace if it is valid.

    Raises:
        ConfigError: It is not.
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
        self.root = os.path.realpath(root)
        self.namespace = namespace
        self.base = f"{self.root}/{namespace.replace('/', '+')}"
        self.temporary = f"{self.base}/{TEMPORARY}"
        self.quarantine = f"{self.base}/{QUARANTINE}"
        self.identity: bytes | None = None  #: the content to write into the identity file if it is missing
        self._prefix = f"{self.base}/"
        self._group: tuple[int | None] | None = None

    @property
    def group(self) -> int | None:
        """The group that shares the root and so gets access to new files; None if there is no such group.

        Raises:
            OSError: The root cannot be reached.
        """
        if self._group is None:
            self._group = (shared_group(self.root),)
        return self._group[0]

    @property
    def is_private(self) -> bool:
        """Whether the blocks belong to one process that is, or may be, alive, so that no other process deletes them."""
        return bool(self._owner) and not self.is_abandoned

    @property
    def is_abandoned(self) -> bool:
        """Whether the blocks belong to one process of this host that is dead, so that no process reads them again."""
        return is_stale(self._owner, 0.0, float("inf"))

    @property
    def _owner(self) -> str:
        """The name of the process to which the namespace belongs; empty if processes share it."""
        first, _, rest = self.namespace.partition("/")
        return rest.rpartition("/")[0] if first == PRIVATE else ""

    @property
    def file_mode(self) -> int:
        """The mode of a new file; raises like ``group``."""
        return FILE_MODE if self.group is None else SHARED_FILE_MODE

    def block(self, key: BlockKey) -> str:
        """Return the path of a block."""
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name[2:]}"

    def quarantined(self, keys: Sequence[BlockKey]) -> list[str]:
        """Return the paths of the copies of blocks in quarantine.

        Raises:
            OSError: The quarantine cannot be listed.
        """
        digits = {key.hex() for key in keys}
        names = [name for name, _ in list_directory(self.quarantine)]
        return [
            f"{self.quarantine}/{name}"
            for name in names
            if (found := _QUARANTINED.fullmatch(name)) and found["key"] in digits
        ]

    def make(self) -> None:
        """Make the namespace's directories below an existing root.

        Writers call this when the directory for temporary files is missing. That directory is made last: a process that
        dies before cannot leave a namespace that accepts blocks but, without its marker, is never maintained.

        Raises:
            OSError: A directory or file cannot be made.
        """
        for path in (self.base, self.quarantine):
            make_directory(path, self.group)
        self._write(MARKER, f"{self.namespace}\n".encode())
        if self.identity is not None:
            self._write(IDENTITY, self.identity)
        make_directory(self.temporary, self.group)

    def keep_identity(self) -> None:
        """Remember the content of an existing identity file, so that ``make`` writes it again."""
        with suppress(OSError):
            self.identity = read_file(f"{self.base}/{IDENTITY}", MAX_IDENTITY_BYTES)

    def mend(self) -> None:
        """Recreate missing parts of an existing namespace, for instance parts deleted beside a running engine.

        Raises:
            OSError: A part cannot be made.
        """
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(status_of(self.base).st_mode):
                self.make()

    def new_file(self, path: str, flags: int = os.O_WRONLY) -> int:
        """Make a new file and return its descriptor.

        Raises:
            OSError: The file cannot be made, or exists already.
        """
        return open_file(path, flags | os.O_CREAT | os.O_EXCL, self.file_mode, self.group)[0]

    def _write(self, name: str, content: bytes) -> None:
        """Write one of the namespace's own files atomically unless it exists; replace anything but a regular file."""
        path = f"{self.base}/{name}"
        with suppress(FileNotFoundError):
            if stat.S_ISREG(status_of(path).st_mode):
                return
        private = f"{self.quarantine}/{owner_name()}"
        descriptor = self.new_file(private)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            rename(private, path)
        except OSError:
            unlink_private(private)
            raise


def unlink_private(path: str) -> None:
    """Delete an unused file of this process; no other process does so while this one lives."""
    with suppress(OSError):
        unlink(path)


def namespaces(root: str) -> Iterator[Layout]:
    """Yield every namespace of a root that has a marker and is no more open to others than the root is.

    Raises:
        OSError: The root cannot be listed.
    """
    for layout, reason in _marked(root):
        if not reason:
            yield layout


def distrusted_namespaces(root: str) -> list[tuple[str, str]]:
    """Return the paths of a root's other namespaces, and what is wrong with each.

    Raises:
        OSError: The root cannot be listed.
    """
    return [(layout.base, reason) for layout, reason in _marked(root) if reason]


def _marked(root: str) -> Iterator[tuple[Layout, str]]:
    root = os.path.realpath(root)
    group = shared_group(root)
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        try:
            status = os.lstat(f"{root}/{name}")
            if not stat.S_ISDIR(status.st_mode):
                continue
            marker = read_file(f"{root}/{name}/{MARKER}", _MAX_MARKER_BYTES)
            layout = Layout(root, check_namespace(marker.decode().strip()))
        except (OSError, ConfigError, UnicodeDecodeError):
            continue
        if layout.base == f"{root}/{name}":
            yield layout, distrust(status, group)


def buckets(layout: Layout) -> list[str]:
    """Return the paths of a namespace's existing block directories."""
    return sorted(
        f"{layout.base}/{name}"
        for name, status in list_directory(layout.base)
        if stat.S_ISDIR(status.st_mode) and _BUCKET.fullmatch(name)
    )


def key_of(bucket: str, name: str) -> BlockKey | None:
    """Return the key of the block with this name in a directory; None if the name is not a block's."""
    if len(name) % 2 or not _REST.fullmatch(name):
        return None
    return BlockKey(bytes.fromhex(bucket[-2:] + name))


def is_owned(name: str) -> bool:
    """Return whether a name was made by ``owner_name``."""
    return _OWNER.fullmatch(name) is not None


def is_quarantined(name: str) -> bool:
    """Return whether a name in the quarantine is one of a quarantined block."""
    return _QUARANTINED.fullmatch(name) is not None


def owner_name() -> str:
    """Return a unique name for a file or directory of this process."""
    return f"{_owner(os.getpid())}-{next(_numbers)}"


@cache
def _owner(process: int) -> str:
    return f"{_host()}-{process}-{_started(process)}-{os.urandom(4).hex()}"


def is_stale(name: str, age: float, stale_seconds: float) -> bool:
    """Return whether a file's owner is gone; False for a file that no store made.

    The processes of this host can be checked: their files stay as long as they live, however old: a write may hang.

    Args:
        name: As made by ``owner_name``, on this host or another one.
        age: The seconds since the file was last written.
        stale_seconds: The age in seconds above which a file of another host, whose owner cannot be checked, is stale.
    """
    owner = _OWNER.fullmatch(name)
    if owner is None:
        return False
    if owner["host"] != _host():
        return age > stale_seconds
    return _started(int(owner["process"])) != int(owner["started"])


@cache
def _host() -> str:
    """Return a digest of this host's boot and its space of process ids, which does not reveal who the host is."""
    parts = [socket.gethostname()]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: p.read_text(encoding="utf-8")),
        ("/proc/self/ns/pid", lambda p: str(p.readlink())),
    ):
        try:
            parts.append(read(Path(path)))
        except OSError:
            # Otherwise two containers could take each other's writers for dead; now only the age decides.
            parts.append(f"{time.time_ns()}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _started(process: int) -> int:
    """Return a process's start in clock ticks since boot, to tell a reused process id apart; -1 if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return -1
    return int(status.rpartition(b")")[2].split()[19])


def write_identity(config: StoreConfig, namespace: str, text: str) -> None:
    """Write what a namespace's blocks depend on into each directory of our tiers; log a directory that fails.

    It shows operators why two engines do not share blocks. The scheduler process writes it when it starts. The workers'
    stores remember the text that they find when they are opened, and write it again when they recreate a namespace
    that was deleted.

    Args:
        config: The store's configuration.
        namespace: The namespace that the text describes.
        text: JSON.
    """
    for root in config.roots:
        try:
            layout = Layout(root, namespace)
            layout.identity = text.encode()
            layout.make()
        except OSError as error:
            get_logger(__name__).warning("[UCM.Store] %s cannot be written below %s: %s", IDENTITY, root, error)
