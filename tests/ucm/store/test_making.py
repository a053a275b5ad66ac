"""A namespace being made by a process that dies."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.blocks import ODD, key, save
from ucm.store.factory import open_store
from ucm.store.posix_layout import Layout, namespaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.store.config import StoreConfig

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename")


class DiedError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("calls", range(9))
def test_whoever_comes_next_makes_the_rest(config: StoreConfig, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    left = [calls]

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
        with pytest.raises(DiedError):
            Layout(config.directories[0], "n").make()
    with open_store(config, "n", ODD) as store:
        save(store, [key(1)], ODD)
    assert [layout.namespace for layout in namespaces(config.directories[0])] == ["n"]
