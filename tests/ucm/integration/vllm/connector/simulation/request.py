"""The part of vLLM's requests that scheduling needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Request:
    """A request, with vLLM's attribute names.

    Args:
        request_id: Its id.
        prompt: Its tokens.
        max_tokens: The maximum number of generated tokens.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    #: Asynchronous scheduling: tokens that are being generated.
    num_output_placeholders: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    num_in_flight_tokens: int = 0
    num_stale_output_tokens: int = 0
    #: ``waiting``, ``loading`` (vLLM's WAITING_FOR_REMOTE_KVS), ``running``, ``preempted`` or ``finished``.
    status: str = "waiting"
    num_preemptions: int = 0
    sampling_params: Any = None

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)
