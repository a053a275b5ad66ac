"""Append an argument to a call, or a parameter to a function, in the layout of the existing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import libcst as cst

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item", cst.Arg, cst.Param)


def appended(items: Sequence[Item], added: Item, opening: cst.BaseParenthesizableWhitespace, mark: str) -> list[Item]:
    """Append an item: on the same line, or on its own line if the existing items have one each.

    Args:
        items: The existing arguments or parameters.
        added: The one to add.
        opening: The space between the opening bracket and the first of them.
        mark: The comment for the added item, used if the closing bracket has its own line.
    """
    if not items:
        return [added]
    *rest, last = items
    space = "whitespace_after_arg" if isinstance(last, cst.Arg) else "whitespace_after_param"
    comma = last.comma if isinstance(last.comma, cst.Comma) else None
    closing: cst.BaseParenthesizableWhitespace = comma.whitespace_after if comma else getattr(last, space)
    separator = cst.Comma(whitespace_after=_between(items, opening, closing))
    marked = _marked(closing, mark)
    ending: dict[str, Any] = {"comma": comma.with_changes(whitespace_after=marked)} if comma else {space: marked}
    parted: dict[str, Any] = {"comma": separator, space: cst.SimpleWhitespace("")}
    return [*rest, last.with_changes(**parted), added.with_changes(**ending)]


def _between(
    items: Sequence[cst.Arg | cst.Param],
    opening: cst.BaseParenthesizableWhitespace,
    closing: cst.BaseParenthesizableWhitespace,
) -> cst.BaseParenthesizableWhitespace:
    """Return the whitespace before the added item; a comment after the item before it stays on its line."""
    ends_line = isinstance(closing, cst.ParenthesizedWhitespace)
    first_line = closing.first_line if isinstance(closing, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()
    before = items[-2].comma if len(items) > 1 else None
    used = before.whitespace_after if isinstance(before, cst.Comma) else opening
    if ends_line and first_line.comment and not isinstance(used, cst.ParenthesizedWhitespace):
        used = opening if isinstance(opening, cst.ParenthesizedWhitespace) else closing
    if isinstance(used, cst.ParenthesizedWhitespace):
        return used.with_changes(first_line=first_line, empty_lines=())
    return cst.SimpleWhitespace(" ")


def _marked(closing: cst.BaseParenthesizableWhitespace, mark: str) -> cst.BaseParenthesizableWhitespace:
    if not isinstance(closing, cst.ParenthesizedWhitespace):
        return closing
    comment = cst.TrailingWhitespace(
        whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(mark), newline=closing.first_line.newline
    )
    return closing.with_changes(first_line=comment)
