"""Find the directories that a command works on, without creating anything."""

from __future__ import annotations

import errno
import os
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.config.document import FILE_KEY, read_document
from ucm.config.load import read_store_settings
from ucm.config.settings import ConnectorConfig, StoreSettings
from ucm.config.upstream import translate
from ucm.errors import ConfigError, UcmError
from ucm.sparse.factory import OFFLOADING
from ucm.store.config import DRAM, POSIX, StoreConfig, pipeline_parts
from ucm.store.factory import back_end_class, is_on_servers, open_tier
from ucm.store.format import namespace_digest
from ucm.store.inspection import stored_blocks, unmarked
from ucm.store.memory.directory import check_apart
from ucm.store.posix.directory import check_root
from ucm.store.posix.layout import distrusted_namespaces, namespaces
from ucm.store.remote.tiers import RemoteTier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from ucm.store.authentication import Authenticator
    from ucm.store.inspection import StoredBlock
    from ucm.store.posix.layout import Layout


@dataclass(frozen=True, slots=True)
class Directory:
    """One directory.

    Args:
        tier: ``posix`` or ``dram``.
        path: The path as given.
        problem: Why it cannot be read; empty if it can.
        offloaded: Whether it is not the configured store's, but holds what ``ESA`` offloads.
    """

    tier: str
    path: str
    problem: str = ""
    offloaded: bool = False

    @property
    def missing(self) -> bool:
        """Whether it does not exist yet, because engines create it when they start."""
        return self.problem == os.strerror(errno.ENOENT)

    @property
    def optional(self) -> bool:
        """Whether it may be missing: shared memory is empty after a boot."""
        return self.missing and self.tier == "dram"

    @property
    def in_memory(self) -> bool:
        """Whether it is the Dram tier's."""
        return self.tier == "dram"

    @property
    def complaint(self) -> str:
        """The message if it cannot be read."""
        said = f"{self.path} ({self.tier}) cannot be read: {self.problem}"
        if not self.missing:
            return said
        mounted = "" if self.optional else "; if they have started, is its file system mounted?"
        return f"{said}: engines make it when they start{mounted}"


@dataclass(frozen=True)
class Places:
    """The directories and namespaces that a command works on.

    Args:
        directories: All directories.
        patterns: Patterns of the selected namespaces; empty for all.
        capacities: The bytes that each tier may use, if limited.
        config: The store's options, or the defaults.
        servers: The names of the selected tiers on servers in the pipeline.
    """

    directories: tuple[Directory, ...]
    patterns: tuple[str, ...]
    capacities: Mapping[str, int] = field(default_factory=dict)
    config: StoreConfig = field(default_factory=StoreConfig)
    servers: tuple[str, ...] = ()

    @property
    def listed(self) -> list[str]:
        """The selected tiers on servers whose blocks can be listed."""
        return [name for name in self.servers if back_end_class(name).lists]

    @property
    def readable(self) -> list[Directory]:
        """The directories that can be read."""
        return [directory for directory in self.directories if not directory.problem]

    @property
    def broken(self) -> list[Directory]:
        """The directories that should exist but cannot be read."""
        return [directory for directory in self.directories if directory.problem and not directory.optional]

    def complaints(self) -> list[str]:
        """The messages about the broken directories."""
        return [directory.complaint for directory in self.broken]

    def unmarked(self) -> list[str]:
        """The paths of directories that look like a namespace but lack its marker."""
        return [path for directory in self.readable for path in unmarked(directory.path)]

    def bare(self) -> list[Directory]:
        """The directories without any part of a store: it is new, elsewhere, or its disk is not mounted."""
        return [
            directory
            for directory in self.readable
            if not directory.offloaded and not any(namespaces(directory.path)) and not unmarked(directory.path)
        ]

    def names(self) -> dict[str, str]:
        """The namespaces that are known by name, by the hexadecimal digest that stands for them on servers."""
        found = {layout.namespace for directory in self.readable for layout in namespaces(directory.path)}
        return {namespace_digest(name).hex(): name for name in found | set(self.patterns)}

    def digests(self) -> set[str] | None:
        """The digests of the namespaces that are meant, on servers, which know no names; None: all."""
        if not self.patterns:
            return None
        return {
            digest
            for digest, name in self.names().items()
            if any(fnmatchcase(name, pattern) for pattern in self.patterns)
        }

    def chosen(self) -> list[tuple[Directory, Layout]]:
        """Return every selected namespace in every directory.

        Raises:
            UcmError: No namespace matches the patterns, or other users may write to a namespace.
        """
        found = [(directory, layout) for directory in self.readable for layout in namespaces(directory.path)]
        for directory in self.readable:
            for path, reason in distrusted_namespaces(directory.path):
                raise UcmError(f"the namespace cannot be trusted: {reason}", where=path, fix="delete it by hand")
        if not self.patterns:
            return found
        meant = [
            (directory, layout)
            for directory, layout in found
            if any(fnmatchcase(layout.namespace, pattern) for pattern in self.patterns)
        ]
        if not meant and not (self.listed and self.digests() is not None):
            there = sorted({layout.namespace for _, layout in found})
            raise UcmError(
                f"no namespace matches {' or '.join(self.patterns)}",
                where="--namespace",
                fix=f"the namespaces are {', '.join(there)}"
                if there
                else "the store has no namespaces: is this the right directory?",
            )
        return meant

    def blocks(self) -> Iterator[tuple[Directory, StoredBlock]]:
        """Yield the blocks of all selected namespaces, which are as many as the medium has at that moment."""
        for directory, layout in self.chosen():
            for block in stored_blocks(layout.root, layout.namespace):
                yield directory, block


def find_places(options: argparse.Namespace, *, servers: bool = False) -> Places:
    """Return the directories and namespaces that a command line selects.

    Raises:
        ConfigError: The configuration is invalid, or other users may write to a directory.
        UcmError: A given path is not a readable directory.
    """
    patterns = tuple(options.namespace or ())
    if options.config is not None:
        settings, offloaded = read_store_settings(options.config), offload_directories(options.config)
        found = _of_config(settings, patterns, servers=servers, others=bool(offloaded))
        known = {os.path.realpath(directory.path) for directory in found.directories}
        further = [
            Directory(tier, path, _problem(path), offloaded=True)
            for tier, path in offloaded
            if os.path.realpath(path) not in known
        ]
        found = replace(found, directories=(*found.directories, *further))
    else:
        if options.tier is not None:
            raise UcmError("--tier chooses among the tiers of a configuration", fix="leave it out, or give --config")
        paths = list(dict.fromkeys(str(path) for path in options.directory))
        found = Places(tuple(Directory("posix", path, _problem(path)) for path in paths), patterns)
        for directory in found.broken:
            raise UcmError(
                f"this directory cannot be read: {directory.problem}",
                where=f"--directory {directory.path}",
                fix="name a directory of the store, as in the engines' configuration",
            )
    for directory in found.readable:
        check_root(directory.path, found.config.trusted_group)
    if options.tier is None:
        return found
    directories = tuple(directory for directory in found.directories if directory.tier == options.tier)
    kept = tuple(name for name in found.servers if name.lower() == options.tier)
    if not directories and not kept:
        raise UcmError(f"this store has no {options.tier} tier", where=f"--tier {options.tier}", fix="leave it out")
    return replace(found, directories=directories, servers=kept)


def about(directory: Directory, block: StoredBlock) -> dict[str, str]:
    """Return what ``--json`` prints of a block."""
    at = {"directory": directory.path, "tier": directory.tier, "namespace": block.layout.namespace}
    return {**at, "key": block.key.hex(), "path": block.path}


@contextmanager
def opened_server(config: StoreConfig, name: str, authenticator: Authenticator | None = None) -> Iterator[RemoteTier]:
    """Open a tier on servers.

    Raises:
        ConfigError: It cannot be opened.
    """
    tier = open_tier(config, name, authenticator=authenticator)
    with closing(tier):
        if isinstance(tier, RemoteTier):
            yield tier


def offload_directories(file: Path) -> list[tuple[str, str]]:
    """Return the existing directories, with their tiers, to which ``ESA`` offloads blocks if a file configures it.

    Raises:
        ConfigError: The file cannot be read, or the method's store is invalid.
    """
    found: dict[tuple[str, str], None] = {}
    section = translate(read_document({FILE_KEY: str(file)}), ConnectorConfig.model_fields).settings
    for name, given in dict(section.get("ucm_sparse_config") or {}).items():
        if name in OFFLOADING:
            from ucm.sparse.esa.method import ESAOptions  # noqa: PLC0415 - few configurations need it
            from ucm.sparse.options import parse_options  # noqa: PLC0415 - likewise

            store = parse_options(ESAOptions, name, given or {}).store
            if store.parts & DRAM:
                found["dram", store.dram_directory] = None
            found.update(dict.fromkeys(("posix", path) for path in store.directories if store.parts & POSIX))
    return [(tier, path) for tier, path in found if Path(path).is_dir()]


def _of_config(settings: StoreSettings, patterns: tuple[str, ...], *, servers: bool, others: bool) -> Places:
    """Return the places of a store; ``others`` says whether the file names further directories."""
    on_servers = tuple(name for name in pipeline_parts(settings.pipeline) if servers and is_on_servers(name))
    if not settings.parts & (POSIX | DRAM) and not on_servers and not others:
        raise ConfigError(
            f"the store {settings.pipeline!r} has no directories that this command can read",
            where="store: pipeline",
            fix="name a store's directories with --directory, or use that store's own tools",
        )
    config = settings.as_store_config()
    if settings.parts & POSIX:
        check_apart(config.directories, config.dram_directory if settings.parts & DRAM else None)
    directories: list[Directory] = []
    capacities: dict[str, int] = {}
    if settings.parts & DRAM:
        path = config.dram_directory
        directories.append(Directory("dram", path, _problem(path)))
        if config.dram_capacity_bytes is not None:
            capacities["dram"] = config.dram_capacity_bytes
        elif not directories[0].missing:
            system = os.statvfs(path)
            capacities["dram"] = int(system.f_blocks * system.f_frsize * config.dram_capacity_fraction)
    if settings.parts & POSIX:
        directories += [Directory("posix", path, _problem(path)) for path in config.directories]
        if config.posix_capacity_bytes is not None:
            capacities["posix"] = config.posix_capacity_bytes
    return Places(tuple(directories), patterns, capacities, config, on_servers)


def _problem(path: str) -> str:
    try:
        with os.scandir(path):
            return ""
    except OSError as error:
        return error.strerror or str(error)
