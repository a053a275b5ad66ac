"""The measured methods, and their options for a budget."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.sparse.factory import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Tokens in a block of the engines that are asked.
BLOCK = 32
DENSE = "dense"
#: Methods that are not sparse: they read the whole context, and have no budget.
_NO_METHODS = {"Probe", "ReRoPE", "LeakyReRoPE"}
#: A placeholder in user options for the budget in tokens, as a string; a number after it is added.
BUDGET = "$budget"


def _block_topk(tokens: int, block: int) -> dict[str, Any]:
    """No layer is dense: these models have few layers, and the method itself is measured."""
    always = {"sink_tokens": block, "recent_tokens": block, "dense_layers": 0, "min_context": 0}
    return {"token_budget": tokens, **always}


def _sink_window(tokens: int, block: int) -> dict[str, Any]:
    return {"sink_tokens": block, "window_tokens": max(1, tokens - block)}


def _esa(tokens: int, block: int) -> dict[str, Any]:
    """Its own budget covers retrieved blocks, in addition to the sinks and a window of two blocks."""
    return {"sink_tokens": block, "window_tokens": 2 * block, "token_budget": max(1, tokens - 3 * block)}


def _others(tokens: int, block: int) -> dict[str, Any]:
    del block
    return {"token_budget": tokens}


#: The options of each method for a budget and a block size in tokens, by its class: all of its names have the same.
_OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "BlockTopK": _block_topk,
    "ESA": _esa,
    "SinkWindow": _sink_window,
}


@dataclass(frozen=True)
class Setting:
    """One engine to ask.

    Attributes:
        method: A name for ``ucm_sparse_config``, or `DENSE`.
        length: Tokens of each prompt.
        budget: The share of them that a decode step may read, 0 to 1; 1 for `DENSE`.
    """

    method: str
    length: int
    budget: float

    @property
    def tokens(self) -> int:
        """The budget in tokens."""
        return round(self.budget * self.length)

    def config(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        """The value of ``ucm_sparse_config``; see `filled`."""
        return None if self.method == DENSE else filled(self.method, self.tokens, BLOCK, given)


def filled(method: str, tokens: int, block: int, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The value of ``ucm_sparse_config`` for a method.

    Args:
        method: Its name.
        tokens: The budget.
        block: Tokens in a block.
        given: By method, what replaces its options here; `BUDGET` in it becomes ``tokens``.
    """
    if method not in given:
        return {method: _OPTIONS.get(class_of(method), _others)(tokens, block)}
    return {method: {name: _replaced(value, tokens) for name, value in given[method].items()}}


def _replaced(value: Any, tokens: int) -> Any:
    if not (isinstance(value, str) and value.startswith(BUDGET)):
        return value
    return max(1, tokens + int(value.removeprefix(BUDGET) or 0))


def class_of(method: str) -> str:
    """The class behind a method's name; of one that is another's by another name, that other."""
    target = METHODS.get(method)
    if target is None:
        return method.rpartition(":")[2]
    module, _, name = target.partition(":")
    names = [base.__name__ for base in getattr(importlib.import_module(module), name).__mro__]
    return next((base for base in names if base in _OPTIONS), name)


def known_methods() -> list[str]:
    """The methods that come with UCM, each by one of its names: that of its class, if it has that."""
    names: dict[str, str] = {}
    for name in METHODS:
        if name not in _NO_METHODS and (class_of(name) not in names or name == class_of(name)):
            names[class_of(name)] = name
    return list(names.values())


def parse_options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options as a user gives them: ``METHOD={"key": value}``, with ``"$budget"`` for the budget in tokens.

    Raises:
        ValueError: If one is not of this form.
    """
    found = {}
    for text in texts:
        method, separator, value = text.partition("=")
        options = json.loads(value) if separator else None
        if not isinstance(options, dict):
            raise ValueError(f"{text!r}: write METHOD={{...}}")  # noqa: TRY004 - of what a user typed
        found[method] = options
    return found
