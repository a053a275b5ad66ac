"""Read settings from ``kv_connector_extra_config``, the file that it names, or both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ucm.config.problems import Place, wrong
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

#: The key that names a file with the settings.
FILE_KEY = "UCM_CONFIG_FILE"
#: The name of the settings on vLLM's command line, for messages.
INLINE = "kv_connector_extra_config"
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
#: The most bytes of a file.
_MOST_BYTES = 1 << 20
#: The values without quotes that are no texts, by YAML 1.2 and without what 1.1 reads otherwise, such as ``010``.
_VALUES = (
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", "~|null|Null|NULL", "~nN"),
    ("merge", "<<", "<"),
)


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

    Raises:
        ConfigError: If the file cannot be used.
    """
    inline = {key: value for key, value in extra_config.items() if key != FILE_KEY}
    if FILE_KEY not in extra_config:
        return Document(inline, None, frozenset(inline))
    file = _file(extra_config[FILE_KEY])
    settings = read_yaml(file)
    if FILE_KEY in settings:
        raise wrong(Place(str(file), FILE_KEY), "a configuration file cannot name another", "remove that line")
    return Document(settings | inline, file, frozenset(inline), frozenset(inline.keys() & settings.keys()))


def _file(value: object) -> Path:
    place = Place(INLINE, FILE_KEY)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise wrong(place, "not the path of a file", "name a YAML file", value)
    path = expand(os.fspath(value), place)
    return path if path.is_absolute() else Path.cwd() / path


def expand(text: str | bytes, place: Place) -> Path:
    """Expand ``~`` and environment variables in a path.

    Raises:
        ConfigError: If the path is empty, contains a null character, or is several paths or a URL; if a variable is not
            set or empty; or if there is no such home directory.
    """
    written = os.fsdecode(text)
    if problem := path_problem(written):
        raise wrong(place, *problem, text)
    for found in _VARIABLE.finditer(written):
        name = found[1].strip("{}")
        if not os.environ.get(name, "").strip():
            how = "empty" if name in os.environ else "not set"
            fix = f"set {name} in the environment of vLLM, or write the path out"
            raise wrong(place, f"the environment variable {name} is {how}", fix, text)
    expanded = os.path.expandvars(written)
    if expanded.startswith("~"):
        expanded = os.path.expanduser(expanded) if os.environ.get("HOME", "/").startswith("/") else expanded  # noqa: PTH111 - it keeps what it does not know
        if expanded.startswith("~"):
            raise wrong(place, "there is no such home directory", "write the path out", text)
    return Path(expanded)


def path_problem(written: str) -> tuple[str, str] | None:
    """Return why a text is not the path of one file or directory, and what to write; None if it can be one."""
    if not written.strip():
        return "the path is empty", "name a file or directory, or remove the setting"
    if "\0" in written:
        return "the path contains a null character", "remove it"
    if written != written.strip():
        return "the path begins or ends with white space", "remove it"
    if "://" in written:
        return "this is a URL, where a path is expected", "write the path of a mounted file system"
    if ":/" in written:
        return "these are several paths, joined by colons", "write a list: [/first, /second]"
    return None


class _Loader(yaml.SafeLoader):
    """Loads plain values only, as YAML 1.2 reads them, and rejects duplicate keys, of which YAML keeps the last."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - as PyYAML declares it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


for _name, _pattern, _first in _VALUES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"({_pattern})$"), list(_first))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, or is not a mapping whose keys are names.
    """
    place = Place(str(path))
    try:
        with path.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        text = content.decode()
    except FileNotFoundError as error:
        raise wrong(place, "the configuration file does not exist", "correct the path, or write the file") from error
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror or error}"
        raise wrong(place, what, "correct the path, or make the file readable") from error
    except UnicodeDecodeError as error:
        raise wrong(place, f"the configuration file is not UTF-8: {error}", "save it as UTF-8") from error
    if len(content) > _MOST_BYTES:
        raise wrong(place, f"the file has more than {_MOST_BYTES} bytes", "name a YAML file of settings")
    found = _load(text, place)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        holds = type(found).__name__ if not isinstance(found, dict) else "keys that are not names"
        what = f"the file holds {holds}, where 'name: value' lines are expected"
        raise wrong(place, what, "see docs/configuration.md for an example")
    return found


def _load(text: str, place: Place) -> Any:
    """Return the content of a YAML document; None if it is empty.

    Raises:
        ConfigError: If it is not YAML.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
            return None
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else str(place)
        fix = "indent with spaces, not with tabs" if "\\t" in str(error.problem) else "correct that line"
        raise ConfigError(f"not YAML: {error.problem}", where=line, fix=fix) from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # the last two: not what its tag says
        raise wrong(place, f"not YAML: {error}", "correct the file") from error
    except RecursionError:
        raise wrong(place, "the file is nested too deeply", "see docs/configuration.md for an example") from None
