"""Drift and review show what changed in the function around each insertion."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.transforms.pipeline.memory import (
    OUTPUT,
    OUTPUT_SOURCE,
    SMALL,
    WORKER,
    WORKER_SOURCE,
    DictTree,
    dict_tree,
    product_of,
    small_overlay,
)
from transforms import scheduler
from transforms.pipeline.drift.machine import as_data
from transforms.pipeline.drift.model import measure_tree
from transforms.pipeline.drift.page import write_drift
from transforms.pipeline.drift.terminal import print_release
from transforms.pipeline.lock import accept
from transforms.pipeline.review.model import Review, make_review, summary
from transforms.pipeline.review.page import write_review
from transforms.pipeline.review.terminal import print_review
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.sources.tree import SourceError
from transforms.pipeline.surroundings import SHORT, Surrounding, definitions, surroundings

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.registry import Package

CALL = "        self.worker.init_device()\n"
GUARDED = WORKER_SOURCE.replace(CALL, f"        if self.is_first:\n            return\n{CALL}")
ELSEWHERE = WORKER_SOURCE.replace("< 7", "< 8")


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    """The overlay of 0.31.0 is reviewed."""
    target = tmp_path / "overlays"
    accept(small_overlay(DictTree("0.31.0"), target))
    return target


def tree(worker: str, release: str = "0.32.0") -> DictTree:
    return DictTree(release, {WORKER: worker, OUTPUT: OUTPUT_SOURCE})


def around(overlays: Path, worker: str) -> dict[str, Surrounding]:
    return surroundings(small_overlay(tree(worker), overlays), "0.31.0", dict_tree).rules


def review_of(overlays: Path, worker: str) -> Review:
    return make_review(small_overlay(tree(worker), overlays), dict_tree)


def printed(review: Review) -> str:
    text = io.StringIO()
    print_review(review, Console(file=text, width=120))
    return text.getvalue()


def test_a_function_that_changed_around_an_anchor_that_did_not() -> None:
    found = definitions(WORKER_SOURCE.encode())
    assert found["WorkerWrapperBase.init_device"] == ["    def init_device(self):", CALL.rstrip("\n")]


def test_decorated_and_guarded_definitions_are_found_whole() -> None:
    source = b"if X:\n    class A:\n        @staticmethod\n        @cache\n        def f():\n            pass\n"
    found = definitions(source)
    assert found["A.f"][0].strip() == "@staticmethod"
    assert found["A.f"][-1].strip() == "pass"


def test_the_change_is_told_line_by_line(overlays: Path) -> None:
    found = around(overlays, GUARDED)["worker.init"]
    assert [line for line in found.diff if line[0] in "+-"] == ["+        if self.is_first:", "+            return"]
    assert (found.added, found.removed) == (2, 0)
    assert found.summary("0.31.0") == "WorkerWrapperBase.init_device: +2 -0 lines since 0.31.0"


def test_a_change_elsewhere_in_the_module_is_none(overlays: Path) -> None:
    found = around(overlays, ELSEWHERE)["worker.init"]
    assert found.diff == ()
    assert found.summary("0.31.0").endswith("the same text as in 0.31.0")


def test_an_insertion_into_the_module_itself_stands_in_no_function(overlays: Path) -> None:
    assert "worker.import" not in around(overlays, GUARDED)


def test_a_rule_that_is_new_has_nothing_to_be_compared_with(overlays: Path) -> None:
    lock = overlays / "vllm-0.31.0" / "lock.json"
    lock.write_text(lock.read_text(encoding="utf-8").replace('"worker.init"', '"worker.other"'), encoding="utf-8")
    found = around(overlays, GUARDED)["worker.init"]
    assert found.summary("0.31.0") == "WorkerWrapperBase.init_device: no rule was here in 0.31.0"


def test_sources_that_cannot_be_had_are_no_failure(overlays: Path) -> None:
    def opened(release: str, *, package: Package) -> DictTree:
        raise SourceError(f"no {release} here")

    drift = measure_tree(tree(GUARDED), product_of(SMALL.transforms[0], overlays=overlays), opened)
    assert drift.applies
    assert drift.around.problem == "no 0.31.0 here"
    text = io.StringIO()
    print_release(drift, Console(file=text, width=100))
    assert "what changed around the rules is not known: no 0.31.0 here" in text.getvalue()


def test_drift_shows_it(overlays: Path, tmp_path: Path) -> None:
    drift = measure_tree(tree(GUARDED), replace(SMALL, overlays=overlays), dict_tree)
    text = io.StringIO()
    print_release(drift, Console(file=text, width=100))
    assert "around: WorkerWrapperBase.init_device: +2 -0 lines since 0.31.0" in text.getvalue()
    assert "    +        if self.is_first:" in text.getvalue()
    assert "if self.is_first:" in write_drift([drift], tmp_path).read_text(encoding="utf-8")
    told = next(entry for entry in as_data([drift])["releases"][0]["around"] if entry["rule"] == "worker.init")
    assert (told["added"], told["removed"], told["name"]) == (2, 0, "WorkerWrapperBase.init_device")


def test_a_review_shows_it_open_where_it_changed_and_closed_where_not(overlays: Path, tmp_path: Path) -> None:
    review = review_of(overlays, GUARDED)
    assert "around the rules since 0.31.0: 1 of 2 functions changed" in summary(review)
    page = write_review(review, tmp_path).read_text(encoding="utf-8")
    assert '<details class="around" open><summary>Around: WorkerWrapperBase.init_device: +2 -0 lines' in page
    assert '<details class="around"><summary>Around: SchedulerOutput: the same text as in 0.31.0' in page
    assert '<code class="plus">+' in page
    text = printed(review)
    assert "around: WorkerWrapperBase.init_device: +2 -0 lines since 0.31.0" in text
    assert "    +        if self.is_first:" in text


def test_a_terminal_shows_a_long_diff_in_part() -> None:
    long = Surrounding("f", "f", tuple(f"+line {n}" for n in range(SHORT + 5)))
    assert len(long.shortened()) == SHORT + 1
    assert "5 more lines" in long.shortened()[-1]
    assert len(Surrounding("f", "f", long.diff[:SHORT]).shortened()) == SHORT


def test_real_releases() -> None:
    overlay = rewrite(open_sources("0.33.0"), product_of(scheduler.TRANSFORM))
    found = surroundings(overlay, "0.32.0")
    assert not found.problem
    assert {rule: a.name for rule, a in found.rules.items()}["scheduler.preempted"] == "Scheduler._preempt_request"
    assert found.rules["scheduler.output"].name_before == "Scheduler.schedule"
    signs = [line[1:] for line in found.rules["scheduler.output"].diff if line.startswith("+")]
    assert any("skip_drafts=" in line for line in signs)  # the field that SchedulerOutput gained in 0.33.0
