"""The options of a store, with their defaults. Whoever reads a configuration file maps it to this class."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30

#: The back ends that we bring, by their names in a pipeline.
OURS = ("Posix", "Dram", "Cache", "Redis", "Empty")
#: Where others announce theirs.
ENTRY_POINT_GROUP = "ucm.stores"


def pipeline_parts(pipeline: str) -> list[str]:
    """The names in a pipeline, fastest first."""
    return [name.strip() for name in pipeline.split("|")]


def default_dram_directory() -> str:
    """Where the Dram tier lives unless configured: one directory per user, shared by all engines of the host."""
    return f"/dev/shm/ucm-{os.getuid()}"  # noqa: S108 - a shared-memory tier, made with mode 0700 and checked


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a store is built and how it behaves.

    Args:
        pipeline: The tiers, fastest first, joined by ``|``: ``Posix``, ``Dram`` (also called ``Cache``), ``Redis``, and
            tiers of others, by an entry point in the group ``ucm.stores`` or as ``package.module:Class``. Alone:
            ``Empty``, or a whole store of others.
        tiers: The options of the tiers that have some, by their names in the pipeline.
        directories: The directories of the Posix tier. Blocks are spread over them by their keys and the directories'
            names, so that every engine must give them by the same names.
        posix_capacity_bytes: What the Posix tier may use, in all directories and of all namespaces together; the least
            recently used blocks beyond it are deleted. None: no limit, nothing is ever deleted.
        dram_directory: The Dram tier's directory, in a tmpfs.
        dram_capacity_bytes: What the Dram tier may use; by default ``dram_capacity_fraction`` of its tmpfs.
        dram_capacity_fraction: See there.
        trusted_group: A group, by name or number, all of whose members may write to the directories of both tiers.
            None: a directory that anybody else may write to is refused.
        fsync: Whether a block reaches the disk before it becomes visible. Without it, a block that a power loss cut
            short fails its checksum and is a miss. Never done in the Dram tier.
        direct_io: Whether the Posix tier bypasses the page cache, where the file system can.
        load_threads: Threads that read.
        dump_threads: Threads that write.
        dump_nice: How much these give way to others, 0 (not at all) to 19.
        dump_queue_bytes: How many bytes may wait for being written; a dump beyond that fails with StoreFullError.
        write_behind_bytes: How many bytes may wait for being written to each tier below the one that took them; more
            are dropped and counted.
        stuck_seconds: After how long in one call a thread counts as stuck.
        lookup_cache_keys: How many keys a lookup remembers as present.
        lookup_cache_seconds: For how long, at least; twice that at most.
        failures_until_rest: After how many failures in a row a directory or a tier is left alone for a while; one is
            enough where the medium did not answer in time.
        rest_seconds: For how long; then the next call tries it.
        aside_keep: How many damaged blocks are kept for inspection in each directory and namespace.
        touch_seconds: How old a block's time of last use may be before a load renews it.
        stale_seconds: How old a temporary file of a writer on another host must be before it is deleted.
        options: For whole stores of others, which get this configuration.
    """

    pipeline: str = "Posix"
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    posix_capacity_bytes: int | None = None
    dram_directory: str = field(default_factory=default_dram_directory)
    dram_capacity_bytes: int | None = None
    dram_capacity_fraction: float = 0.25
    trusted_group: str | int | None = None
    fsync: bool = False
    direct_io: bool = False
    load_threads: int = 4
    dump_threads: int = 2
    dump_nice: int = 19
    dump_queue_bytes: int = 2 * GIB
    write_behind_bytes: int = 2 * GIB
    stuck_seconds: float = 10.0
    lookup_cache_keys: int = 65536
    lookup_cache_seconds: float = 3.0
    failures_until_rest: int = 3
    rest_seconds: float = 30.0
    aside_keep: int = 16
    touch_seconds: float = 60.0
    stale_seconds: float = 3600.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", where=f"store: {name}")
        if not 0 <= self.dump_nice <= _NICEST:
            raise ConfigError(f"dump_nice is {self.dump_nice}; it goes from 0 to {_NICEST}", where="store: dump_nice")
        if not 0 < self.dram_capacity_fraction <= 1:
            raise ConfigError(
                f"dram_capacity_fraction is {self.dram_capacity_fraction}; it must be above 0 and at most 1",
                where="store: dram_capacity_fraction",
            )

    @property
    def parts(self) -> list[str]:
        """The names in the pipeline, fastest first."""
        return pipeline_parts(self.pipeline)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The options, in order."""
        return tuple(f.name for f in fields(cls))


_NICEST = 19
_LEAST = {
    "posix_capacity_bytes": 1,
    "dram_capacity_bytes": 1,
    "load_threads": 1,
    "dump_threads": 1,
    "dump_queue_bytes": 1,
    "write_behind_bytes": 1,
    "stuck_seconds": 0,
    "lookup_cache_keys": 0,
    "lookup_cache_seconds": 0,
    "failures_until_rest": 1,
    "rest_seconds": 0,
    "aside_keep": 0,
    "touch_seconds": 0,
    "stale_seconds": 0,
}
