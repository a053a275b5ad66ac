"""What of the machine decides how KV lies in memory: the device, and the instructions that its kernels choose."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

#: Instruction sets by which vLLM's CPU backend, or torch's, chooses the packing of KV inside a block.
_CPU_FLAGS = ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2", "bf16", "sve", "asimd")
#: Variables by which an operator chooses a backend or a layout past the configuration.
_VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE", "VLLM_PP_LAYER_PARTITION")


def vllm_release() -> str:
    """The version of the vLLM in this process, or of the installed one; empty if there is none."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if loaded:
        return str(loaded)
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ""


def platform_facts(vllm_config: Any) -> dict[str, Any]:
    """The device type with what its kernels look at, and the variables that choose layouts.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """
    device = getattr(vllm_config, "device_config", None)
    kind = str(getattr(device, "device_type", None) or getattr(device, "device", None) or "")
    facts: dict[str, Any] = {
        "device": kind,
        "environment": {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }
    if kind == "cpu":
        return facts | {"machine": platform.machine(), "instructions": _instructions()}
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    capability = getattr(current, "get_device_capability", lambda: None)()
    return facts | {"capability": None if capability is None else str(capability)}


def _instructions() -> list[str]:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return []
    there = set(line.split())
    return [flag for flag in _CPU_FLAGS if flag in there]
