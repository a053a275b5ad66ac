"""An operating system in which any call may fail, or do only a part of its work."""

from __future__ import annotations

import errno
import os
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.campaign.figures import Figures
from tests.campaign.processes import in_new_process
from tests.campaign.scene import Stage, inspect, reopen
from tests.campaign.user import User
from ucm.store.posix import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.campaign.processes import Reporter
    from tests.campaign.scene import Scene

_BLOCKS, _STEPS = 40, 20
_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EINVAL, errno.ENOENT, errno.EBUSY),
)
_OF_OS = ("open", "pread", "preadv", "pwritev", "ftruncate", "fsync", "fstat", "rename", "mkdir", "unlink", "link")
_CALLS = [*((os, name) for name in _OF_OS), (paths, "rename_new")]
_HALVED = ("pwritev", "preadv")
_SHARE = 0.05


def run(count: int, stage: Stage) -> Figures:
    """Make system calls fail in this many stores.

    Args:
        count: The number of stores.
        stage: Where they are created.
    """
    figures = Figures()
    scenes: list[Scene] = []
    for _ in range(count):
        scenes.append(stage.scene(_BLOCKS))
        figures.add(in_new_process(_use_refused, scenes[-1], stage.rng.getrandbits(32))[1])
        figures.add(inspect(scenes[-1]))
        figures.trials += 1
        stage.tick()
    figures.add(reopen(scenes))
    return figures


def _use_refused(reporter: Reporter, scene: Scene, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - it decides what is tested
    user = User(scene, rng, 0, 1)
    with _refusals(rng):
        for _ in range(_STEPS):
            user.save_some()
            user.load_some()
    user.recover()
    user.store.close()
    reporter.tell("figures", user.figures)


@contextmanager
def _refusals(rng: random.Random) -> Iterator[None]:
    """Make some system calls fail, and others read or write less than requested."""
    originals = [(module, name, getattr(module, name)) for module, name in _CALLS]

    def unreliable(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if rng.random() < _SHARE:
                number = rng.choice(_ERRORS)
                raise OSError(number, os.strerror(number))
            if name in _HALVED and rng.random() < _SHARE:
                descriptor, buffers, offset = arguments
                first = memoryview(buffers[0]).cast("B")
                return call(descriptor, [first[: rng.randrange(1, len(first) + 1)]], offset)
            return call(*arguments, **keywords)

        return wrapped

    for module, name, call in originals:
        setattr(module, name, unreliable(name, call))
    try:
        yield
    finally:
        for module, name, call in originals:
            setattr(module, name, call)
