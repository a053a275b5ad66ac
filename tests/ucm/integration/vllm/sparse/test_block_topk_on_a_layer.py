"""Block top-k on the installed vLLM's own layer and kernel, token by token: it reads just what it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.integration.vllm.sparse.test_real_layers import assert_close, reference
from tests.ucm.sparse.steps import step
from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.sparse.attention import StepBatch

SIZE, HEAD = 32, 64
#: One block of sinks, two recent ones, two to choose.
OPTIONS = {"token_budget": 5 * SIZE, "min_context": 0, "sink_tokens": 1, "recent_tokens": 1, "dense_layers": 0}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), request.param, SIZE, HEAD, blocks=40)


class Sequence:
    """A request: its blocks, and the keys and values of all of its tokens."""

    def __init__(self, real: RealLayer, blocks: list[int], tokens: int, seed: int) -> None:
        self._real, self._source = real, torch.Generator().manual_seed(seed)
        self.blocks, self.prompt = blocks, tokens
        self.keys, self.values = self._draw(tokens), self._draw(tokens)
        self.write(0)

    def __len__(self) -> int:
        return len(self.keys)

    def write(self, start: int) -> None:
        """Write its tokens from one on into its blocks."""
        places = torch.arange(start, len(self))
        slots = torch.tensor(self.blocks)[places // SIZE] * SIZE + places % SIZE
        self._real.write(self.keys[start:], self.values[start:], slots)

    def grow(self) -> None:
        """One more token."""
        self.keys = torch.cat((self.keys, self._draw(1)))
        self.values = torch.cat((self.values, self._draw(1)))
        self.write(len(self) - 1)

    def _draw(self, tokens: int) -> torch.Tensor:
        shape = (tokens, KV_HEADS, HEAD)
        return torch.randn(shape, generator=self._source).to(self._real.kv_cache.dtype)


def method(real: RealLayer, monkeypatch: pytest.MonkeyPatch) -> tuple[BlockTopK, Callable[[StepBatch], None]]:
    """The method on the layer, and how it gets its steps, for which there is no runner here."""
    made = BlockTopK(real.config, Role.WORKER, OPTIONS)
    made.attention = real.view
    made.worker_started()
    made.layer_seen(NAME)
    made.layers_seen()
    batches: list[StepBatch] = []
    monkeypatch.setattr(real.view, "batch", lambda *_: batches[-1])
    return made, batches.append


def decode(real: RealLayer, made: BlockTopK, sequences: list[Sequence], query: torch.Tensor) -> tuple[Any, Any]:
    """One step of all sequences: the metadata that was used, and what attention gave."""
    dense = real.metadata([s.blocks for s in sequences], [len(s) for s in sequences], [1] * len(sequences))
    made.execute_begin(None, None, None)
    used = made.attention_begin(NAME, query, query, query, real.kv_cache, dense)[3]
    output = real.attend(query, used)
    made.execute_finished(None, None, None)
    return used, output


def rows_of(sequences: list[Sequence]) -> StepBatch:
    return step(*[(f"{n}", len(s) - 1, 1, s.prompt) for n, s in enumerate(sequences)])


def test_attention_is_that_of_the_chosen_tokens_in_every_step(real: RealLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long requests across the ends of blocks, and a short one that becomes sparse on the way."""
    made, give = method(real, monkeypatch)
    starts = [
        (list(range(1, 13)), 10 * SIZE - 3),
        (list(range(13, 25)), 9 * SIZE + 7),
        ([30, 26, 33, 27, 39, 31, 28], 157),
    ]
    sequences = [Sequence(real, blocks, tokens, n) for n, (blocks, tokens) in enumerate(starts)]
    source = torch.Generator().manual_seed(9)
    for _ in range(40):
        for sequence in sequences:
            sequence.grow()
        give(rows_of(sequences))
        query = torch.randn((3, HEADS, HEAD), generator=source).to(real.kv_cache.dtype)
        used, output = decode(real, made, sequences, query)
        for row, sequence in enumerate(sequences):
            count = -(-int(used.seq_lens[row]) // SIZE)
            assert count == min(5, -(-len(sequence) // SIZE))
            places = [sequence.blocks.index(block) for block in used.block_table[row, :count].tolist()]
            read = [p for block in places for p in range(block * SIZE, min(len(sequence), (block + 1) * SIZE))]
            assert len(read) == int(used.seq_lens[row])
            wanted = reference(query[row : row + 1], sequence.keys[read], sequence.values[read])
            assert_close(output[row : row + 1], wanted)
    assert made.counts["failures"] == 0
    assert made.counts["rows"] > 100


def test_a_token_that_a_query_looks_for_is_read(real: RealLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of six looks for one token of a middle block; the others look nowhere in particular."""
    made, give = method(real, monkeypatch)
    for place in (70, 130, 201):
        sequence = Sequence(real, list(range(1, 11)), 9 * SIZE + 5, place)
        query = torch.randn((1, HEADS, HEAD), generator=torch.Generator().manual_seed(place)).to(real.kv_cache.dtype)
        sequence.keys[place, 1] = 2 * query[0, -1]
        sequence.write(0)
        give(step(("0", len(sequence) - 1, 1, sequence.prompt - 1), admitted=["0"]))
        used, output = decode(real, made, [sequence], query)
        assert sequence.blocks[place // SIZE] in used.block_table[0].tolist()
        dense = reference(query, sequence.keys, sequence.values)
        # That head gives nearly all of its attention to the token, so it hardly misses what is not read.
        torch.testing.assert_close(output[:, -1].double(), dense[:, -1], rtol=0, atol=0.05)
