"""Walk a LibCST tree by path and replace one node without visiting the rest.

A LibCST transformer visits the whole module for every rule; a vLLM model runner has 7,000 lines and six rules. A path
lists the fields that lead to one node, and only the nodes on it are rebuilt.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import libcst as cst

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

#: A field of a node, and the index in it if the field is a sequence.
Step: TypeAlias = tuple[str, int | None]
#: The steps from a root to one of its descendants; the empty path is the root.
Path: TypeAlias = tuple[Step, ...]

#: Fields of LibCST nodes that describe only layout.
LAYOUT = frozenset({"lpar", "rpar", "comma", "semicolon", "equal", "leading_lines", "lines_after_decorators", "header",
                    "footer", "lbracket", "rbracket", "lbrace", "rbrace", "colon", "dot", "indent"})  # fmt: skip
#: Fields of statements that contain further statements.
BLOCKS = frozenset({"body", "orelse", "handlers", "finalbody", "cases"})

#: Nodes with a list of statements as their body.
Block: TypeAlias = cst.Module | cst.IndentedBlock
#: A node and its link, which is the parent's link and the step from the parent, or None for the root.
_Linked: TypeAlias = tuple[tuple[Any, str, int | None] | None, cst.CSTNode]


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def children(
    node: cst.CSTNode, fields: Callable[[type[cst.CSTNode]], Iterable[str]] = _fields
) -> Iterator[tuple[Step, cst.CSTNode]]:
    """Yield a node's direct children, or those in some fields, with the step to each, in source order."""
    for name in fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield (name, None), value
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if isinstance(item, cst.CSTNode):
                    yield (name, index), item


def walk(node: cst.CSTNode, path: Path = ()) -> Iterator[tuple[Path, cst.CSTNode]]:
    """Yield a node and all its descendants with their paths, parents first."""
    waiting = [(path, node)]
    while waiting:
        here, found = waiting.pop()
        yield here, found
        waiting += [((*here, step), child) for step, child in children(found)][::-1]


@functools.cache
def code_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a node type that are not only layout."""
    return tuple(
        n for n in _fields(kind) if n not in LAYOUT and not n.startswith(("whitespace", "trailing_whitespace"))
    )


@functools.cache
def _block_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(name for name in _fields(kind) if name in BLOCKS)


def statement_nodes(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the statements, small statements and blocks at or below one, without entering expressions."""
    return (node for _, node in _walk_fields(root, _block_fields))


def code_nodes(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all its descendants that are not only layout."""
    return (node for _, node in _walk_fields(root, code_fields))


def find(root: cst.CSTNode, kind: type[cst.CSTNode], fits: Callable[[cst.CSTNode], bool]) -> list[Path]:
    """Return the paths of the matching nodes of a type at or below a node, in the order of `walk`."""
    is_statement = issubclass(kind, cst.BaseStatement | cst.BaseSmallStatement)
    nodes = _walk_fields(root, _block_fields if is_statement else code_fields)
    return [_path(link) for link, node in nodes if type(node) is kind and fits(node)]


def _walk_fields(root: cst.CSTNode, fields: Callable[[type[cst.CSTNode]], Iterable[str]]) -> Iterator[_Linked]:
    """Like `walk`, but visit only some fields and yield links; `_path` makes a path of a link where one is needed."""
    waiting: list[_Linked] = [(None, root)]
    while waiting:
        here = waiting.pop()
        yield here
        link, node = here
        below: list[_Linked] = []
        for name in fields(type(node)):
            value = getattr(node, name)
            if isinstance(value, cst.CSTNode):
                below.append(((link, name, None), value))
            elif isinstance(value, (tuple, list)):
                below += [((link, name, i), item) for i, item in enumerate(value) if isinstance(item, cst.CSTNode)]
        below.reverse()
        waiting += below


def _path(link: Any) -> Path:
    steps: list[Step] = []
    while link is not None:
        link, name, index = link
        steps.append((name, index))
    return tuple(steps[::-1])


def get(root: cst.CSTNode, path: Path) -> cst.CSTNode:
    """Return the node at a path."""
    node = root
    for name, index in path:
        value = getattr(node, name)
        node = value if index is None else value[index]
    return node


def replace(root: cst.CSTNode, path: Path, new: cst.CSTNode) -> cst.CSTNode:
    """Return the root with the node at a path replaced; rebuild only the nodes on the path."""
    if not path:
        return new
    (name, index), rest = path[0], path[1:]
    value = getattr(root, name)
    if index is None:
        return root.with_changes(**{name: replace(value, rest, new)})
    items = list(value)
    items[index] = replace(items[index], rest, new)
    return root.with_changes(**{name: items})


def insert_statements(root: cst.CSTNode, block: Path, index: int, new: Sequence[cst.BaseStatement]) -> cst.CSTNode:
    """Return the root with statements inserted into the block at a path, before its statement ``index``."""
    node = cast("Block", get(root, block))
    body = list(node.body)
    body[index:index] = new
    return replace(root, block, node.with_changes(body=body))


def enclosing_statement(root: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
    """Return the innermost block around the node at a path, and the index of the statement that contains the node."""
    for length in range(len(path), 0, -1):
        name, index = path[length - 1]
        if (
            name == "body"
            and index is not None
            and isinstance(get(root, path[: length - 1]), cst.Module | cst.IndentedBlock)
        ):
            return path[: length - 1], index
    return None


def code_of(node: cst.CSTNode) -> str:
    """Return a node's source text without surrounding blank lines."""
    return cst.Module(body=()).code_for_node(node).strip()
