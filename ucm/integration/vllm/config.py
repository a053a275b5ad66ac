"""What an operator has asked of UCM, read from vLLM's own configuration.

Two places are read, the first that has the key wins: the KV connector's settings
(``--kv-transfer-config '{…, "kv_connector_extra_config": {"ucm_sparse_config": {…}}}'``) and, for a sparse method
without a connector, ``--additional-config '{"ucm_sparse_config": {…}}'``.
"""

from __future__ import annotations

from typing import Any

from ucm.errors import ConfigError

KEY = "ucm_sparse_config"


def sparse_method_config(vllm_config: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and the options of the configured sparse method, or None.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ConfigError: If the setting is not one method with its options.
    """
    for place, settings in _places(vllm_config):
        if settings.get(KEY):
            return _one_method(place, settings[KEY])
    return None


def _places(vllm_config: Any) -> list[tuple[str, dict[str, Any]]]:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None)
    additional = getattr(vllm_config, "additional_config", None)
    found = [(f"kv_connector_extra_config.{KEY}", extra), (f"additional_config.{KEY}", additional)]
    return [(place, settings) for place, settings in found if isinstance(settings, dict)]


def _one_method(place: str, value: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(
            "a sparse method is one name with its options",
            where=f"{place}: {value!r}",
            fix=f'write {{"{KEY}": {{"<method>": {{…options…}}}}}}',
        )
    ((name, options),) = value.items()
    if not isinstance(options, dict):
        raise ConfigError(
            f"the options of {name!r} are not a mapping", where=f"{place}.{name}: {options!r}", fix="write {} for none"
        )
    return str(name), options
