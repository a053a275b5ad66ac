"""Settings on their way from how they were written to how we call them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.config.problems import NO_VALUE, Place, wrong

if TYPE_CHECKING:
    from ucm.errors import ConfigError

#: The path of one of our fields, and what was written for it.
Origins: TypeAlias = "dict[tuple[str, ...], tuple[Place, object]]"


@dataclass
class Translation:
    """Settings in our names.

    Attributes:
        settings: What is left to be checked field by field.
        origins: Where each came from that stood under another name, or in another place.
        notices: What was understood and changes nothing, one sentence each.
        problems: What could not be understood.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, path: tuple[str, ...], value: object, place: Place, written: object) -> None:
        """Set one of our fields, and remember where it was written."""
        target = self.settings
        for step in path[:-1]:
            target = target.setdefault(step, {})
        target[path[-1]] = value
        self.origins[path] = (place, written)

    def origin(self, path: tuple[str | int, ...], top: Place, found: object = NO_VALUE) -> tuple[Place, object]:
        """Where one of our fields was written, and what was written for it.

        Args:
            path: The field, or an element of it.
            top: Where a field is expected that was not written.
            found: What stands there, as far as is known.
        """
        for length in range(len(path), 0, -1):
            place, written = self.origins.get(tuple(map(str, path[:length])), (None, None))
            if place is not None:
                rest = path[length:]
                return place.inside(*rest), found if rest else written
        return top.inside(*path), NO_VALUE

    def refuse(self, place: Place, what: str, fix: str, value: object) -> None:
        """Note a problem."""
        self.problems.append(wrong(place, what, fix, value))

    def without_effect(self, place: Place, reason: str) -> None:
        """Note a key that is understood and changes nothing."""
        self.notices.append(f"{place} has no effect here: {reason}")
