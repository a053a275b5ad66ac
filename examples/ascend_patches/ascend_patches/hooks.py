"""The seam: the logic of the patches; `rules.py` inserts the calls.

Every vLLM process with the overlay imports this module, before vLLM's own: vLLM is imported where it is needed. What is
for NPUs alone asks first whether this engine serves on one.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(f"vllm.{__name__}")

#: Milliseconds after which a reader of shared memory checks again, even without a notification.
RECHECK_MS = 5000


def recheck(read_timeout: Any) -> None:
    """Make a reader of a message queue check again after `RECHECK_MS`: a notification may have been lost.

    Args:
        read_timeout: vLLM's ``MessageQueue.ReadTimeoutWithWarnings``, of one read.
    """
    wanted = read_timeout.timeout_ms

    def timeout_ms() -> int:
        left = wanted()
        return RECHECK_MS if left is None else min(int(left), RECHECK_MS)

    read_timeout.timeout_ms = timeout_ms


def external_blocks(local: int, computed: int, wanted: int) -> int:
    """Return the extra blocks that a mamba group needs for a hit loaded in the step that uses it: one or none.

    Args:
        local: Tokens found in the engine's own cache.
        computed: Tokens with KV before the step, in the engine's cache or elsewhere.
        wanted: Tokens with KV at the end of the step.
    """
    return int(local < computed < wanted)


def engine_core_started(engine_core: Any) -> None:
    """Let a scheduler that measures its chunks do so, now that the workers are up.

    Args:
        engine_core: vLLM's ``EngineCore``.
    """
    measure = getattr(engine_core.scheduler, "run_profiling_chunk_init", None)
    if measure is not None:
        logger.info("%s measures its chunks", type(engine_core.scheduler).__name__)
        measure(engine_core.model_executor)


def on_npu() -> bool:
    """Return whether this engine serves on NPUs."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    return str(current_platform.device_name) == "npu"


def v2_runner_is_chosen() -> bool:
    """Return whether the environment chooses the V2 model runner: on NPUs, nothing else does."""
    from vllm import envs  # noqa: PLC0415

    return bool(envs.VLLM_USE_V2_MODEL_RUNNER)


#: Features that vLLM Ascend's V1 model runner has, and vLLM's has not.
V1_FEATURES = frozenset({"dspark speculative decoding", "dflash2 drafts"})


def without_v1_features(unsupported: list[str]) -> list[str]:
    """Return the features that the V1 model runner lacks, without those that vLLM Ascend's has."""
    return [feature for feature in unsupported if not (on_npu() and feature in V1_FEATURES)]


def _model_type(model_config: Any) -> str:
    """Return a model's type; at this point of its configuration, vLLM's releases have it in different places."""
    places = (getattr(model_config, name, None) for name in ("model_arch_config", "hf_text_config", "hf_config"))
    types = (getattr(place, "model_type", None) for place in places)
    return str(next(filter(None, types), ""))


def quantization(model_config: Any) -> Any:
    """Return the quantization to verify: none for MiniMax-M2 in fp8, whose weights an NPU loads as bfloat16."""
    given = model_config.quantization
    if not (on_npu() and given == "fp8" and _model_type(model_config) == "minimax_m2"):
        return given
    logger.info("MiniMax-M2 in fp8 is loaded as bfloat16 on an NPU")
    return None


#: How HCCL expands its operators; AIV lets an ACL graph of MiniMax-M2 have most shapes.
EXPANSION = "HCCL_OP_EXPANSION_MODE"


def expand_collectives(model_config: Any) -> None:
    """Let HCCL expand operators on the vector cores if MiniMax-M2 is captured in graphs, unless it is set otherwise."""
    if not on_npu() or model_config.enforce_eager or _model_type(model_config) != "minimax_m2":
        return
    given = os.environ.setdefault(EXPANSION, "AIV")
    if given != "AIV":
        logger.warning("%s=%s may leave shapes out of MiniMax-M2's ACL graphs; AIV covers them", EXPANSION, given)


#: Architectures of vLLM Ascend's own with latent attention.
LATENT = frozenset({"glm5_next", "glm5_next_text"})


def has_latent_attention(model_config: Any) -> bool:
    """Return whether a model has latent attention and an architecture that only vLLM Ascend knows."""
    config = model_config.hf_text_config
    return getattr(config, "model_type", None) in LATENT and getattr(config, "kv_lora_rank", None) is not None


def rank_among_visible(variable: str, rank: int, world_size: int, local_size: int | None, assigned: Any) -> int:
    """Return the rank by which to find a data-parallel rank's devices among the visible ones.

    Args:
        variable: The environment variable that makes devices visible.
        rank: The data-parallel rank on this node.
        world_size: Devices of each such rank.
        local_size: Those on this node; None: all.
        assigned: Devices that the user assigned; they are those of all ranks.
    """
    visible = sum(map(bool, os.getenv(variable, "").split(",")))
    if assigned is not None or not visible:  # Ray leaves the variable empty where all are visible
        return rank
    is_own = rank * world_size + (world_size if local_size is None else local_size) > visible
    return 0 if is_own else rank  # the caller has made only this rank's visible


@functools.cache
def mla_prefill_backend() -> type[Any]:
    """Return a backend that computes no prefill: Ascend's attention computes prompts itself."""
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend  # noqa: PLC0415

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("Ascend's MLA and SFA implementations compute the prefill")

    own = {
        "get_name": staticmethod(lambda: "ASCEND"),
        "is_available": classmethod(lambda _: True),
        "run_prefill_new_tokens": refuse,
        "run_prefill_context_chunk": refuse,
    }
    return type("AscendMLAPrefillBackend", (MLAPrefillBackend,), own)


#: The attribute in which the first backend of structured outputs is remembered.
BACKEND = "_vllm_ascend_structured_output_backend"
#: The backends by the names of their classes.
BACKENDS = {
    "XgrammarBackend": "xgrammar",
    "GuidanceBackend": "guidance",
    "OutlinesBackend": "outlines",
    "LMFormatEnforcerBackend": "lm-format-enforcer",
}


def _refuse_other(first: str | None, wanted: str) -> None:
    if first is None or first == wanted:
        return
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

    raise VLLMValidationError(
        f"an engine has one backend of structured outputs: this one uses '{first}', the request needs '{wanted}'. Set "
        "`structured_outputs_config.backend`, or use schemas that the first backend supports"
    )


def keep_backend(config: Any, params: Any) -> None:
    """Refuse a request whose structured outputs need another backend than the first one's.

    Args:
        config: vLLM's ``StructuredOutputsConfig``.
        params: The request's ``SamplingParams``, validated.
    """
    wanted = params.structured_outputs._backend  # noqa: SLF001 - vLLM keeps the resolved one there
    if on_npu() and wanted is not None:
        _refuse_other(getattr(config, BACKEND, None), wanted)
        setattr(config, BACKEND, wanted)


def keep_grammar_backend(manager: Any, request: Any) -> None:
    """Refuse the same where the grammar is made: not every request is validated before.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
        request: vLLM's ``Request``, with structured outputs.
    """
    wanted = request.sampling_params.structured_outputs._backend  # noqa: SLF001 - as above
    if on_npu() and wanted is not None and manager.backend is not None:
        names = {name for kind in type(manager.backend).__mro__ for name in BACKENDS if name in kind.__name__}
        _refuse_other(next((BACKENDS[name] for name in names), None), wanted)


def is_complete(guide: Any) -> bool:
    """Return whether a grammar of Outlines is complete, so that it accepts the token that ends the request."""
    return on_npu() and bool(guide.is_finished())


def is_uniform(uniform: bool, mode: Any) -> bool:
    """Return whether a step is captured as one of uniform decodes: never if all graphs are full ones.

    Args:
        uniform: Whether all its requests have as many tokens.
        mode: vLLM's ``CUDAGraphMode``.
    """
    return uniform and not (on_npu() and mode.name == "FULL")


def layers_of_all_stages(vllm_config: Any) -> int:
    """Return the layers of the whole target model, after which a draft model's are numbered in a checkpoint."""
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def with_dtypes(known: Any, more: tuple[str, ...]) -> Any:
    """Return vLLM's ``Literal`` of a cache's dtypes with those that only NPUs have."""
    return Literal[(*get_args(known), *more)]


def own_device(connector: Any, device: str) -> str:
    """Return where an encoder-cache consumer loads to: on an NPU, its own one instead of the first."""
    if not (on_npu() and connector.is_consumer):
        return device
    from vllm.platforms import current_platform  # noqa: PLC0415

    return f"{device}:{current_platform.current_device()}"


#: What the chat template of GLM-5.3 has, whose model always thinks; older ones have `enable_thinking`.
ALWAYS_THINKS = ("[gMASK]<sop>", "Reasoning Effort:", "<tool_call>", "<arg_key>", "<arg_value>")
SWITCHES = ("thinking", "enable_thinking")


def always_thinking(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return a GLM parser's arguments without a switch that its model does not have.

    Args:
        tokenizer: The model's tokenizer.
        given: The parser's keyword arguments, which stay as they are.
    """
    chat = given.get("chat_template_kwargs") or {}
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "enable_thinking" in template:
        return given
    if not all(sign in template for sign in ALWAYS_THINKS) or all(chat.get(name) is not False for name in SWITCHES):
        return given
    logger.warning("GLM-5.3 always thinks: thinking=False and enable_thinking=False are ignored")
    return {**given, "chat_template_kwargs": {**chat, **dict.fromkeys(SWITCHES)}}


#: With these, a worker starts processes of its own, which a daemon cannot.
BALANCES_EXPERTS: dict[str, Callable[[str], bool]] = {
    "DYNAMIC_EPLB": lambda value: value.lower() in {"true", "1"},
    "EXPERT_MAP_RECORD": lambda value: value == "true",
}


def let_have_children(worker: Any) -> None:
    """Let a worker's process start others if experts are balanced while it serves.

    Args:
        worker: The process, not yet started.
    """
    if on_npu() and any(is_on(os.getenv(name, "false")) for name, is_on in BALANCES_EXPERTS.items()):
        worker.daemon = False
