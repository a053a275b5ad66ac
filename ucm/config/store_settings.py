"""The ``store`` section of the settings."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ucm.config.units import SIZE_HELP, parse_size
from ucm.config.validation import RefusedValueError
from ucm.store.config import ENTRY_POINT_GROUP, OURS, StoreConfig, default_dram_directory, pipeline_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The names of the Posix tier and of the Dram tier in a pipeline.
POSIX, DRAM = frozenset({"Posix"}), frozenset({"Dram", "Cache"})
#: Settings that apply only to some tiers.
ONLY_WITH = {
    "directories": POSIX,
    "posix_capacity": POSIX,
    "trusted_group": POSIX | DRAM,
    "fsync": POSIX,
    "direct_io": POSIX,
    "dram_directory": DRAM,
    "dram_capacity": DRAM,
    "dram_capacity_fraction": DRAM,
}
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise RefusedValueError(str(error), SIZE_HELP) from error


def _paths(value: object) -> object:
    """Accept a single path as a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Size = Annotated[int, BeforeValidator(_size)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]


class StoreSettings(BaseModel):
    """The settings of a store; docs/configuration.md explains each of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    pipeline: str = StoreConfig.pipeline
    tiers: dict[str, dict[str, Any]] = {}
    directories: Paths = StoreConfig.directories
    posix_capacity: Size | None = StoreConfig.posix_capacity_bytes
    dram_directory: str = Field(default_factory=default_dram_directory)
    dram_capacity: Size | None = StoreConfig.dram_capacity_bytes
    dram_capacity_fraction: float = Field(default=StoreConfig.dram_capacity_fraction, gt=0, le=1)
    trusted_group: str | int | None = StoreConfig.trusted_group
    authentication_key_file: str | None = StoreConfig.authentication_key_file
    fsync: bool = StoreConfig.fsync
    direct_io: bool = StoreConfig.direct_io
    load_threads: int = Field(default=StoreConfig.load_threads, ge=1, le=256)
    save_threads: int = Field(default=StoreConfig.save_threads, ge=1, le=256)
    save_nice: int = Field(default=StoreConfig.save_nice, ge=0, le=19)
    save_queue: Size = StoreConfig.save_queue_bytes
    write_behind: Size = StoreConfig.write_behind_bytes
    stuck_seconds: float = Field(default=StoreConfig.stuck_seconds, gt=0)
    lookup_cache_keys: int = Field(default=StoreConfig.lookup_cache_keys, ge=0)
    lookup_cache_seconds: float = Field(default=StoreConfig.lookup_cache_seconds, ge=0)
    failures_until_rest: int = Field(default=StoreConfig.failures_until_rest, ge=1)
    rest_seconds: float = Field(default=StoreConfig.rest_seconds, ge=0)
    quarantine_keep: int = Field(default=StoreConfig.quarantine_keep, ge=0)
    touch_seconds: float = Field(default=StoreConfig.touch_seconds, ge=0)
    stale_seconds: float = Field(default=StoreConfig.stale_seconds, ge=0)
    options: dict[str, Any] = {}

    @field_validator("pipeline")
    @classmethod
    def _known_pipeline(cls, value: str) -> str:
        parts = pipeline_parts(value)
        for part in parts:
            if part not in OURS and not _CLASS.fullmatch(part) and not entry_points(group=ENTRY_POINT_GROUP, name=part):
                others = f"the name of an entry point in {ENTRY_POINT_GROUP}, or package.module:Class"
                raise RefusedValueError(
                    f"there is no such store as {part!r}",
                    f"use {', '.join(OURS)}, {others}; join several with |, as in Cache|Posix",
                )
        if len(set(parts)) < len(parts) or set(parts) >= DRAM:
            raise RefusedValueError("a tier is listed twice", "name each tier once; Cache is Dram")
        if "Empty" in parts and len(parts) > 1:
            raise RefusedValueError("Empty cannot be combined with other stores", "remove it, or the others")
        return value

    @property
    def parts(self) -> frozenset[str]:
        """The names in the pipeline."""
        return frozenset(pipeline_parts(self.pipeline))

    @model_validator(mode="after")
    def _what_goes_together(self) -> StoreSettings:
        if self.parts & POSIX and not self.directories:
            raise RefusedValueError(f"the store {self.pipeline!r} needs a directory", "add directories: [/path]")
        for name in self.tiers:
            if name not in self.parts:
                raise RefusedValueError(
                    f"there are options for {name}, which is not part of {self.pipeline!r}",
                    f"remove tiers: {name}, or add {name} to the pipeline",
                )
        if self.parts - set(OURS):
            return self  # a third-party back end gets all settings
        for name, tiers in ONLY_WITH.items():
            if name in self.model_fields_set and not self.parts & tiers:
                raise RefusedValueError(f"{name} does not apply to the store {self.pipeline!r}", f"remove {name}")
        if "options" in self.model_fields_set:
            raise RefusedValueError(f"options does not apply to the store {self.pipeline!r}", "remove options")
        return self

    def as_store_config(self) -> StoreConfig:
        """Return the settings in the form that ``ucm.store.factory.open_store`` takes."""
        return StoreConfig(**{_STORE_NAMES.get(name, name): getattr(self, name) for name in type(self).model_fields})


def replace_former_names(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace the former names of settings in a ``store`` section, before it is validated.

    Args:
        section: The settings as they were written.

    Returns:
        The settings under their present names, and the former names that were replaced, with the present ones. If both
        names of a setting are given, neither is changed.
    """
    replaced = {former: name for former, name in FORMER_NAMES.items() if former in section and name not in section}
    return {replaced.get(key, key): value for key, value in section.items()}, replaced


#: Former names of settings, deprecated, with the names to use.
FORMER_NAMES = {
    "dump_threads": "save_threads",
    "dump_nice": "save_nice",
    "dump_queue": "save_queue",
    "aside_keep": "quarantine_keep",
}
_STORE_NAMES = {
    "posix_capacity": "posix_capacity_bytes",
    "dram_capacity": "dram_capacity_bytes",
    "save_queue": "save_queue_bytes",
    "write_behind": "write_behind_bytes",
}
