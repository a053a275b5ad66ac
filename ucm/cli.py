"""The command ``ucm``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ucm import __version__
from ucm.commands import try_stores
from ucm.commands.store import command as store
from ucm.doctor import command as doctor
from ucm.errors import UcmError
from ucm.prove import command as prove

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Exit code for wrong usage, the same as argparse's.
USAGE = 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``ucm``; each subcommand sets ``handle`` to the function that runs it."""
    parser = argparse.ArgumentParser("ucm", description="UCM: prefix cache and sparse attention for vLLM.")
    parser.add_argument("--version", action="version", version=f"ucm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    prove.add_parser(commands)
    store.add_parser(commands)
    try_stores.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The exit code: 0 no problem, 1 a problem, 2 wrong usage.
    """
    options = make_parser().parse_args(arguments)
    try:
        code: int = options.handle(options)
    except UcmError as error:
        print(f"ucm: {error}", file=sys.stderr)  # noqa: T201 - a command's error goes to its terminal
        return USAGE
    return code
