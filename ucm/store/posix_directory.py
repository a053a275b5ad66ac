"""One directory of a tier: how its blocks are reached, and whether it is in a state to be asked."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.store.health import Breaker
from ucm.store.posix_io import store_error
from ucm.store.posix_layout import Layout, make_directory

if TYPE_CHECKING:
    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig
    from ucm.store.errors import StoreError


class Directory:
    """A configured directory, opened for one namespace.

    Args:
        root: Its path.
        namespace: The namespace.
        config: The store's options.
        on_disk: Whether it is, or else in memory: then direct I/O, syncing and claiming space mean nothing.

    Raises:
        ConfigError: It is not there, or cannot be used by us.
    """

    def __init__(self, root: str, namespace: str, config: StoreConfig, *, on_disk: bool) -> None:
        self.layout = Layout(os.path.realpath(root), namespace)
        self.direct_io = config.direct_io and on_disk
        self.fsync = config.fsync and on_disk
        self.claims_space = on_disk
        self.aside_keep = config.aside_keep
        self.touch_seconds = config.touch_seconds
        self.reads = Breaker(f"reading from {root}", config.failures_until_rest, config.rest_seconds)
        self.writes = Breaker(f"writing to {root}", config.failures_until_rest, config.rest_seconds)
        check_root(root)
        self.layout.keep_identity()
        self._parent = os.path.dirname(self.layout.root)  # noqa: PTH120 - as the root, a text
        self._parent_device = _device(self._parent)

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is there, as far as its name tells."""
        return os.access(self.layout.block(key), os.F_OK)

    def read_failed(self, error: OSError, path: str) -> StoreError:
        """Note that a file could not be read, and say why."""
        found = store_error(error, path)
        self.reads.failed(found.what)
        return found

    def write_failed(self, error: OSError, path: str) -> StoreError:
        """Note that a file could not be written, and say why."""
        found = store_error(error, path)
        self.writes.failed(found.what)
        return found

    def make(self) -> None:
        """Make the namespace's directories, where they are missing.

        A root that somebody deleted is made anew at once. Where the directory above it is another one, or on another
        file system than before, the root may be about to be mounted again: then only the call that tries it after a
        rest makes it.

        Raises:
            OSError: They cannot be made.
        """
        if self.writes.probing or self._parent_device == _device(self._parent):
            make_directory(self.layout.root)
        self.layout.make()

    def no_direct_io(self, error: OSError) -> None:
        """Go on through the page cache."""
        if self.direct_io:
            self.direct_io = False
            get_logger().warning(
                "[UCM.Store] %s refuses direct I/O (%s); the page cache is used", self.layout.root, error.strerror
            )


def _device(path: str) -> int:
    """The file system that a directory is on; -1 if it is not there."""
    try:
        return Path(path).stat().st_dev
    except OSError:
        return -1


def check_root(root: str) -> None:
    """Refuse a directory that cannot hold a store.

    Raises:
        ConfigError: It is not there, is not ours to write, or lets others write.
    """
    fix = "make it with `mkdir -m 700`, owned by the user who runs the engine"
    try:
        status = Path(root).stat()
    except OSError as error:
        raise ConfigError(
            f"a directory of the store cannot be opened: {error.strerror}", where=f"store: directories: {root}", fix=fix
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError("it is no directory", where=f"store: directories: {root}", fix=fix)
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError("it cannot be written by this user", where=f"store: directories: {root}", fix=fix)
