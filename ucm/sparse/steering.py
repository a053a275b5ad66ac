"""Per-request settings of the sparse method: ``ucm_sparse`` in ``SamplingParams.extra_args``.

The API server's ``vllm_xargs`` become ``extra_args``, but cannot contain objects, and booleans arrive as 0 and 1. An
object may therefore be JSON text, and 0 and 1 count as booleans.
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
from ucm.sparse.options import MethodOptions, parse_options, shown, tokens

if TYPE_CHECKING:
    from ucm.sparse.base import SparseMethod

#: The maximum number of logged refusals, because clients control their number.
MOST_TOLD = 20
#: The maximum length of the JSON text; valid settings are shorter, and deeply nested text is not parsed.
LONGEST = 200


class RequestOptions(MethodOptions):
    """The settings that a request may have.

    Attributes:
        token_budget: Tokens of this request that a decode step reads in a layer, instead of the method's budget; None
            keeps the method's.
        budget_share: The share of its context that a decode step reads if that is more; None keeps the method's, or
            none with a ``token_budget``.
        top_p: The estimated share of attention at which a step stops to choose; None keeps the method's.
    """

    token_budget: int | None = tokens(None, at_least=1)
    budget_share: float | None = Field(default=None, gt=0, lt=1, description="a share of the context, between 0 and 1")
    top_p: float | None = Field(default=None, gt=0, le=1, description="a share of the attention, above 0, at most 1")


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
