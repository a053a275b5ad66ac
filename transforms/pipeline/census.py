"""The census of a release: every place in its package of a kind that matters, with its classification.

``overlays/vllm-X/census.json`` records the sites as module paths, qualified names and counts. It also records hashes of
the package's Python files and of the patterns, and is valid as long as neither changes. The transforms classify the
sites, so a new classification needs no new search.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transforms.engine.census import Consequence
from transforms.engine.errors import OverlayError
from transforms.engine.report import Status
from transforms.engine.sites import find_sites
from transforms.pipeline.lock import RESTORE, LockError, dump, read_lock
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.tree import sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from transforms.engine.census import Census, Elsewhere
    from transforms.engine.report import Outcome
    from transforms.pipeline.lock import Lock
    from transforms.pipeline.product import Product
    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import SourceTree

SCHEMA = 1
FILE = "census.json"
NEIGHBOURS = 3
#: What the ids of the names census start with; see `transforms.names`.
NAMES = "names."

#: Counts by census, path and qualified name.
Found = dict[str, dict[str, dict[str, int]]]
#: How often each rule matched, by the path and the qualified name of its scope.
Hooks = dict[tuple[str, str], dict[str, int]]


class UnclassifiedError(OverlayError):
    """A release has places of the kinds that rules hook, about which nobody has decided."""


@dataclass(frozen=True)
class Site:
    """A class or function that contains places counted by a census.

    Attributes:
        census: The census.
        path: The module.
        name: The qualified name.
        count: The number of places in it.
        hooked: How many of them rules hook.
        said: The classification of the rest; None if there is none, or all are hooked.
    """

    census: Census
    path: str
    name: str
    count: int
    hooked: int
    said: Elsewhere | None

    @property
    def place(self) -> str:
        """The site as classifications write it: ``path:qualified name``."""
        return f"{self.path}:{self.name}"

    @property
    def is_known(self) -> bool:
        """Whether it is hooked or classified."""
        return self.hooked >= self.count or self.said is not None

    def describe(self) -> str:
        """Describe the site and its classification in one line."""
        if self.hooked >= self.count:
            return f"{self.place}: hooked"
        if self.said is not None:
            return f"{self.place}: {self.said.consequence.value}: {self.said.reason}"
        some = f"{self.count - self.hooked} of {self.count} not hooked and" if self.hooked else f"{self.count}"
        return f"{self.place}: {some} not classified"


def take(tree: SourceTree, product: Product = UCM) -> Found:
    """Search the whole package.

    Raises:
        SourceError: If it cannot be read.
    """
    wanted = _patterns(product)
    found: Found = {thing: {} for thing in wanted}
    for path, source in tree.read_package() if wanted else ():
        for thing, names in find_sites(source, wanted, path).items():
            found[thing][path] = dict(sorted(names.items()))
    return {thing: dict(sorted(paths.items())) for thing, paths in found.items()}


def current(tree: SourceTree, product: Product = UCM) -> Found:
    """Return the sites: from the record if it is valid, else from a search."""
    record = read_record(tree.release, product)
    if record and (record["files"], record["patterns"]) == (_digest(tree.python_files()), _digest_of(product)):
        found: Found = record["sites"]
        return found
    return take(tree, product)


def read_record(release: str, product: Product = UCM) -> dict[str, Any] | None:
    """Return the recorded census of a reviewed release, or None.

    Raises:
        LockError: If it cannot be read.
    """
    path = census_path(release, product)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LockError("a census is not JSON", where=f"{path}: {error}", fix=RESTORE) from error
    if not isinstance(record, dict) or not {"schema", "files", "patterns", "sites"} <= record.keys():
        raise LockError("a census is damaged", where=str(path), fix=RESTORE)
    return record if record["schema"] == SCHEMA else None


def recorded(product: Product = UCM) -> dict[str, Found]:
    """Return the recorded censuses made with the current patterns, oldest release first."""
    records = {release: read_record(release, product) for release in product.reviewed()}
    patterns = _digest_of(product)
    return {
        release: record["sites"] for release, record in records.items() if record and record["patterns"] == patterns
    }


def census_path(release: str, product: Product = UCM) -> Path:
    """Return the path of a reviewed release's census."""
    return product.directory(release) / FILE


def census_text(
    tree: SourceTree,
    product: Product = UCM,
    *,
    anew: bool = False,
) -> str:
    """Return the text of a release's census file.

    Args:
        tree: The release.
        product: The product of the overlay.
        anew: Whether to search even if the record is valid.

    Raises:
        SourceError: If the package has to be searched and cannot be read.
    """
    found = take(tree, product) if anew else current(tree, product)
    return dump(
        {
            "schema": SCHEMA,
            "release": tree.release,
            "files": _digest(tree.python_files()),
            "patterns": _digest_of(product),
            "sites": found,
        }
    )


def hooks_of_outcomes(outcomes: Iterable[Outcome], product: Product = UCM) -> Hooks:
    """Return the places that rules hook in a release, by the outcomes of trying them."""
    applied = (o for o in outcomes if o.status is Status.APPLIED)
    return _hooks(((o.rule, o.variant, o.path, o.hits) for o in applied), product)


def hooks_of_lock(lock: Lock, product: Product = UCM) -> Hooks:
    """Return the places that a reviewed overlay hooks."""
    rules = ((r["id"], r.get("variant", ""), m["path"], r["hits"]) for m in lock["modules"] for r in m["rules"])
    return _hooks(rules, product)


def hooks_of_release(release: str, product: Product = UCM) -> Hooks:
    """Return the places that the reviewed overlay of a release hooks; empty if there is no overlay."""
    lock = read_lock(release, product)
    return hooks_of_lock(lock, product) if lock else {}


def judge(found: Found, hooks: Hooks, release: str, product: Product = UCM) -> list[Site]:
    """Return every site of a release with its classification, in the order of the censuses."""
    return [
        _site(census, path, name, count, hooks, release)
        for census in product.censuses
        for path, names in found.get(census.id, {}).items()
        for name, count in names.items()
    ]


def judged(product: Product = UCM) -> dict[str, list[Site]]:
    """Return the recorded sites of every reviewed release with their classification, oldest release first."""
    return {
        release: judge(found, hooks_of_release(release, product), release, product)
        for release, found in recorded(product).items()
    }


def obsolete(sites: Mapping[str, Sequence[Site]], product: Product = UCM) -> list[tuple[Census, str]]:
    """Return the site patterns that match nothing in any of the given releases."""
    used = {
        (site.census.id, id(site.said), pattern)
        for of_release in sites.values()
        for site in of_release
        if site.said is not None
        for pattern in site.said.patterns_for(site.place)
    }
    return [
        (census, pattern)
        for census in product.censuses
        for said in census.elsewhere
        for pattern in said.sites
        if (census.id, id(said), pattern) not in used
    ]


def neighbours(site: Site, sites: Sequence[Site]) -> list[Site]:
    """Return the known sites of the same census whose names are most similar to a site's."""
    known = {s.place: s for s in sites if s.census.id == site.census.id and s.is_known}
    return [known[place] for place in difflib.get_close_matches(site.place, known, n=NEIGHBOURS, cutoff=0.3)]


def advice(site: Site, sites: Sequence[Site], title: str) -> list[str]:
    """Explain an unclassified site and what to do about it, as lines of text."""
    transform = site.census.id.rpartition(".")[0]
    hook = f"Give a rule of {transform} this place, or say" if site.census.rules else "Say"
    to_do = f"read it in {title}. {hook} in {site.census.id} what follows (CONTRIBUTING.md, 'Try a new vLLM release')"
    known = [f"    known: {other.describe()}" for other in neighbours(site, sites)]
    return [f"new place: {site.describe()} ({site.census.what})", *known, f"    to do: {to_do}"]


def check_classified(found: Found, overlay: Overlay) -> None:
    """Refuse an overlay whose release has places of the kinds that rules hook which nobody has looked at.

    Raises:
        UnclassifiedError: Naming each place and the nearest known ones.
    """
    product = overlay.product
    sites = judge(found, hooks_of_outcomes(overlay.outcomes, product), overlay.release, product)
    unknown = [site for site in sites if not site.is_known]
    if unknown:
        told = [line for site in unknown for line in advice(site, sites, overlay.title)]
        raise UnclassifiedError(
            f"{len(unknown)} places in {overlay.title} are of kinds that are counted, and nobody has decided on them; "
            "what runs there could pass the hooks by, or find KV by a name:\n    " + "\n    ".join(told),
            where=str(overlay.directory),
            fix=f"hook or classify each; `nox -s drift -- {overlay.named}` shows them",
        )


def scope_names(product: Product = UCM) -> dict[tuple[str, str], str]:
    """Return the qualified names of the rules' scopes, by rule id and variant name."""
    return {(r.id, v.name): v.scope.name for t in product.transforms for r in t.rules for v in r.variants}


def by_kind(sites: Sequence[Site]) -> dict[str, list[Site]]:
    """Return the sites of the transforms' censuses, and those of the names census, under ``hooks`` and ``names``."""
    kinds: dict[str, list[Site]] = {}
    for site in sites:
        kinds.setdefault("names" if site.census.id.startswith(NAMES) else "hooks", []).append(site)
    return kinds


def census_summary(sites: Sequence[Site]) -> str:
    """Summarise the sites in one line: how many, hooked, classified, unknown."""
    places = dict.fromkeys(["hooked", *(consequence.value for consequence in Consequence), "not classified"], 0)
    for site in sites:
        places["hooked"] += site.hooked
        if site.hooked < site.count:
            places[site.said.consequence.value if site.said else "not classified"] += site.count - site.hooked
    told = ", ".join(f"{count} {kind}" for kind, count in places.items() if count)
    return f"{sum(places.values())} places in {len(sites)} functions and classes: {told}"


def _site(census: Census, path: str, name: str, count: int, hooks: Hooks, release: str) -> Site:
    hits = hooks.get((path, name), {})
    hooked = min(count, sum(hits.get(rule, 0) for rule in census.rules))
    said = None if hooked >= count else census.classified(f"{path}:{name}", release)
    return Site(census, path, name, count, hooked, said)


def _hooks(applied: Iterable[tuple[str, str, str, int]], product: Product) -> Hooks:
    scopes = scope_names(product)
    hooks: Hooks = {}
    for rule, variant, path, hits in applied:
        scope = scopes.get((rule, variant))
        if scope is not None:
            hooks.setdefault((path, scope), {})[rule] = hits
    return hooks


def _patterns(product: Product) -> dict[str, tuple[str, ...]]:
    return {census.id: census.patterns for census in product.censuses}


def _digest_of(product: Product) -> str:
    return _digest(_patterns(product))


def _digest(data: Mapping[str, object]) -> str:
    return sha256(json.dumps(data, sort_keys=True).encode())
