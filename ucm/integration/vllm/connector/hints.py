"""Read how long a request asks to be retained: from its ``kv_transfer_params``, or from vLLM's hints for KV caches."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucm.compat import hint_actions, transfer_params

if TYPE_CHECKING:
    from ucm.vllm_types import Request

#: The key in a request's ``kv_transfer_params``.
RETAIN = "ucm_retain_seconds"
#: The type of an action among vLLM's hints, and its major version. vLLM 0.32.0 transports actions and defines none;
#: this is the form that is proposed there: ``directives``, each with an optional ``duration`` in seconds.
_ACTION, _VERSION = "kv.retain", "1"


class HintError(ValueError):
    """A request's hint is not understood."""


def retain_seconds(request: Request) -> float:
    """Return for how many seconds a request's blocks are worth keeping, the longest time that it gives; 0 if none.

    Raises:
        HintError: A hint is malformed.
    """
    params = transfer_params(request)
    if params is not None and not isinstance(params, Mapping):
        raise HintError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    times = [_seconds(RETAIN, params[RETAIN])] if params and RETAIN in params else []
    for action in hint_actions(request):
        if action.action_type == _ACTION and action.action_version.partition(".")[0] == _VERSION:
            times += [_seconds("duration", one["duration"]) for one in _directives(action.payload) if "duration" in one]
    return max(times, default=0.0)


def _directives(payload: Any) -> list[Mapping[str, Any]]:
    found = payload.get("directives") if isinstance(payload, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise HintError(f"the directives of a {_ACTION} action are no list of objects")
    return found


def _seconds(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(min(value, 1 << 40))
    raise HintError(f"{name} is {reprlib.repr(value)}, not a number of seconds")
