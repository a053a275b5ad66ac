"""What a prefill engine and a decode engine tell each other about a prompt, in a request's ``kv_transfer_params``.

A proxy asks the prefill engine for one token with vLLM's ``do_remote_decode``, and hands the ``kv_transfer_params`` of
its answer to the decode engine, as for vLLM's transports. The answer comes before the prompt's last blocks are in the
store, so it says how many tokens they will hold, and the decode engine's lookup waits for those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucm.compat import transfer_params

if TYPE_CHECKING:
    from ucm.vllm_types import Request

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
