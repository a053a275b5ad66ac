"""The ``store`` section: where blocks are kept, and how."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ucm.config.units import SIZE_HELP, parse_size
from ucm.config.validation import RefusedValueError
from ucm.store.config import StoreConfig, default_dram_directory

#: The stores that we bring.
PIPELINES = ("Posix", "Dram", "Cache|Posix", "Empty")
#: Those with a Posix tier, and those with a Dram tier.
WITH_POSIX, WITH_DRAM = ("Posix", "Cache|Posix"), ("Dram", "Cache|Posix")
#: Settings that mean something to some of our stores only.
ONLY_WITH = {
    "directories": WITH_POSIX,
    "posix_capacity": WITH_POSIX,
    "fsync": WITH_POSIX,
    "direct_io": WITH_POSIX,
    "dram_directory": WITH_DRAM,
    "dram_capacity": WITH_DRAM,
    "dram_capacity_fraction": WITH_DRAM,
    "options": (),
}
#: The entry points of others' stores.
GROUP = "ucm.stores"
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise RefusedValueError(str(error), SIZE_HELP) from error


def _paths(value: object) -> object:
    """One path may stand for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Size = Annotated[int, BeforeValidator(_size)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]


class StoreSettings(BaseModel):
    """What an operator can say of a store; every setting is explained in docs/configuration.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    pipeline: str = StoreConfig.pipeline
    directories: Paths = StoreConfig.directories
    posix_capacity: Size | None = StoreConfig.posix_capacity_bytes
    dram_directory: str = Field(default_factory=default_dram_directory)
    dram_capacity: Size | None = StoreConfig.dram_capacity_bytes
    dram_capacity_fraction: float = Field(default=StoreConfig.dram_capacity_fraction, gt=0, le=1)
    fsync: bool = StoreConfig.fsync
    direct_io: bool = StoreConfig.direct_io
    load_threads: int = Field(default=StoreConfig.load_threads, ge=1, le=256)
    dump_threads: int = Field(default=StoreConfig.dump_threads, ge=1, le=256)
    dump_nice: int = Field(default=StoreConfig.dump_nice, ge=0, le=19)
    dump_queue: Size = StoreConfig.dump_queue_bytes
    lookup_cache_keys: int = Field(default=StoreConfig.lookup_cache_keys, ge=0)
    lookup_cache_seconds: float = Field(default=StoreConfig.lookup_cache_seconds, ge=0)
    failures_until_rest: int = Field(default=StoreConfig.failures_until_rest, ge=1)
    rest_seconds: float = Field(default=StoreConfig.rest_seconds, ge=0)
    aside_keep: int = Field(default=StoreConfig.aside_keep, ge=0)
    touch_seconds: float = Field(default=StoreConfig.touch_seconds, ge=0)
    stale_seconds: float = Field(default=StoreConfig.stale_seconds, ge=0)
    options: dict[str, Any] = {}

    @field_validator("pipeline")
    @classmethod
    def _known_pipeline(cls, value: str) -> str:
        if value not in PIPELINES and not _CLASS.fullmatch(value) and not entry_points(group=GROUP, name=value):
            others = f"the name of an entry point in {GROUP}, or package.module:Class"
            raise RefusedValueError("there is no such store", f"use one of {', '.join(PIPELINES)}, {others}")
        return value

    @model_validator(mode="after")
    def _what_goes_together(self) -> StoreSettings:
        if self.pipeline not in PIPELINES:
            return self
        if self.pipeline in WITH_POSIX and not self.directories:
            raise RefusedValueError(f"the store {self.pipeline!r} needs a directory", "add directories: [/path]")
        for name, stores in ONLY_WITH.items():
            if name in self.model_fields_set and self.pipeline not in stores:
                raise RefusedValueError(f"{name} means nothing to the store {self.pipeline!r}", f"remove {name}")
        return self

    def as_store_config(self) -> StoreConfig:
        """The same for ``ucm.store.factory.open_store``."""
        return StoreConfig(**{_STORE_NAMES.get(name, name): getattr(self, name) for name in type(self).model_fields})


_STORE_NAMES = {
    "posix_capacity": "posix_capacity_bytes",
    "dram_capacity": "dram_capacity_bytes",
    "dump_queue": "dump_queue_bytes",
}
