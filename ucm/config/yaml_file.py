"""Read a YAML file as a mapping, and reject duplicate keys, which YAML silently accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from ucm.config.problems import Place
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path


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
