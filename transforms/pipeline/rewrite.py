"""Rewrite a release: apply a product's transforms to its sources."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import apply_rules
from transforms.engine.marks import UNREADABLE
from transforms.engine.report import Outcome, Status
from transforms.engine.splice import spliced
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.tree import SourceError, unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transforms.engine.releases import Absent
    from transforms.engine.transform import Transform
    from transforms.pipeline.product import Product
    from transforms.pipeline.results import Results
    from transforms.pipeline.sources.tree import Artefact, SourceTree

NOTICE = (
    "# Changed by the {overlay} overlay for {package} {release}. "
    "A line that ends in `ucm:` and the name of a rule was added by\n"
    "# that rule, with the block that it opens. The NOTICE file of this distribution says from which sources.\n"
)


@dataclass(frozen=True)
class RewrittenModule:
    """One module before and after.

    Attributes:
        transforms: The transforms that changed it, in order; they may be of several owners.
        path: Its path in the release, ``vllm/…/x.py``.
        upstream: Its source as published.
        rewritten: Its source in the overlay with all hooks.
        outcomes: The outcome of each of the transforms' rules.
        default: Its source in the overlay with the hooks that shipped features use; None if it needs none of these.
        opt_in: The rules that only ``rewritten`` has.
    """

    transforms: tuple[Transform, ...]
    path: str
    upstream: bytes
    rewritten: bytes
    outcomes: tuple[Outcome, ...]
    default: bytes | None = None
    opt_in: tuple[str, ...] = ()

    @property
    def transform(self) -> str:
        """The ids of the transforms that changed it."""
        return ", ".join(transform.id for transform in self.transforms)

    @property
    def group(self) -> str:
        """The unit that can be switched off in a process; groups of further owners go off with it."""
        return self.transforms[0].module.group

    @property
    def name(self) -> str:
        """The dotted name under which it is imported."""
        return self.path.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Overlay:
    """The result of applying a product's transforms to one release.

    Attributes:
        release: The release.
        artefact: The artefact that its sources were read from.
        modules: The modules that changed, in the order of the transforms.
        outcomes: The outcome of every rule, also of those whose module did not change.
        product: The package and the rules that were applied to it.
    """

    release: str
    artefact: Artefact
    modules: tuple[RewrittenModule, ...]
    outcomes: tuple[Outcome, ...]
    product: Product = UCM

    @property
    def named(self) -> str:
        """Its name on a command line."""
        return self.product.named(self.release)

    @property
    def directory(self) -> Path:
        """The directory of its lock."""
        return self.product.directory(self.release)

    @property
    def title(self) -> str:
        """The package and the release, in prose."""
        return f"{self.product.package.title} {self.release}"

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that stop a build: rules that failed, and rules whose insertion the sources already contain."""
        return [outcome for outcome in self.outcomes if outcome.status.failed or outcome.status is Status.PRESENT]


def rewrite(tree: SourceTree, product: Product = UCM, results: Results | None = None) -> Overlay:
    """Apply all transforms of a product to a release.

    Args:
        tree: The release's files.
        product: The package and the rules.
        results: Kept results, which are used where they are found; None rewrites every module.

    Raises:
        SourceError: If its files cannot be read.
    """
    paths = {transform.id: module_path(transform, tree) for transform in product.transforms}
    sources = tree.read_many(list(dict.fromkeys(path for path in paths.values() if path)))
    modules, outcomes, done = [], [], set()
    for transform in product.transforms:
        path = paths[transform.id]
        if path is None:
            outcomes += _without_module(transform, tree.release)
        elif path not in done:
            done.add(path)
            together = [t for t in product.transforms if paths[t.id] == path]
            kept = results.get(together, path, sources[path]) if results else None
            module = kept or _rewrite_module(together, path, sources[path], tree.release, product)
            if module.transforms:
                modules.append(module)
            elif results:
                results.keep([module])  # as published: there is nothing to check
            outcomes += module.outcomes
    return Overlay(tree.release, tree.artefact, tuple(modules), tuple(outcomes), product)


def module_path(transform: Transform, tree: SourceTree) -> str | None:
    """Return the path of a transform's module in a release; None if the release has none, or one that is not used."""
    if _reason(transform.module.unused, tree.release):
        return None
    return next((path for path in transform.module.candidates(tree.release) if tree.exists(path)), None)


def _rewrite_module(
    transforms: Sequence[Transform], path: str, source: bytes, release: str, product: Product
) -> RewrittenModule:
    """Return a module with the insertions of its transforms; ``transforms`` is empty if they insert nothing."""
    try:
        parsed = cst.parse_module(source)
    except (cst.ParserSyntaxError, *UNREADABLE) as error:
        raise unreadable(path, error) from error
    try:
        return _inserted(transforms, path, source, parsed, release, product)
    except RecursionError as error:
        raise unreadable(path, error) from error


def _inserted(
    transforms: Sequence[Transform], path: str, source: bytes, parsed: cst.Module, release: str, product: Product
) -> RewrittenModule:
    changed, outcomes, changing = _applied(transforms, parsed, path, release)
    rewritten = _with_notice(_printed(path, source, parsed, changed), release, product)
    module = RewrittenModule(tuple(changing), path, source, rewritten, tuple(outcomes), rewritten)
    if not any(transform.opt_in for transform in changing):
        return module
    defaults = [transform.default for transform in changing if transform.default is not None]
    smaller, _, left = _applied(defaults, parsed, path, release)
    opt_in = tuple(rule.id for t in changing for rule in t.all_rules if t.is_opt_in(rule.id))
    default = _with_notice(_printed(path, source, parsed, smaller), release, product) if left else None
    return replace(module, default=default, opt_in=opt_in)


def _printed(path: str, source: bytes, parsed: cst.Module, changed: cst.Module) -> bytes:
    """Return a changed module's source; nothing but the insertions differs from the upstream one."""
    found = spliced(source, parsed, changed)
    if found is not None:
        return found
    if parsed.bytes != source:
        what = "an upstream module would change in more than its insertions"
        raise SourceError(what, where=path, fix="end its lines with \\n or \\r\\n, not with \\r, in the sources")
    return changed.bytes


def _applied(
    transforms: Sequence[Transform], module: cst.Module, path: str, release: str
) -> tuple[cst.Module, list[Outcome], list[Transform]]:
    """Apply transforms in turn; return the module, all outcomes, and the transforms that inserted anything."""
    outcomes: list[Outcome] = []
    changing = []
    for transform in transforms:
        changed, found = apply_rules(module, transform.all_rules, path, release)
        reason = _reason(transform.module.absent, release)
        own = [_against_record(outcome, reason) for outcome in found]
        if any(_is_change(outcome, transform) for outcome in own):
            module = changed
            outcomes += own
            changing.append(transform)
        else:
            outcomes += [_left_out(outcome, reason) for outcome in own]
    return module, outcomes, changing


def _with_notice(source: bytes, release: str, product: Product) -> bytes:
    """Insert the notice of changes after the source's leading comments: its licence header, and its encoding.

    A byte order mark stays first, a declaration of the encoding stays in the first two lines, and the notice's lines
    end as the source's do.
    """
    mark = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    lines = source.removeprefix(mark).splitlines(keepends=True)
    blank = 1 if len(lines) > 1 and not lines[0].strip() and lines[1].lstrip().startswith(b"#") else 0
    header = next((i for i, line in enumerate(lines) if i >= blank and not line.startswith(b"#")), len(lines))
    notice = NOTICE.format(overlay=product.publisher.title, package=product.package.title, release=release).encode()
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    before = b"".join(lines[:header])
    before += end if before and not before.endswith(b"\n") else b""
    return b"".join([mark, before, notice.replace(b"\n", end), *lines[header:]])


def _is_change(outcome: Outcome, transform: Transform) -> bool:
    """Return whether an outcome is more than an import of hooks that nothing would call."""
    return outcome.status not in {Status.UPSTREAMED, Status.NOT_APPLICABLE} and outcome.rule != f"{transform.id}.import"


def _left_out(outcome: Outcome, reason: str | None) -> Outcome:
    """Return the outcome of a rule in a module that is not shadowed because it would gain only the import."""
    if outcome.status is not Status.APPLIED:
        return outcome
    if reason is not None:
        return Outcome(outcome.rule, Status.NOT_APPLICABLE, "", detail=reason)
    detail = "no other rule inserts anything into this module, so nothing would call a hook"
    return Outcome(outcome.rule, Status.NOT_APPLICABLE, outcome.path, detail=detail)


def _against_record(outcome: Outcome, reason: str | None) -> Outcome:
    """Return a failure as the record explains it: a rule may have ended in a release that is said to lack its module.

    Any other failure shows that the record is wrong, because the release has what the rule looks for.
    """
    if not outcome.status.failed or reason is None:
        return outcome
    if outcome.status is Status.ENDED:
        return Outcome(outcome.rule, Status.NOT_APPLICABLE, "", detail=reason)
    return replace(outcome, detail=f"{outcome.detail}; the record is wrong for this release, which has it: {reason}")


def _reason(absences: Sequence[Absent], release: str) -> str | None:
    return next((a.reason for a in absences if release in a.releases), None)


def _without_module(transform: Transform, release: str) -> list[Outcome]:
    reason = _reason((*transform.module.unused, *transform.module.absent), release)
    status = Status.NOT_APPLICABLE if reason else Status.ENDED
    looked = ", ".join(transform.module.candidates(release))
    detail = reason or f"the release has none of {looked}"
    return [Outcome(rule.id, status, "", detail=detail) for rule in transform.all_rules]
