"""The intermediate result of translating settings into our names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.config.problems import NO_VALUE, Place, wrong

if TYPE_CHECKING:
    from ucm.errors import ConfigError

#: The place and the original value of each of our fields, by path.
Origins: TypeAlias = "dict[tuple[str, ...], tuple[Place, object]]"


@dataclass
class Translation:
    """Settings in our names.

    Attributes:
        settings: The settings, not yet validated field by field.
        origins: The origin of each setting that had another name or place.
        notices: Settings that are recognised but have no effect, one sentence each.
        problems: Settings that are not recognised.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, path: tuple[str, ...], value: object, place: Place, written: object) -> None:
        """Set one of our fields, and record where it was written."""
        target = self.settings
        for step in path[:-1]:
            target = target.setdefault(step, {})
        target[path[-1]] = value
        self.origins[path] = (place, written)

    def origin(self, path: tuple[str | int, ...], top: Place, found: object = NO_VALUE) -> tuple[Place, object]:
        """Return where one of our fields was written, and its original value.

        Args:
            path: The field, or an element of it.
            top: The place reported for a field that was not written.
            found: Its current value, if known.
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
        """Note a key that is recognised but has no effect."""
        self.notices.append(f"{place} has no effect here: {reason}")
