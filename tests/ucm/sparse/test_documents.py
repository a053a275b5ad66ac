"""docs/sparse_attention.md and docs/rerope.md: every method and option with its default, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.sparse.esa.method import ESAOptions
from ucm.sparse.factory import METHODS
from ucm.sparse.rerope import LeakyReRoPEOptions, ReRoPEOptions
from ucm.sparse.sink_window import SinkWindowOptions
from ucm.sparse.topk.method import BlockTopKOptions

if TYPE_CHECKING:
    from ucm.sparse.options import MethodOptions

DOCS = Path(__file__).parents[3] / "docs"
#: By page, in the order of the defaults there.
OPTIONS: dict[str, dict[str, type[MethodOptions]]] = {
    "sparse_attention.md": {"BlockTopK": BlockTopKOptions, "SinkWindow": SinkWindowOptions, "ESA": ESAOptions},
    "rerope.md": {"ReRoPE": ReRoPEOptions, "LeakyReRoPE": LeakyReRoPEOptions},
}
PAGES = {page: (DOCS / page).read_text(encoding="utf-8") for page in OPTIONS}


def documented(page: str) -> dict[tuple[str, str], str]:
    """Return the documented defaults by method and option."""
    found: dict[tuple[str, str], str] = {}
    option = ""
    for name, defaults, methods in re.findall(
        r"^\| ?(?:`(\w+)`)? \| ([^|]+) \| (all|(?:`\w+`(?:, )?)+) \|", PAGES[page], re.MULTILINE
    ):
        option = name or option
        of = list(OPTIONS[page]) if methods == "all" else re.findall(r"`(\w+)`", methods)
        values = [value.strip().strip("`") for value in defaults.split(", ")]
        for method, value in zip(of, values if len(values) == len(of) else values * len(of), strict=True):
            found[method, option] = value
    return found


@pytest.mark.parametrize(("page", "method"), [(page, method) for page, of in OPTIONS.items() for method in of])
def test_every_option_is_documented_with_its_default(page: str, method: str) -> None:
    model = OPTIONS[page][method]
    found = {option: value for (of, option), value in documented(page).items() if of == method}
    assert set(found) == set(model.model_fields)
    defaults = {
        name: "required" if field.is_required() else str(field.default)
        for name, field in model.model_fields.items()
        if name != "store"
    }
    assert {name: value for name, value in found.items() if name != "store"} == defaults


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_a_method_is_documented(page: str) -> None:
    wanted = [name for name in METHODS if name != "Probe"] if page == "sparse_attention.md" else OPTIONS[page]
    assert [name for name in wanted if f"`{name}`" not in PAGES[page]] == []
