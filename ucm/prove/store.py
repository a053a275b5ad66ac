"""The store of a proof: that of the user's settings, in places of its own which are deleted at the end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.store.places import opened_server
from ucm.config.document import FILE_KEY
from ucm.config.load import check_connector_config
from ucm.errors import ConfigError
from ucm.store.base import StoreError
from ucm.store.config import DRAM, LOCAL, OURS, POSIX
from ucm.store.factory import is_on_servers
from ucm.store.format import namespace_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucm.store.config import StoreConfig

#: Settings of the connector that a proof does without, with the reasons.
LEFT_OUT = {
    "blend": "blending changes answers by design, so it is not part of the proof",
    "kv_head_shards": "one tensor-parallel size is proved, with blocks stored as its ranks hold them",
    "ucm_sparse_config": "a budget changes answers by design; --sparse NAME tries the method with a full budget",
}


@dataclass
class ProofStore:
    """The settings of the engines' connector.

    Args:
        extra: vLLM's ``kv_connector_extra_config``.
        config: The options of the store in it.
        places: The directories to delete at the end.
        notes: What differs from the user's settings, in words.
        namespaces: The namespaces that the engines used, as far as known; only servers need them.
    """

    extra: Mapping[str, Any]
    config: StoreConfig
    places: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    namespaces: set[str] = field(default_factory=set)

    @property
    def servers(self) -> list[str]:
        """The tiers on servers."""
        return [name for name in self.config.parts if name in OURS and is_on_servers(name)]

    def remove(self, tags: Iterable[str]) -> list[str]:
        """Delete the store.

        Args:
            tags: Of each rank and KV-cache group, the last part of its namespace.

        Returns:
            What could not be deleted, in words.
        """
        left = []
        for place in self.places:
            shutil.rmtree(place, ignore_errors=True)
            if place.exists():
                left.append(f"{place} could not be deleted: delete it by hand")
        digests = {namespace_digest(f"{name}/{tag}").hex() for name in self.namespaces for tag in tags}
        for name in self.servers:
            if not digests:
                left.append(f"blocks of this run may be left on {name}: no engine said under which namespace")
                continue
            try:
                with opened_server(self.config, name) as tier:
                    for value in [value for value in tier.stored() if value.digest in digests]:
                        tier.discard(value)
            except StoreError as error:
                left.append(f"blocks of this run may be left on {name}: {error}")
        return left


def proof_store(file: Path | None, directory: Path) -> ProofStore:
    """Return the store of a proof.

    Local tiers get directories of their own beside or inside the user's, on the same medium. On servers the engines get
    a namespace of their own, because their blocks are named by what identifies the weights. A file without a store, or
    no file, means files in a temporary directory.

    Args:
        file: The user's settings; None for the defaults.
        directory: A temporary directory.

    Raises:
        ConfigError: With everything that is wrong in the file.
    """
    name = directory.name
    default = {"store": {"pipeline": "Posix", "directories": [str(directory / "store")]}}
    written = default if file is None else {FILE_KEY: str(file.absolute())}
    settings, notices = check_connector_config(written, make=False)
    given = settings.model_dump(mode="json", exclude_unset=True)
    notes = [*notices[1:], *(reason for key, reason in LEFT_OUT.items() if given.pop(key, None) is not None)]
    store = settings.store
    section: dict[str, Any] = dict(given["store"])
    places: list[Path] = []
    if store.parts & POSIX:
        own = list(dict.fromkeys(_beside(path, name) for path in store.directories))
        section["directories"] = [str(path) for path in own]
        places += own
    if store.parts & DRAM:
        own_memory = _beside(store.dram_directory, name)
        section["dram_directory"] = str(own_memory)
        places.append(own_memory)
    else:
        section.pop("dram_directory", None)
    if not store.parts <= LOCAL:
        given["weights_id"] = name
        notes.append("blocks on servers and in stores of others are named by weights_id, apart from those of engines")
    extra = {**given, "store": section, "metrics": True}
    try:
        config, _ = check_connector_config(extra)  # makes the directories
    except ConfigError:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        raise
    return ProofStore(extra, config.store.as_store_config(), tuple(places), tuple(notes))


def _beside(path: str, name: str) -> Path:
    """Return a directory of our own on the same medium: inside the user's, or beside what is missing of its path."""
    found = Path(path)
    if found.is_dir():
        return found / name
    while not found.parent.exists():
        found = found.parent
    return found.with_name(f"{found.name}-{name}")
