"""Read settings from ``kv_connector_extra_config``, the file that it names, or both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.config.problems import Place
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The key that names a file with the settings.
FILE_KEY = "UCM_CONFIG_FILE"
#: The name of the settings on vLLM's command line, for messages.
INLINE = "kv_connector_extra_config"

_LEFT_OVER = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True)
class Document:
    """Settings as written by the user.

    Args:
        settings: All settings, by top-level key.
        file: The file that was read, if any.
        inline: The top-level keys in ``kv_connector_extra_config`` itself.
        overridden: The inline keys that the file has, too.
    """

    settings: Mapping[str, Any]
    file: Path | None = None
    inline: frozenset[str] = frozenset()
    overridden: frozenset[str] = frozenset()

    def place(self, key: str) -> Place:
        """Return the place of a top-level key."""
        source = INLINE if self.file is None or key in self.inline else str(self.file)
        return Place(source, key)


def read_document(extra_config: Mapping[str, Any]) -> Document:
    """Read the settings of a connector; inline settings override the file's, one top-level key at a time.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``.

    Raises:
        ConfigError: If the file cannot be used.
    """
    inline = {key: value for key, value in extra_config.items() if key != FILE_KEY}
    if FILE_KEY not in extra_config:
        return Document(inline, None, frozenset(inline))
    from ucm.config.yaml_file import read_yaml  # noqa: PLC0415 - every vLLM process imports us, few have a file

    file = _file(extra_config[FILE_KEY])
    settings = read_yaml(file)
    if FILE_KEY in settings:
        raise ConfigError(
            "a configuration file cannot name another", where=str(Place(str(file), FILE_KEY)), fix="remove that line"
        )
    return Document(settings | inline, file, frozenset(inline), frozenset(inline.keys() & settings.keys()))


def _file(value: object) -> Path:
    place = Place(INLINE, FILE_KEY)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError("not the path of a file", where=f"{place} = {value!r}", fix="name a YAML file")
    path = expand(os.fspath(value), place)
    return path if path.is_absolute() else Path.cwd() / path


def expand(text: str | bytes, place: Place) -> Path:
    """Expand ``~`` and environment variables in a path.

    Raises:
        ConfigError: If a variable is not set, or there is no such home directory.
    """
    expanded = os.path.expanduser(os.path.expandvars(os.fsdecode(text)))  # noqa: PTH111 - Path has no expandvars
    missing = _LEFT_OVER.search(expanded)
    if missing:
        name = missing[1].strip("{}")
        fix = f"set {name} in the environment of vLLM, or write the path out"
        raise ConfigError(f"the environment variable {name} is not set", where=f"{place} = {text!r}", fix=fix)
    if expanded.startswith("~"):
        raise ConfigError("there is no such home directory", where=f"{place} = {text!r}", fix="write the path out")
    return Path(expanded)
