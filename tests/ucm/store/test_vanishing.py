"""The store's directory is renamed or deleted at every point of a running engine's save."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.factory import open_store
from ucm.store.posix import paths as posix_paths
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import open_in_steps
from ucm.testing.blocks import ODD, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store.config import StoreConfig

NAMESPACE = "n"
#: The system calls of a save that take a path or an open directory, or write.
CALLS = ("open", "mkdir", "rename", "stat", "write", "pwritev", "fsync")
#: The thread that calls them.
SAVES = "ucm-save-0"
#: More calls than a save makes.
MOST = 80
BEFORE, DURING, AFTER = key(1), key(2), key(3)


def rename_away(root: Path) -> None:
    root.rename(root.with_name("gone"))


def delete(root: Path) -> None:
    """Delete like ``rm -r``; files created meanwhile may need a second round."""
    while root.exists():
        shutil.rmtree(root, ignore_errors=True)


@dataclass
class Trap:
    """Runs an action before a given call of the saving thread, and counts its calls."""

    act: Callable[[], None]
    calls: int | None = None
    made: int = 0
    fired: bool = False

    def set(self, calls: int) -> None:
        self.made, self.calls = 0, calls

    def passed(self) -> None:
        if self.calls is None or self.fired or threading.current_thread().name != SAVES:
            return
        if self.made == self.calls:
            self.fired = True
            self.act()
        self.made += 1


@pytest.fixture
def trap(config: StoreConfig, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trap]:
    """A trap that renames or deletes the root before the given call."""
    found = Trap(lambda: request.param(Path(config.directories[0])))

    def trapped(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **keywords: object) -> object:
            found.passed()
            return call(*arguments, **keywords)

        return wrapped

    with monkeypatch.context() as patch:
        opening = trapped(posix_paths._open())
        patch.setattr(posix_paths, "_open", lambda: opening)
        for name in CALLS:
            patch.setattr(os, name, trapped(getattr(os, name)))
        patch.setattr(posix_paths, "rename_new", trapped(posix_paths.rename_new))
        yield found
    assert found.fired or found.made <= MOST


@pytest.mark.parametrize("known", [False, True], ids=["first", "kept open"])
@pytest.mark.parametrize("trap", [rename_away], indirect=True)
def test_a_save_beside_a_rename_may_be_lost_and_the_next_one_is_not(
    config: StoreConfig, trap: Trap, *, known: bool
) -> None:
    """If the rename happens in the last step, the block is in the old directory although it was saved: a miss."""
    check_every_point(config, trap, known=known)


@pytest.mark.parametrize("known", [False, True], ids=["first", "kept open"])
@pytest.mark.parametrize("trap", [delete], indirect=True)
def test_a_block_that_is_deleted_while_it_is_written_is_not_called_stored(
    config: StoreConfig, trap: Trap, *, known: bool
) -> None:
    """It may be lost, but then the save fails; the next save succeeds."""
    check_every_point(config, trap, known=known)


def check_every_point(config: StoreConfig, trap: Trap, *, known: bool) -> None:
    root = Path(config.directories[0])
    path = Path(Layout(str(root), NAMESPACE).block(DURING))
    for calls in range(MOST):
        for name in ("root", "gone"):
            shutil.rmtree(root.with_name(name), ignore_errors=True)
        root.mkdir()
        trap.calls, trap.fired = None, False
        with open_store(replace(config, save_threads=1), NAMESPACE, ODD) as store:
            if known:
                assert save(store, [BEFORE], ODD).failed == {}
            trap.set(calls)
            result = save(store, [DURING], ODD)
            if not trap.fired:
                assert calls > 5
                return
            if not root.with_name("gone").exists():
                assert (DURING not in result.failed) == path.exists(), f"call {calls}"
            assert save(store, [AFTER], ODD).failed == {}, f"call {calls}"
            assert fetch(store, [AFTER], ODD)[0] == {AFTER: content(AFTER, ODD)}
    pytest.fail(f"a save makes more than {MOST} calls")


def test_what_is_saved_after_a_rename_is_not_saved_in_the_old_place(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds without ``openat2``."""
    monkeypatch.setattr(posix_paths, "_open", lambda: open_in_steps)
    root = Path(config.directories[0])
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, [BEFORE], ODD)
        rename_away(root)
        assert save(store, [DURING], ODD).failed == {}
        assert fetch(store, [DURING], ODD)[0] == {DURING: content(DURING, ODD)}
