"""Read vLLM's own configuration: the configured sparse method, and options by their names in the installed release.

A sparse method is configured in one of two places: the KV connector's settings
(``--kv-transfer-config '{…, "kv_connector_extra_config": {"ucm_sparse_config": {…}}}'``, or the file that its
``UCM_CONFIG_FILE`` names; also those of a connector within vLLM's ``MultiConnector``) and, for a sparse method without
a connector, ``--additional-config '{"ucm_sparse_config": {…}}'``. If several have a method, it must be the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "ucm_sparse_config"
#: The key, beside `KEY` in ``--additional-config``, of connectors for which the operator vouches; see `.sharing`.
TRUSTED = "ucm_trusted_connectors"
#: A key in UCM's files that is not a sparse method: the settings of `BlendConnector`.
BLEND = "Blend"
#: The connector's key for a file with its settings; the same as ``ucm.config.document.FILE_KEY``, which is not
#: imported here because every vLLM process imports this module, and few have such a file.
FILE_KEY = "UCM_CONFIG_FILE"


def sparse_method_config(vllm_config: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of the configured sparse method, or None.

    Raises:
        ConfigError: If the setting is not one method with its options, differs between places, or is misspelt; or
            the settings file cannot be read.
    """
    extra = optional(vllm_config, "kv_transfer_config.kv_connector_extra_config")
    found = list(_of_connectors("kv_connector_extra_config", extra))
    additional = optional(vllm_config, "additional_config")
    if isinstance(additional, dict) and additional:
        if additional.get(KEY):
            found.append((f"additional_config.{KEY}", additional[KEY]))
        else:
            _refuse_misspelt(additional)
    methods = [_one_method(*place_and_value) for place_and_value in found]
    if any(method != methods[0] for method in methods):
        raise ConfigError(
            "two sparse methods are configured, but only one can run",
            where="; ".join(f"{place}: {value!r}" for place, value in found),
            fix="remove all but one",
        )
    return methods[0] if methods else None


def method_of_file(file: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the sparse method that a connector's settings file names, or None; see `sparse_method_config`."""
    transfer = SimpleNamespace(kv_connector_extra_config={FILE_KEY: str(file.absolute())})
    return sparse_method_config(SimpleNamespace(kv_transfer_config=transfer))


def _of_connectors(place: str, extra: object) -> Iterator[tuple[str, object]]:
    """Yield the places and values of a connector's setting, and of connectors inside it (``MultiConnector``).

    vLLM gives each inner connector its own settings, so each would use its own method.
    """
    if not isinstance(extra, dict):
        return
    found = _of_connector(place, extra)
    if found is not None and not (isinstance(found[1], dict) and found[1].keys() == {BLEND}):
        yield found
    within = extra.get("connectors")
    for number, one in enumerate(within if isinstance(within, list) else []):
        if isinstance(one, dict):
            yield from _of_connectors(
                f"{place}.connectors[{number}].kv_connector_extra_config", one.get("kv_connector_extra_config")
            )


def _refuse_misspelt(additional: dict[str, Any]) -> None:
    """Refuse misspelt keys, which would otherwise be ignored and leave the engine silently dense.

    Other packages use these settings, too, so keys that may be theirs are ignored.
    """
    from ucm.sparse.factory import METHODS  # noqa: PLC0415 - most have no such settings

    for key, value in additional.items():
        ours = str(key).lower().replace("-", "_").startswith("ucm_") or (key in METHODS and isinstance(value, dict))
        if ours and key not in {KEY, TRUSTED}:
            raise ConfigError(
                f"{key!r} is not a setting that UCM reads here",
                where=f"additional_config.{key}",
                fix=f"""write {{"{KEY}": {{"<method>": {{…options…}}}}}}; files are for the connector's settings""",
            )


def _of_connector(place: str, extra: dict[str, Any]) -> tuple[str, object] | None:
    """Return the place and the value of a connector's setting; the inline one takes precedence over the file."""
    if extra.get(KEY):
        return f"{place}.{KEY}", extra[KEY]
    if FILE_KEY not in extra:
        return None
    from ucm.config.document import read_document  # noqa: PLC0415 - most have none

    document = read_document(extra)
    value = document.settings.get(KEY)
    return (str(document.place(KEY)), value) if value else None


def _one_method(place: str, value: object) -> tuple[str, dict[str, Any]]:
    if isinstance(value, dict) and len(value) > 1:
        raise ConfigError(
            f"{len(value)} sparse methods are named, but only one can run",
            where=f"{place}: {', '.join(map(str, value))}",
            fix="remove all but one; write a method's options below its name",
        )
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            "a sparse method must be one name with its options",
            where=f"{place}: {value!r}",
            fix=f'write {{"{KEY}": {{"<method>": {{…options…}}}}}}',
        )
    ((name, options),) = value.items()
    if not isinstance(options, dict):
        raise ConfigError(
            f"the options of {name!r} are not a mapping", where=f"{place}.{name}: {options!r}", fix="write {} for none"
        )
    return str(name), options
