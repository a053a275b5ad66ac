"""Reference pages generated from the code: settings from their models, commands from their parsers."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import griffe
from pydantic_core import PydanticUndefined

from ucm.cli import make_parser
from ucm.config import ConnectorConfig, StoreSettings
from ucm.config.settings import BlendSettings
from ucm.sparse.factory import METHODS
from ucm.sparse.options import MethodOptions
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
#: Settings of a store whose names differ from those of the class that explains them.
SIZES = {"posix_capacity", "dram_capacity", "save_queue"}
KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "NoneType": "none"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class UndocumentedError(Exception):
    """A setting has no description, or a command no help; its text says which and where to add one."""


def settings_page() -> str:
    """Return every setting with its type, default, bounds and meaning, as Markdown."""
    methods = sorted({import_of(target) for target in METHODS.values()}, key=lambda method: str(method.__name__))
    options = {method.options_type: method.__name__ for method in methods if method.options_type is not None}
    parts = [
        "# Settings",
        (
            "This page is generated from the models that check the settings."
            " [Configure the connectors](configuration.md) explains where they are written and how to choose them."
        ),
        section("Connector", "At the top of the configuration file.", ConnectorConfig),
        section("Store", "Below `store`.", StoreSettings, StoreConfig),
        section("Blending", "Below `blend`; [Reuse chunks anywhere](blend.md) explains it.", BlendSettings),
        (
            "## Sparse methods\n\nBelow `ucm_sparse_config: {METHOD: {…}}`;"
            " [Run sparse attention](sparse_attention.md) explains them."
        ),
    ]
    for model in options:
        names = sorted(n for n, target in METHODS.items() if import_of(target).options_type is model)
        parts.append(section(" and ".join(names), "", model, level=3))
    return "\n\n".join(part for part in parts if part) + "\n"


def import_of(target: str) -> Any:
    """Return the class that ``module:Class`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def section(title: str, about: str, model: type[BaseModel], *explained_by: type[Any], level: int = 2) -> str:
    """Return one model's settings as a table.

    Raises:
        UndocumentedError: If a setting has no description.
    """
    meanings: dict[str, str] = {}
    for source in (*explained_by, *reversed(model.__mro__)):
        meanings |= documented(source.__doc__ or "")
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = meanings.get(name) or meanings.get(f"{name}_bytes") or field.description
        if not meaning:
            raise UndocumentedError(
                f"{model.__module__}.{model.__name__}.{name}: describe it under `Attributes:` in the class's docstring"
            )
        cells = (f"`{name}`", kind(name, field), default(name, field), " ".join(meaning.split()).replace("``", "`"))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n\n".join(filter(None, (f"{'#' * level} {title}", about, "\n".join(rows))))


@cache
def documented(docstring: str) -> dict[str, str]:
    """Return the descriptions in a docstring's ``Args`` and ``Attributes``, by name."""
    sections = griffe.Docstring(docstring, lineno=1).parse("google", warnings=False)
    kinds = (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
    return {item.name: item.description for part in sections if part.kind in kinds for item in part.value}


def kind(name: str, field: FieldInfo) -> str:
    """Return a setting's type and bounds, in words."""
    if name in SIZES:
        return "size"
    bounds = [
        f"{words} {getattr(of, key)}" for of in field.metadata for key, words in BOUNDS.items() if hasattr(of, key)
    ]
    return ", ".join([kind_of(field.annotation), *bounds])


def kind_of(annotation: Any) -> str:
    """Return the type of an annotation, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {kind_of(arguments[0])}s, or one"
    if origin is dict:
        return "mapping"
    if arguments:
        return " or ".join(dict.fromkeys(kind_of(argument) for argument in arguments))
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return "mapping"
    return KINDS.get(getattr(annotation, "__name__", ""), f"`{annotation}`")


def default(name: str, field: FieldInfo) -> str:
    """Return a setting's default as written in YAML."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if name in SIZES:
        return f"`{value >> 30}GiB`"
    if isinstance(value, MethodOptions):
        value = {}
    text = str(list(value) if isinstance(value, tuple) else value).replace(f"-{os.getuid()}", "-<user id>")
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def commands_page() -> str:
    """Return every command with its help, as Markdown."""
    parts = [
        "# Commands",
        "This page is generated from the commands' own parsers and from `noxfile.py`.",
        "## In the environment of vLLM",
        "The wheel `ucm-runtime` installs the command `ucm`.",
    ]
    parts += [f"### {parser.prog}\n\n```text\n{parser.format_help().strip()}\n```" for parser in leaves(make_parser())]
    parts += [
        "## In this repository",
        "`nox -s SESSION -- ARGUMENTS` runs a session; each installs what it needs into an environment of its own.",
        "| session | what it does |\n|---|---|\n"
        + "\n".join(f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in sessions()),
    ]
    return "\n\n".join(parts) + "\n"


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands without subcommands, in order."""
    groups = [action.choices for action in parser._actions if isinstance(action.choices, dict)]  # noqa: SLF001 - argparse has no other way
    if not groups:
        parser.formatter_class = formatter
        yield parser
    for group in groups:
        for inner in group.values():
            yield from leaves(inner)


def formatter(prog: str) -> argparse.HelpFormatter:
    """Return a help formatter of a fixed width, whatever the terminal."""
    from argparse import HelpFormatter  # noqa: PLC0415

    return HelpFormatter(prog, max_help_position=28, width=92)


def sessions() -> Iterator[tuple[str, str]]:
    """Yield the nox sessions with their docstrings, on one line each."""
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and "nox.session" in map(decorator, node.decorator_list):
            named = re.search(r"name='([\w-]+)'", ast.unparse(node.decorator_list[0]))
            yield named[1] if named else node.name, " ".join((ast.get_docstring(node) or "").split())


def decorator(node: ast.expr) -> str:
    """Return a decorator's name."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)
