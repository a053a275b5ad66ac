"""The diff: git and patch recreate the reviewed overlay from it, and it contains no other lines of vLLM."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.system import PATCH
from transforms.pipeline.build import make_overlay
from transforms.pipeline.diff import module_diff, overlay_diff, unified_lines
from transforms.pipeline.product import UCM

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.pipeline.rewrite import Overlay

GIT_APPLY = ("git", "apply", "--unidiff-zero", "-")
BY_PATCH = ("patch", "--quiet", "-p1")
TOOLS = pytest.mark.parametrize("tool", [GIT_APPLY, BY_PATCH], ids=["git", "patch"])
RANGE = re.compile(r"@@ -\d+,(\d+) \+\d+,(\d+) @@(?: [\w.]+)?(?: \([^)]*\))?")
LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "-- a/x\n", "\x0c\n", "\u2028\n"]), max_size=12)


def applied(root: Path, diff: str, files: dict[str, bytes], tool: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files after applying the diff."""
    if tool[0] == "patch":
        PATCH.require()
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    subprocess.run(tool, cwd=root, input=diff.encode(), check=True)
    return {path: (root / path).read_bytes() for path in files}


def upstream(overlay: Overlay) -> dict[str, bytes]:
    return {module.path: module.upstream for module in overlay.modules}


def rewritten(overlay: Overlay) -> dict[str, bytes]:
    return {module.path: module.rewritten for module in overlay.modules}


def assert_zero_context(diff: str) -> None:
    """Check that each hunk has as many lines as its range says, all of them added or removed."""
    for header, body in re.findall(r"^(@@ .*)\n((?:[^-@].*\n|-(?!-- a/).*\n)*)", diff, re.MULTILINE):
        removed, added = (int(count) for count in RANGE.fullmatch(header).groups())  # type: ignore[union-attr]
        lines = body.splitlines()
        assert [line[0] for line in lines] == ["-"] * removed + ["+"] * added


@TOOLS
def test_the_miniature(tmp_path: Path, overlay: Overlay, tool: tuple[str, ...]) -> None:
    assert applied(tmp_path, overlay_diff(overlay), upstream(overlay), tool) == rewritten(overlay)


def test_a_published_release(tmp_path: Path) -> None:
    """Git recreates the reviewed overlay from the real sources, and the diff contains no unchanged upstream line."""
    overlay = make_overlay("0.32.0")
    diff = overlay_diff(overlay)
    assert applied(tmp_path, diff, upstream(overlay), GIT_APPLY) == rewritten(overlay)
    assert_zero_context(diff)
    for module in overlay.modules:
        before, after = (data.decode().split("\n") for data in (module.upstream, module.rewritten))
        removed = re.findall(
            r"^-(?!-- a/)(.*)$", module_diff(module.path, module.upstream, module.rewritten), re.MULTILINE
        )
        assert all(before.count(line) > after.count(line) for line in removed)
    assert diff == overlay_diff(overlay)
    assert diff.encode() == (UCM.directory("0.32.0") / "changes.diff").read_bytes()


@TOOLS
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\nb", b"a\nx\nb"),
        (b"a\nb", b"a\nb\n"),
        (b"a\nb\n", b"a\nb"),
        (b"a\nb", b"a\nc"),
        (b"a", b"b"),
        (b"a\n", b"x\na\n"),
        (b"a\r\nb\r\n", b"a\r\nx\r\nb\r\n"),
        (b"a\n'\x0c\x1c\xe2\x80\xa8'\nb\n", b"a\n'\x0c\x1c\xe2\x80\xa8'\nx\nb\n"),
        (b"b\na\n-- a/x\n", b"a\n++ b/x\n"),
    ],
    ids=["no-end", "end-added", "end-lost", "end-changed", "one-line", "start", "crlf", "odd-breaks", "like-a-header"],
)
def test_unusual_files(tmp_path: Path, before: bytes, after: bytes, tool: tuple[str, ...]) -> None:
    extra = ("--binary",) if tool is BY_PATCH and b"\r" in before else ()
    assert applied(tmp_path, module_diff("x.py", before, after), {"x.py": before}, (*tool, *extra)) == {"x.py": after}


def test_an_insertion_names_the_line_before_it() -> None:
    assert module_diff("x.py", b"a\nb\n", b"a\nnew\nb\n") == "--- a/x.py\n+++ b/x.py\n@@ -1,0 +2,1 @@\n+new\n"
    assert module_diff("x.py", b"a\n", b"new\na\n").endswith("@@ -0,0 +1,1 @@\n+new\n")
    assert module_diff("x.py", b"a\nb\nc\n", b"a\nc\n").endswith("@@ -2,1 +1,0 @@\n-b\n")


def test_a_hunk_says_whether_a_build_without_all_hooks_lacks_it(overlay: Overlay) -> None:
    """Taking the hunks out that say so leaves the lines of a default build."""
    named = 0
    for module in overlay.modules:
        diff = overlay_diff(replace(overlay, modules=(module,)))
        lacking = re.findall(r"^@@ .* \(only with --hooks all\)\n((?:\+.*\n)+)", diff, re.MULTILINE)
        left = Counter(module.rewritten.decode().splitlines())
        left.subtract(line[1:] for lines in lacking for line in lines.splitlines())
        assert +left == Counter((module.default or module.upstream).decode().splitlines())
        named += len(lacking)
    assert named > len(overlay.modules)


def test_a_hunk_of_which_a_default_build_has_a_part_names_the_rest(overlay: Overlay) -> None:
    module = next(module for module in overlay.modules if module.opt_in and module.default)
    kept = next(one.rule for one in module.outcomes if one.rule not in module.opt_in)
    rules = (module.opt_in[0], kept)
    both = module.upstream + "".join(f"f()  # ucm: {rule}\n" for rule in rules).encode()
    diff = overlay_diff(replace(overlay, modules=(replace(module, rewritten=both),)))
    assert f" ({module.opt_in[0]} only with --hooks all)\n" in diff


def test_a_hunk_names_the_function_that_it_changes() -> None:
    before = """import a
class A:
    b = 1
    @wrapped
    def f(
        self,
    ):
        if a:
            def inner():
                return 1
        return 2
if a:
    c = 3
    def g(): return 4
"""
    lines = before.splitlines(keepends=True)
    names = {
        number: module_diff(
            "x.py", before.encode(), "".join([*lines[: number - 1], "# new\n", *lines[number - 1 :]]).encode()
        )
        .splitlines()[2]
        .partition(" @@")[2]
        for number in range(1, len(lines) + 1)
    }
    assert names == {
        1: "", 2: "", 3: " A", 4: " A", 5: " A.f", 6: " A.f", 7: " A.f", 8: " A.f", 9: " A.f", 10: " A.f.inner",
        11: " A.f", 12: "", 13: "", 14: "",
    }  # fmt: skip
    assert module_diff("x.py", b"def f():\n    a\n    b\n", b"def f():\n    b\n").splitlines()[2] == "@@ -2,1 +1,0 @@ f"
    assert module_diff("x.txt", b"def f(:\n    a\n", b"def f(:\n    b\n").splitlines()[2] == "@@ -2,1 +2,1 @@"


def test_nothing_changed_is_no_diff() -> None:
    assert module_diff("x.py", b"a\n", b"a\n") == ""


@settings(deadline=None)
@given(LINES, LINES)
def test_any_change_read_back(before: list[str], after: list[str]) -> None:
    """A reader that knows only the format recreates the second file from the first."""
    diff = module_diff("x", "".join(before).encode(), "".join(after).encode())
    result, taken = [], 0
    parts = re.split(r"(?:^|\n)@@ -(\d+),(\d+) \+\d+,(\d+) @@\n", diff)
    for start, removed, _added, body in zip(*[iter(parts[1:])] * 4, strict=True):
        at = int(start) - (1 if int(removed) else 0)
        lines = [line + "\n" for line in body.removesuffix("\n").split("\n")]
        assert [line[1:] for line in lines[: int(removed)]] == before[at : at + int(removed)]
        result += before[taken:at] + [line[1:] for line in lines[int(removed) :]]
        taken = at + int(removed)
    assert result + before[taken:] == after


def test_lines_that_occur_once_are_aligned_before_all_others() -> None:
    """The standard library's matcher would match the brackets of one function with those of another."""
    before = ["def a():\n", "{\n", "    one\n", "}\n", "\n", "def c():\n", "{\n", "}\n"]
    after = [*before[:5], "def b():\n", "{\n", "    two\n", "}\n", "\n", *before[5:]]
    diff = module_diff("x", "".join(before).encode(), "".join(after).encode())
    assert diff.splitlines()[2:] == ["@@ -5,0 +6,5 @@", "+def b():", "+{", "+    two", "+}", "+"]
    moved = module_diff("x", b"{\nfirst\n}\n{\nsecond\n}\n", b"{\nsecond\n}\n{\nfirst\n}\n")
    assert sum(line.startswith("-") for line in moved.splitlines()[1:]) == 3


@settings(deadline=None)
@given(LINES, LINES)
def test_any_unified_diff_is_applied(before: list[str], after: list[str]) -> None:
    """A reader of unified diffs recreates the second list of lines from the first, whatever the context."""
    for context in (0, 3):
        result: list[str] = []
        done = 0
        for line in unified_lines(before, after, context):
            if line.startswith("@@ "):
                start, length = map(int, line.split()[1][1:].split(","))
                result, done = [*result, *before[done : start - 1 if length else start]], start - 1 if length else start
            else:
                if line[0] != "+":
                    assert before[done] == line[1:]
                    done += 1
                if line[0] != "-":
                    result.append(line[1:])
        assert [*result, *before[done:]] == after
