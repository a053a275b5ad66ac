"""The settings of a sparse method: its own, declared as a pydantic model, and those of single requests.

Errors name the wrong option. A request's settings are ``ucm_sparse`` in ``SamplingParams.extra_args``. The API server's
``vllm_xargs`` become ``extra_args``, but cannot contain objects, and booleans arrive as 0 and 1. An object may
therefore be JSON text, and 0 and 1 count as booleans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucm.config.problems import found_or_problems, shown
from ucm.errors import ConfigError, meant
from ucm.logger import get_logger
from ucm.sparse.attention import KEY

if TYPE_CHECKING:
    from ucm.sparse.base import SparseMethod

#: The key of all methods' settings.
SECTION = "ucm_sparse_config"
#: The largest number of tokens that an option may have. Sums of several of them fit into 64 bits.
MOST_TOKENS = 2**31 - 1

#: The maximum number of logged refusals, because clients control their number.
MOST_TOLD = 20
#: The maximum length of the JSON text; valid settings are shorter, and deeply nested text is not parsed.
LONGEST = 200


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
    found, errors = None, list[ConfigError]()
    try:
        found = model.model_validate(dict(given))
    except ValidationError as error:
        errors = [_refused(model, name, of, f"{section}.{name}") for of in error.errors()]
    return found_or_problems(found, errors)


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
        fix = meant(str(error["input"]), map(str, get_args(model.model_fields[option].annotation))) + fix
    return ConfigError(error["msg"].removeprefix("Value error, "), where=f"{place}: {shown(error['input'])}", fix=fix)


def _instead(model: type[MethodOptions], option: str) -> str:
    """Suggest the intended option; for nested options only the outer one is known."""
    if "." in option:
        return f"remove it, or correct it: {_about(model, option.partition('.')[0])}"
    return f"{meant(option, model.model_fields)}There are {', '.join(model.model_fields)}"


def _about(model: type[MethodOptions], option: str) -> str:
    """Describe an option, from its declaration."""
    field = model.model_fields.get(option)
    if field is None or field.description is None:
        return f"correct it; the options are {', '.join(model.model_fields)}"
    return f"{option}: {field.description}"


class RequestOptions(MethodOptions):
    """The settings that a request may have.

    Attributes:
        token_budget: Tokens of this request that a decode step reads in a layer, instead of the method's budget; None
            keeps the method's.
        budget_share: The share of its context that a decode step reads if that is more; None keeps the method's, or
            none with a ``token_budget``.
    """

    token_budget: int | None = tokens(None, at_least=1)
    budget_share: float | None = Field(default=None, gt=0, lt=1, description="a share of the context, between 0 and 1")


def parse_asked(asked: object) -> RequestOptions | None:
    """Parse a request's settings; return None if the request is to be dense.

    Args:
        asked: The result of `asked_of`: a boolean (or 0 or 1), `RequestOptions` as a mapping, or that as JSON text.

    Raises:
        ConfigError: If it is none of these, or an option is wrong.
    """
    given = asked
    if isinstance(given, str) and len(given) <= LONGEST:
        with suppress(ValueError):
            given = json.loads(given)
    if given is None or given in (False, True):
        return RequestOptions() if given in (None, True) else None
    if isinstance(given, Mapping):
        return parse_options(RequestOptions, KEY, {str(key): value for key, value in given.items()}, "extra_args")
    raise ConfigError(
        "it is neither a boolean nor an object",
        where=f"extra_args.{KEY}: {shown(asked)}",
        fix='false makes a request dense, {"token_budget": 4096} gives it a budget of its own',
    )


class Complaints:
    """Warnings about refused per-request settings: vLLM cannot reject a request at this point.

    Args:
        name: The method's name.
        rank: The worker's rank; all see the same, and only one logs it.
    """

    def __init__(self, name: str, rank: int = 0) -> None:
        self._name = name
        self._rank = rank
        self._told: set[str] = set()

    def tell(self, request_id: str, error: ConfigError, instead: str) -> None:
        """Log why a request's settings are refused; once per reason, and at most `MOST_TOLD` reasons.

        Args:
            request_id: The request's id.
            error: The problem.
            instead: How the request is served instead.
        """
        why = str(error)[:1000]
        if self._rank == 0 and why not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(why)
            get_logger(__name__).warning(
                "[UCM.Sparse] request %s asks %s for options that cannot be honoured, so %s; further such requests "
                "are not logged.\n%s",
                *(request_id, self._name, instead, why),
            )


def refuse_asked(asked: Mapping[str, object], method: SparseMethod) -> None:
    """Log that a method has no per-request settings, if a request has any.

    Args:
        asked: The settings of a step's requests; see `StepBatch`.
        method: The method.
    """
    for request_id, of in asked.items():
        try:
            if parse_asked(of) == RequestOptions():
                continue
            error = ConfigError(
                f"{type(method).__name__} has no options for single requests",
                where=f"extra_args.{KEY}: {shown(of)}",
                fix=f"leave {KEY} out; BlockTopK, GSAOnDevice, and SinkWindow with `prefill: dense` support it",
            )
        except ConfigError as wrong:
            error = wrong
        method.complaints.tell(request_id, error, "it runs like all others")
