"""Define the options of a store with their defaults and bounds, and read the secrets that options name.

The settings of configuration files (`ucm.config.settings`) are derived from `StoreConfig`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping  # noqa: TC003 - read at run time, with the types of the options
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from ucm.errors import ConfigError
from ucm.store.shares import weights_problem

GIB = 1 << 30
#: The built-in back ends, by their names in a pipeline.
OURS = ("Posix", "Dram", "Cache", "Redis", "Mooncake", "S3", "Empty")
#: Those of the Posix tier and of the Dram tier, and of all that need no server.
POSIX, DRAM = frozenset({"Posix"}), frozenset({"Dram", "Cache"})
LOCAL = POSIX | DRAM | {"Empty"}
#: The entry-point group of third-party back ends.
ENTRY_POINT_GROUP = "ucm.stores"


#: Ten years in seconds: a lease is the time of a file, which must not overflow, and nor must what waits for the system.
LONGEST = 10 * 366 * 86_400
#: A day in seconds: a time of last use is ahead by up to a span, and the blocks used in one are ordered by depth alone.
_LONGEST_SPAN = 86_400
Positive, NotNegative = Field(gt=0, le=LONGEST), Field(ge=0, le=LONGEST)
AtLeastOne, Threads = Field(ge=1), Field(ge=1, le=256)


def pipeline_parts(pipeline: str) -> list[str]:
    """Return the names in a pipeline, fastest first."""
    return [name.strip() for name in pipeline.split("|")]


def default_dram_directory() -> str:
    """Return the Dram tier's default directory: one per user, shared by all engines of the host."""
    return f"/dev/shm/ucm-{os.getuid()}"  # noqa: S108 - a shared-memory tier, made with mode 0700 and checked


def default_offload_directory() -> str:
    """Return the default directory of the blocks that ``ESA`` offloads, which are not to evict those of the tier."""
    return f"{default_dram_directory()}-offloaded"


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The options of a store.

    Args:
        pipeline: The tiers, fastest first, joined by ``|``: ``Posix``, ``Dram`` (also called ``Cache``), ``Redis``,
            ``Mooncake``, ``S3``, and third-party tiers, by an entry point in the group ``ucm.stores`` or as
            ``package.module:Class``. Alone: ``Empty``, or a third-party store.
        tiers: The options of the tiers that have some, by their names in the pipeline.
        directories: The directories of the Posix tier. Blocks are spread over them by their keys and the directories'
            names, so that every engine must use the same names.
        posix_capacity_bytes: The most bytes that the Posix tier may use, in all directories and for all namespaces
            together; beyond it the least recently used blocks are deleted. None: no limit, nothing is ever deleted.
        dram_directory: The Dram tier's directory, in a tmpfs.
        dram_capacity_bytes: The most bytes that the Dram tier may use; by default ``dram_capacity_fraction`` of its
            tmpfs.
        dram_capacity_fraction: See ``dram_capacity_bytes``.
        trusted_group: A group, by name or number, all of whose members may write to the directories of both tiers.
            None: a directory that anybody else may write to is refused.
        authentication_key_file: A file with a secret key that authenticates all blocks, so that whoever can write to a
            medium, but has no key, cannot forge them. None: checksums alone, which protect against accidents.
        fsync: Whether a block is synced to the disk before it becomes visible. Without it, a block truncated by a power
            loss fails its checksum and is a miss. Never done in the Dram tier.
        load_threads: The number of threads that read.
        save_threads: The number of threads that write.
        save_nice: The nice value of the threads that write, 0 (normal priority) to 19.
        save_queue_bytes: Bytes that may wait to be written; a save beyond that fails with StoreFullError.
        write_behind_bytes: Bytes that may wait to be written to each lower tier; further blocks are dropped and
            counted.
        stuck_seconds: Seconds in one call after which a thread counts as stuck.
        failures_until_rest: The number of consecutive failures after which a directory or a tier rests; one timeout is
            enough.
        rest_seconds: The length of a rest; the next call after it tries the medium.
        quarantine_keep: The number of damaged blocks kept for inspection in each directory and namespace.
        touch_seconds: The span of seconds in which a block's time of last use is renewed once, to the span's end.
        lease_seconds: The longest time, in seconds, for which blocks can be retained or pinned; 0: they cannot. It must
            be the same for all that share a store.
        share_seconds: How long a block is in its cache salt's share of the Posix tier's capacity after its last use; 0:
            the least recently used blocks go, whosever they are. See ``ucm.store.shares``. To be the same for all that
            share a store, like the weights.
        share_weights: The weights of salts, by what ``ucm store tag`` prints, or ``no-salt``; ``others``: that of all
            other salts together, 1 by default. Empty: each salt has the same.
        stale_seconds: The age from which on a temporary file of a writer on another host is deleted.
        options: The options of a third-party store, which gets this configuration.
    """

    pipeline: str = "Posix"
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    posix_capacity_bytes: Annotated[int | None, AtLeastOne] = None
    dram_directory: str = field(default_factory=default_dram_directory)
    dram_capacity_bytes: Annotated[int | None, AtLeastOne] = None
    dram_capacity_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    trusted_group: str | int | None = None
    authentication_key_file: str | None = None
    fsync: bool = False
    load_threads: Annotated[int, Threads] = 4
    save_threads: Annotated[int, Threads] = 2
    save_nice: Annotated[int, Field(ge=0, le=19)] = 19
    save_queue_bytes: Annotated[int, AtLeastOne] = 2 * GIB
    write_behind_bytes: Annotated[int, AtLeastOne] = 2 * GIB
    stuck_seconds: Annotated[float, Positive] = 10.0
    failures_until_rest: Annotated[int, AtLeastOne] = 3
    rest_seconds: Annotated[float, NotNegative] = 30.0
    quarantine_keep: Annotated[int, Field(ge=0)] = 16
    touch_seconds: Annotated[float, Field(ge=0, le=_LONGEST_SPAN)] = 60.0
    lease_seconds: Annotated[float, NotNegative] = 86_400.0
    share_seconds: Annotated[float, NotNegative] = 0.0
    share_weights: Mapping[str, float] = field(default_factory=dict)
    stale_seconds: Annotated[float, NotNegative] = 3600.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            try:
                bounds.validate_python(value)
            except ValidationError as error:
                problem = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise ConfigError(f"{name} is {value}; it must be {problem}", where=f"store: {name}") from None
        problem = weights_problem(self.share_weights)
        if problem:
            raise ConfigError(problem, where="store: share_weights")

    @property
    def parts(self) -> list[str]:
        """The names in the pipeline, fastest first."""
        return pipeline_parts(self.pipeline)

    @property
    def roots(self) -> list[str]:
        """The directories in which our tiers keep blocks."""
        found = list(self.directories) if POSIX.intersection(self.parts) else []
        return found + ([self.dram_directory] if DRAM.intersection(self.parts) else [])

    @property
    def directory_bytes(self) -> float | None:
        """The most bytes that each of the Posix tier's directories may hold; None: no limit."""
        most = self.posix_capacity_bytes
        return None if most is None else most / len(self.directories)

    @property
    def capacity_bytes(self) -> int | None:
        """The most bytes that all tiers together may use; None if one of them has no limit in bytes."""
        memory = self.dram_capacity_bytes
        limits = {"Posix": self.posix_capacity_bytes, "Dram": memory, "Cache": memory}
        found = 0
        for part in self.parts:
            limit = limits.get(part)
            if limit is None:
                return None
            found += limit
        return found

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the options, in order."""
        return tuple(f.name for f in fields(cls))


def option_types() -> dict[str, Any]:
    """Return the type of each option by name, with its bounds."""
    return get_type_hints(StoreConfig, include_extras=True)


_BOUNDS = {name: TypeAdapter(hint) for name, hint in option_types().items() if hasattr(hint, "__metadata__")}


def read_secret(
    file: str | None, variable: str | None, where: str, *, is_key: bool = False, owners: frozenset[int] = frozenset()
) -> str:
    """Return the first line of a file or an environment variable's value; empty if neither is named.

    Args:
        file: The path of the file; ``~`` is expanded.
        variable: The name of the variable.
        where: The setting, for messages.
        is_key: Whether whoever can change the file can forge answers: then it must belong to this user or to root, and
            no group may write to it.
        owners: The ids of other users to whom a key may belong.

    Raises:
        ConfigError: The file cannot be read, others may read it, or the variable is not set.
    """
    if file is None:
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(
                f"the environment variable {variable} is not set, but must contain a secret",
                where=where,
                fix="set it in the environment of vLLM",
            )
        return "" if variable is None else os.environ[variable]
    path, secret = Path(file).expanduser(), ""
    try:
        with open(path, encoding="utf-8", opener=_open) as opened:
            status = os.fstat(opened.fileno())
            if stat.S_ISREG(status.st_mode):
                secret = opened.readline().rstrip("\r\n")
    except (OSError, ValueError) as error:
        reasons = {UnicodeDecodeError: "it is not UTF-8", ValueError: "its name contains a null character"}
        reason = getattr(error, "strerror", None) or reasons.get(type(error), str(error))
        raise ConfigError(
            f"a file with a secret cannot be read: {reason}",
            where=f"{where}: {file!r}",
            fix="name a text file that this user can read, whose first line is the secret",
        ) from None
    if not stat.S_ISREG(status.st_mode):
        what, fix = "this is no file", "name a file with a secret"
    elif status.st_mode & (0o027 if is_key else 0o007):
        what, fix = "this file contains a secret, but other users can read or change it", f"chmod 600 {path}"
    elif is_key and status.st_uid not in {0, os.geteuid(), *owners}:
        what = f"this file contains a key, but belongs to user {status.st_uid}, who can change it"
        fix = f"let it belong to this user, {os.geteuid()}, or to root"
    elif not secret:
        what, fix = "a file with a secret has an empty first line", "write the secret into its first line"
    else:
        return secret
    raise ConfigError(what, where=f"{where}: {path}", fix=fix)


def _open(path: str, flags: int) -> int:
    """Open a file; a FIFO is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
