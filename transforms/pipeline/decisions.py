"""What a person must decide about a release, each with the nearest place and the edit that would do it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from packaging.version import Version

from transforms.engine.edits import AtEnd, AtStart, Beside
from transforms.engine.members import Keyword, Method
from transforms.engine.report import Status
from transforms.engine.sites import TOP_LEVEL, site_lines
from transforms.pipeline.census import neighbours, scope_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from transforms.engine.census import Elsewhere
    from transforms.engine.releases import Releases
    from transforms.engine.report import Outcome
    from transforms.engine.rule import Rule, Variant
    from transforms.pipeline.census import Site
    from transforms.pipeline.product import Product
    from transforms.pipeline.rebindings import Fate
    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import SourceTree

#: The most places of one kind that a decision shows.
SHOWN = 6
REASON = "…"


@dataclass(frozen=True)
class Decision:
    """One thing that a person must decide.

    Attributes:
        what: What is not known, in one line.
        near: The nearest places: of the new source, and known ones.
        edit: What to change, and in which file.
        code: The code that would do it; ``…`` stands for the reason that a person has to give.
    """

    what: str
    near: tuple[str, ...]
    edit: str
    code: str = ""


def decisions(overlay: Overlay, tree: SourceTree, sites: Sequence[Site], lost: Sequence[Fate]) -> list[Decision]:
    """Return what a person must decide about a release.

    Args:
        overlay: The result of trying every rule.
        tree: The release.
        sites: All places of the kinds that rules hook.
        lost: The replacements that take hooks away.
    """
    places: dict[str, list[Site]] = {}
    for site in sites:
        if not site.is_known:
            places.setdefault(site.place, []).append(site)
    return [
        *(_of_rule(outcome, overlay, tree) for outcome in _first_of_module(overlay.failures)),
        *(_of_place(same, sites, overlay, tree) for same in places.values()),
        *(_of_replacement(fate, overlay) for fate in lost),
    ]


def _first_of_module(failures: Iterable[Outcome]) -> Iterator[Outcome]:
    """Yield the failures; of those that only say that a transform's module is gone, one for each transform."""
    seen = set()
    for outcome in failures:
        transform = outcome.rule.rpartition(".")[0]
        if outcome.path or transform not in seen:
            yield outcome
        if not outcome.path:
            seen.add(transform)


def _of_rule(outcome: Outcome, overlay: Overlay, tree: SourceTree) -> Decision:
    product, release = overlay.product, overlay.release
    transform = next(t for t in product.transforms if any(r.id == outcome.rule for r in t.all_rules))
    rule = next(r for r in transform.all_rules if r.id == outcome.rule)
    near = [f"{outcome.path}:{one.line}: {one.code.strip()}" for one in outcome.candidates[:SHOWN]]
    what = f"{outcome.rule} is {outcome.status.value}: {outcome.detail}"
    file = file_of(outcome.rule, product)
    if outcome.status is Status.ENDED:
        scopes = [form.scope.name for one in (rule, *transform.rules) for form in one.variants]
        name = next(filter(None, scopes), "").partition(".")[0]
        homes = list(_homes(tree, name)) if name else []
        if homes and not outcome.path:
            edit = f"the class is elsewhere now; in {file}, add the path, newest first, to the module of {transform.id}"
            code = f'ModulePath("{homes[0].partition(":")[0]}", Releases(since="{release}")),'
            return Decision(what, tuple(homes[:SHOWN]), edit, code)
        owner = "the rule" if outcome.path else "the module"
        edit = f"in {file}, say of {owner} since when it is absent, and what takes its place"
        return Decision(what, (*near, *homes[:SHOWN]), edit, f'Absent(Releases(since="{release}"), "{REASON}"),')
    if outcome.status is Status.MISSING:
        edit = f"in {file}, give {rule.id} a variant for the new form; if there is nothing like it, an `Absent` range"
        return Decision(what, tuple(near), edit, _variant(rule, outcome, release))
    if outcome.status is Status.AMBIGUOUS:
        edit = f"in {file}, narrow the scope of {rule.id} (`loop_with`, a function) or its anchor, or set `expect`"
        return Decision(what, tuple(near), edit)
    if outcome.status is Status.PRESENT:
        return Decision(what, tuple(near), "the sources are rewritten already: name published ones with --from")
    edit = f"read the function, then change `never` of {rule.id} in {file}, or say since when the rule is absent"
    return Decision(what, tuple(near), edit, f'Absent(Releases(since="{release}"), "{REASON}"),')


def _variant(rule: Rule, outcome: Outcome, release: str) -> str:
    """Return a variant whose anchor is the nearest statement."""
    last: Variant = next((v for v in rule.variants if v.name == outcome.variant), rule.variants[0])
    anchor = outcome.candidates[0].code.strip().rstrip(":") if outcome.candidates else REASON
    scope = f'Scope("{last.scope.name}")' if last.scope.name else "Scope()"
    edit = last.edit
    if isinstance(edit, Beside):
        made = f"{edit.side}({anchor!r}, {edit.code!r})"
    elif isinstance(edit, Keyword):
        made = f"Keyword({anchor!r}, {edit.name!r}, {edit.value!r})"
    elif isinstance(edit, Method):
        made = f"Method({anchor!r}, {edit.code!r})"
    else:
        made = f"{type(edit).__name__}({edit.code!r})"
        if isinstance(edit, AtStart | AtEnd) and outcome.candidates:
            scope = f"Scope({REASON!r})"
    return f'Variant({scope}, {made}, Releases(since="{release}"), "since {release}"),'


def _homes(tree: SourceTree, name: str) -> Iterator[str]:
    """Yield the places of a package that define a class or function of this name."""
    wanted = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b.*$".encode(), re.MULTILINE)
    for path, source in tree.read_package():
        for found in wanted.finditer(source):
            line = source.count(b"\n", 0, found.start()) + 1
            yield f"{path}:{line}: {found[0].decode(errors='replace').strip()}"


def _of_place(same: Sequence[Site], sites: Sequence[Site], overlay: Overlay, tree: SourceTree) -> Decision:
    """Return the decision about one function or class, which several censuses may have found."""
    first, release = same[0], overlay.release
    censuses = ", ".join(site.census.id for site in same)
    source = tree.read(first.path)
    lines = source.decode(errors="replace").splitlines()
    patterns = [pattern for site in same for pattern in site.census.patterns]
    at = site_lines(source, patterns, first.name, first.path)
    near = [f"{first.path}:{line}: {lines[line - 1].strip()}" for line in at[:SHOWN]]
    near += [f"known: {other.describe()}" for other in neighbours(first, sites)]
    what = f"{first.place} has code like that which rules hook, and nobody decided on it ({censuses})"
    near += _not_tried(same, overlay)
    files = ", ".join(dict.fromkeys(file_of(site.census.id, overlay.product) for site in same))
    known = {site.census.id: similar for site in same for similar in _similar(site, release, overlay.product)[:1]}
    changes = [f"# {of}: {said.consequence.value}: {said.reason}\n{change}" for of, (said, change) in known.items()]
    if len(known) < len(same):
        others = ", ".join(site.census.id for site in same if site.census.id not in known)
        changes.append(f'# {others}\nElsewhere(("{first.place}",), Consequence.{REASON}, "{REASON}"),')
    edit = f"in {files}, say in each census what follows"
    if len(known) == len(same):
        edit = f"in {files}, others like it are classified; if the reason holds here, too, do the same"
    hooked = [s for s in sites if s.hooked and s.name.rpartition(".")[2] == first.name.rpartition(".")[2]]
    if hooked and first.name is not TOP_LEVEL and not known:
        near.append(f"hooked: {hooked[0].place}")
        there = file_of(hooked[0].census.id, overlay.product)
        edit = (
            f"if it is a step of its own, give it the rules of {hooked[0].place}, in {there}: a transform of "
            f'ModulePath("{first.path}") with Scope("{first.name}"); else, {edit}'
        )
    return Decision(what, tuple(near), edit, "\n".join(changes))


def _not_tried(same: Sequence[Site], overlay: Overlay) -> list[str]:
    """Return the rules for a place which the record does not apply in the release, with the reason."""
    scopes = scope_names(overlay.product)
    own = {rule for (rule, _), scope in scopes.items() if scope == same[0].name}
    rules = own & {rule for site in same for rule in site.census.rules}
    absent = (o for o in overlay.outcomes if o.rule in rules and o.status is Status.NOT_APPLICABLE)
    return [f"not applicable: {o.rule}: {o.detail}" for o in absent]


def _similar(site: Site, release: str, product: Product) -> list[tuple[Elsewhere, str]]:
    """Return how a census classifies the same place in other releases, or one of that name in another file.

    Returns:
        The classifications, each with the change that would make it cover the place.
    """
    known = site.census.elsewhere
    ranges = [
        (said, f"releases={said.releases} -> {_with(said.releases, release, product)}")
        for said in known
        if release not in said.releases and said.patterns_for(site.place)
    ]
    moved = [
        (said, f'sites: add "{site.place}"')
        for said in known
        if release in said.releases and any(_is_named(site.name, pattern) for pattern in said.sites)
    ]
    return ranges + moved


def _is_named(name: str, pattern: str) -> bool:
    """Return whether a classification's pattern, in whatever file, is for a class or function of this name."""
    of = pattern.partition(":")[2]
    return of.strip("*.") != "" and fnmatchcase(name, of)


def _with(releases: Releases, release: str, product: Product) -> str:
    """Return the source of a range that also has a release."""
    since, before = releases.since, releases.before
    if since and Version(release) < Version(since):
        since = release
    if before and Version(release) >= Version(before):
        before = next((one for one in product.reviewed() if Version(one) > Version(release)), "")
    given = [f'since="{since}"'] * bool(since) + [f'before="{before}"'] * bool(before)
    return f"Releases({', '.join(given)})"


def _of_replacement(fate: Fate, overlay: Overlay) -> Decision:
    one = fate.rebinding
    missing = ", ".join(fate.lost)
    where = one.defined_in or one.path
    file = file_of(_nearest(fate, overlay), overlay.product)
    return Decision(
        f"{one.path} replaces {one.dotted} by {one.by or 'something'}, which has nothing in place of {missing}",
        (f"{where}: {one.by}",),
        f"add a transform that inserts them there, as for other copies in {file}",
        f'Module("{overlay.product.publisher.owner}.…", "…", (ModulePath("{where}"),))',
    )


def _nearest(fate: Fate, overlay: Overlay) -> str:
    """Return the transform of the package that has a rule of the same purpose as a lost one."""
    wanted = {rule.rpartition(".")[2] for rule in fate.lost}
    found = (t.id for t in overlay.product.transforms for r in t.rules if r.id.rpartition(".")[2] in wanted)
    return next(found, overlay.product.transforms[0].id)


def file_of(id: str, product: Product) -> str:  # noqa: A002 - of a transform, a rule or a census
    """Return the source file that defines a transform, a rule or a census, as far as its text tells; else its owner."""
    owner = product.owner_of(id)
    transform = next((t.id for t in product.transforms if id == t.id or id.startswith(f"{t.id}.")), id)
    for root in (owner.overlays.parent / "transforms", owner.hooks.parent):
        files = sorted(root.rglob("*.py"), key=_depth) if root.is_dir() else []
        texts = {file: file.read_text(encoding="utf-8") for file in files if "cases" not in file.parts}
        for wanted in (f'"{id}",\n', f'"{id}"', f'id="{transform}"', f'"{transform}"'):
            for file, text in texts.items():
                if wanted in text and "Transform" in text:
                    return str(file.relative_to(root.parent))
    return f"the rules of {owner.title}"


def _depth(path: Path) -> tuple[int, str]:
    return len(path.parts), str(path)
