"""Claiming a file's space on the disk before writing it.

On ext4 this makes buffered writing about a quarter faster, since blocks are then not reserved page by page, and keeps a
file in one piece for later cold reads. ``os.posix_fallocate`` would do, but where the file system cannot, glibc writes
to every page instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Smaller files are written faster without.
CLAIM_FROM = 256 * 1024
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM})


def claim_space(descriptor: int, nbytes: int) -> bool:
    """Claim the space of a file that was just made.

    Returns:
        False if the system cannot, and need not be asked again.

    Raises:
        OSError: There is no room.
    """
    fallocate = _fallocate()
    if fallocate is None:
        return False
    if fallocate(descriptor, 0, 0, nbytes) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    if number == errno.EINTR:
        return True
    raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found: Callable[[int, int, int, int], int] = function
    return found
