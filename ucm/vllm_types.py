"""Protocols of the vLLM objects that UCM reads: vLLM is not installed where types are checked.

They declare only attributes that all supported releases have. `ucm.compat` reads those that differ
between releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Request(Protocol):
    """``vllm.v1.request.Request``: one request on the scheduler side."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens."""

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens whose KV has been computed."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The ids of the prompt and generated tokens."""


class LoRARequest(Protocol):
    """``vllm.lora.request.LoRARequest``: the LoRA adapter of a request."""

    @property
    def lora_name(self) -> str:
        """The adapter's name."""

    @property
    def lora_int_id(self) -> int:
        """The engine's number of the adapter, from 1 on."""


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: the work of one step."""

    @property
    def scheduled_new_reqs(self) -> Sequence[Any]:
        """Requests that run for the first time."""

    @property
    def scheduled_cached_reqs(self) -> Any:
        """Requests that have run before; the form depends on the release."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """The number of tokens that the step computes, by request id."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """The number of tokens that the step computes."""

    @property
    def finished_req_ids(self) -> set[str]:
        """The requests that ended since the previous step."""


class VllmConfig(Protocol):
    """``vllm.config.VllmConfig``; the sections' fields depend on the release."""

    model_config: Any  #: the model
    cache_config: Any  #: the KV cache: block size, dtype, prefix caching
    parallel_config: Any  #: the parallel ranks
    scheduler_config: Any  #: the limits of a step
    load_config: Any  #: how weights are loaded
    kv_transfer_config: Any  #: the KV connector's configuration; None without one
    compilation_config: Any  #: torch.compile and CUDA graphs


class KVCacheConfig(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheConfig``: the layout of the KV cache."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each group."""

    @property
    def kv_cache_groups(self) -> Sequence[Any]:
        """The groups of layers that share a block table."""
