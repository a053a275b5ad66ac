"""The review: its content, its form in a terminal, and the files that accepting it writes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.releases import REVIEWED
from tests.transforms.pipeline.memory import (
    OUTPUT,
    OUTPUT_SOURCE,
    WORKER,
    WORKER_SOURCE,
    DictTree,
    dict_tree,
    small_overlay,
)
from transforms.pipeline import cli
from transforms.pipeline.changes import Change
from transforms.pipeline.diff import module_diff
from transforms.pipeline.hunks import inserted, owners, parse_diff
from transforms.pipeline.lock import accept, read_lock
from transforms.pipeline.product import UCM
from transforms.pipeline.review.highlight import highlighted
from transforms.pipeline.review.model import Review, Verdict, make_review, summary
from transforms.pipeline.review.page import write_review
from transforms.pipeline.review.regions import lines_of, regions
from transforms.pipeline.review.terminal import print_review
from transforms.registry import TRANSFORMS, VLLM

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.product import Product

MIB = 1 << 20
LONGER = WORKER_SOURCE.replace("import os\n", "import os\n" + "\n" * 59 + "\f\n")


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    """The overlay of 0.31.0 is reviewed."""
    target = tmp_path / "overlays"
    accept(small_overlay(DictTree("0.31.0"), target))
    return target


def review_of(overlays: Path, worker: str = WORKER_SOURCE) -> Review:
    return make_review(small_overlay(DictTree("0.32.0", {WORKER: worker, OUTPUT: OUTPUT_SOURCE}), overlays), dict_tree)


def printed(review: Review, width: int) -> str:
    text = io.StringIO()
    print_review(review, Console(file=text, width=width))
    return text.getvalue()


def test_verdicts(overlays: Path) -> None:
    assert review_of(overlays).verdict is Verdict.UNREVIEWED
    accept(small_overlay(DictTree("0.32.0"), overlays))
    assert review_of(overlays).verdict is Verdict.SAME
    changed = review_of(overlays, worker=LONGER)
    assert (changed.verdict, changed.differences) == (Verdict.DIFFERS, (f"{WORKER}: the upstream file has changed",))
    (overlays / "vllm-0.32.0" / "changes.diff").write_text("", encoding="utf-8")
    assert review_of(overlays).differences == ("changes.diff is not the diff of these modules",)


def test_summary(overlays: Path) -> None:
    text = "\n".join(summary(review_of(overlays, worker=LONGER)))
    assert "2 modules, 3 rules inserted, 0 not" in text
    assert "compared with the lock: unreviewed" in text
    assert "rules since 0.31.0: 1 other line, 2 unchanged" in text
    assert "around the rules since 0.31.0: 0 of 2 functions changed" in text


def test_regions_hold_every_line_once() -> None:
    (_, module) = small_overlay(DictTree(files={WORKER: LONGER, OUTPUT: OUTPUT_SOURCE})).modules
    found = regions(module, context=3)
    rows = [row for region in found for row in region.rows]
    assert [row.old for row in rows if row.old] == list(range(1, len(lines_of(module.upstream)) + 1))
    assert [row.new for row in rows if row.new] == list(range(1, len(lines_of(module.rewritten)) + 1))
    assert [region.rules for region in found] == [("worker.import",), (), ("worker.init",)]
    assert found[-1].scope == "WorkerWrapperBase.init_device"


def test_an_upstream_line_that_had_to_change_belongs_to_the_rule() -> None:
    diff = module_diff("m.py", b"f(a,\n  b)\n", b"f(a,\n  b,\n  c=1)  # ucm: x.y\n")
    ((hunk,),) = parse_diff(diff).values()
    assert (hunk.line, hunk.removed, owners(hunk, "m.py", ())) == (2, ("  b)",), ["x.y", "x.y"])


def test_the_notice_belongs_to_no_rule() -> None:
    (_, module) = small_overlay(DictTree()).modules
    found = inserted(module_diff(module.path, module.upstream, module.rewritten), module.transforms)
    assert set(found) == {"worker.import", "worker.init"}
    assert found["worker.init"].text == ("_ucm_hooks.worker_init(self)  # ucm: worker.init",)
    assert found["worker.import"].lines == (5,)


def test_highlighting_keeps_every_character() -> None:
    lines = ['x = """<a>', "&", '</a>"""  # end', "", "\tdef f(): pass"]
    plain = [re.sub(r"</?i[^>]*>", "", line) for line in highlighted(lines)]
    assert plain == ['x = """&lt;a&gt;', "&amp;", '&lt;/a&gt;"""  # end', "", "\tdef f(): pass"]
    assert all(line.count("<i") == line.count("</i>") for line in highlighted(lines))


def test_a_long_line_may_be_broken_after_punctuation() -> None:
    long = f"    result = self.method(argument, key={'x' * 50})"
    (line,) = highlighted([long])
    assert "method(<wbr>argument,<wbr> key=<wbr>x" in line
    assert re.sub(r"<[^>]*>", "", line) == long


def test_other_text_is_told(overlays: Path) -> None:
    diff = overlays / "vllm-0.31.0" / "changes.diff"
    diff.write_text(diff.read_text(encoding="utf-8").replace("worker_init(", "worker_start("), encoding="utf-8")
    change = review_of(overlays).changes.rules["worker.init"]
    assert change.change is Change.REWORDED
    assert "worker_start(" in change.notes[-1]


@pytest.mark.parametrize("width", [80, 200])
def test_terminal(overlays: Path, width: int) -> None:
    text = printed(review_of(overlays, worker=LONGER), width)
    assert max(map(len, text.splitlines())) <= width
    assert "+         _ucm_hooks.worker_init(self)  # ucm: worker.init" in text
    assert "A general plugin runs before either exists" in " ".join(text.split())
    assert "worker.init  1 hit  other line: +60 lines" in text
    both = "self.worker.init_device()"
    assert any(line.count(both) == (2 if width > 100 else 1) for line in text.splitlines())


def test_page_of_a_small_overlay(overlays: Path, tmp_path: Path) -> None:
    text = write_review(review_of(overlays), tmp_path).read_text(encoding="utf-8")
    assert "This overlay has not been reviewed." in text
    assert "nox -s review -- 0.32.0 --accept" in text
    assert text.count("</script>") == 1
    assert "&lt;/script&gt;` &amp; &lt;b&gt;markup" in text
    addresses = set(re.findall(r"(?:src|href)=\"(https?:[^\"]*)", text))
    assert addresses <= {transform.governance.upstream.link for transform in TRANSFORMS}


def test_a_real_release(review: Review, tmp_path: Path) -> None:
    assert review.verdict is Verdict.SAME
    assert review.changes.since == REVIEWED[REVIEWED.index("0.16.0") - 1]
    assert review.changes.rules["attention.begin"].change is Change.MOVED
    assert review.changes.rules["attention.mla-begin"].change is Change.GONE
    page = write_review(review, tmp_path)
    assert page.stat().st_size < 8 * MIB
    text = page.read_text(encoding="utf-8")
    for module in review.modules:
        assert module.module.path in text
        assert all(f'<code class="rule">{rule}</code>' in text for rule in module.outcomes)


def test_accept_writes_lock_diff_and_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Product] = []

    def write_generated(product: Product = UCM) -> list[Path]:
        written.append(product)
        return []

    monkeypatch.setattr(
        cli, "make_overlay", lambda release, origin=None, product=UCM: small_overlay(DictTree(release), tmp_path)
    )
    monkeypatch.setattr(
        cli, "open_sources", lambda release, origin=None, cache=None, *, package=VLLM: DictTree(release)
    )
    monkeypatch.setattr(cli, "write_review", lambda review, out=None: write_review(review, tmp_path / "build"))
    monkeypatch.setattr(cli, "write_generated", write_generated)
    assert cli.main(["review", "0.99.0"]) == 0
    told = capsys.readouterr()
    assert "unreviewed" in told.out
    assert "nox -s review -- 0.99.0 --accept" in told.err
    assert read_lock("0.99.0", replace(UCM, overlays=tmp_path)) is None

    assert cli.main(["review", "0.99.0", "--accept"]) == 0
    told = capsys.readouterr()
    assert f"wrote: {tmp_path / 'vllm-0.99.0' / 'lock.json'}" in told.out
    assert f"wrote: {tmp_path / 'vllm-0.99.0' / 'census.json'}" in told.out
    assert "nox -s build-overlay -- 0.99.0" in told.err
    assert [one.owners for one in written] == [("ucm",)]


def test_one_release_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["review", "0.32.0", "0.33.0"]) == 1
    assert "one release at a time" in capsys.readouterr().err
