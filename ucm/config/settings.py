"""The settings of the connectors: their names, types, bounds and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ucm.config.store_settings import Size, StoreSettings  # noqa: TC001 - pydantic reads the annotations
from ucm.config.validation import RefusedValueError


def _numbers(value: object) -> object:
    """Accept a single number as a list of one."""
    return (value,) if type(value) is int else tuple(value) if isinstance(value, list) else value


class BlendSettings(BaseModel):
    """The settings of blending; docs/blend.md explains each of them.

    Attributes:
        select: Which tokens of a reused chunk are recomputed: its ``edges``, those of largest ``deviation``, or
            ``none``.
        edge_tokens: With ``edges``, the number of tokens at the start of each chunk.
        ratio: With ``deviation``, the share of the reused tokens to recompute, 0 to 1.
        check_layer: With ``deviation``, the layer whose KV is compared.
        min_tokens: The minimum size of a chunk to store or look up, and of a blended hit.
        chunk_end_token_ids: Tokens that end a chunk, for requests that do not mark their chunks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    select: Literal["edges", "deviation", "none"] = "edges"
    edge_tokens: int = Field(default=16, ge=0)
    ratio: float = Field(default=0.15, ge=0, le=1)
    check_layer: int = Field(default=1, ge=0)
    min_tokens: int = Field(default=256, ge=1)
    chunk_end_token_ids: Annotated[tuple[int, ...], BeforeValidator(_numbers)] = ()


class ConnectorConfig(BaseModel):
    """The checked settings of the connectors; docs/configuration.md explains each of them.

    Attributes:
        connector: How blocks are loaded: ``direct`` before the forward pass, ``layerwise`` layer by layer, ``mock`` as
            direct with capped hits.
        store: The store of the blocks; ``store.as_store_config()`` converts it for ``ucm.store``.
        save_decode_blocks: Whether blocks filled with generated tokens are saved, too.
        min_hit_tokens: The minimum size of a hit; smaller ones are recomputed instead of loaded.
        hit_ratio: The maximum share of a prompt's tokens to load, 0 to 1.
        staging: Bytes of host memory in which blocks are staged; None for a share of the host's.
        staging_deadline: Seconds after which a lookup returns what has been verified by then.
        load_failure: Whether a request whose blocks fail to load is recomputed or fails.
        metrics: Whether counters are exported through vLLM's metrics.
        metrics_log_interval: Seconds between log lines about hits; 0 for none.
        metrics_config_path: A metrics file of UCM, of which log_interval is used.
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
    staging: Size | None = None
    staging_deadline: float = Field(default=2.0, gt=0)
    load_failure: Literal["recompute", "fail"] = "recompute"
    metrics: bool = True
    metrics_log_interval: float = Field(default=10.0, ge=0)
    metrics_config_path: str | None = None
    kv_events: bool = False
    weights_id: str | None = Field(default=None, min_length=1)
    trust_media_names: bool = False
    ucm_sparse_config: dict[str, Any] = {}
    blend: BlendSettings | None = None

    @model_validator(mode="after")
    def _mock_has_a_ratio(self) -> ConnectorConfig:
        if self.connector == "mock" and "hit_ratio" not in self.model_fields_set:
            raise RefusedValueError(
                "the mock connector needs hit_ratio", "add hit_ratio: the share of a prompt to hit, 0 to 1"
            )
        return self
