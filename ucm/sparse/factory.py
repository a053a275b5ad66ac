"""Find sparse methods by their names in the configuration."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from ucm.errors import ConfigError, meant
from ucm.sparse.base import SparseMethod

#: Other packages register their methods under this group of entry points.
ENTRY_POINT_GROUP = "ucm.sparse_methods"
#: The methods that come with UCM. An entry point cannot take one of their names.
METHODS = {
    "BlockRetrieval": "ucm.sparse.esa.method:ESA",
    "BlockTopK": "ucm.sparse.topk.method:BlockTopK",
    "ESA": "ucm.sparse.esa.method:ESA",
    "GSAOnDevice": "ucm.sparse.topk.method:GSAOnDevice",
    "LeakyReRoPE": "ucm.sparse.rerope:LeakyReRoPE",
    "Probe": "ucm.sparse.probe:Probe",
    "ReRoPE": "ucm.sparse.rerope:ReRoPE",
    "SinkWindow": "ucm.sparse.sink_window:SinkWindow",
    "SparseDrafts": "ucm.sparse.topk.drafts:SparseDrafts",
    "StreamingLLM": "ucm.sparse.sink_window:SinkWindow",
}

#: The names of the method that offloads blocks to a store of its own.
OFFLOADING = frozenset({"BlockRetrieval", "ESA"})


def method_class(name: str) -> type[SparseMethod]:
    """Return the class of a method.

    Args:
        name: The name of a method of UCM, of an entry point, or ``package.module:Class``.

    Raises:
        ConfigError: If there is no such method, or the name is not that of a method.
    """
    try:
        method = _load(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the sparse method {name!r} cannot be loaded: {error}",
            where="ucm_sparse_config",
            fix="install its package in this environment, or correct the name",
        ) from error
    if not (isinstance(method, type) and issubclass(method, SparseMethod)):
        raise ConfigError(
            f"{name!r} is not a sparse method", where="ucm_sparse_config", fix="derive it from SparseMethod"
        )
    return method


def _load(name: str) -> Any:
    """Load the object of a name: a method of UCM, ``package.module:Class``, or an entry point."""
    module_name, separator, class_name = METHODS.get(name, name).partition(":")
    if separator:
        return getattr(importlib.import_module(module_name), class_name)
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        # Users do not run the probe: `ucm doctor` and tests do.
        known = sorted({*METHODS, *entry_points(group=ENTRY_POINT_GROUP).names} - {"Probe"})
        raise ConfigError(
            f"there is no sparse method {name!r}",
            where="ucm_sparse_config",
            fix=f"{meant(name, known)}Name one of {', '.join(known)}, or your own as `package.module:Class`",
        )
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} installed packages register a sparse method {name!r}",
            where=f"ucm_sparse_config: {', '.join(sorted(point.value for point in found))}",
            fix="name the one you want as `package.module:Class`",
        )
    return found[0].load()
