"""Whether compression pays is judged by what was measured, and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ucm.store.advice import (
    CodecFigures,
    Comparison,
    codec_figures,
    compare,
    compressing_tiers,
    generated,
    stored_sample,
)
from ucm.store.base import KVStore, TransferTask
from ucm.store.bench import Figures, Workload, for_bench, save_all
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import EVEN, content, files, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Task, TierStats

WORK = Workload(blocks=4, slices=4, slice_nbytes=4096, rounds=3)
CODEC = CodecFigures(1.46, 0.3e9, 0.8e9)


@dataclass
class Medium:
    """A medium that moves some bytes per second, one operation at a time; time is what it says."""

    speed: float
    now: float = 0.0
    opened: list[StoreConfig] = field(default_factory=list)
    geometries: list[BlockGeometry] = field(default_factory=list)
    blocks: dict[BlockKey, bytes] = field(default_factory=dict)

    def open(self, config: StoreConfig, namespace: str, geometry: BlockGeometry) -> KVStore:
        assert namespace.startswith("bench-")
        self.opened.append(config)
        self.geometries.append(geometry)
        return OnMedium(self, is_compressed=config.tiers["Redis"]["compression"] == "lossless")

    def moves(self, nbytes: int, *, is_compressed: bool) -> None:
        stored = nbytes / CODEC.ratio if is_compressed else nbytes
        self.now += stored / self.speed + (nbytes / CODEC.decompress if is_compressed else 0)


class OnMedium(KVStore):
    def __init__(self, medium: Medium, *, is_compressed: bool) -> None:
        self._medium, self._is_compressed = medium, is_compressed

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        return 0 * len(keys)

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        return self._move(blocks, lambda block: self._medium.blocks.__setitem__(block.key, b"".join(block.slices)))

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        def deliver(block: BlockTransfer) -> None:
            stored, at = self._medium.blocks[block.key], 0
            for memory in block.slices:
                memory[:] = stored[at : at + memory.nbytes]
                at += memory.nbytes

        return self._move(blocks, deliver)

    def stats(self) -> Mapping[str, TierStats]:
        return {}

    def close(self) -> None:
        """Do nothing."""

    def _move(self, blocks: Sequence[BlockTransfer], one: Callable[[BlockTransfer], None]) -> Task:
        for block in blocks:
            one(block)
        self._medium.moves(sum(s.nbytes for b in blocks for s in b.slices), is_compressed=self._is_compressed)
        return self._done([block.key for block in blocks])

    def _done(self, keys: Sequence[BlockKey]) -> Task:
        task = TransferTask(len(keys))
        for block in keys:
            task.succeeded(block, "redis", 0)
        return task


@pytest.mark.parametrize(
    ("speed", "gain", "begins"),
    [
        (0.05e9, 1.338, "compress: loading a GB takes 14.95 s compressed and 20.00 s as it is, at least 1.34 times"),
        (0.2e9, 1.07, "no difference in speed: loading a GB takes 4.67 s compressed and 5.00 s as it is"),
        (1e9, 0.517, "do not compress for speed: loading a GB takes 1.93 s compressed and 1.00 s as it is, which is"),
    ],
)
def test_the_medium_s_speed_decides(monkeypatch: pytest.MonkeyPatch, speed: float, gain: float, begins: str) -> None:
    removed: list[str] = []
    monkeypatch.setattr("ucm.store.advice.remove_blocks", lambda config, namespace, keys: removed.append(namespace))
    medium = Medium(speed)
    config = StoreConfig(pipeline="Cache|Redis", tiers={"Redis": {"address": "somewhere:1"}})
    sample = generated(WORK.nbytes)
    found = compare(config, "Redis", WORK, sample, codec=lambda _: CODEC, opened=medium.open, timer=lambda: medium.now)
    assert sorted(found.figures.seconds) == ["load lossless", "load none", "save lossless", "save none"]
    assert {one.pipeline for one in medium.opened} == {"Redis"}
    assert {one.tiers["Redis"]["address"] for one in medium.opened} == {"somewhere:1"}
    assert {one.element_size for one in medium.geometries} == {2}
    assert len(removed) == len(medium.opened) == 2 * WORK.rounds
    assert found.gains == pytest.approx((gain, gain), rel=0.01)
    assert found.advice.startswith(begins)
    assert "holds 1.46 times as many blocks" in found.advice


def test_rounds_that_disagree_are_no_difference() -> None:
    rounds = {"load none": [1.0, 1.0, 1.0], "load lossless": [0.5, 2.0, 2.0]}
    found = Comparison("Posix", CODEC, Figures(WORK, rounds))
    assert found.gains == (2.0, 0.5)
    assert found.advice.startswith("no difference in speed")


def test_a_tier_is_measured_and_left_empty(config: StoreConfig) -> None:
    chosen = for_bench(replace(config, pipeline="Posix"))
    heard: list[str] = []
    found = compare(chosen, "Posix", WORK, generated(WORK.nbytes), heard.append)
    assert heard == [f"Posix: {side}" for side in ("lossless", "none", "none", "lossless", "lossless", "none")]
    assert {len(seconds) for seconds in found.figures.seconds.values()} == {WORK.rounds}
    assert min(found.gains) > 0
    assert min(found.codec.compress, found.codec.decompress) > 0
    assert files(config.directories[0]) == []


def test_generated_numbers_compress_like_a_trained_model_s() -> None:
    sample = generated(1 << 20)
    ticks = iter(range(100))
    found = codec_figures(sample, timer=lambda: float(next(ticks)))
    assert found.ratio == pytest.approx(1.46, abs=0.02)
    assert found.compress == found.decompress == len(sample.body) == 1 << 20
    assert len(generated(1000).body) >= 1000


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_the_store_s_own_blocks_are_the_sample(config: StoreConfig, compression: str) -> None:
    chosen = replace(config, pipeline="Posix", tiers={"Posix": {"compression": compression}})
    root = config.directories[0]
    assert stored_sample([root]) is None
    keys = [key(number) for number in range(3)]
    for namespace, count in (("few", 1), ("many", 3)):
        with open_store(chosen, namespace, EVEN) as store:
            save(store, keys[:count], EVEN)
    sample = stored_sample([root])
    assert sample is not None
    assert sample.what == f"3 of the blocks in {Layout(root, 'many').base}"
    bodies = [content(one, EVEN) for one in keys]
    size = EVEN.nbytes
    assert sorted(bytes(sample.body[at : at + size]) for at in range(0, 3 * size, size)) == sorted(bodies)
    assert sample.element_size == 1  # every byte of these has 32 values
    short = stored_sample([root], 1)
    assert short is not None
    assert len(short.body) == size
    for number, namespace in enumerate(("few", "many")):
        for one in keys[: 1 + number]:
            Path(Layout(root, namespace).block(one)).write_bytes(b"damaged")
    left = replace(sample, what=f"1 of the blocks in {Layout(root, 'many').base}", body=memoryview(bodies[2]))
    assert stored_sample([root], 1 << 30) == left


def test_numbers_of_two_bytes_are_recognised(config: StoreConfig) -> None:
    numbers = generated(WORK.nbytes)
    chosen = for_bench(replace(config, pipeline="Posix"))
    memory = np.frombuffer(numbers.body, np.uint8)[: WORK.nbytes]
    with open_store(chosen, "real", WORK.geometry) as store:
        save_all(store, WORK.transfers(memory))
    sample = stored_sample(config.directories)
    assert sample is not None
    assert sample.element_size == 2


def test_tiers_in_memory_do_not_compress() -> None:
    assert compressing_tiers(StoreConfig(pipeline="Cache|Posix|S3")) == ["Posix", "S3"]
    assert compressing_tiers(StoreConfig(pipeline="Dram")) == []
