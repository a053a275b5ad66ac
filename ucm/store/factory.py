"""Open a store by its configuration."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.store.base import KVStore
from ucm.store.dram import prepare_dram
from ucm.store.empty import EmptyStore
from ucm.store.format import HeaderCodec
from ucm.store.posix import PosixTier
from ucm.store.posix_layout import check_namespace
from ucm.store.tier import Tier
from ucm.store.tiered import TieredStore

if TYPE_CHECKING:
    from ucm.store.base import BlockGeometry
    from ucm.store.config import StoreConfig

ENTRY_POINT_GROUP = "ucm.stores"
_OURS = ("Posix", "Dram", "Cache", "Empty")
_WHERE = "store: pipeline"


def open_store(config: StoreConfig, namespace: str, geometry: BlockGeometry | None) -> KVStore:
    """Open one namespace of a store.

    A back end of others is a class that is called with these three arguments: a ``KVStore``, or a ``Tier`` that can
    also stand in a pipeline.

    Args:
        config: Its options.
        namespace: What the sharers of blocks have in common; of ``a-z 0-9 . _ / -``.
        geometry: What a block is; None for an instance that only looks up and prefetches.

    Raises:
        ConfigError: An option is wrong, or names something that is not there; it says which.
    """
    check_namespace(namespace)
    names = [name.strip() for name in config.pipeline.split("|")]
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError(
            f"the pipeline {config.pipeline!r} has an empty or repeated part", where=_WHERE, fix="for instance Posix"
        )
    try:
        codec = HeaderCodec(namespace, geometry) if geometry is not None else None
    except ValueError as error:
        raise ConfigError(str(error), where="store: geometry") from error
    tiers: list[Tier] = []
    for name in names:
        found = _open_part(name, config, namespace, geometry, codec)
        if isinstance(found, Tier):
            tiers.append(found)
        elif len(names) == 1:
            return found
        else:
            raise ConfigError(f"{name} is a whole store and cannot be a part of {config.pipeline!r}", where=_WHERE)
    return TieredStore(tiers, codec, config)


def _open_part(
    name: str, config: StoreConfig, namespace: str, geometry: BlockGeometry | None, codec: HeaderCodec | None
) -> KVStore | Tier:
    if name == "Posix":
        return PosixTier("posix", config.directories, namespace, codec, config, config.posix_capacity_bytes)
    if name in {"Dram", "Cache"}:
        root, capacity = prepare_dram(config)
        return PosixTier("dram", [root], namespace, codec, config, capacity, on_disk=False)
    back_end: Any = EmptyStore if name == "Empty" else _class_of_others(name)
    made = back_end(config, namespace, geometry)
    if not isinstance(made, KVStore | Tier):
        raise ConfigError(f"{name} is neither a KVStore nor a Tier", where=_WHERE)
    return made


def _class_of_others(name: str) -> Any:
    module_name, colon, class_name = name.partition(":")
    if colon:
        try:
            return getattr(import_module(module_name), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the back end {name} cannot be loaded: {error}",
                where=_WHERE,
                fix="check that the package is installed in this environment",
            ) from error
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        raise ConfigError(
            f"there is no back end {name!r}",
            where=_WHERE,
            fix=f"use one of {', '.join([*_OURS, *sorted(installed)])}, or package.module:Class",
        )
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the back end {name} cannot be loaded: {error}", where=_WHERE) from error
