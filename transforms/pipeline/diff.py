"""The reviewed diff: zero context, so that it holds nothing of vLLM but the lines that change.

The settings are pinned here and nowhere else: patience matching, no context, ``a/`` and ``b/`` prefixes, no dates.
``git apply --unidiff-zero`` and ``patch -p1`` apply the result to the published sources.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from patiencediff import PatienceSequenceMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transforms.pipeline.rewrite import Overlay


def module_diff(path: str, upstream: bytes, rewritten: bytes) -> str:
    """The zero-context diff of one module, with its file header; empty where nothing changed."""
    hunks = "".join(_hunks(_lines(upstream), _lines(rewritten)))
    return f"--- a/{path}\n+++ b/{path}\n{hunks}" if hunks else ""


def overlay_diff(overlay: Overlay) -> str:
    """The diff of all modules of an overlay, ordered by path."""
    modules = sorted(overlay.modules, key=lambda module: module.path)
    return "".join(module_diff(module.path, module.upstream, module.rewritten) for module in modules)


def _lines(source: bytes) -> list[str]:
    """The lines as git and patch count them: nothing but a line feed ends one."""
    return list(io.StringIO(source.decode(), newline="\n"))


def _hunks(before: list[str], after: list[str]) -> Iterator[str]:
    for tag, i1, i2, j1, j2 in PatienceSequenceMatcher(None, before, after).get_opcodes():
        if tag != "equal":
            yield f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@\n"
            yield from _marked("-", before[i1:i2])
            yield from _marked("+", after[j1:j2])


def _range(start: int, end: int) -> str:
    """A range of lines as the format has it: an empty one names the line before it."""
    return f"{start + 1 if end > start else start},{end - start}"


def _marked(sign: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"
