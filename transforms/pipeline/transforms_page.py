"""`docs/transforms.md`: every transform's governance record, and in which releases each of its rules is inserted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from transforms.pipeline.lock import OVERLAYS, read_lock, reviewed_releases
from transforms.registry import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.rule import Rule

TEMPLATE = "transforms.md.j2"


def transforms_page(overlays: Path = OVERLAYS) -> str:
    """The page, as Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - Markdown of our own words
    )
    releases = reviewed_releases(overlays)
    inserted = {release: set(_inserted(release, overlays)) for release in releases}
    rows = {rule.id: _ranges(rule, releases, inserted) for t in TRANSFORMS for rule in t.all_rules}
    notes = {rule.id: _notes(rule) for t in TRANSFORMS for rule in t.all_rules}
    code = {rule.id: _code(rule) for t in TRANSFORMS for rule in t.all_rules}
    return environment.get_template(TEMPLATE).render(transforms=TRANSFORMS, rows=rows, notes=notes, code=code)


def _inserted(release: str, overlays: Path) -> Iterator[str]:
    lock = read_lock(release, overlays)
    for module in lock["modules"] if lock else []:
        yield from (rule["id"] for rule in module["rules"])


def _ranges(rule: Rule, releases: list[str], inserted: dict[str, set[str]]) -> str:
    """The reviewed releases with the rule, as ranges of consecutive ones."""
    spans: list[list[str]] = []
    previous_had_it = False
    for release in releases:
        has_it = rule.id in inserted[release]
        if has_it and previous_had_it:
            spans[-1][1:] = [release]
        elif has_it:
            spans.append([release])
        previous_had_it = has_it
    return ", ".join(" to ".join(span) for span in spans) or "none"


def _notes(rule: Rule) -> list[str]:
    notes = [f"not {absent.releases}: {absent.reason}" for absent in rule.absent]
    if rule.upstreamed:
        notes.append(f"upstreamed: {rule.upstreamed.note}")
    return notes


def _code(rule: Rule) -> list[str]:
    """What the rule inserts, each form once, all of its lines."""
    return list(dict.fromkeys(" ⏎ ".join(variant.edit.code.strip().splitlines()) for variant in rule.variants))
