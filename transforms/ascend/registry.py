"""The registry for vLLM Ascend, which uses UCM's seam."""

from __future__ import annotations

from transforms.ascend import attention, runner, schedulers
from transforms.engine.registry import Package, Registry
from transforms.place import ROOT
from transforms.registry import HOOKS

VLLM_ASCEND = Package(
    "vllm_ascend",
    "vllm-ascend",
    "vLLM Ascend",
    "Huawei Technologies Co., Ltd., and the vLLM team",
    rebinds="vllm_ascend/patch/",
    sdist_first=True,
)

TRANSFORMS = (*schedulers.TRANSFORMS, *runner.TRANSFORMS, *attention.TRANSFORMS)

REGISTRY = Registry(
    "ascend",
    "UCM",
    VLLM_ASCEND,
    TRANSFORMS,
    hooks=HOOKS,
    overlays=ROOT / "overlays",
    distribution="ucm-vllm-ascend-overlay",
)
