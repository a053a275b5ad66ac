"""A release's sources in, its rewritten modules out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import apply_rules
from transforms.engine.report import Outcome, Status
from transforms.pipeline.sources.tree import SourceError
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.engine.transform import Transform
    from transforms.pipeline.sources.tree import Artefact, SourceTree

NOTICE = (
    "# Changed by the UCM overlay for vLLM {release}. A line that ends in `ucm:` and the name of a rule was added by\n"
    "# that rule, with the block that it opens. The NOTICE file of this distribution says from which sources.\n"
)


@dataclass(frozen=True)
class RewrittenModule:
    """One vLLM module before and after.

    Attributes:
        transform: The id of the transform that changed it.
        group: The unit that can be switched off in a process.
        path: Its path in the release, ``vllm/…/x.py``.
        upstream: Its source as published.
        rewritten: Its source in the overlay.
        outcomes: What became of each of the transform's rules.
    """

    transform: str
    group: str
    path: str
    upstream: bytes
    rewritten: bytes
    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        """The dotted name under which it is imported."""
        return self.path.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Overlay:
    """All that the transforms make of one release.

    Attributes:
        release: The release.
        artefact: What its sources were read from.
        modules: The modules that changed, in the order of the transforms.
        outcomes: What became of every rule of every transform, also of those whose module did not change.
    """

    release: str
    artefact: Artefact
    modules: tuple[RewrittenModule, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that stop a build: rules that failed, and rules that found their own work in the sources."""
        return [outcome for outcome in self.outcomes if outcome.status.failed or outcome.status is Status.PRESENT]


def rewrite(tree: SourceTree, transforms: Sequence[Transform] = TRANSFORMS) -> Overlay:
    """Apply all transforms to a release.

    Raises:
        SourceError: If its files cannot be read.
    """
    paths = {transform.id: module_path(transform, tree) for transform in transforms}
    sources = tree.read_many([path for path in paths.values() if path])
    modules, outcomes = [], []
    for transform in transforms:
        path = paths[transform.id]
        if path is None:
            outcomes += _without_module(transform, tree.release)
            continue
        module = _rewrite_module(transform, path, sources[path], tree.release)
        if any(_is_change(outcome, transform) for outcome in module.outcomes):
            modules.append(module)
            outcomes += module.outcomes
        else:
            outcomes += [_left_out(outcome) for outcome in module.outcomes]
    return Overlay(tree.release, tree.artefact, tuple(modules), tuple(outcomes))


def module_path(transform: Transform, tree: SourceTree) -> str | None:
    """Where the release keeps a transform's module; None if it has none, or one that is not for use."""
    if _absence(transform, tree.release):
        return None
    return next((path for path in transform.module.candidates(tree.release) if tree.exists(path)), None)


def _rewrite_module(transform: Transform, path: str, source: bytes, release: str) -> RewrittenModule:
    try:
        parsed = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise SourceError(
            "an upstream module does not parse", where=f"{path}: {error}", fix="check that the sources are complete"
        ) from error
    changed, outcomes = apply_rules(parsed, transform.all_rules, path, release)
    rewritten = _with_notice(changed.bytes, release)
    return RewrittenModule(transform.id, transform.module.group, path, source, rewritten, tuple(outcomes))


def _with_notice(source: bytes, release: str) -> bytes:
    """The source with a notice of changes after the comments that it starts with (its licence header)."""
    lines = source.splitlines(keepends=True)
    header = next((i for i, line in enumerate(lines) if not line.startswith(b"#")), len(lines))
    return b"".join([*lines[:header], NOTICE.format(release=release).encode(), *lines[header:]])


def _is_change(outcome: Outcome, transform: Transform) -> bool:
    """Whether an outcome is more than the import of hooks that nothing would call."""
    return outcome.status not in {Status.UPSTREAMED, Status.NOT_APPLICABLE} and outcome.rule != f"{transform.id}.import"


def _left_out(outcome: Outcome) -> Outcome:
    """The outcome of a rule in a module that is not shadowed, because nothing but the import would be inserted."""
    if outcome.status is not Status.APPLIED:
        return outcome
    detail = "no other rule inserts anything into this module, so nothing would call a hook"
    return Outcome(outcome.rule, Status.NOT_APPLICABLE, outcome.path, detail=detail)


def _absence(transform: Transform, release: str) -> str | None:
    return next((a.reason for a in transform.module.absent if release in a.releases), None)


def _without_module(transform: Transform, release: str) -> list[Outcome]:
    reason = _absence(transform, release)
    status = Status.NOT_APPLICABLE if reason else Status.MISSING
    looked = ", ".join(transform.module.candidates(release))
    detail = reason or f"the release has none of {looked}"
    return [Outcome(rule.id, status, "", detail=detail) for rule in transform.all_rules]
