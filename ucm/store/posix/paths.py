"""Access to files below a root that never follows a symbolic link, and who may write to a directory.

Every function takes an absolute path whose root was resolved when the store was opened. A symbolic link in any later
part of the path is refused by the kernel (``openat2``; where that is missing, by one ``openat`` per part), so that
nobody who can write below a root can make us read, write or delete elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import grp
import os
import stat
import struct
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Open = Callable[[str, int, int], int]

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
#: The same where the root's group shares the store; the set-group-id bit hands the group on.
SHARED_FILE_MODE, SHARED_DIRECTORY_MODE = 0o660, 0o2770

_OPENAT2 = 437  # the same number on every architecture that Python and vLLM run on
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04
_HOW = struct.Struct("=QQQ")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: To name something in a directory, it need not be readable.
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: For how long a directory stays open that is no longer written to.
_KEPT_SECONDS = 1.0
#: What opening something says that is no regular file, or lies beyond something that is no directory.
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV})


class NotAFileError(OSError):
    """There is a symbolic link, a directory, a FIFO, a device or the like where a regular file should be."""


class KeptDirectory:
    """A directory that stays open for a moment, so that not every file in it costs a walk from the root.

    Its path is resolved as that of every other file. Before a file is made in it, one call tells whether the path still
    leads to it, for anybody may rename, delete or replace what is above. Every method may be called from any thread; a
    thread that uses the directory keeps it open.

    Args:
        path: Of the directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._open: _Kept | None = None

    def new_file(self, name: str, flags: int, mode: int, group: int | None) -> tuple[int, NewFile]:
        """Make a file that nobody else has; its descriptor, and the file.

        Args:
            name: In this directory.
            flags: As for ``os.open``.
            mode: As for ``open_file``.
            group: As for ``open_file``.

        Raises:
            OSError: It cannot be made, or is there.
        """
        folder = self._open
        if folder is None or not self._leads_to(folder):
            folder = self._resolve()
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC  # so it is a regular file
        descriptor = os.open(name, flags, mode, dir_fd=folder.number)
        if group is not None:
            try:
                _share(descriptor, os.fstat(descriptor), mode, group)
            except OSError:
                os.close(descriptor)
                raise
        return descriptor, NewFile(folder, name)

    def receive(self, file: NewFile, inner: str, name: str) -> bool:
        """Move a file into a directory in this one, in place of what has its name already.

        Args:
            file: Of any directory on the same file system.
            inner: The directory in this one.
            name: The file's name in there.

        Returns:
            Whether this directory's path leads to where the file is now; False if somebody has just renamed or deleted
            what is above: then the path is resolved anew next time.

        Raises:
            OSError: It cannot be done; the file is where it was.
        """
        above = self._open or self._resolve()
        try:
            file.move(_Descriptor(os.open(inner, _PARENT, dir_fd=above.number)), name)
            leads = self._leads_to(above)
        except OSError:
            self._open = None
            raise
        if not leads:
            self._open = None
        return leads

    def let_go(self, *, old: bool = False) -> None:
        """Resolve the path anew next time; with ``old``, only if it was resolved more than a second ago."""
        found = self._open
        if found is not None and not (old and time.monotonic() < found.until):
            self._open = None

    def _resolve(self) -> _Kept:
        found = self._open = _Kept(_open()(self._path, _PARENT, 0))
        return found

    def _leads_to(self, folder: _Kept) -> bool:
        try:
            status = os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 - a text
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == folder.identity


class NewFile:
    """A file of which nobody else knows; it is found whatever becomes of its directory's name.

    Args:
        folder: Its directory.
        name: In there.
    """

    def __init__(self, folder: _Descriptor, name: str) -> None:
        self._folder = folder
        self._name = name

    def open(self, flags: int) -> int:
        """Open it again.

        Raises:
            OSError: It cannot be opened.
        """
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self._name, flags, dir_fd=self._folder.number)

    def move(self, folder: _Descriptor, name: str) -> None:
        """Give it another directory and name.

        Raises:
            OSError: It cannot be done.
        """
        os.rename(self._name, name, src_dir_fd=self._folder.number, dst_dir_fd=folder.number)
        self._folder, self._name = folder, name

    def unlink(self) -> None:
        """Delete it, if that can be done: nobody else will, as long as this process lives."""
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder.number)


class _Descriptor:
    """An open directory; it is closed when nobody uses it any more."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class _Kept(_Descriptor):
    """The same, with what tells it apart from every other one, and until when it is kept unused."""

    __slots__ = ("identity", "until")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        status = os.fstat(number)
        self.identity = status.st_dev, status.st_ino
        self.until = time.monotonic() + _KEPT_SECONDS


def open_file(path: str, flags: int, mode: int = 0, group: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file.

    Args:
        path: Of the file.
        flags: As for ``os.open``.
        mode: For a file that is made; the umask does not apply where it lets the group in.
        group: The group that a file of ours is given; None for whatever the system gives it.

    Returns:
        Its descriptor, and its status.

    Raises:
        NotAFileError: It is no regular file, or a part of its path is a symbolic link.
        OSError: It cannot be opened.
    """
    try:
        # Without O_NONBLOCK, a FIFO in a file's place would hold us up until somebody opens its other end.
        descriptor = _open()(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotAFileError(error.errno, "not a regular file", path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFileError(errno.EINVAL, "not a regular file", path)
        if group is not None:
            _share(descriptor, status, mode, group)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status


def _share(descriptor: int, status: os.stat_result, mode: int, group: int) -> None:
    """Give a file of ours to a group."""
    if status.st_uid == os.geteuid():
        # Its directory hands the group on, but may just be being made.
        if status.st_gid != group:
            with suppress(PermissionError):
                os.fchown(descriptor, -1, group)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)


def open_directory(path: str) -> int:
    """Open a directory to list it.

    Raises:
        OSError: It is not there, is no directory, or a part of its path is a symbolic link.
    """
    return _open()(path, _DIRECTORY, 0)


def read_file(path: str, limit: int) -> bytes:
    """The first bytes of a regular file, of which it is known that it is small.

    Raises:
        OSError: It cannot be read.
    """
    descriptor, _ = open_file(path, os.O_RDONLY)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def status_of(path: str) -> os.stat_result:
    """The status of whatever has this name; of a symbolic link its own.

    Raises:
        OSError: There is nothing, or a part of the path before the name is a symbolic link.
    """
    folder, name = _split(path)
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(folder)


def list_directory(path: str) -> list[tuple[str, os.stat_result]]:
    """The names in a directory with their own statuses; nothing if it is not there.

    Raises:
        OSError: It cannot be listed.
    """
    found = []
    try:
        folder = open_directory(path)
    except FileNotFoundError:
        return []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue  # deleted meanwhile
    finally:
        os.close(folder)
    return found


def names_in(path: str) -> list[str]:
    """The names in a directory; nothing if it is not there.

    Raises:
        OSError: It cannot be listed.
    """
    try:
        folder = open_directory(path)
    except FileNotFoundError:
        return []
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    finally:
        os.close(folder)


def touch(path: str) -> None:
    """Renew a file's time of last use.

    Raises:
        OSError: It cannot be done.
    """
    folder, name = _split(path)
    try:
        os.utime(name, dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(folder)


def unlink(path: str) -> None:
    """Delete a file, or a symbolic link itself.

    Raises:
        OSError: It cannot be done; what is a directory is not deleted.
    """
    folder, name = _split(path)
    try:
        os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def unlink_unused(path: str, used_ns: int) -> bool:
    """Delete a file that was used last at this time.

    Returns:
        Whether it is deleted.

    Raises:
        OSError: It cannot be done.
    """
    folder, name = _split(path)
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if status.st_mtime_ns != used_ns:
            return False
        os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
    return True


def remove_directory(path: str) -> None:
    """Delete an empty directory.

    Raises:
        OSError: It cannot be done.
    """
    folder, name = _split(path)
    try:
        os.rmdir(name, dir_fd=folder)
    finally:
        os.close(folder)


def rename(source: str, target: str) -> None:
    """Give anything another name, in place of what has that name already.

    Raises:
        OSError: It cannot be done.
    """
    first, name = _split(source)
    try:
        second, new = _split(target)
        try:
            os.rename(name, new, src_dir_fd=first, dst_dir_fd=second)
        finally:
            os.close(second)
    finally:
        os.close(first)


def make_directory(path: str, group: int | None = None) -> None:
    """Make one directory, for its owner only, or for a group as well, unless it is there.

    Raises:
        NotADirectoryError: Something else is there, for instance a symbolic link.
        OSError: It cannot be made.
    """
    folder, name = _split(path)
    try:
        try:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=folder)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "it is no directory", path) from None
            return
        if group is not None:
            made = os.open(name, _DIRECTORY, dir_fd=folder)
            try:
                os.fchown(made, -1, group)
                os.fchmod(made, SHARED_DIRECTORY_MODE)
            finally:
                os.close(made)
    finally:
        os.close(folder)


def distrust(status: os.stat_result, group: int | None) -> str:
    """Why the content of a directory is not to be trusted.

    Args:
        status: The directory's own.
        group: The id of a group whose members are trusted.

    Returns:
        What is wrong with it; nothing if it is ours, and only we, or members of that group, may write to it.
    """
    mode = stat.S_IMODE(status.st_mode)
    by_group = bool(mode & stat.S_IWGRP)
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if mode & stat.S_IWOTH:
        return f"everybody may write to it (mode {mode:o})"
    if by_group and status.st_gid != group:
        return f"its group {status.st_gid} may write to it (mode {mode:o})"
    if status.st_uid != os.geteuid() and not by_group:
        return f"it belongs to user {status.st_uid}, not to this one ({os.geteuid()})"
    return ""


def group_id(group: str | int | None) -> int | None:
    """The id of a group; None for none.

    Raises:
        ConfigError: There is no group of this name.
    """
    if not isinstance(group, str):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"there is no group {group!r} here", where="store: trusted_group", fix="name one by its number"
        ) from None


def shared_group(root: str) -> int | None:
    """The group that shares a root, as its mode says; None if there is none.

    Raises:
        OSError: The root cannot be reached.
    """
    status = os.stat(root)  # noqa: PTH116 - a text
    return status.st_gid if status.st_mode & stat.S_IWGRP else None


def _split(path: str) -> tuple[int, str]:
    folder, _, name = path.rpartition("/")
    return _open()(folder or "/", _PARENT, 0), name


@cache
def _open() -> Open:
    """``openat2`` if this system lets us, or else the same in several steps."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)

    def open_at_once(path: str, flags: int, mode: int) -> int:
        how = _HOW.pack(flags, mode, _RESOLVE_NO_SYMLINKS)
        while (descriptor := call(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, _HOW.size)) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), path)
        return int(descriptor)

    try:
        os.close(open_at_once("/", _DIRECTORY, 0))
    except OSError:  # an old kernel, or a container's filter of system calls
        return open_in_steps
    return open_at_once


def open_in_steps(path: str, flags: int, mode: int) -> int:
    """As ``openat2`` with RESOLVE_NO_SYMLINKS."""
    *folders, name = path.lstrip("/").split("/")
    folder = os.open("/", _PARENT)
    try:
        for part in folders:
            inner = os.open(part, _PARENT, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name or ".", flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    finally:
        os.close(folder)
