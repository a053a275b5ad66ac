"""Torch views of the stand-in tensors' memory; imported only where torch is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.ucm.integration.vllm.connector.tensors import Tensor

_DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "float32": torch.float32, "uint64": torch.int64}


def as_torch(given: Tensor) -> Any:
    """Return a view of the stand-in's memory."""
    flat = torch.from_numpy(given.raw).view(_DTYPES[str(given.dtype)])
    return flat.as_strided(given.shape, given.strides, given.offset)


def all_as_torch(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return views of KV caches, by layer name; a layer has one tensor, or a tuple of them."""
    return {
        name: tuple(map(as_torch, found)) if isinstance(found, tuple) else as_torch(found)
        for name, found in given.items()
    }
