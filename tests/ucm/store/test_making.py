"""A process dies while it creates a namespace."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.factory import open_store
from ucm.store.posix import paths as posix_paths
from ucm.store.posix import space as posix_space
from ucm.store.posix.layout import Layout, namespaces
from ucm.testing.blocks import ODD, key, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clock import SimulatedClock
    from ucm.store.config import StoreConfig

CALLS = ("mkdir", "fsync", "rename")


class DiedError(BaseException):
    """Simulates the death of the process."""


@pytest.mark.parametrize("calls", range(18))
def test_whoever_comes_next_makes_the_rest(config: StoreConfig, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    left = [calls]
    layout = Layout(config.directories[0], "n")
    layout.identity = b"{}"

    def deadly(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **keywords: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise DiedError
            return call(*arguments, **keywords)

        return wrapped

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, deadly(getattr(os, name)))
        opening = deadly(posix_paths._open())
        patch.setattr(posix_paths, "_open", lambda: opening)
        with pytest.raises(DiedError):
            layout.make()
    with open_store(config, "n", ODD) as store:
        save(store, [key(1)], ODD)
    assert [layout.namespace for layout in namespaces(config.directories[0])] == ["n"]


def test_a_store_in_use_makes_a_lost_marker_again(config: StoreConfig, clock: SimulatedClock) -> None:
    """``rm -r`` next to a running writer may delete the marker and leave the rest."""
    layout = Layout(config.directories[0], "n")
    with open_store(config, "n", ODD, clock=clock) as store:
        save(store, [key(1)], ODD)
    Path(layout.base, "NAMESPACE").unlink()
    with open_store(config, "n", ODD, clock=clock) as store:
        save(store, [key(2)], ODD)
        clock.advance(posix_space._FIRST_SECONDS + 1)
    assert [found.namespace for found in namespaces(config.directories[0])] == ["n"]


def test_a_file_that_could_not_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process would delete it while its owner lives."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    layout = Layout(str(tmp_path), "n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space"):
            layout.make()
        assert list(Path(layout.quarantine).iterdir()) == []


def test_a_namespace_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "n")
    layout.mend()
    assert list(tmp_path.iterdir()) == []
