"""A source tree in memory: two small modules that two real transforms change."""

from __future__ import annotations

from dataclasses import dataclass, field

from transforms import scheduler_output, worker
from transforms.pipeline.rewrite import Overlay, rewrite
from transforms.pipeline.sources.tree import Artefact

WORKER = "vllm/v1/worker/gpu_worker.py"
OUTPUT = "vllm/v1/core/sched/output.py"
SMALL = (scheduler_output.TRANSFORM, worker.TRANSFORM)

WORKER_SOURCE = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"A worker with `</script>` & <b>markup</b> in its words.\"\"\"

import os


def unrelated():
    return os.getpid() < 7


def init_worker_distributed_environment(vllm_config):
    ensure_model_parallel_initialized(1, 1)


def ensure_model_parallel_initialized(first, second):
    return first, second
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


def small_overlay(tree: DictTree) -> Overlay:
    """What the two transforms make of a tree."""
    return rewrite(tree, SMALL)
