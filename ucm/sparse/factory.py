"""From a sparse method's name in the configuration to an instance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The methods that come with UCM; any other is named as ``package.module:Class``.
METHODS = {
    "BlockRetrieval": "ucm.sparse.esa:ESA",
    "BlockTopK": "ucm.sparse.block_topk:BlockTopK",
    "ESA": "ucm.sparse.esa:ESA",
    "GSAOnDevice": "ucm.sparse.block_topk:GSAOnDevice",
    "Probe": "ucm.sparse.probe:Probe",
    "SinkWindow": "ucm.sparse.sink_window:SinkWindow",
    "StreamingLLM": "ucm.sparse.sink_window:SinkWindow",
}


def create_method(name: str, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> SparseMethod:
    """An instance of a configured method.

    Raises:
        ConfigError: If there is no such method, the name does not lead to one, or an option is wrong.
    """
    return method_class(name)(vllm_config, role, options)


def method_class(name: str) -> type[SparseMethod]:
    """The class of a method.

    Raises:
        ConfigError: If there is no such method, or the name does not lead to one.
    """
    target = METHODS.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        raise ConfigError(
            f"there is no sparse method {name!r}",
            where="ucm_sparse_config",
            fix=f"name one of {', '.join(sorted(METHODS))}, or your own as `package.module:Class`",
        )
    try:
        method = getattr(importlib.import_module(module_name), class_name)
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
