"""Access files below a root without following symbolic links, and check who may write to a directory.

Every function takes an absolute path whose root was resolved when the store was opened. The kernel refuses a symbolic
link in any later part of the path (``openat2``; where that is missing, one ``openat`` per part), so that nobody who can
write below a root can make us read, write or delete elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import os
import stat
import struct
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Open = Callable[[str, int, int], int]

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
#: The modes if the root's group shares the store; the set-group-id bit passes the group on.
SHARED_FILE_MODE, SHARED_DIRECTORY_MODE = 0o660, 0o2770

_OPENAT2 = 437  # the same on every architecture that Python and vLLM run on
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04
_RENAME_NOREPLACE = 1
_RENAMEAT2 = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
_HOW = struct.Struct("=QQQ")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: A parent directory need not be readable to access an entry by name.
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Errors of opening a path that is no regular file, or that passes through something other than a directory.
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV})
#: Errors of a file system without locks.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class NotAFileError(OSError):
    """The path leads to something other than a regular file: a symbolic link, a directory, a FIFO, a device."""


def rename_new(source: str, target: str, folder: int, new_folder: int) -> None:
    """Rename a file, unless there is one of the new name.

    Where the file system cannot do that in one step, as NFS and CephFS, another process may be faster in between.

    Args:
        source: The file's name.
        target: Its new name.
        folder: A descriptor of its directory.
        new_folder: A descriptor of its new directory.

    Raises:
        FileExistsError: There is one.
        OSError: The file cannot be renamed.
    """
    renameat2 = system_call("renameat2", *_RENAMEAT2)
    if renameat2 is not None:
        if renameat2(folder, os.fsencode(source), new_folder, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in {errno.EINVAL, errno.ENOSYS}:
            raise OSError(number, os.strerror(number), target)
    if os.access(target, os.F_OK, dir_fd=new_folder, follow_symlinks=False):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target, src_dir_fd=folder, dst_dir_fd=new_folder)


@cache
def system_call(name: str, /, *types: Any) -> Any:
    """Return a function of the C library that leaves its error in ``ctypes.get_errno``; None if there is no such one.

    Args:
        name: Its name.
        types: The types of its arguments.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


def open_file(path: str, flags: int, mode: int = 0, group: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file.

    Args:
        path: The path of the file.
        flags: As for ``os.open``.
        mode: The mode of a new file; with a ``group``, the umask does not apply.
        group: The group to give a file of ours to; None: the system's choice.

    Returns:
        The descriptor and the status.

    Raises:
        NotAFileError: The path is no regular file, or a part of it is a symbolic link.
        OSError: The file cannot be opened.
    """
    try:
        # Without O_NONBLOCK, a FIFO in a file's place would block us until somebody opens its other end.
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
        # New files inherit the group from their directory, but that may not have its group yet.
        if status.st_gid != group:
            with suppress(PermissionError):
                os.fchown(descriptor, -1, group)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)


def read_file(path: str, limit: int) -> bytes:
    """Return the first bytes of a small regular file.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor, _ = open_file(path, os.O_RDONLY)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def status_of(path: str) -> os.stat_result:
    """Return the status of a directory entry; for a symbolic link, the link's own.

    Raises:
        OSError: There is no such entry, or a part of the path before its name is a symbolic link.
    """
    with _inside(path) as (folder, name):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def list_directory(path: str) -> list[tuple[str, os.stat_result]]:
    """Return the names in a directory, each with its own status; empty if there is no such directory.

    Raises:
        OSError: The directory cannot be listed.
    """
    found = []
    try:
        folder = _open()(path, _DIRECTORY, 0)
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


@contextmanager
def _held(path: str, how: int) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file, with its status, and lock it meanwhile; never wait.

    Args:
        path: The file.
        how: ``LOCK_EX`` to touch it, so that nobody else does or deletes it; ``LOCK_SH`` to delete it, as others may.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It is gone, or cannot be opened.
    """
    descriptor, _ = open_file(path, os.O_RDWR)  # NFS locks only what may be written
    try:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        status = os.fstat(descriptor)
        if not status.st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield descriptor, status
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has a copy of it
        os.close(descriptor)


def touch(path: str, change: Callable[[int], int]) -> int:
    """Change a file's time of last use.

    Args:
        path: The file.
        change: Returns the new time for the old one, in nanoseconds since the epoch.

    Returns:
        The time as the file system keeps it.

    Raises:
        BlockingIOError: Another process changes it or deletes the file.
        OSError: The time cannot be set.
    """
    with _held(path, fcntl.LOCK_EX) as (descriptor, status):
        used_ns = change(status.st_mtime_ns)
        if used_ns == status.st_mtime_ns:
            return used_ns
        os.utime(descriptor, ns=(used_ns, used_ns))
        return os.fstat(descriptor).st_mtime_ns


def unlink(path: str) -> None:
    """Delete a file, or a symbolic link itself.

    Raises:
        OSError: The file cannot be deleted; directories are never deleted.
    """
    with _inside(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def unlink_if(path: str, goes: Callable[[int], bool]) -> bool:
    """Delete a file because of its time of last use, which nobody changes meanwhile.

    Args:
        path: The file.
        goes: Whether a file with this time is to be deleted, in nanoseconds since the epoch.

    Returns:
        Whether the file was deleted.

    Raises:
        BlockingIOError: Another process changes its time.
        OSError: The file cannot be deleted.
    """
    with _held(path, fcntl.LOCK_SH) as (_, status):
        if not goes(status.st_mtime_ns):
            return False
        unlink(path)
    return True


def remove_directory(path: str) -> None:
    """Delete an empty directory.

    Raises:
        OSError: The directory cannot be deleted.
    """
    with _inside(path) as (folder, name):
        os.rmdir(name, dir_fd=folder)


def rename(source: str, target: str) -> None:
    """Rename a file or directory, replacing an existing target.

    Raises:
        OSError: It cannot be renamed.
    """
    with _inside(source) as (folder, name), _inside(target) as (into, new):
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=into)


def publish(source: str, target: str, *, touches: bool = False) -> None:
    """Rename a new file, unless there is one of the new name.

    Args:
        source: The file.
        target: Its new path.
        touches: Whether to set its time of last use to now.

    Raises:
        FileExistsError: There is one.
        OSError: The file cannot be renamed.
    """
    with _inside(source) as (folder, name), _inside(target) as (into, new):
        rename_new(name, new, folder, into)
        if touches:
            with suppress(OSError):  # it was deleted
                os.utime(new, dir_fd=into, follow_symlinks=False)


def make_directory(path: str, group: int | None = None) -> None:
    """Make one directory, for its owner and, if given, a group, unless it exists.

    Raises:
        NotADirectoryError: Something else is there, for instance a symbolic link.
        OSError: The directory cannot be made.
    """
    with _inside(path) as (folder, name):
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


def distrust(status: os.stat_result, group: int | None) -> str:
    """Return why the content of a directory cannot be trusted.

    Args:
        status: The directory's own status.
        group: The id of a group whose members are trusted.

    Returns:
        The problem; empty if the directory is ours and only we, or members of that group, may write to it.
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
    """Return the id of a group; None for None.

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
    """Return the group that a root's mode lets write to it; None if there is none.

    Raises:
        OSError: The root cannot be reached.
    """
    status = os.stat(root)  # noqa: PTH116 - a text
    return status.st_gid if status.st_mode & stat.S_IWGRP else None


def file_system_of(path: str) -> str:
    """Return the type of the file system of a directory, as the system names it; empty if that cannot be told.

    Args:
        path: An absolute path without symbolic links.
    """
    found, best = "", ""
    with suppress(OSError), Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mount, _, source = line.partition(" - ")
            where = mount.split(" ")[4].rstrip("/")
            if len(where) >= len(best) and f"{path}/".startswith(f"{where}/"):
                found, best = source.split(" ")[0], where
    return found


@contextmanager
def _inside(path: str) -> Iterator[tuple[int, str]]:
    """Open the directory of an entry; return its descriptor, and the entry's name."""
    folder, _, name = path.rpartition("/")
    descriptor = _open()(folder or "/", _PARENT, 0)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


@cache
def _open() -> Open:
    """Return ``openat2`` as a function if the system allows it, or else ``open_in_steps``."""
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
    """Open a path as ``openat2`` with RESOLVE_NO_SYMLINKS does."""
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
