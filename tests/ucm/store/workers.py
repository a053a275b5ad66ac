"""Functions that the tests run in separate processes."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ucm import cli
from ucm.errors import ConfigError
from ucm.salts import tag_of_salt, tagged
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix.layout import owner_name
from ucm.store.posix.space import Usage
from ucm.testing.blocks import content, fetch, filled, key, save

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CLONE_NEWUTS = 0x04000000


def owner_name_of_this_process() -> str:
    return owner_name()


def save_for_ever(config: StoreConfig, namespace: str, geometry: BlockGeometry, seed: int, told: Connection) -> None:
    """Write blocks until killed; tell at each."""
    chance = np.random.default_rng(seed)
    with open_store(config, namespace, geometry) as store:
        while True:
            memories = filled([key(int(number)) for number in chance.integers(200, size=8)], geometry)
            for memory in memories:
                saved = store.save([memory.transfer()])
                told.send(None)
            saved.wait()


def live_with_limits(config: StoreConfig, namespace: str, most_nbytes: int) -> tuple[list[str], list[str]]:
    """Save blocks of two sizes under a limit on file size; return the failures' causes and what could be loaded."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_nbytes, most_nbytes))
    small, large = BlockGeometry((1000,), bytes(16)), BlockGeometry((most_nbytes,), bytes(16))
    with open_store(config, f"{namespace}/large", large) as store:
        causes = [error.cause for error in save(store, [key(1), key(2)], large).failed.values()]
    with open_store(config, f"{namespace}/small", small) as store:
        causes += [error.cause for error in save(store, [key(1)], small).failed.values()]
        return causes, [block.hex() for block in fetch(store, [key(1)], small)[0]]


def live_without_privileges(root: str, user: int) -> dict[str, object]:
    """Use a store as another user, while its permissions are withdrawn step by step."""
    keys, geometry = [key(1), key(2)], BlockGeometry((1000,), bytes(16))
    content(keys[0], geometry)  # imports now what the other user may not be able to import
    os.setgid(user)
    os.setuid(user)
    config = StoreConfig(directories=(root,), rest_seconds=0.0)
    seen: dict[str, object] = {}
    with open_store(config, "n", geometry) as store:
        assert save(store, keys[:1], geometry).failed == {}
        for path in (Path(root, "n", "tmp"), Path(root, "n")):
            path.chmod(0o500)
        seen["read only: save"] = [error.cause for error in save(store, keys[1:], geometry).failed.values()]
        seen["read only: load"] = len(fetch(store, keys[:1], geometry)[0])
        for path in Path(root, "n").glob("??"):
            path.chmod(0)
        seen["locked: lookup"] = store.lookup(keys)
        seen["locked: load"] = [error.cause for error in fetch(store, keys[:1], geometry)[1].values()]
        for path in [Path(root, "n"), *Path(root, "n").iterdir()]:
            path.chmod(0o700)
        seen["open again: save"] = len(save(store, keys[1:], geometry).done)
        seen["open again: load"] = len(fetch(store, keys, geometry)[0])
    Path(root).chmod(0o500)
    try:
        open_store(config, "n", geometry)
    except ConfigError as error:
        seen["at opening"] = error.where
    return seen


def fill(config: StoreConfig, namespace: str, geometry: BlockGeometry, seed: int, told: Connection) -> None:
    """Save this process's own blocks, half as many as the capacity allows, as fast as possible; tell after each ten."""
    with open_store(config, namespace, geometry) as store:
        for first in range(0, 100, 10):
            save(store, [key(1000 * seed + first + number) for number in range(10)], geometry)
            told.send(first)


def evict_until_killed(root: str, told: Connection) -> None:
    """Be the root's evictor until killed."""
    usage = Usage(root)
    usage.add(1, None)
    told.send(usage.elect())
    threading.Event().wait()


def become_another_host() -> None:
    """Give this process a host name of its own; stores compare the names of hosts."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname("another-host")


def save_there(config: StoreConfig, namespace: str, geometry: BlockGeometry, keys: list[BlockKey]) -> int:
    """Save blocks, ten at a time; return how many were saved or there."""
    with open_store(config, namespace, geometry) as store:
        return sum(len(save(store, keys[at : at + 10], geometry).done) for at in range(0, len(keys), 10))


def store_command(*words: str) -> int:
    return cli.main(["store", *words])


def of_salt(salt: str, number: int) -> BlockKey:
    return BlockKey(tagged(key(number), tag_of_salt(salt)))


def flood_until_killed(
    config: StoreConfig, namespace: str, geometry: BlockGeometry, salt: str, first: int, told: Connection
) -> None:
    """Save new blocks of a salt for ever; tell after each ten that are there."""
    with open_store(config, namespace, geometry) as store:
        while True:
            keys = [of_salt(salt, number) for number in range(first, first + 10)]
            while not all(one in save(store, keys, geometry).done for one in keys):
                pass
            first += 10
            told.send(first)
