"""vLLM's options by their names in the installed release, for messages."""

from __future__ import annotations

from typing import Any

#: The variable that selects the attention backend in releases without the option.
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
#: The runner's variable, from 0.12.0 on.
V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V2_PACKAGE = "vllm.v1.worker.gpu."
#: The Triton backend's name where V0 had one of the same name.
V1_TRITON = "TRITON_ATTN_VLLM_V1"


def choose_backend(*, tells_sums: bool = False) -> str:
    """Return how to select, on a GPU, an attention backend whose block table can be restricted.

    Args:
        tells_sums: Whether the backend must also return the log-sum-exp.
    """
    try:
        from vllm import envs  # noqa: PLC0415 - ucm imports without vLLM
        from vllm.platforms import interface  # noqa: PLC0415
    except ImportError:
        named, triton = False, "TRITON_ATTN"
    else:
        named = BACKEND_VARIABLE in envs.environment_variables
        triton = V1_TRITON if hasattr(getattr(interface, "_Backend", None), V1_TRITON) else "TRITON_ATTN"
    option = f"{BACKEND_VARIABLE}=" if named else "--attention-backend "
    others = "" if tells_sums else f" or {option}{triton}"
    return f"choose another backend, on a GPU: {option}FLASH_ATTN{others}"


def leave_out(config: Any, *fields: str) -> tuple[str, str]:
    """Return which of some fields of a configuration are set, and how to start without them.

    Args:
        config: The part of vLLM's configuration with the fields.
        fields: Their names, which are also the options' names.

    Returns:
        The fields, and the options, each list in words.
    """
    set_here = [field for field in fields if getattr(config, field, None)]
    return ", ".join(set_here), " and ".join(f"--{field.replace('_', '-')}" for field in set_here)


def no_whole_graphs(compilation_config: Any) -> str:
    """Return how to start vLLM without full CUDA graphs: up to 0.10.0 a flag, then a mode."""
    has_mode = getattr(compilation_config, "cudagraph_mode", None) is not None
    setting = '{"cudagraph_mode": "PIECEWISE"}' if has_mode else '{"full_cuda_graph": false}'
    return f"start vLLM with --compilation-config '{setting}' or with --enforce-eager"


def v1_runner(runner: object) -> str:
    """Return how to select vLLM's V1 model runner; empty if the release has no choice."""
    return f" ({V2_RUNNER_VARIABLE}=0)" if type(runner).__module__.startswith(V2_PACKAGE) else ""
