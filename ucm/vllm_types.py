"""What UCM reads of vLLM's objects, as protocols: vLLM is not installed where types are checked.

Only attributes that all supported releases have are declared. What differs between releases is read in
`ucm.integration.vllm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Request(Protocol):
    """``vllm.v1.request.Request``: one request on the scheduler side."""

    @property
    def request_id(self) -> str:
        """The name that the engine knows it by."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV exists."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt and generated ones."""


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: what one step computes."""

    @property
    def scheduled_new_reqs(self) -> Sequence[Any]:
        """Requests that run for the first time."""

    @property
    def scheduled_cached_reqs(self) -> Any:
        """Requests that have run before; the form depends on the release."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens of the step, by request id."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step."""

    @property
    def finished_req_ids(self) -> set[str]:
        """Requests that ended since the previous step."""


class VllmConfig(Protocol):
    """``vllm.config.VllmConfig``; the sections' fields depend on the release."""

    @property
    def model_config(self) -> Any:
        """The model."""

    @property
    def cache_config(self) -> Any:
        """The KV cache: block size, dtype, prefix caching."""

    @property
    def parallel_config(self) -> Any:
        """Ranks."""

    @property
    def scheduler_config(self) -> Any:
        """Limits of a step."""

    @property
    def load_config(self) -> Any:
        """How weights are loaded."""

    @property
    def kv_transfer_config(self) -> Any:
        """The KV connector; None without one."""

    @property
    def compilation_config(self) -> Any:
        """torch.compile and CUDA graphs."""


class KVCacheConfig(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheConfig``: the layout of the KV cache."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each group."""

    @property
    def kv_cache_groups(self) -> Sequence[Any]:
        """The groups of layers that share a block table."""
