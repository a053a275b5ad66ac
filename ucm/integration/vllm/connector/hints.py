"""Read what a request tells the connectors: in its ``kv_transfer_params``, or in vLLM's hints for KV caches.

*How long it asks to be retained.* With an engine in the client's process, vLLM checks the type of neither.

*What a prefill engine and a decode engine tell each other about a prompt.* A proxy asks the prefill engine for one
token with vLLM's ``do_remote_decode``, and hands the ``kv_transfer_params`` of its answer to the decode engine, as for
vLLM's transports. The answer comes before the prompt's last blocks are in the store, so it says how many tokens they
will hold, and the decode engine's lookup waits for those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucm.compat import optional, transfer_params

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    # There are no hints before 0.32.0. Nothing checks those of a client in the engine's process.
    for directive in _directives(optional(request, "kv_hints.actions") or ()):
        times += [_seconds("duration", directive["duration"])] if "duration" in directive else []
    return max(times, default=0.0)


def _directives(actions: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the directives of the actions that are ours; the others may have any payload."""
    if not isinstance(actions, list | tuple):
        raise HintError("the actions of kv_hints are no list")
    for action in actions:
        kind, version = optional(action, "action_type"), optional(action, "action_version")
        if not isinstance(kind, str) or not isinstance(version, str):
            raise HintError("the type or the version of an action of kv_hints is no string")
        if kind == _ACTION and version.partition(".")[0] == _VERSION:
            payload = optional(action, "payload")
            found = payload.get("directives") if isinstance(payload, Mapping) else None
            if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
                raise HintError(f"the directives of a {_ACTION} action are no list of objects")
            yield from found


def _seconds(name: str, value: object) -> float:
    # The value is not in the message: Python refuses to write long integers, wherever they are within it.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HintError(f"{name} is {type(value).__name__}, not a number of seconds")
    if not 0 <= value < math.inf:
        raise HintError(f"{name} is out of range, not a number of seconds")
    return float(min(value, 1 << 40))


#: The key of the number of a prompt's first tokens whose blocks are in the store, or on their way there.
SAVED = "ucm_saved_tokens"


def saved_tokens(request: Request) -> int:
    """Return how many tokens of a request another engine says it has saved; 0 if none says so.

    vLLM passes on what a client sends unchecked; what is no such number is as good as none.
    """
    found = _params(request).get(SAVED)
    return found if type(found) is int and found > 0 else 0


def is_handed_on(request: Request) -> bool:
    """Return whether another engine decodes the request: vLLM's ``do_remote_decode``."""
    return bool(_params(request).get("do_remote_decode"))


def comes_from_afar(request: Request) -> bool:
    """Return whether a transport has yet to bring the request's KV from the engine that computed it.

    That is vLLM's ``do_remote_prefill``, which a transport's connector clears once it has begun, also if it then fails.
    """
    return bool(_params(request).get("do_remote_prefill"))


def _params(request: Request) -> Mapping[str, Any]:
    params = transfer_params(request)
    return params if isinstance(params, Mapping) else {}
