"""The published modules that the transforms change, read once per test process."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import libcst as cst

from transforms.ascend.registry import VLLM_ASCEND
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import products
from transforms.pipeline.rewrite import module_path
from transforms.pipeline.sources.open import open_sources
from transforms.registry import VLLM

if TYPE_CHECKING:
    from transforms.engine.registry import Package
    from transforms.engine.transform import Transform
    from transforms.pipeline.sources.tree import SourceTree

#: The files of vLLM that tests read.
READ = re.compile(
    r"vllm/(?:config\.py|config/\w+\.py|envs\.py|_custom_ops\.py|engine/arg_utils\.py|platforms/interface\.py"
    r"|attention/(?:layer|backends/registry|utils/kv_transfer_utils)\.py|model_executor/layers/attention/\w+\.py"
    r"|distributed/kv_transfer/(?:kv_transfer_state|kv_connector/factory|kv_connector/v1/base)\.py"
    r"|v1/(?:request|kv_cache_interface|engine/core|core/\w+|core/sched/\w+|worker/\w+|worker/gpu/\w+)\.py"
    r"|v1/attention/backends/(?:flash_attn|triton_attn|cpu_attn|registry)\.py)"
)


def package_of(transform: Transform) -> Package:
    """Return the package that a transform changes."""
    return VLLM_ASCEND if transform.id.startswith("ascend.") else VLLM


@functools.cache
def sources(release: str, package: Package = VLLM) -> SourceTree:
    """Return the sources of a release, with what the tests read of vLLM in the cache.

    A remote wheel is opened for each read of a file that is not cached, which takes half a second; together, all files
    take as long as a few.
    """
    tree = open_sources(release, package=package)
    if package is VLLM:
        tree.read_many([path for path in tree.python_files() if READ.fullmatch(path)])
    return tree


def source(transform: Transform, release: str) -> tuple[str, bytes] | None:
    """Return the path and the bytes of a transform's module; None if the release has none that is used."""
    tree = sources(release, package_of(transform))
    path = module_path(transform, tree)
    return (path, tree.read(path)) if path else None


def parsed(transform: Transform, release: str) -> tuple[str, cst.Module] | None:
    """Return the path and the tree of a transform's module."""
    found = source(transform, release)
    return (found[0], cst.parse_module(found[1])) if found else None


def forms() -> list[tuple[str, Transform]]:
    """Return transforms with releases that together have every variant of every rule in a lock: few, and new ones.

    The releases of one set of variants differ in the code around the anchors, which LibCST leaves as it is.
    """
    newest: dict[tuple[tuple[str, str], ...], tuple[str, Transform]] = {}
    for product in products():
        for release in product.reviewed():
            lock = read_lock(release, product)
            inserted = {r["id"]: r.get("variant", "") for m in (lock or {"modules": []})["modules"] for r in m["rules"]}
            for transform in product.transforms:
                form = tuple((rule.id, inserted[rule.id]) for rule in transform.rules if rule.id in inserted)
                newest[form] = release, transform
    chosen, left = [], {variant for form in newest for variant in form}
    while left:
        form = max(newest, key=lambda one: len(left.intersection(one)))
        chosen.append(newest[form])
        left.difference_update(form)
    return chosen
