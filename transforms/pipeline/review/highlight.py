"""Convert Python source to HTML, line by line, with few elements."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygments.token import _TokenType

#: Token types and their classes in the style sheet, narrower types first; all other tokens stay plain.
CLASSES: tuple[tuple[_TokenType, str], ...] = (
    (Comment, "c"),
    (String.Doc, "c"),
    (String, "s"),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Number, "m"),
    (Name.Function, "f"),
    (Name.Class, "f"),
    (Name.Decorator, "f"),
    (Name.Builtin, "b"),
)


#: Lines of at least this length may be broken after a ``BREAKABLE`` character, for narrow columns.
LONG = 60
BREAKABLE = re.compile(r"([(\[,.=])")


def highlighted(lines: Sequence[str]) -> list[str]:
    """Return each line as HTML; a token over several lines is closed and reopened on each line."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    long = {number for number, line in enumerate(lines, 1) if len(line) >= LONG}
    done = [""]
    for kind, text in lexer.get_tokens("\n".join(line.replace("\r", " ") for line in lines)):
        css = _class(kind)
        for index, part in enumerate(text.split("\n")):
            if index:
                done.append("")
            if part:
                done[-1] += _element(part, css, is_long=len(done) in long)
    return done[: len(lines)]


def _element(text: str, css: str, *, is_long: bool) -> str:
    code = escape(text, quote=False)
    if css:
        return f"<i class={css}>{code}</i>"
    return BREAKABLE.sub(r"\1<wbr>", code) if is_long else code


def _class(kind: _TokenType) -> str:
    return next((css for wider, css in CLASSES if kind[: len(wider)] == wider[:]), "")
