"""The configuration of UCM's connectors: YAML or inline, in our format or UCM's, checked as a whole."""

from __future__ import annotations

from ucm.config.load import load_connector_config
from ucm.config.settings import ConnectorConfig, StoreSettings

__all__ = ["ConnectorConfig", "StoreSettings", "load_connector_config"]
