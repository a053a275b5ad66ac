"""A short campaign on KV-cache groups passes, and notices what a broken product would do."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

from tests.campaign import groups
from tests.campaign.damage import DAMAGES
from tests.campaign.figures import Figures, table
from tests.campaign.scene import Stage
from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.store.evicting import evict_unpinned
from ucm.integration.vllm.connector import staging
from ucm.integration.vllm.connector.kv_cache import longest_hit
from ucm.store.format import HeaderCodec
from ucm.store.posix.scan import scan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import SimulatedClock

pytest_plugins = ("tests.simulated",)

SEED = 20260711
#: More than ``store.touch_seconds``.
SPAN = 120.0


def run(count: int, directory: Path) -> Figures:
    figures = groups.run(count, Stage(random.Random(SEED), directory, None))  # noqa: S311 - it decides what is tested
    print(table({"groups": figures}))
    return figures


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PROMPTS", 6)


def test_what_must_be_zero_is_zero(tmp_path: Path) -> None:
    figures = run(groups.PROMPTS * len(groups.MODELS), tmp_path)
    assert figures.trials == groups.PROMPTS * len(groups.MODELS)
    assert figures.visible
    assert figures.loaded
    assert not figures.failed, figures


def test_a_store_without_checksums_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MODELS", {"latents": groups.MODELS["latents"]})
    # The blocks are small: other ways damage little but their headers, which are read in any case.
    monkeypatch.setattr(groups, "DAMAGES", {way: DAMAGES[way] for way in ("flip-body", "misplace")})
    with patch.object(HeaderCodec, "is_sound", lambda *_: True):
        figures = run(2 * groups.PROMPTS, tmp_path)
    assert figures.wrong_bytes
    assert figures.corrupt_hits


@pytest.fixture
def _hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with states alone."""
    monkeypatch.setattr(groups, "MODELS", {"state": groups.MODELS["state"]})


@pytest.mark.usefixtures("_hybrid")
def test_hits_that_ignore_the_states_are_found_out(tmp_path: Path) -> None:
    def ignorant(of: Any, present: Any, *more: int) -> int:
        rows = [row if group.needs_all else [True] * 99 for group, row in zip(of, present, strict=True)]
        return longest_hit(of, rows, *more)

    with patch.object(staging, "longest_hit", ignorant):
        figures = run(groups.PROMPTS, tmp_path)
    assert figures.wrong_bytes
    assert figures.corrupt_hits


@pytest.mark.usefixtures("_hybrid")
def test_shorter_hits_than_possible_are_found_out(tmp_path: Path) -> None:
    with patch.object(staging, "longest_hit", lambda *of: max(0, longest_hit(*of) - of[-1])):
        assert run(groups.PROMPTS, tmp_path).lost


@pytest.mark.usefixtures("_hybrid")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_a_group_has_left_of_a_prompt_is_evicted_like_other_old_blocks(
    clock: SimulatedClock, tmp_path: Path, lost: int
) -> None:
    """Uses of other prompts renew nothing of one whose states, or attention, are gone."""
    rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
    one = groups.Round(groups.MODELS["state"], tmp_path, rng, clock, Figures())
    clock.advance(3600.0)  # the kernel's times of files, which are real, are in the past
    assert one.serve()
    clock.advance(SPAN)
    orphan, *others = one.stored().values()
    for place in orphan:
        if place.group == lost:
            place.file.path.unlink()
    left = [place.file.path for place in orphan if place.group != lost]
    prompts, one.prompts = one.prompts, one.prompts[1:]
    assert all(one.serve() or [])
    clock.advance(2.0)  # the evictors' threads set the times
    root = str(tmp_path / "store")
    assert evict_unpinned(root, scan(root), sum(path.stat().st_size for path in left), lambda _: None)[0] == len(left)
    assert not any(path.exists() for path in left)
    assert all(place.file.path.exists() for of_prompt in others for place in of_prompt)
    one.prompts = prompts
    hits = one.serve() or []
    assert not hits[0]
    assert all(hits[1:])


@pytest.mark.parametrize(("full", "window"), [(4, 4), (16, 4), (16, 2)])
def test_a_prompt_is_evicted_from_its_end_whatever_the_sizes_of_the_groups_blocks(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int, window: int
) -> None:
    monkeypatch.setattr(groups, "_SHORTEST", 161)
    monkeypatch.setattr(groups, "_LONGEST", 161)
    rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
    setting = Setting(groups=((full, None, 2), (window, 9, 2)), blocks=1200)
    one = groups.Round(setting, tmp_path, rng, clock, Figures())
    clock.advance(3600.0)  # see above
    assert one.serve()
    clock.advance(SPAN)
    assert one.serve() == [160] * groups.PROMPTS  # a use of all that is there
    clock.advance(2.0)
    files = [place.file.path for of_prompt in one.stored().values() for place in of_prompt]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)[: len(files) // 2]:
        path.unlink()
    assert one.expected(one.stored(), {}) == [80] * groups.PROMPTS
