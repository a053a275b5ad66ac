"""A sparse method's own settings: declared as a pydantic model, with errors that name the wrong option."""

from __future__ import annotations

import difflib
import reprlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucm.config.problems import raise_for
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: The key of all methods' settings.
SECTION = "ucm_sparse_config"
#: The largest number of tokens that an option may have. Sums of several of them fit into 64 bits.
MOST_TOKENS = 2**31 - 1


def tokens(default: int | None, *, at_least: int) -> Any:
    """Return the field of an option that is a number of tokens, up to `MOST_TOKENS`.

    Args:
        default: Its default.
        at_least: The smallest number.
    """
    return Field(
        default=default, ge=at_least, le=MOST_TOKENS, description=f"a number of tokens, {at_least} to {MOST_TOKENS}"
    )


class MethodOptions(BaseModel):
    """The base class of a method's options: unknown keys and values of another type are refused.

    Attributes:
        beside_kv: Options that do not influence the KV of tokens computed under the method, so that
            engines that differ in them can share it.
    """

    beside_kv: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160


def shown(value: object) -> str:
    """Format a value for a message, however long or deeply nested it is."""
    return _short.repr(value)


Options = TypeVar("Options", bound=MethodOptions)


def parse_options(model: type[Options], name: str, given: Mapping[str, Any], section: str = SECTION) -> Options:
    """Parse a method's options as an operator wrote them.

    Args:
        model: The method's options.
        name: The method's name, for messages.
        given: The value under the method's name.
        section: The key that contains the method's name.

    Raises:
        ConfigError: For all wrong options, each with its place and the remedy.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        errors = [_refused(model, name, of, f"{section}.{name}") for of in error.errors()]
    raise_for(errors)
    raise RuntimeError("options that are refused have no error")


def plain_options(model: type[MethodOptions], name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that shape KV, including defaults; errors as in `parse_options`."""
    return parse_options(model, name, given).model_dump(mode="json", exclude=set(model.beside_kv))


def _refused(model: type[MethodOptions], name: str, error: Mapping[str, Any], place: str) -> ConfigError:
    """Convert one of pydantic's errors."""
    option = ".".join(str(part) for part in error["loc"])
    place = f"{place}.{option}" if option else place
    if error["type"] == "extra_forbidden":
        return ConfigError(f"{name} has no option {option!r}", where=place, fix=_instead(model, option))
    fix = _about(model, option)
    if error["type"] == "literal_error" and option in model.model_fields:
        fix = _meant(str(error["input"]), map(str, get_args(model.model_fields[option].annotation))) + fix
    return ConfigError(_message(error["msg"]), where=f"{place}: {shown(error['input'])}", fix=fix)


def _meant(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _instead(model: type[MethodOptions], option: str) -> str:
    """Suggest the intended option; for nested options only the outer one is known."""
    if "." in option:
        return f"remove it, or correct it: {_about(model, option.partition('.')[0])}"
    return f"{_meant(option, model.model_fields)}There are {', '.join(model.model_fields)}"


def _message(text: str) -> str:
    return text.removeprefix("Value error, ")


def _about(model: type[MethodOptions], option: str) -> str:
    """Describe an option, from its declaration."""
    field = model.model_fields.get(option)
    if field is None or field.description is None:
        return f"correct it; the options are {', '.join(model.model_fields)}"
    return f"{option}: {field.description}"
