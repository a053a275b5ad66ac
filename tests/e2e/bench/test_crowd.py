from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.bench.crowd import BLOCKS, LENGTH, Served, compare, prompts, show, stored_bytes
from tests.e2e.bench.peers import EXAMPLE, NO_CONNECTOR, OURS
from tests.e2e.bench.ttft_model import BLOCK, BLOCK_BYTES

if TYPE_CHECKING:
    import pytest


def served(seconds: float, token: int = 7) -> Served:
    return Served([seconds, seconds], [seconds, 2 * seconds], LENGTH, [[token], [token]], [0.1, 0.3], [1.0, 2.0])


def test_our_side_is_compared_with_each_other_one_of_its_group() -> None:
    found = compare({NO_CONNECTOR: served(4.0), OURS: served(2.0), EXAMPLE: served(1.6)})
    assert {figure.name: (round(figure.value, 6), figure.met) for figure in found} == {
        f"crowd: seconds, to {NO_CONNECTOR}": (0.5, True),
        f"crowd: p99 to the first token, to {NO_CONNECTOR}": (0.5, True),
        f"crowd: seconds, to {EXAMPLE}": (1.25, False),
        f"crowd: p99 to the first token, to {EXAMPLE}": (1.25, False),
    }


def test_the_table_shows_rates_and_who_failed(capsys: pytest.CaptureFixture[str]) -> None:
    show({NO_CONNECTOR: served(4.0), OURS: served(2.0, 8)}, {EXAMPLE: "a long log\nits last line\n"})
    shown = capsys.readouterr().out
    for text in ("0.500", "50%", "0 of 2", "20%", "1.0 to 2.0", f"{EXAMPLE} failed: its last line"):
        assert text in shown


def test_prompts_share_blocks_and_do_not_fit_into_the_engines_cache() -> None:
    asked = prompts(32)
    assert asked == prompts(32)
    stored = stored_bytes(asked) // BLOCK_BYTES
    assert BLOCKS < stored < 0.8 * len(asked) * (LENGTH // BLOCK)
