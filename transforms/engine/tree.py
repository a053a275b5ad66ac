"""Walk a LibCST tree by path and replace one node without visiting the rest.

A LibCST transformer visits the whole module for every rule; a vLLM model runner has 7,000 lines and takes six rules. A
path names the fields that lead to one node, and only the nodes on it are rebuilt.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, TypeAlias, cast

import libcst as cst

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: One field of a node, and the position in it where it is a sequence.
Step: TypeAlias = tuple[str, int | None]
#: The steps from a root to one of its descendants; the empty path is the root.
Path: TypeAlias = tuple[Step, ...]

#: A block's statements lie under these fields.
Block: TypeAlias = cst.Module | cst.IndentedBlock


def children(node: cst.CSTNode) -> Iterator[tuple[Step, cst.CSTNode]]:
    """The direct children of a node with the step to each, in source order."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield (name, None), value
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if isinstance(item, cst.CSTNode):
                    yield (name, index), item


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def walk(node: cst.CSTNode, path: Path = ()) -> Iterator[tuple[Path, cst.CSTNode]]:
    """A node and all its descendants, each with its path, parents first."""
    waiting = [(path, node)]
    while waiting:
        here, found = waiting.pop()
        yield here, found
        waiting += [((*here, step), child) for step, child in children(found)][::-1]


def get(root: cst.CSTNode, path: Path) -> cst.CSTNode:
    """The node at a path."""
    node = root
    for name, index in path:
        value = getattr(node, name)
        node = value if index is None else value[index]
    return node


def replace(root: cst.CSTNode, path: Path, new: cst.CSTNode) -> cst.CSTNode:
    """The root with the node at a path replaced; only the nodes on the path are rebuilt."""
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
    """The root with statements inserted into the block at a path, before its statement ``index``."""
    node = cast("Block", get(root, block))
    body = list(node.body)
    body[index:index] = new
    return replace(root, block, node.with_changes(body=body))


def enclosing_statement(root: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
    """The innermost block around the node at a path, and the index of the statement in it that holds the node."""
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
    """A node as source text, without surrounding blank lines."""
    return cst.Module(body=()).code_for_node(node).strip()
