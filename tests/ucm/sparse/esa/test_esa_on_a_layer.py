"""ESA's worker side on the installed vLLM's own layer and kernel: released blocks are overwritten, and still read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.integration.vllm.sparse.test_real_layers import assert_close, reference
from tests.ucm.sparse.esa.memory import shared_memory
from tests.ucm.sparse.steps import step
from ucm.sparse.base import Role
from ucm.sparse.esa.method import ESA
from ucm.sparse.esa.offloaded import OffloadedNews, Released
from ucm.store.posix.layout import owner_name
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

if TYPE_CHECKING:
    from pathlib import Path


SIZE, HEAD = 32, 64
TOKENS = 9 * SIZE + 5
#: After one block of sinks, five blocks are offloaded; the next ones are not released yet, then comes the window.
FIRST, STORED = 1, 5
WINDOW = 90
BLOCKS = list(range(2, 14))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), request.param, SIZE, HEAD, blocks=40)


class Tiles(ESA):
    """ESA with tiles of one token, so that the offloaded context grows within a test."""

    tile = 1


class Case:
    """One request whose offloaded context has been released, on a layer; from memory, blocks are loaded in place."""

    def __init__(
        self,
        real: RealLayer,
        directory: Path,
        resident: list[int],
        budget: int,
        tier: str = "Posix",
    ) -> None:
        self.real, self.resident = real, resident
        self._source = torch.Generator().manual_seed(len(resident))
        self.keys, self.values = self.draw(TOKENS, KV_HEADS), self.draw(TOKENS, KV_HEADS)
        self._write(0)
        directory.mkdir(mode=0o700)
        store = {"pipeline": tier, "directories": [str(directory)]}
        if tier == "Dram":
            store = {"pipeline": tier, "dram_directory": str(directory), "dram_capacity": "16MiB"}
        options = {"store": store, "token_budget": budget * SIZE, "window_tokens": WINDOW}
        self.method = Tiles(real.config, Role.WORKER, options)
        self.method.attention = real.view
        self.method.worker_started()
        self.method.confirms(("", owner_name()))
        self.method.layer_seen(NAME)
        self.method.layers_seen()
        released = tuple(BLOCKS[FIRST : FIRST + STORED])
        news = OffloadedNews((), (Released("0", 0, FIRST, released, tuple(resident)),))
        self.method.update_states(None, SimpleNamespace(ucm_sparse_meta=news))
        self._clobber(released)

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn((tokens, heads, HEAD), generator=self._source).to(self.real.kv_cache.dtype)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Run a decode step; return its query, the attention's output, and the blocks that it read."""
        self.keys = torch.cat((self.keys, self.draw(1, KV_HEADS)))
        self.values = torch.cat((self.values, self.draw(1, KV_HEADS)))
        before = len(self.keys) - 1
        self._write(before)
        query = self.draw(1, HEADS)
        self.method.update_states(None, SimpleNamespace(ucm_sparse_meta=None))
        with patch.object(self.method.attention, "batch", autospec=True) as batch:
            batch.return_value = step(("0", before, 1, TOKENS))
            self.method.execute_begin(None, None, None)
        dense = self.real.metadata([BLOCKS], [len(self.keys)], [1])
        key, value = self.keys[before:], self.values[before:]
        used = self.method.attention_begin(NAME, query, key, value, self.real.kv_cache, dense)[3]
        output = self.real.attend(query, used)
        self.method.execute_finished(None, None, None)
        slots = self.method._offloaded["0"].layers[NAME]._slots
        content = {self.resident[slot]: place for place, slot in slots.items()}
        held = used.block_table[0, : -(-int(used.seq_lens[0]) // SIZE)].tolist()
        places = [(content.get(block), block) for block in held]
        return query, output, [BLOCKS.index(block) if place is None else place for place, block in places]

    def check(self) -> list[int]:
        """Check that a step's output is the attention over the blocks that it read; return these."""
        query, output, places = self.run()
        assert places == sorted(set(places))
        read = [p for block in places for p in range(block * SIZE, min(len(self.keys), (block + 1) * SIZE))]
        assert_close(output, reference(query, self.keys[read], self.values[read]))
        return places

    @property
    def offloaded(self) -> range:
        """Return the blocks between the sinks and the window of the newest token."""
        return range(FIRST, (len(self.keys) - 1 - WINDOW) // SIZE)

    def saved(self) -> None:
        """Wait until the store has the released blocks, so that none of them is in host memory."""
        store = self.method._opened
        for saving in store._saving:
            saving.task.wait()
        store.settle()
        assert not any(admission.copies for admission in store._kept.values())

    def _write(self, start: int) -> None:
        places = torch.arange(start, len(self.keys))
        slots = torch.tensor(BLOCKS)[places // SIZE] * SIZE + places % SIZE
        self.real.write(self.keys[start:], self.values[start:], slots)

    def _clobber(self, blocks: tuple[int, ...]) -> None:
        slots = (torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)).flatten()
        self.real.write(self.draw(len(slots), KV_HEADS), self.draw(len(slots), KV_HEADS), slots)


def test_with_room_for_all_everything_is_read(real: RealLayer, tmp_path: Path) -> None:
    case = Case(real, tmp_path / "store", [30, 3, 25, 4, 39], 20)
    for _ in range(30):
        assert case.check() == list(range(-(-len(case.keys) // SIZE)))


def test_with_room_for_two_just_these_are_read(real: RealLayer, tmp_path: Path) -> None:
    two_are_read(Case(real, tmp_path / "store", [3, 20], 2))


def test_with_blocks_from_memory_just_these_are_read(real: RealLayer) -> None:
    with shared_memory() as root:
        case = Case(real, root / "store", [3, 20], 2, "Dram")
        two_are_read(case)
        case.method._opened._end()


def two_are_read(case: Case) -> None:
    seen = set()
    for at in range(28):
        if at == 3:
            case.saved()
        places = case.check()
        offloaded = [place for place in places if place in case.offloaded]
        assert len(offloaded) == 2
        seen.update(offloaded)
        assert set(places) - set(offloaded) == {0, *range(case.offloaded.stop, -(-len(case.keys) // SIZE))}
    assert len(seen) > 2, "queries that differ want different blocks"
    assert case.method._opened.counts["loaded"] > 0


def test_a_token_that_a_query_looks_for_is_read(
    real: RealLayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of six attends to one token of the offloaded context; the others attend to nothing in particular."""
    case = Case(real, tmp_path / "store", [3], 1)
    wanted = 3 * case.keys[(FIRST + 3) * SIZE + 9, 1]
    draw = case.draw

    def drawn(tokens: int, heads: int) -> torch.Tensor:
        found = draw(tokens, heads)
        if heads == HEADS:  # only queries have so many
            found[:, -1] = wanted
        return found

    monkeypatch.setattr(case, "draw", drawn)
    assert FIRST + 3 in case.check()
