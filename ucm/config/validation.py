"""Turn pydantic's errors into errors that name the place in the operator's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.config.problems import NO_VALUE, unknown, wrong

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    from ucm.config.problems import Place
    from ucm.config.translation import Translation
    from ucm.errors import ConfigError

#: The problem and the remedy for each kind of error, with placeholders for the error's values.
_WORDS = {
    "bool_type": ("neither true nor false", "write true or false"),
    "dict_type": ("not a mapping", "write {{name: value, …}}"),
    "finite_number": ("not a finite number", "write a finite number"),
    "float_type": ("not a number", "write a number"),
    "greater_than": ("{gt} or less", "write more than {gt}"),
    "greater_than_equal": ("less than {ge}", "write {ge} or more"),
    "int_type": ("not a whole number", "write a whole number"),
    "invalid_key": ("a name is expected, not a number", "write a setting's name"),
    "less_than_equal": ("more than {le}", "write {le} or less"),
    "literal_error": ("not one of the possible values", "write {expected}"),
    "model_type": ("not a mapping", "write {{name: value, …}}"),
    "string_too_short": ("empty", "write a text, or leave the setting out"),
    "string_type": ("not a text", "write it in quotes"),
    "tuple_type": ("not a list", "write [first, second, …]"),
}


class RefusedValueError(ValueError):
    """Raised by validators of the settings.

    Args:
        what: The problem.
        fix: The remedy.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def problems_of(
    error: ValidationError, model: type[BaseModel], path: tuple[str, ...], out: Translation, top: Place
) -> list[ConfigError]:
    """List the problems that pydantic found.

    Args:
        error: Pydantic's error.
        model: The validated model.
        path: The model's path among our settings.
        out: The translation, which has the place of each setting.
        top: The place reported for settings that were not written.
    """
    return [_problem(details, model, path, out, top) for details in error.errors()]


def _problem(
    details: ErrorDetails, model: type[BaseModel], path: tuple[str, ...], out: Translation, top: Place
) -> ConfigError:
    kind, context = details["type"], details.get("ctx", {})
    place, value = out.origin((*path, *details["loc"]), top, details["input"])
    if (*path, *details["loc"])[:2] == ("store", "tiers"):
        value = NO_VALUE  # it may be a server's password, put there by mistake
    elif isinstance(value, dict) and "tiers" in value:
        value = {**value, "tiers": "…"}
    if kind == "extra_forbidden":
        return unknown(place, value, model.model_fields)
    ours = context.get("error")
    if isinstance(ours, RefusedValueError):
        return wrong(place, ours.what, ours.fix, value)
    what, fix = _WORDS.get(kind, (details["msg"], "see docs/configuration.md"))
    return wrong(place, what.format_map(context), fix.format_map(context), value)
