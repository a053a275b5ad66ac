"""What a client asks of the sparse method for its own request: ``ucm_sparse`` in ``SamplingParams.extra_args``.

The API server's ``vllm_xargs`` become ``extra_args``, but hold no objects, and their booleans arrive as 0 and 1. So an
object may be written as JSON text, and 0 and 1 are booleans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.sparse.attention import KEY
from ucm.sparse.options import MethodOptions, parse_options, shown

if TYPE_CHECKING:
    from ucm.sparse.base import SparseMethod

#: Clients choose what they write, so there is an end to what is logged of it.
MOST_TOLD = 20
#: An object with what may be asked is shorter; what is nested deeply is not even read.
LONGEST = 200


class RequestOptions(MethodOptions):
    """What a request may ask for.

    Attributes:
        token_budget: Tokens that a decode step reads of this request in a layer, instead of the method's own; None
            leaves that.
    """

    token_budget: int | None = Field(default=None, ge=1, description="a number of tokens, 1 or more")


def parse_asked(asked: object) -> RequestOptions | None:
    """What a request asks for; None if it asks to be dense.

    Args:
        asked: What `asked_of` found: a boolean (or 0 or 1), `RequestOptions` as a mapping, or that as JSON text.

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
    """Warnings to the operator of what requests ask for and do not get: vLLM has no way to refuse a request here.

    Args:
        name: The method's.
        rank: The worker's; all see the same, and one says it.
    """

    def __init__(self, name: str, rank: int = 0) -> None:
        self._name = name
        self._rank = rank
        self._told: set[str] = set()

    def tell(self, request_id: str, error: ConfigError, instead: str) -> None:
        """Log why a request does not get what it asks for; once for each reason, and no more than `MOST_TOLD` of them.

        Args:
            request_id: The request.
            error: What is wrong.
            instead: What happens to it.
        """
        why = str(error)[:1000]
        if self._rank == 0 and why not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(why)
            get_logger(__name__).warning(
                "[UCM.Sparse] request %s asks %s for what it does not get, so %s; further ones are not told.\n%s",
                *(request_id, self._name, instead, why),
            )


def refuse_asked(asked: Mapping[str, object], method: SparseMethod) -> None:
    """Say that a method serves all requests alike, if one asks for anything else.

    Args:
        asked: Of a step; see `StepBatch`.
        method: The method.
    """
    for request_id, of in asked.items():
        try:
            if parse_asked(of) == RequestOptions():
                continue
            error = ConfigError(
                f"{type(method).__name__} serves all requests alike",
                where=f"extra_args.{KEY}: {shown(of)}",
                fix=f"leave {KEY} out; BlockTopK, GSAOnDevice, and SinkWindow with `prefill: dense`, serve it",
            )
        except ConfigError as wrong:
            error = wrong
        method.complaints.tell(request_id, error, "it is served like all others")
