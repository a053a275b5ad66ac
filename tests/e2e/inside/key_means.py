"""A way to summarise blocks that the codes of keys must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ucm.sparse.topk.codes import KeyCodes

if TYPE_CHECKING:
    from torch import Tensor


class KeyMeans(KeyCodes):
    """The mean of each block's keys: the simplest summary."""

    def __init__(self, num_blocks: int, keys: Tensor) -> None:
        super().__init__(num_blocks, keys)
        self._kept = keys.new_zeros((num_blocks, *keys.shape[2:]))

    def put(self, block_ids: Tensor, keys: Tensor) -> None:
        self._kept[block_ids] = keys.mean(1)

    def scores(self, query: Tensor, block_ids: Tensor) -> Tensor:
        means = self._kept[block_ids].float()
        grouped = query.float().unflatten(1, (means.shape[2], -1))
        return torch.einsum("rkgd,rbkd->krgb", grouped, means) * query.shape[-1] ** -0.5
