"""Configuration problems, each with its place and remedy.

They are collected and raised as one error.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ucm.errors import ConfigError, meant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


T = TypeVar("T")
#: Marks a missing value where None would be valid.
NO_VALUE: Any = object()

#: The names of settings whose values must not be shown.
SECRET = re.compile(r"(?i)password|passwd|secret|token|credential")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160
_short.maxlist = _short.maxdict = 8


def shown(value: object) -> str:
    """Format a value for a message, however long or deeply nested it is."""
    return _short.repr(value)


@dataclass(frozen=True)
class Place:
    """The place of a setting.

    Args:
        source: The file, or the name of the vLLM option that contains it.
        path: The field within it, for instance ``ucm_connectors[0].ucm_connector_config``.
    """

    source: str
    path: str = ""

    def inside(self, *steps: str | int) -> Place:
        """Return the place of a field or an element below this one."""
        path = self.path
        for step in steps:
            if isinstance(step, int):
                path += f"[{step}]"
            else:
                path += f".{step}" if path else step
        return Place(self.source, path)

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source


def wrong(place: Place, what: str, fix: str, value: object = NO_VALUE) -> ConfigError:
    """Return the error for one problem.

    Args:
        place: Its place.
        what: The problem, in one sentence.
        fix: The remedy.
        value: The wrong value; NO_VALUE if the problem is that there is none.
    """
    written = "" if value is NO_VALUE else f" = {shown(value)}"
    return ConfigError(what, where=f"{place}{written}", fix=fix)


def found_or_problems(found: T | None, errors: Sequence[ConfigError]) -> T:
    """Return what was found; raise one error that lists all problems, if there are any.

    Raises:
        ConfigError: If there is a problem.
    """
    if not errors and found is not None:
        return found
    if len(errors) == 1:
        raise errors[0]
    listed = "\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
    raise ConfigError(f"{len(errors)} settings cannot be used\n{listed}")


def unknown(place: Place, value: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key.

    Args:
        place: Its place; the last step is the key.
        value: Its value.
        known: The keys that are valid there.
    """
    key = place.path.rpartition(".")[2]
    names = sorted(known)
    fix = meant(key, names).strip() or f"remove it; the settings are {', '.join(names)}"
    if SECRET.search(key):
        fix = f"write the secret into a file, or an environment variable; {fix}"
        value = NO_VALUE
    return wrong(place, f"{key!r} is not a setting", fix, value)


class RefusedValueError(ValueError):
    """Raised by validators of the settings."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
