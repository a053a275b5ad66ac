"""`docs/transforms.md`: every transform's governance record, and in which releases each of its rules is inserted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.pipeline.census import judged
from transforms.pipeline.lock import read_lock
from transforms.pipeline.pages import templates
from transforms.pipeline.product import UCM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.census import Census, Elsewhere
    from transforms.engine.rule import Rule
    from transforms.pipeline.census import Site
    from transforms.pipeline.product import Product

TEMPLATE = "transforms.md.j2"


def transforms_page(product: Product = UCM) -> str:
    """Return the page, as Markdown."""
    releases, transforms = product.reviewed(), product.transforms
    inserted = {release: set(_inserted(release, product)) for release in releases}
    rows = {rule.id: _ranges(rule, releases, inserted) for t in transforms for rule in t.all_rules}
    notes = {rule.id: _notes(rule, opt_in=t.is_opt_in(rule.id)) for t in transforms for rule in t.all_rules}
    code = {rule.id: _code(rule) for t in transforms for rule in t.all_rules}
    return (
        templates()
        .get_template(TEMPLATE)
        .render(
            product=product,
            transforms=transforms,
            rows=rows,
            notes=notes,
            code=code,
            censuses=_censuses(releases, product),
            own=[census for registry in product.registries for census in registry.census],
        )
    )


@dataclass(frozen=True)
class CensusRow:
    """Places with the same classification.

    Attributes:
        places: Their modules and qualified names.
        follows: The classification.
        releases: The reviewed releases that have any of them.
    """

    places: tuple[str, ...]
    follows: str
    releases: str


def _censuses(releases: list[str], product: Product) -> dict[str, list[CensusRow]]:
    """Return the rows of each census: the hooked places, then the others in the order of the classifications."""
    found: dict[str, dict[str, dict[str, set[str]]]] = {census.id: {} for census in product.censuses}
    for release, sites in judged(product).items():
        for site in sites:
            for follows in _follows(site):
                found[site.census.id].setdefault(follows, {}).setdefault(f"`{site.place}`", set()).add(release)
    return {
        census.id: [
            CensusRow(tuple(sorted(places)), follows, _spans(releases, set().union(*places.values())))
            for follows, places in sorted(found[census.id].items(), key=lambda item: _order(census, item[0]))
        ]
        for census in product.censuses
    }


def _follows(site: Site) -> list[str]:
    """Return the classifications of a site; a site that is only partly hooked has two."""
    hooked = ["**hooked**"] if site.hooked else []
    if site.hooked >= site.count:
        return hooked
    return [*hooked, _said(site.said) if site.said else "**not classified**"]


def _said(said: Elsewhere) -> str:
    by = f" (`{said.refused_by}`)" if said.refused_by else ""
    return f"**{said.consequence.value}**: {said.reason}{by}"


def _order(census: Census, follows: str) -> int:
    known = [_said(said) for said in census.elsewhere]
    return known.index(follows) if follows in known else -1


def _inserted(release: str, product: Product) -> Iterator[str]:
    lock = read_lock(release, product)
    for module in lock["modules"] if lock else []:
        yield from (rule["id"] for rule in module["rules"])


def _ranges(rule: Rule, releases: list[str], inserted: dict[str, set[str]]) -> str:
    """Return the reviewed releases that have the rule, as ranges."""
    return _spans(releases, {release for release in releases if rule.id in inserted[release]})


def _spans(releases: list[str], chosen: set[str]) -> str:
    """Format some of the reviewed releases as ranges of consecutive ones."""
    spans: list[list[str]] = []
    previous_had_it = False
    for release in releases:
        has_it = release in chosen
        if has_it and previous_had_it:
            spans[-1][1:] = [release]
        elif has_it:
            spans.append([release])
        previous_had_it = has_it
    return ", ".join(" to ".join(span) for span in spans) or "none"


def _notes(rule: Rule, *, opt_in: bool) -> list[str]:
    notes = ["opt-in"] if opt_in else []
    notes += [f"not {absent.releases}: {absent.reason}" for absent in rule.absent]
    if rule.upstreamed:
        notes.append(f"upstreamed: {rule.upstreamed.note}")
    return notes


def _code(rule: Rule) -> list[str]:
    """Return the code that the rule inserts, each form once, on one line."""
    return list(dict.fromkeys(" ⏎ ".join(variant.edit.code.strip().splitlines()) for variant in rule.variants))
