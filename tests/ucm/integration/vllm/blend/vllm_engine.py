"""BlendConnector with vLLM's own scheduler, and a miniature model in which every wrong cell changes the next token.

Imported only where vLLM is installed. The scheduler, the connector's both sides and its stores are real. The caches
replace `LayerCaches`, and the model replaces vLLM's. The model has no positions, so no key has to be rotated.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from tests.ucm.integration.vllm.connector.simulation import memory, truth
from tests.ucm.integration.vllm.connector.simulation.memory import Chunk, KVMemory, embedded, forward
from tests.ucm.integration.vllm.connector.simulation.truth import digest
from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine
from ucm.blend import PIECE
from ucm.integration.vllm.blend.scheduler import OF_PIECES
from ucm.integration.vllm.blend.sides import BlendWorkerSide
from ucm.integration.vllm.blend.worker import BlendWorker
from ucm.integration.vllm.blend_connector import BlendConnector
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from ucm.blend import Run

#: Tokens of a forward pass of a blend, fewer than those of most stretches.
PASS = 13


class Caches:
    """One worker's memory and model; a cell of 64 bits is a key and a value of two numbers each."""

    dtype, device = torch.float64, torch.device("cpu")
    piece_shape = (2, PIECE, 1, 2)

    def __init__(self, memory: KVMemory, truth: Truth) -> None:
        self._memory, self._truth = memory, truth
        self._size = memory.groups[0].block_size
        self.names = list(memory.layers)
        self.geometry = BlockGeometry((2 * PIECE * 2 * 8,) * len(self.names), b"cells of a test.")
        self._rows: Any = None

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(block_ids))

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return blocks[positions // self._size] * self._size + positions % self._size

    def write(
        self, layer: int, positions: torch.Tensor, slots: torch.Tensor, free: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(positions) == len(slots)
        keys, values = free
        assert torch.equal(keys, values)
        halves = keys.squeeze(1).numpy().astype(np.uint64)
        self._memory._cells[layer].reshape(-1)[slots.numpy()] = (halves[:, 0] << np.uint64(32)) | halves[:, 1]
        return keys, values

    def read(self, layer: int, blocks: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = _halves(self._memory._cells[layer].reshape(-1)[self.slots(blocks, positions).numpy()])
        return found, found

    read_free = read

    def rows(self, runs: Sequence[Run], blocks: torch.Tensor) -> Any:
        positions = torch.cat([torch.arange(run.start, run.end) for run in runs])
        assert len(positions) <= PASS
        return SimpleNamespace(runs=runs, positions=positions, slots=self.slots(blocks, positions), blocks=blocks)

    @contextmanager
    def context(self, rows: Any, attn_metadata: Any, *, by_modules: bool = False) -> Iterator[None]:
        del by_modules
        assert attn_metadata == {}
        self._rows = rows
        yield

    @contextmanager
    def attention(self, blocks: torch.Tensor, reach: int, asking: int) -> Iterator[torch.Tensor]:
        del blocks, asking
        yield torch.ones(reach)

    def model(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Compute the runs of the current rows."""
        tokens, blocks = iter(input_ids.tolist()), [self._rows.blocks.tolist()]
        assert positions is self._rows.positions
        chunks = [Chunk(run.start, list(islice(tokens, run.tokens)), blocks) for run in self._rows.runs]
        hidden = embedded(chunks)
        for layer in range(len(self.names)):
            hidden = forward([self._memory], layer, chunks, hidden, self._truth)


def _halves(cells: Any) -> torch.Tensor:
    """``[n, 1, 2]``, float64: the upper and lower half of each cell."""
    return torch.from_numpy(np.stack((cells >> np.uint64(32), cells & np.uint64(2**32 - 1)), 1).astype(np.float64))[
        :, None
    ]


class BlendEngine(VllmEngine):
    """An engine whose requests mark chunks.

    Args:
        setting: The engine's settings.
        directory: The directory of its model and blocks.
        chance: The source of random choices.
        clock: Time and threads.
        blend: The settings of ``blend``.
    """

    kind = BlendConnector

    def __init__(
        self, setting: Setting, directory: Path, chance: random.Random, clock: SimulatedClock, **blend: Any
    ) -> None:
        self._blend = blend
        without_positions = patch.multiple(truth, embed=_embed), patch.multiple(memory, embed=_embed)
        for each in without_positions:
            each.start()
        self._without_positions = without_positions
        super().__init__(setting, directory, chance, setting.truth(), clock)

    def store(self, chunk: list[int]) -> None:
        """Compute a chunk alone, and wait until it is stored."""
        self.submit(chunk, 1, {"ucm_chunks": [[0, len(chunk)]]})
        self.drain()

    def doubt(self, tokens: list[int]) -> None:
        """Note that the name of a prompt's first block stands for content that nobody knows."""
        for naming in self.connector._scheduler._block_keys._reader.first_block(self._new.make(tokens, 1)):
            assert not naming.holds()

    def left(self) -> int:
        """Return the number of chunks that are being stored."""
        return sum(worker._worker.worker._left() for worker in self.workers)

    def close(self) -> None:
        super().close()
        for each in self._without_positions:
            each.stop()

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "blend": {"min_tokens": 8, **self._blend}}

    def _configuration(self, model: Path) -> Any:
        config = super()._configuration(model)
        config.model_config.enforce_eager = True
        return config

    def _worker(self, config: Any, caches: Any, memory: KVMemory) -> Any:
        with patch.object(BlendWorkerSide, "_find_layers"):  # it looks for a real model
            worker = super()._worker(config, caches, memory)
        side = worker._worker
        side._caches = own = Caches(memory, self.truth)
        settings = side._settings.blend
        side._blending = BlendWorker(own, own.model, settings, side.counters, most_tokens=PASS)  # type: ignore[arg-type]
        return worker

    def _work(self, output: Any) -> Any:
        blends = output.kv_connector_metadata.plan.blend.blends
        self.happened["blends"] += len(blends)
        self.happened["two in a step"] += len(blends) > 1
        self.happened["ahead"] += bool(blends) and bool(self._planned or self._executed)
        self.happened["chunks"] += len({chunk for blend in blends for chunk in blend.chunks})
        plan = output.kv_connector_metadata.plan
        self.happened["saved chunks"] += sum(moves.group == OF_PIECES for moves in plan.saves)
        return super()._work(output)


def _embed(token: int, position: int) -> int:
    """Return the first layer's input, which here depends on the token alone."""
    del position
    return digest(token)
