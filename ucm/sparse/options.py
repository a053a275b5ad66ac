"""A sparse method's own settings: declared as a pydantic model, refused by name when they are wrong."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The key that all methods' settings stand under.
SECTION = "ucm_sparse_config"


class MethodOptions(BaseModel):
    """The base of a method's options: unknown keys and values of another type are refused.

    Attributes:
        beside_kv: Options that have no influence on the KV of the tokens that are computed under the method, so that
            engines which differ in them can share it.
    """

    beside_kv: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Options = TypeVar("Options", bound=MethodOptions)


def parse_options(model: type[Options], name: str, given: Mapping[str, Any]) -> Options:
    """A method's options as an operator wrote them.

    Args:
        model: The method's options.
        name: The method's name, for messages.
        given: What stands under the method's name.

    Raises:
        ConfigError: For the first option that is wrong, with its place and what would be right.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        place = ".".join(part for part in (SECTION, name, option) if part)
        if first["type"] == "extra_forbidden":
            what, fix = f"{name} has no option {option!r}", _instead(model, option)
        else:
            what, fix = _message(first["msg"]), _about(model, option)
            place = f"{place}: {first['input']!r}"
        raise ConfigError(what, where=place, fix=fix) from error


def _instead(model: type[MethodOptions], option: str) -> str:
    """What may be meant; of options of an option, only that one knows."""
    if "." in option:
        return f"remove it, or correct it: {_about(model, option.partition('.')[0])}"
    close = difflib.get_close_matches(option, model.model_fields, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}There are {', '.join(model.model_fields)}"


def _message(text: str) -> str:
    return text.removeprefix("Value error, ")


def _about(model: type[MethodOptions], option: str) -> str:
    """What an option is, from its declaration."""
    field = model.model_fields.get(option)
    if field is None or field.description is None:
        return f"correct it; the options are {', '.join(model.model_fields)}"
    return f"{option}: {field.description}"
