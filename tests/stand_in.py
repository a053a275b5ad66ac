"""Check whether a function can replace another one: it accepts every call that the other one accepts."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def disagreement(real: Any, stand_in: Any) -> str | None:
    """Return why a stand-in does not accept the real function's calls; None if it does, or one is not a function.

    Args:
        real: The replaced object.
        stand_in: Its replacement.
    """
    if not (inspect.isroutine(real) and callable(stand_in)):
        return None
    try:
        wanted, taken = inspect.signature(real), inspect.signature(stand_in)
    except ValueError:  # some builtins have no signature
        return None
    for positional, named in _calls(wanted):
        try:
            taken.bind(*positional, **named)
        except TypeError as error:
            return f"{real.__qualname__}{wanted} is replaced by a function that takes {taken}: {error}"
    return None


def _calls(signature: inspect.Signature) -> Iterator[tuple[list[None], dict[str, None]]]:
    """Yield the extreme calls of a signature: all arguments by position, all by name, only the required ones."""
    parameters = signature.parameters.values()
    by_position = [p for p in parameters if p.kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}]
    only_position = [p for p in by_position if p.kind is Parameter.POSITIONAL_ONLY]
    only_name = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    more = [None for p in parameters if p.kind is Parameter.VAR_POSITIONAL]
    more_names = dict.fromkeys(["any_other_name" for p in parameters if p.kind is Parameter.VAR_KEYWORD])

    yield [None for _ in by_position] + more, dict.fromkeys(only_name) | more_names
    names = [p.name for p in by_position[len(only_position) :]]
    yield [None for _ in only_position], dict.fromkeys(names + only_name) | more_names
    required = [p for p in parameters if p.default is Parameter.empty and (p in by_position or p.name in only_name)]
    yield [None for p in required if p in by_position], {p.name: None for p in required if p.name in only_name}
