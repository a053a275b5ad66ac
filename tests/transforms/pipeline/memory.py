"""An in-memory source tree of two small modules that two real transforms change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transforms import scheduler_output, worker
from transforms.pipeline.product import UCM, Product
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.tree import Artefact, sha256
from transforms.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transforms.engine.registry import Package
    from transforms.engine.transform import Transform

WORKER = "vllm/v1/worker/worker_base.py"
OUTPUT = "vllm/v1/core/sched/output.py"

WORKER_SOURCE = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"A worker with `</script>` & <b>markup</b> in its words.\"\"\"

import os


def unrelated():
    return os.getpid() < 7


class WorkerWrapperBase:
    def init_device(self):
        self.worker.init_device()

    def shutdown(self):
        self.worker.shutdown()
"""
OUTPUT_SOURCE = """\
class SchedulerOutput:
    step: int
    total: int

    def both(self):
        return self.step + self.total
"""


@dataclass
class DictTree:
    """The files of a release, by path."""

    release: str = "0.32.0"
    files: dict[str, str] = field(default_factory=lambda: {WORKER: WORKER_SOURCE, OUTPUT: OUTPUT_SOURCE})
    artefact: Artefact = field(default_factory=lambda: Artefact("wheel", "vllm.whl", "0" * 64))

    def exists(self, path: str) -> bool:
        return path in self.files

    def read(self, path: str) -> bytes:
        return self.files[path].encode()

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        return {path: self.read(path) for path in paths}

    def python_files(self) -> dict[str, str]:
        return {path: sha256(source.encode()) for path, source in self.files.items()}

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        return ((path, self.read(path)) for path in self.files)


def dict_tree(release: str, *, package: Package) -> DictTree:
    """Return the tree of a release, like `open_sources`."""
    return DictTree(release)


def product_of(*transforms: Transform, overlays: Path = UCM.overlays) -> Product:
    """Return UCM's product with only some transforms, and without the names census."""
    return Product((replace(REGISTRY, transforms=transforms, census=()),), overlays)


SMALL = product_of(scheduler_output.TRANSFORM, worker.TRANSFORM)


def small_overlay(tree: DictTree, overlays: Path = UCM.overlays) -> Overlay:
    """Return the overlay of a tree by the two transforms."""
    return rewrite(tree, replace(SMALL, overlays=overlays))
