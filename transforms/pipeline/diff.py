"""The reviewed diff: zero context, so that it holds nothing of vLLM but the lines that change.

The settings are pinned here and nowhere else: patience matching, no context, ``a/`` and ``b/`` prefixes, no dates.
``git apply --unidiff-zero`` applies the result to the published sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patiencediff import PatienceSequenceMatcher, unified_diff

if TYPE_CHECKING:
    from transforms.pipeline.rewrite import Overlay


def module_diff(path: str, upstream: bytes, rewritten: bytes) -> str:
    """The zero-context diff of one module, with its file header."""
    before, after = (source.decode().splitlines(keepends=True) for source in (upstream, rewritten))
    lines = unified_diff(
        before,
        after,
        fromfile=f"a/{path}",
        tofile=f"b/{path}",
        n=0,
        sequencematcher=PatienceSequenceMatcher,
    )
    return "".join(_without_date(line) for line in lines)


def overlay_diff(overlay: Overlay) -> str:
    """The diff of all modules of an overlay, ordered by path."""
    modules = sorted(overlay.modules, key=lambda module: module.path)
    return "".join(module_diff(module.path, module.upstream, module.rewritten) for module in modules)


def _without_date(line: str) -> str:
    if line.startswith(("--- a/", "+++ b/")):
        return line.partition("\t")[0].rstrip("\n") + "\n"
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
