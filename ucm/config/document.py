"""Read settings from ``kv_connector_extra_config``, the file that it names, or both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ucm.config.problems import Place
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

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


class _Loader(yaml.SafeLoader):
    """Loads plain values only, and rejects duplicate keys, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, or is not a mapping whose keys are names.
    """
    where = str(Place(str(path)))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=where, fix="correct the path, or make the file readable") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration file is not UTF-8: {error}", where=where, fix="save it as UTF-8"
        ) from error
    try:
        found = yaml.load(text, _Loader)  # noqa: S506 - the loader derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(f"not YAML: {error.problem}", where=line, fix="correct that line") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", where=where, fix="correct the file") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(
            f"the file holds {type(found).__name__ if not isinstance(found, dict) else 'keys that are not names'}, "
            "where 'name: value' lines are expected",
            where=where,
            fix="see docs/configuration.md for an example",
        )
    return found
