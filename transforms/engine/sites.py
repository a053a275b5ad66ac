"""Find patterns in a source by qualified name, fast enough for a whole package.

The patterns are written like those of `transforms.engine.patterns`, with the same wildcards: ``_`` for any expression,
``...`` for any further arguments. Two more forms match definitions, whatever their bodies contain, and one matches what
finds something by a value:

    _.kv_cache_manager.allocate_slots(...)
    _.status = RequestStatus.PREEMPTED
    def schedule
    class (Scheduler)
    key (mm_hash)

``def name`` matches a function or method of that name, ``class (Base)`` a class with a base of that name. ``key
(name)`` matches where a variable or attribute of that name is a key: as a subscript, of a dictionary or set, before
``in``, as the first argument of a container's method (`CONTAINER_METHODS`), or within a tuple or list, which are
hashed.

The search changes nothing, so it uses the standard library's `ast`, which parses ten times faster than LibCST. It
parses only sources that contain all words of a pattern.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.marks import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DEFINITION = re.compile(r"def (\w+)")
SUBCLASS = re.compile(r"class \((\w+)\)")
KEY = re.compile(r"key \((\w+)\)")
#: Methods of dictionaries, sets, caches and hashes whose first argument is a key.
CONTAINER_METHODS = frozenset(
    {"__contains__", "__getitem__", "add", "append", "discard", "get", "move_to_end", "pop", "remove", "setdefault"}
    | {"touch", "update"}
)
DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
WORD = re.compile(r"[^\W\d]\w*")
NO_WORDS = frozenset({"_", "def", "class", "key"})
#: The name of code outside of functions and classes.
TOP_LEVEL = "<module>"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
#: The nodes that may have a key.
KEYED = (ast.Call, ast.Compare, ast.Dict, ast.DictComp, ast.List, ast.Set, ast.SetComp, ast.Subscript, ast.Tuple)


class SitePattern:
    """A compiled pattern.

    Args:
        text: An expression, a statement, ``def name``, ``class (Base)`` or ``key (name)``.

    Attributes:
        text: The source of the pattern.
        kinds: The types of node that it can match.

    Raises:
        RuleDefinitionError: If the text is none of these, or contains no name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        definition, subclass, key = (form.fullmatch(text) for form in (DEFINITION, SUBCLASS, KEY))
        self._defined = definition[1] if definition else ""
        self._base = subclass[1] if subclass else ""
        self._key = key[1] if key else ""
        self._node = _parse("..." if definition or subclass or key else text)
        words = [word for word in WORD.findall(text) if word not in NO_WORDS]
        if not words:
            raise RuleDefinitionError("a pattern names nothing, so it would match everywhere", where=repr(text))
        self._words = sorted((word.encode() for word in words), key=len, reverse=True)  # the rarest first
        names = [name.removeprefix("_.") for name in DOTTED.findall(text) if name not in NO_WORDS]
        self._searches = [re.compile(rf"\b{_spaced(name)}\b".encode()) for name in names]
        if definition:
            self._searches = [re.compile(rf"\bdef\s+{self._defined}\b".encode())]
        elif subclass:
            self._searches = [re.compile(rf"\bclass\s+\w+\s*\([^)]*\b{self._base}\b".encode())]
        self.kinds: tuple[type[ast.AST], ...] = (
            FUNCTIONS if definition else (ast.ClassDef,) if subclass else KEYED if key else (type(self._node),)
        )

    def may_occur(self, source: bytes) -> bool:
        """Return whether a source's text contains all words of the pattern, without parsing it."""
        return all(word in source for word in self._words) and all(search.search(source) for search in self._searches)

    def matches(self, node: ast.AST) -> bool:
        """Return whether the pattern matches a node of one of its kinds."""
        if isinstance(node, ast.ClassDef) and self._base:
            return any(_last_name(base) == self._base for base in node.bases)
        if isinstance(node, FUNCTIONS) and self._defined:
            return node.name == self._defined
        if self._key:
            return any(_last_name(found) == self._key for found in _keys(node))
        return _same(self._node, node)


@functools.cache
def site_pattern(text: str) -> SitePattern:
    """Compile a pattern; cached."""
    return SitePattern(text)


def find_sites(source: bytes, wanted: Mapping[str, Sequence[str]], path: str) -> dict[str, dict[str, int]]:
    """Count the matches of several groups of patterns in a source.

    Args:
        source: The source.
        wanted: The groups, by name; a node that matches several patterns of a group counts once.
        path: The source's path, for error messages.

    Returns:
        The counts, by group and qualified name of the innermost class or function around the match (for a definition,
        its own name). Groups without matches are left out.

    Raises:
        RuleDefinitionError: If the source does not parse.
    """
    counts: dict[str, Counter[str]] = {}
    for thing, name, _ in _matches(source, wanted, path):
        counts.setdefault(thing, Counter())[name] += 1
    return {thing: dict(names) for thing, names in counts.items()}


def site_lines(source: bytes, patterns: Sequence[str], name: str, path: str) -> list[int]:
    """Return the lines of the matches of some patterns in one class or function, in order.

    Args:
        source: The source.
        patterns: The patterns.
        name: The qualified name of the innermost class or function around the matches.
        path: The source's path, for error messages.

    Raises:
        RuleDefinitionError: If the source does not parse.
    """
    found = _matches(source, {"": patterns}, path)
    return sorted(getattr(node, "lineno", 1) for _, where, node in found if where == name)


def _matches(source: bytes, wanted: Mapping[str, Sequence[str]], path: str) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield each group and node that match, with the qualified name around the node, unordered."""
    by_kind: dict[type[ast.AST], list[tuple[str, SitePattern]]] = {}
    for thing, texts in wanted.items():
        for found in map(site_pattern, texts):
            if found.may_occur(source):
                for kind in found.kinds:
                    by_kind.setdefault(kind, []).append((thing, found))
    for name, node in _named_nodes(_parsed(source, path)) if by_kind else ():
        for thing in {thing for thing, found in by_kind.get(type(node), ()) if found.matches(node)}:
            yield thing, name, node


def _parsed(source: bytes, path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # warnings about vLLM's own strings do not matter here
            return ast.parse(source, path)
    except UNREADABLE as error:
        raise RuleDefinitionError(
            f"a source does not parse: {error}", where=path, fix="check that the sources are complete"
        ) from error


def _named_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes, unordered, each with the qualified name of the innermost definition that it is or is in."""
    waiting: list[tuple[str, ast.AST]] = [(TOP_LEVEL, tree)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, DEFINITIONS):
            name = node.name if name is TOP_LEVEL else f"{name}.{node.name}"
        yield name, node
        waiting += [(name, child) for child in ast.iter_child_nodes(node)]


def _parse(text: str) -> ast.AST:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise RuleDefinitionError(
            "a pattern is neither an expression, nor a statement, nor `def name`, nor `class (Base)`",
            where=repr(text),
            fix=str(error),
        ) from None
    if len(body) != 1:
        raise RuleDefinitionError("a pattern is not one statement", where=repr(text))
    return body[0].value if isinstance(body[0], ast.Expr) else body[0]


def _same(wanted: object, found: object) -> bool:
    if isinstance(wanted, ast.Name) and wanted.id == "_":
        return isinstance(found, ast.expr)
    if type(wanted) is not type(found):
        return False
    if isinstance(wanted, ast.Call) and isinstance(found, ast.Call):
        return _same(wanted.func, found.func) and _same_arguments(wanted, found)
    if isinstance(wanted, ast.AST):
        return all(_same(getattr(wanted, name), getattr(found, name)) for name in wanted._fields if name != "ctx")
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_same, wanted, found))
    return wanted == found


def _same_arguments(wanted: ast.Call, found: ast.Call) -> bool:
    fixed = [arg for arg in wanted.args if not (isinstance(arg, ast.Constant) and arg.value is ...)]
    open_ended = len(fixed) < len(wanted.args)
    keywords = {keyword.arg: keyword.value for keyword in found.keywords}
    if len(found.args) < len(fixed) or not all(map(_same, fixed, found.args)):
        return False
    if not all(k.arg in keywords and _same(k.value, keywords[k.arg]) for k in wanted.keywords):
        return False
    return open_ended or (len(found.args) == len(fixed) and len(keywords) == len(wanted.keywords))


def _spaced(dotted: str) -> str:
    """Return a regular expression for a dotted name; its parts may be on different lines."""
    return r"\s*\.\s*".join(dotted.split("."))


def _keys(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that are keys in a node; of a tuple or list, the elements."""
    if isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CONTAINER_METHODS:
            yield from node.args[:1]
    elif isinstance(node, ast.Compare):
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            yield node.left
    elif isinstance(node, ast.Dict):
        yield from filter(None, node.keys)
    elif isinstance(node, ast.DictComp):
        yield node.key
    elif isinstance(node, ast.SetComp):
        yield node.elt
    elif isinstance(node, (ast.List, ast.Set, ast.Tuple)):
        yield from node.elts


def _last_name(node: ast.expr) -> str:
    """Return ``Base`` for ``Base``, ``module.Base`` and ``Base[T]``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
