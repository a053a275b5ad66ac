"""Sources in unusual forms: what is not inserted stays as it is, and what cannot be read is told."""

from __future__ import annotations

import ast
import codecs
from dataclasses import dataclass

import pytest

from tests.transforms.pipeline.memory import OUTPUT, OUTPUT_SOURCE, SMALL, WORKER, WORKER_SOURCE, DictTree
from transforms.engine.marks import MARK
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.diff import overlay_diff
from transforms.pipeline.rewrite import NOTICE, RewrittenModule, rewrite
from transforms.pipeline.sources.tree import SourceError

PLAIN = WORKER_SOURCE.encode()
ACCENT = "# é\n"
FORMS = {
    "plain": PLAIN,
    "with a byte order mark": codecs.BOM_UTF8 + PLAIN,
    "with a mark and a declaration": codecs.BOM_UTF8 + b"# coding: utf-8\n" + PLAIN,
    "with CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "with a mark and CRLF": codecs.BOM_UTF8 + PLAIN.replace(b"\n", b"\r\n"),
    "in Latin-1": b"# coding: latin-1\n" + PLAIN + ACCENT.encode("latin-1"),
    "in Latin-1, after a blank line": b"\n# coding: latin-1\n" + PLAIN + ACCENT.encode("latin-1"),
    "after an interpreter": b"#!/usr/bin/python3\n# -*- coding: cp1252 -*-\n" + PLAIN + ACCENT.encode("cp1252"),
    "without an end of line": PLAIN.rstrip(b"\n"),
    "with form feeds": PLAIN.replace(b"\n\n\nclass", b"\n\x0c\n\nclass"),
    "with other separators in texts": PLAIN.replace(b"< 7", "< 7  # \x1c \u2028 \x85".encode()),
}


@dataclass
class BytesTree(DictTree):
    """The files of a release, of which one is given as bytes."""

    worker: bytes = PLAIN

    def read(self, path: str) -> bytes:
        return self.worker if path == WORKER else OUTPUT_SOURCE.encode()

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        return {path: self.read(path) for path in paths}


def rewritten(source: bytes) -> RewrittenModule:
    overlay = rewrite(BytesTree(files={WORKER: "", OUTPUT: ""}, worker=source), SMALL)
    check_overlay(overlay)
    assert overlay_diff(overlay)
    return next(module for module in overlay.modules if module.path == WORKER)


@pytest.mark.parametrize("form", FORMS)
def test_a_source_keeps_its_form(form: str) -> None:
    source = FORMS[form]
    module = rewritten(source)
    compile(module.rewritten, WORKER, "exec", dont_inherit=True)
    assert module.rewritten.startswith(codecs.BOM_UTF8) == source.startswith(codecs.BOM_UTF8)
    assert module.rewritten.count(b"\xef\xbb\xbf") == source.count(b"\xef\xbb\xbf")
    is_crlf = b"\r\n" in source
    lines = module.rewritten.splitlines(keepends=True)
    assert {line.endswith(b"\r\n") for line in lines if line.endswith(b"\n")} == {is_crlf}
    assert NOTICE[:10].encode() in module.rewritten
    kept = [line for line in lines if MARK.encode() not in line and b"hooks" not in line and line.strip()]
    text = b"".join(kept)
    assert all(line.strip() in text for line in source.splitlines() if line.strip())


@pytest.mark.parametrize("form", FORMS)
def test_what_is_inserted_does_not_depend_on_the_form(form: str) -> None:
    plain, other = rewritten(PLAIN), rewritten(FORMS[form])
    assert ast.dump(ast.parse(other.rewritten)) == ast.dump(ast.parse(plain.rewritten))


UNREADABLE = {
    "an unknown encoding": (b"# coding: nonsense\n" + PLAIN, "does not parse", "as published"),
    "an encoding of no text": (b"# coding: rot13\n" + PLAIN, "does not parse", "as published"),
    "a mark and another encoding": (codecs.BOM_UTF8 + b"# coding: latin-1\n" + PLAIN, "does not parse", "as published"),
    "another encoding than it says": (PLAIN + ACCENT.encode("latin-1"), "does not parse", "as published"),
    "UTF-16": (WORKER_SOURCE.encode("utf-16"), "does not parse", "as published"),
    "a null byte": (PLAIN + b"x = 1\0\n", "does not parse", "as published"),
    "half a file": (PLAIN + b"def f(\n", "does not parse", "as published"),
    "a long sum": (PLAIN + b"x = " + b"+".join([b"1"] * 1500) + b"\n", "nested too deeply", "split it"),
    "a long chain": (PLAIN + b"x = a" + b".b()" * 800 + b"\n", "nested too deeply", "split it"),
    "old line ends": (PLAIN.replace(b"\n", b"\r"), "more than its insertions", "end its lines"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_source_that_cannot_be_read_is_told_with_its_file(what: str) -> None:
    source, says, fix = UNREADABLE[what]
    with pytest.raises(SourceError, match=says) as caught:
        rewritten(source)
    assert caught.value.where.startswith(WORKER)
    assert fix in caught.value.fix


def test_an_empty_source_is_reported_by_its_rules() -> None:
    overlay = rewrite(BytesTree(files={WORKER: "", OUTPUT: ""}, worker=b""), SMALL)
    assert {outcome.rule.partition(".")[0] for outcome in overlay.failures} == {"worker"}
