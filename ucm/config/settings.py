"""The settings of the connectors: every name, type, bound and default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ucm.config.store_settings import StoreSettings  # noqa: TC001 - pydantic reads the annotations
from ucm.config.validation import RefusedValueError


class ConnectorConfig(BaseModel):
    """What an operator has asked of the connectors, checked; every setting is explained in docs/configuration.md.

    Attributes:
        connector: How blocks are moved: ``direct`` before the forward pass, ``layerwise`` layer by layer, ``mock`` as
            direct with hits capped.
        store: Where blocks are kept; ``store.as_store_config()`` is what ``ucm.store`` takes.
        save_decode_blocks: Whether blocks that are filled by generated tokens are saved as well.
        min_hit_tokens: Smaller hits are computed instead of loaded.
        hit_ratio: At most this share of a prompt's tokens is loaded, 0 to 1.
        load_failure: What becomes of a request whose blocks could not be loaded.
        metrics: Whether counts are handed to vLLM's metrics.
        metrics_log_interval: Seconds between two log lines of hits; 0 for none.
        metrics_config_path: A metrics file of UCM, whose log_interval is used.
        weights_id: The operator's own name for the weights, believed in place of their files.
        ucm_sparse_config: A sparse method with its options, as it stands.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    connector: Literal["direct", "layerwise", "mock"] = "direct"
    store: StoreSettings
    save_decode_blocks: bool = True
    min_hit_tokens: int = Field(default=0, ge=0)
    hit_ratio: float = Field(default=1.0, ge=0, le=1)
    load_failure: Literal["recompute", "fail"] = "recompute"
    metrics: bool = True
    metrics_log_interval: float = Field(default=10.0, ge=0)
    metrics_config_path: str | None = None
    weights_id: str | None = Field(default=None, min_length=1)
    ucm_sparse_config: dict[str, Any] = {}

    @field_validator("ucm_sparse_config")
    @classmethod
    def _no_blending(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "Blend" in value:
            raise RefusedValueError("blending is not in this version", "remove it; prefix caching works without")
        return value

    @model_validator(mode="after")
    def _mock_has_a_ratio(self) -> ConnectorConfig:
        if self.connector == "mock" and "hit_ratio" not in self.model_fields_set:
            raise RefusedValueError(
                "the mock connector needs hit_ratio", "add hit_ratio: the share of a prompt to hit, 0 to 1"
            )
        return self
