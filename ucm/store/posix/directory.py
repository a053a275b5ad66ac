"""Use one directory of the Posix tier for one namespace: read, write and publish its blocks' files, with breakers.

A block is written to a temporary file and becomes visible by one atomic rename.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.errors import ConfigError
from ucm.store.base import BlockMissingError, BlockUnreadableError, StoreError, StoreFullError
from ucm.store.format import nbytes_of
from ucm.store.health import Breaker, Pool
from ucm.store.posix.files import (
    CLAIM_FROM,
    check_file,
    claim_space,
    read_slices,
    store_error,
    write_from,
)
from ucm.store.posix.layout import IDENTITY, MARKER, Layout, owner_name, unlink_private
from ucm.store.posix.paths import (
    NotAFileError,
    distrust,
    file_system_of,
    group_id,
    make_directory,
    publish,
    shared_group,
)
from ucm.store.posix.space import USAGE_FILE, Evictor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from ucm.clock import Clock
    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Buffer
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec

    T = TypeVar("T")

#: How often missing directories are made for one file.
_TRIES = 2
#: The file systems on which a renamed file is touched: until its writer has sent another request for it, the server
#: lets each other host that looks for it wait until its next tick, for five seconds.
_TOUCHED_AFTER_RENAME = frozenset({"ceph", "fuse.ceph-fuse"})
#: How many lookups of one directory may run at once.
_LOOKUP_THREADS = 2
#: Errors about one file rather than the medium, provided that the file can be moved away.
_OF_ONE_FILE = frozenset(
    {
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.EUCLEAN,
        errno.EBADMSG,
        errno.ENODATA,
        errno.EOVERFLOW,
        errno.EREMOTEIO,
    }
)


class Directory:
    """A configured directory, opened for one namespace.

    Args:
        root: The path of the directory.
        namespace: The namespace.
        config: The store's options.
        evicted: Called with the path of each block deleted to make room.
        clock: The store's clock.

    Raises:
        ConfigError: The directory is missing, cannot be used by this user, or others may write to it.
    """

    def __init__(
        self,
        root: str,
        namespace: str,
        config: StoreConfig,
        evicted: Callable[[str], None],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.clock = clock
        self.layout = Layout(root, namespace)
        self._fsync = config.fsync
        self._claims_space = True
        stuck, failures, rest = config.stuck_seconds, config.failures_until_rest, config.rest_seconds
        self.reads = Breaker(f"reading from {root}", failures, rest, clock=clock)
        self.writes = Breaker(f"writing to {root}", failures, rest, clock=clock)
        self.lookups = Pool("ucm-lookup", _LOOKUP_THREADS, patience=stuck, rest=rest, clock=clock)
        check_root(root, config.trusted_group)
        _check_namespace(self.layout)
        self.layout.keep_identity()
        self._parent = os.path.dirname(self.layout.root)  # noqa: PTH120 - like the root, a str
        self._parent_device = _device(self._parent)
        self._touches = file_system_of(self.layout.root) in _TOUCHED_AFTER_RENAME
        self.evictor = Evictor(self.layout, config, evicted, clock=clock)

    def holds(self, key: BlockKey) -> bool:
        """Return whether a block exists, judged by its name."""
        return os.access(self.layout.block(key), os.F_OK, follow_symlinks=False)

    def read(self, codec: HeaderCodec, block: BlockTransfer) -> int:
        """Load a block's layer slices into memory, verify them, and return the file's time of last use.

        Raises:
            BlockMissingError: There is no such block.
            BlockCorruptError: The block is damaged; the caller quarantines it.
            BlockForeignError: The file is not the expected block; the caller quarantines it.
            BlockUnreadableError: The medium cannot read it; the caller quarantines it, or treats the medium as broken.
            StoreError: The directory rests or cannot be read.
        """
        path = self.layout.block(block.key)
        return self._read(block.key, path, lambda: read_slices(path, codec, block))

    def read_file(self, key: BlockKey, geometry: BlockGeometry | None, authenticator: Authenticator | None) -> Buffer:
        """Return a whole block, decompressed, verified against its own header; raises like ``read``.

        Args:
            key: The block's key.
            geometry: The expected geometry; None: any.
            authenticator: Authenticates blocks; None: they have checksums alone.
        """
        path, namespace = self.layout.block(key), self.layout.namespace
        check = partial(check_file, path, key, authenticator, namespace=namespace, geometry=geometry)
        return self._read(key, path, check)[1]

    def _read(self, key: BlockKey, path: str, call: Callable[[], T]) -> T:
        if not self.reads.allows():
            raise self.reads.refusal(self.layout.root)
        try:
            found = call()
        except OSError as error:
            raise self._failure(key, path, error) from error
        except StoreError as error:
            error.where = path
            self.reads.succeeded()  # the medium answers
            raise
        self.reads.succeeded()
        return found

    def _failure(self, key: BlockKey, path: str, error: OSError) -> StoreError:
        """Return the error of a block that cannot be read, which may be the block's or the medium's."""
        if isinstance(error, FileNotFoundError):
            if self.reads.probing:
                self.reads.succeeded()  # the medium answers
            return BlockMissingError(f"block {key.hex()} is not in the store", where=path)
        if isinstance(error, NotAFileError):
            return BlockUnreadableError("there is something else in the block's place", where=path)
        if error.errno in _OF_ONE_FILE:
            return BlockUnreadableError(f"the block cannot be read: {error.strerror}", where=path)
        return self.read_failed(error, path)

    def read_failed(self, error: OSError, path: str) -> StoreError:
        """Note that a file could not be read, and return the error."""
        found = store_error(error, path)
        self.reads.failed(found)
        return found

    def write(self, key: BlockKey, pieces: Sequence[Buffer | bytearray]) -> None:
        """Write a block's file under a private name, and rename it into its place.

        If another writer was faster, its block stays: it may have a lease.

        Raises:
            StoreError: The directory rests, has no room, or cannot be written.
        """
        if not self.writes.allows():
            raise self.writes.refusal(self.layout.root)
        private = where = f"{self.layout.temporary}/{owner_name()}"
        published = False
        try:
            self._write(private, pieces, nbytes_of(pieces))
            where = self.layout.block(key)
            with suppress(FileExistsError):
                self.publish(private, where)
                published = True
        except StoreFullError:  # the evictor is behind, which is no failure of the medium
            self.writes.succeeded()
            raise
        except OSError as error:
            failure = store_error(error, where)
            self.writes.failed(failure)
            if isinstance(failure, StoreFullError):
                self.evictor.full()
            raise failure from error
        finally:
            if not published:
                unlink_private(private)
        self.writes.succeeded()

    def _write(self, path: str, pieces: Sequence[Buffer | bytearray], nbytes: int) -> None:
        """Write a new file."""
        descriptor = self._new_file(path)
        try:
            self.evictor.reserve(descriptor, nbytes)
            if self._claims_space and nbytes >= CLAIM_FROM:
                self._claims_space = claim_space(descriptor, nbytes)
            write_from(descriptor, pieces, 0, nbytes)
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # where a network file system may report that it could not write

    def publish(self, private: str, path: str) -> None:
        """Rename a temporary file to its block's name.

        Raises:
            FileExistsError: The block is there.
            OSError: The file cannot be renamed.
        """
        try:
            publish(private, path, touches=self._touches)
        except FileNotFoundError:  # of the directory, or the file is gone, which the second attempt reports
            make_directory(path.rpartition("/")[0], self.layout.group)
            publish(private, path, touches=self._touches)

    def _new_file(self, path: str) -> int:
        """Make a new file and return its descriptor; make the namespace's missing directories.

        This is repeated, because directories may be renamed or deleted at any moment, even while they are made.

        Raises:
            OSError: The file or the directories cannot be made.
        """
        for _ in range(_TRIES):
            try:
                return self.layout.new_file(path)
            except FileNotFoundError:
                with suppress(FileNotFoundError):  # making the file then reports what is missing
                    self._make()
        return self.layout.new_file(path)

    def _make(self) -> None:
        """Make the namespace's missing directories.

        A deleted root is made again at once. But if its parent is now on another file system than before, the root may
        be about to be mounted again: then only a probe after a rest makes it.

        Raises:
            OSError: They cannot be made.
        """
        if self.writes.probing or self._parent_device == _device(self._parent):
            make_directory(self.layout.root)
        self.layout.make()


def _device(path: str) -> int:
    """Return the device of a directory's file system; -1 if the directory is missing."""
    try:
        return Path(path).stat().st_dev
    except OSError:
        return -1


def check_root(root: str, trusted_group: str | int | None) -> None:
    """Refuse a directory that cannot hold a store, or into which others could put blocks.

    Args:
        root: The path of the directory; it may itself be a symbolic link.
        trusted_group: As in ``StoreConfig``.

    Raises:
        ConfigError: The directory is missing, is not writable by this user, or is writable by others.
    """
    where = f"store: directories: {root}"
    fix = "make it with `mkdir -m 700`, owned by the user who runs the engine"
    try:
        status = Path(root).stat()
    except OSError as error:
        raise ConfigError(
            f"a directory of the store cannot be opened: {error.strerror}", where=where, fix=fix
        ) from error
    reason = distrust(status, group_id(trusted_group))
    if reason:
        share = "name the group in trusted_group if all of its members may read prompts and forge answers"
        raise ConfigError(reason, where=where, fix=f"{fix} (`chown`, `chmod go-w`), or {share}")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError("it cannot be written by this user", where=where, fix=fix)


def _check_namespace(layout: Layout) -> None:
    """Refuse a namespace that others may write to, or with symbolic links in place of our files and directories.

    Raises:
        ConfigError: The namespace is refused.
    """
    try:
        reason = distrust(Path(layout.base).lstat(), shared_group(layout.root))
    except FileNotFoundError:
        reason = ""
    except OSError as error:
        reason = f"it cannot be reached: {error.strerror}"
    if reason:
        raise _refused(layout.base, reason)
    for path in (
        *(layout.temporary, layout.quarantine),
        *(f"{layout.base}/{name}" for name in (MARKER, IDENTITY)),
        f"{layout.root}/{USAGE_FILE}",
    ):
        if os.path.islink(path):  # noqa: PTH114 - unlike Path.is_symlink, it never raises
            raise _refused(path, "it is a symbolic link")


def _refused(path: str, reason: str) -> ConfigError:
    return ConfigError(reason, where=f"store: directories: {path}", fix="delete it: engines make it again")
