"""Problems of a configuration, collected and then raised as one error, each with its place and its remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Stands for a value that is not there, where None would be one.
NO_VALUE: Any = object()

#: Fewer letters in common than this, and a suggestion would puzzle more than it helps.
SIMILARITY = 0.6

#: What a setting is called whose value is not to be shown.
SECRET = re.compile(r"(?i)password|passwd|secret|token|credential")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160
_short.maxlist = _short.maxdict = 8


@dataclass(frozen=True)
class Place:
    """Where a setting stands.

    Args:
        source: The file, or the name of the option of vLLM that holds it.
        path: The field within it, for instance ``ucm_connectors[0].ucm_connector_config``.
    """

    source: str
    path: str = ""

    def inside(self, *steps: str | int) -> Place:
        """The place of a field or an element below this one."""
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
    """The error that tells of one problem.

    Args:
        place: Where it stands.
        what: What is wrong, in one sentence.
        fix: What to do about it.
        value: The value that stands there; NO_VALUE where the point is that there is none.
    """
    shown = "" if value is NO_VALUE else f" = {_short.repr(value)}"
    return ConfigError(what, where=f"{place}{shown}", fix=fix)


def raise_for(errors: Sequence[ConfigError]) -> None:
    """Raise one error that tells of all problems; none if there are none.

    Raises:
        ConfigError: If there is a problem.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    listed = "\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
    raise ConfigError(f"{len(errors)} settings cannot be used\n{listed}")


def unknown(place: Place, value: object, known: Iterable[str]) -> ConfigError:
    """The error for an unknown key.

    Args:
        place: Where it stands; the last step is the key.
        value: What it was set to.
        known: The keys that could stand there.
    """
    key = place.path.rpartition(".")[2]
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=SIMILARITY)
    fix = f"did you mean {close[0]!r}?" if close else f"remove it; known here: {', '.join(names)}"
    if SECRET.search(key):
        fix = f"write the secret into a file, or an environment variable; {fix}"
        value = NO_VALUE
    return wrong(place, f"{key!r} is not a setting", fix, value)
