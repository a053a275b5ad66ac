"""The benchmark measures what it claims; the speed itself is not tested."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ucm.hashing.bench import chained_md5, main, measure

if TYPE_CHECKING:
    import pytest


def test_every_way_is_measured_for_every_size() -> None:
    costs = measure((4, 16), num_tokens=64, rounds=1)
    assert [cost.block_size for cost in costs] == [4, 16]
    assert all(min(cost.md5_us, cost.ours_us, cost.ours_growing_us) > 0 for cost in costs)


def test_the_peer_is_a_chain() -> None:
    one, other = chained_md5([1, 2, 3, 4, 5], 2), chained_md5([1, 2, 3, 9, 5], 2)
    assert [len(one), len(other)] == [2, 2]
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_it_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm.hashing.bench.measure", lambda *_, **__: measure((4,), num_tokens=16, rounds=1))
    main([])
    assert "chained MD5" in capsys.readouterr().out
    main(["--json"])
    assert json.loads(capsys.readouterr().out)[0]["block_size"] == 4
