"""What the commands share: their options for a deployment and a prompt, and their output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError
from ucm.logger import LEVEL_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how an engine is started."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the connector's settings")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model's directory")
    add_engine_args(parser, '{"dtype": "float16"}', "; some of them change the namespace")


def add_engine_args(parser: argparse.ArgumentParser, example: str, more: str = "") -> None:
    """Add the option ``--engine-args``, whose help gives an example."""
    help_ = f"the engine's other arguments, for instance '{example}'{more}"
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help=help_)


def positive(text: str) -> float:
    """Return an argument that is a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number of at least so much."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}")
        return int(text)

    return whole_number


def quieten() -> None:
    """Hide vLLM's start-up messages; UCM's warnings are shown, and go to standard error beside the command's result."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # from 0.10.2 on
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault(LEVEL_VARIABLE, "WARNING")


def read_prompt(options: argparse.Namespace) -> list[int]:
    """Return the token ids of the prompt.

    Raises:
        UcmError: The file cannot be read, or the prompt cannot be tokenized.
    """
    if options.tokens is not None:
        return _read_tokens(options.tokens)
    return tokenize(options.model, options.prompt)


def json_object(text: str) -> dict[str, Any]:
    """Return an argument that is a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('write a JSON object, for instance {"dtype": "float16"}')
    return found


def _read_tokens(file: Path) -> list[int]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UcmError(f"cannot read the file with token ids: {error}", where=f"--tokens {file}") from error
    if not isinstance(found, list) or not found or not all(type(one) is int and one >= 0 for one in found):
        raise UcmError("the file is not a JSON list of token ids", where=f"--tokens {file}", fix="write [1, 2, 3]")
    return found


@cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - vLLM brings it; few commands need it

    return AutoTokenizer.from_pretrained(model)


def tokenize(model: Path, text: str) -> list[int]:
    """Return the token ids of a text, by the model's tokenizer, without a chat template.

    Raises:
        UcmError: The tokenizer cannot be loaded.
    """
    try:
        found: list[int] = _tokenizer(model)(text)["input_ids"]
    except Exception as error:
        raise UcmError(
            f"cannot tokenize the prompt: {error}",
            where=f"--model {model}",
            fix="give the token ids with --tokens",
        ) from error
    return found


def say(lines: Iterable[str]) -> None:
    """Write a result's lines to standard output at once."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def answer(options: argparse.Namespace, data: Any, lines: Iterable[str]) -> None:
    """Write a result: with ``--json`` for a program, whose paths may be in any encoding, else the lines."""
    say([json.dumps(data, indent=1)] if options.json else lines)


def say_aside(line: str) -> None:
    """Write a line about the progress to standard error at once, beside the result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows as aligned lines.

    Args:
        rows: The rows; the first one is the header.
        right: The right-aligned columns.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def many(number: int, one: str, more: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else more}"
