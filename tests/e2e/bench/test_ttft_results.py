from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.e2e.bench.peers import EXAMPLE, LMCACHE_FS, NO_CONNECTOR, OURS, Place
from tests.e2e.bench.ttft_results import Results, goals
from tests.e2e.bench.ttft_stages import COLD, HIT, NEXT, PLAIN_READ, RESET, RESTART, Sample
from tests.e2e.bench.ttft_table import show

LENGTH = 512
#: Seconds by side and phase; the machine is twice as slow in the second round.
SECONDS = {
    (NO_CONNECTOR, COLD): 1.0,
    (NO_CONNECTOR, NEXT): 0.1,
    (NO_CONNECTOR, HIT): 0.1,
    (NO_CONNECTOR, f"{RESTART} {HIT}"): 0.1,
    (PLAIN_READ, RESET): 0.025,
    (PLAIN_READ, RESTART): 0.04,
    (OURS, COLD): 1.02,
    (OURS, NEXT): 0.11,
    (OURS, RESET): 0.2,
    (OURS, RESTART): 0.14,
    (EXAMPLE, COLD): 1.5,
    (EXAMPLE, NEXT): 0.1,
    (EXAMPLE, RESET): 0.4,
    (EXAMPLE, RESTART): 0.28,
    (LMCACHE_FS, RESTART): 0.7,
}


def samples(*, token: int = 7) -> list[Sample]:
    return [
        Sample(side, phase, LENGTH, number, number * seconds, () if side == PLAIN_READ else (token,), LENGTH)
        for number in (1, 2)
        for (side, phase), seconds in SECONDS.items()
    ]


@pytest.fixture
def results() -> Results:
    found = Results([LENGTH])
    found.add_group(samples())
    return found


def test_every_goal_is_judged_by_ratios_within_rounds(results: Results) -> None:
    found = {figure.name.removeprefix(f"{OURS}, 512 tokens: "): figure for figure in goals(results)}
    assert {name: (round(figure.value, 6), figure.met) for name, figure in found.items()} == {
        "first tokens that differ": (0, True),
        "cold with saving, to no connector": (1.02, True),
        "loaded after a reset, to the in-engine hit and a plain read": (1.6, False),
        "loaded after a restart, to the in-engine hit and a plain read": (1.0, True),
        "next request while saving, to no connector": (1.1, False),
        f"cold with saving, to the best peer ({EXAMPLE})": (0.68, True),
        f"loaded after a reset, to the best peer ({EXAMPLE})": (0.5, True),
        f"loaded after a restart, to the best peer ({EXAMPLE})": (0.5, True),
        f"next request while saving, to the best peer ({EXAMPLE})": (1.1, False),
    }


def test_disturbed_rounds_count_only_where_there_are_no_others(results: Results) -> None:
    slow = dataclasses.replace(results.of(0, OURS, COLD, LENGTH)[2], seconds=20.4, disturbed=True)
    results.groups[0] = [slow if (s.side, s.phase, s.number) == (OURS, COLD, 2) else s for s in results.groups[0]]
    assert results.ratios((OURS, COLD), (NO_CONNECTOR, COLD), LENGTH) == [1.02]
    assert results.seconds(0, OURS, COLD, LENGTH) == [1.02]
    results.groups[0] = [dataclasses.replace(s, disturbed=True) for s in results.groups[0]]
    assert results.ratios((OURS, COLD), (NO_CONNECTOR, COLD), LENGTH) == [1.02, 10.2]


@pytest.mark.parametrize(("side", "phase"), [(OURS, COLD), (OURS, NEXT), (OURS, RESTART), (EXAMPLE, RESTART)])
def test_one_other_token_is_found(side: str, phase: str) -> None:
    results = Results([LENGTH])
    results.add_group(
        dataclasses.replace(s, tokens=(8,)) if (s.side, s.phase, s.number) == (side, phase, 2) else s for s in samples()
    )
    assert results.differing_tokens() == [f"{side}, 512 tokens, {phase}: [8], not [7]"]


def test_the_tables_show_medians_and_what_was_not_found(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    results.groups[0] = [dataclasses.replace(s, cached=0) if s.side == LMCACHE_FS else s for s in results.groups[0]]
    results.failures["SomeConnector"] = "a long log\nits last line\n"
    show(results)
    shown = capsys.readouterr().out
    assert "1530.0, 1020 to 2040" in shown
    assert "hit 150.0" in shown
    assert "1050.0 (missed)" in shown
    assert "SomeConnector could not be measured to the end: its last line" in shown


@pytest.mark.parametrize(
    ("disk", "memory", "name"), [("", "/b", "c"), ("/a", "", "c"), ("/a", "/b", ""), ("a", "/b", "c")]
)
def test_a_side_that_would_delete_what_is_not_its_own_is_refused(disk: str, memory: str, name: str) -> None:
    with pytest.raises(ValueError, match="deleted at the end"):
        Place(Path(disk), Path(memory), name, 0, 0)
