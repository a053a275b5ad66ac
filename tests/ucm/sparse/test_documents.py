"""docs/sparse_attention.md: every method and option, its default, and nothing that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.sparse.block_topk import BlockTopKOptions
from ucm.sparse.esa_options import ESAOptions
from ucm.sparse.factory import METHODS
from ucm.sparse.sink_window import SinkWindowOptions

if TYPE_CHECKING:
    from ucm.sparse.options import MethodOptions

PAGE = (Path(__file__).parents[3] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")
OPTIONS: dict[str, type[MethodOptions]] = {
    "BlockTopK": BlockTopKOptions,
    "SinkWindow": SinkWindowOptions,
    "ESA": ESAOptions,
}


def documented() -> dict[tuple[str, str], str]:
    """By method and option, its default."""
    found: dict[tuple[str, str], str] = {}
    option = ""
    for name, defaults, methods in re.findall(
        r"^\| ?(?:`(\w+)`)? \| ([^|]+) \| (all|(?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE
    ):
        option = name or option
        of = list(OPTIONS) if methods == "all" else re.findall(r"`(\w+)`", methods)
        values = [value.strip().strip("`") for value in defaults.split(", ")]
        for method, value in zip(of, values if len(values) == len(of) else values * len(of), strict=True):
            found[method, option] = value
    return found


@pytest.mark.parametrize("method", OPTIONS)
def test_every_option_is_documented_with_its_default(method: str) -> None:
    model = OPTIONS[method]
    page = {option: value for (of, option), value in documented().items() if of == method}
    assert set(page) == set(model.model_fields)
    defaults = {name: str(field.default) for name, field in model.model_fields.items() if name != "store"}
    assert {name: value for name, value in page.items() if name != "store"} == defaults


def test_every_name_of_a_method_is_documented() -> None:
    assert [name for name in METHODS if name != "Probe" and f"`{name}`" not in PAGE] == []
