"""The settings of the connectors: their names, types, bounds and defaults."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    create_model,
    field_validator,
    model_validator,
)

from ucm.config.document import path_problem
from ucm.config.problems import RefusedValueError
from ucm.store.config import (
    DRAM,
    ENTRY_POINT_GROUP,
    LONGEST,
    OURS,
    POSIX,
    StoreConfig,
    option_types,
    pipeline_parts,
)
from ucm.store.shares import weights_problem

_UNITS = {"b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"\s*(?P<number>(?:0|[1-9]\d*)(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)\s*", re.ASCII)

#: How to write a size, for messages.
SIZE_HELP = "write a number with a unit, such as 512MiB, 200GiB or 1.5TB"
#: The fewest bytes of a size without a unit: in a smaller one, the unit was forgotten.
LEAST_BARE = 1 << 20

#: Settings that apply only to some tiers.
ONLY_WITH = {
    "directories": POSIX,
    "posix_capacity": POSIX,
    "trusted_group": POSIX | DRAM,
    "fsync": POSIX,
    "share_seconds": POSIX,
    "dram_directory": DRAM,
    "dram_capacity": DRAM,
    "dram_capacity_fraction": DRAM,
}
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def parse_size(value: object) -> int:
    """Return the bytes of a size: a number, or a text such as ``200GiB``.

    Units of 1024 have an ``i`` (KiB, MiB, GiB, TiB, PiB), units of 1000 have none (kB, MB, GB, TB, PB); case does not
    matter. A number without a unit is bytes, from 1 MiB on: with fewer, the unit was forgotten. A bare ``G`` is
    ambiguous and is refused.

    Raises:
        RefusedValueError: If it is not a size, or less than one byte.
    """
    unit = ""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = match["unit"].lower()
        if unit and unit not in _UNITS:
            raise RefusedValueError(f"{match['unit']!r} is not a unit of size", SIZE_HELP)
        size = int(Decimal(match["number"]) * _UNITS[unit or "b"])
    else:
        raise RefusedValueError("not a size", SIZE_HELP)
    if size < 1:
        raise RefusedValueError("a size must be at least one byte", SIZE_HELP)
    if not unit and size < LEAST_BARE:
        raise RefusedValueError(f"{size} without a unit is read as {size} bytes", SIZE_HELP)
    return size


def format_size(size: float) -> str:
    """Format a size with three digits and a unit of 1024."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:  # noqa: PLR2004 - the step between the units
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"  # noqa: PLR2004 - three digits


def _list_of(kind: type) -> BeforeValidator:
    """Accept a single value as a list of one."""

    def listed(value: object) -> object:
        return (value,) if type(value) is kind else tuple(value) if isinstance(value, list) else value

    return BeforeValidator(listed)


def _path(value: str) -> str:
    problem = path_problem(value)
    if problem is not None:
        raise RefusedValueError(*problem)
    return value


def _weights(value: dict[str, float]) -> dict[str, float]:
    problem = weights_problem(value)
    if problem:
        raise RefusedValueError(problem, "write {<tag>: <weight>, …}, with tags that `ucm store tag` prints")
    return value


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer("{}B".format, when_used="json")]
FilePath = Annotated[str, AfterValidator(_path)]
Paths = Annotated[tuple[FilePath, ...], _list_of(str)]
Weights = Annotated[dict[str, float], AfterValidator(_weights)]


#: Options of a store that are written in another form than `StoreConfig` has them.
_WRITTEN_AS: dict[str, Any] = {
    "directories": Paths,
    "dram_directory": FilePath,
    "authentication_key_file": FilePath | None,
    "tiers": dict[str, dict[str, Any]],
    "share_weights": Weights,
}


def setting_name(option: str) -> str:
    """Return the name of the setting for an option of `StoreConfig`: sizes may be written with any unit."""
    return option.removesuffix("_bytes")


def _setting(option: dataclasses.Field[Any], kind: Any) -> tuple[Any, Any]:
    """Return the type and the default of the setting for an option of `StoreConfig`, with the option's bounds."""
    if option.name != setting_name(option.name):
        written: Any = Size if option.default else Size | None
    else:
        written = _WRITTEN_AS.get(option.name, kind)
    default: dict[str, Any] = {"default": option.default}
    if option.default is dataclasses.MISSING:
        default = {"default_factory": option.default_factory}
    return written, Field(**default)


_SETTINGS: dict[str, Any] = {
    setting_name(option.name): _setting(option, option_types()[option.name])
    for option in dataclasses.fields(StoreConfig)
}
_Settings: Any = create_model(
    "_Settings",
    __config__=ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False),
    **_SETTINGS,
)


class StoreSettings(_Settings):  # type: ignore[misc] # its fields are those of StoreConfig
    """The settings of a store, one for each option of `StoreConfig`; docs/configuration.md explains each of them."""

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
        return StoreConfig(**{name: getattr(self, setting_name(name)) for name in StoreConfig.field_names()})


class BlendSettings(BaseModel):
    """The settings of blending; docs/blend.md explains each of them.

    Attributes:
        select: Which tokens of a reused chunk are recomputed: its ``edges``, its edges and the passages that the
            ``question`` attends to, or ``none``.
        edge_tokens: With ``edges`` and ``question``, the number of tokens at the start of each chunk.
        ratio: With ``question``, the share of the reused tokens to recompute, 0 to 1.
        min_tokens: The minimum size of a chunk to store or look up, and of a blended hit.
        chunk_end_token_ids: Tokens that end a chunk, for requests that do not mark their chunks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    select: Literal["edges", "question", "none"] = "edges"
    edge_tokens: int = Field(default=16, ge=0)
    ratio: float = Field(default=0.15, ge=0, le=1)
    min_tokens: int = Field(default=256, ge=1)
    chunk_end_token_ids: Annotated[tuple[int, ...], _list_of(int)] = ()


class ConnectorConfig(BaseModel):
    """The checked settings of the connectors; docs/configuration.md explains each of them.

    Attributes:
        connector: How blocks are loaded: ``direct`` before the forward pass, ``layerwise`` layer by layer, ``mock`` as
            direct with capped hits.
        store: The store of the blocks; ``store.as_store_config()`` converts it for ``ucm.store``.
        save_decode_blocks: Whether blocks filled with generated tokens are saved, too.
        min_hit_tokens: The minimum size of a hit; smaller ones are recomputed instead of loaded.
        hit_ratio: The maximum share of a prompt's tokens to load, 0 to 1.
        chunk_tokens: The tokens whose blocks are stored as one, rounded up to whole blocks; 0: each block alone.
        kv_head_shards: The slices of KV heads that a block is stored in, which engines of several tensor-parallel sizes
            share; 0: each rank's part of a block is stored as it is.
        staging: Bytes of host memory in which blocks are staged; None for a share of the host's.
        staging_deadline: Seconds after which a lookup returns what has been verified by then.
        load_failure: Whether a request whose blocks fail to load is recomputed or fails.
        metrics: Whether counters are exported through vLLM's metrics.
        metrics_log_interval: Seconds between log lines about hits; 0 for none.
        kv_events: Whether stored blocks are announced by vLLM's KV-cache events.
        weights_id: The operator's name for the weights, used as their identity in place of their files' contents.
        trust_media_names: Whether a multimodal input's name identifies it in place of its data.
        ucm_sparse_config: The sparse method with its options, unchanged.
        blend: The settings of blending, for BlendConnector only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    connector: Literal["direct", "layerwise", "mock"] = "direct"
    store: StoreSettings
    save_decode_blocks: bool = True
    min_hit_tokens: int = Field(default=0, ge=0)
    hit_ratio: float = Field(default=1.0, ge=0, le=1)
    chunk_tokens: int = Field(default=0, ge=0, le=1 << 20)
    kv_head_shards: int = Field(default=0, ge=0, le=1 << 10)
    staging: Size | None = None
    staging_deadline: float = Field(default=2.0, gt=0, le=LONGEST)
    load_failure: Literal["recompute", "fail"] = "recompute"
    metrics: bool = True
    metrics_log_interval: float = Field(default=10.0, ge=0, le=LONGEST)
    kv_events: bool = False
    weights_id: str | None = Field(default=None, min_length=1)
    trust_media_names: bool = False
    ucm_sparse_config: dict[str, Any] = {}
    blend: BlendSettings | None = None

    @model_validator(mode="after")
    def _layers_are_not_compressed(self) -> ConnectorConfig:
        for name, options in self.store.tiers.items():
            if self.connector == "layerwise" and options.get("compression", "none") != "none":
                raise RefusedValueError(
                    f"the layerwise connector would read each compressed block of {name} once for every layer",
                    f"remove connector: layerwise, or compression from tiers: {name}",
                )
        return self

    @model_validator(mode="after")
    def _mock_has_a_ratio(self) -> ConnectorConfig:
        if self.connector == "mock" and "hit_ratio" not in self.model_fields_set:
            raise RefusedValueError(
                "the mock connector needs hit_ratio", "add hit_ratio: the share of a prompt to hit, 0 to 1"
            )
        return self
