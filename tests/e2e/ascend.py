"""vLLM Ascend's own files beside a real vLLM on the CPU, with both overlays: `python -m tests.e2e.ascend RELEASE`.

Its sources come from the published sdist, and torch-npu is a stand-in (`inside/torch_npu`): nothing here runs on an
NPU. No entry point of vLLM Ascend is installed, so vLLM stays on its CPU platform and loads only what a test names.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.e2e.environment import Environment, beside, build_wheels, install_needs
from tests.e2e.install_vllm import ENVIRONMENTS
from tests.examples import EXAMPLES, registry_of
from tests.moved import moved
from transforms.ascend.registry import REGISTRY, VLLM_ASCEND
from transforms.pipeline.build import build_overlay, make_overlay
from transforms.pipeline.lock import check_reviewed
from transforms.pipeline.package import build_package, build_runtime, build_wheel
from transforms.pipeline.product import compose
from transforms.pipeline.sources.open import open_sources
from transforms.place import BUILD
from transforms.registry import REGISTRY as VLLM_REGISTRY

STAND_IN = Path(__file__).parent / "inside" / "torch_npu"
#: The file that its setup writes, for a given device.
BUILD_INFO = "__device_type__ = 'A2'\n"
#: The content of a moved patch.
MOVED = "# moved to examples/ascend_patches\n"
ASCEND = compose(REGISTRY)
#: The packages that it imports besides vLLM and what that needs on a CPU; the last belongs to the torch of 0.23.0.
NEEDS = ("pandas", "scipy", "torchvision==0.26.0")


def with_ascend(release: str) -> Environment:
    """Return the environment of a release that both packages have."""
    return _with_ascend(release, "ascend", [*build_wheels(release), _wheel(release)])


def as_published(release: str) -> Environment:
    """Return the same without vLLM Ascend's overlay: its own modules run beside vLLM's overlay."""
    return _with_ascend(release, "ascend-as-published", build_wheels(release))


def with_patches(release: str) -> Environment:
    """Return the same with a vLLM overlay that has UCM's rules and then those of the example `ascend_patches`.

    The patches that the example has moved are empty files, which vLLM Ascend still imports.
    """
    overlay = make_overlay(release, product=compose(VLLM_REGISTRY, registry_of("ascend_patches")))
    out = BUILD / "e2e" / f"ascend-patches-{release}"
    built = build_package(overlay, check_reviewed(overlay), out).wheel
    wheels = [built, build_runtime(out), build_wheel(EXAMPLES / "ascend_patches", out), _wheel(release)]
    made = _with_ascend(release, "ascend-patches", wheels)
    for one in moved(release):
        (made.site / one.path).write_text(MOVED, encoding="utf-8")
    return made


def _wheel(release: str) -> Path:
    return build_overlay(release, product=ASCEND, out=BUILD / "e2e" / f"ascend-{release}").wheel


def _with_ascend(release: str, name: str, wheels: list[Path]) -> Environment:
    made = beside(release, ENVIRONMENTS / f"vllm-{release}-{name}", wheels)
    package = made.site / VLLM_ASCEND.name
    if not package.exists():
        for path, source in open_sources(release, package=VLLM_ASCEND).read_package():
            (made.site / path).parent.mkdir(parents=True, exist_ok=True)
            (made.site / path).write_bytes(source)
        (package / "_build_info.py").write_text(BUILD_INFO, encoding="utf-8")
        install_needs(made, NEEDS)
    shutil.copytree(STAND_IN, made.site / "torch_npu", dirs_exist_ok=True)
    return made


if __name__ == "__main__":
    print(with_ascend(sys.argv[1]).python)
