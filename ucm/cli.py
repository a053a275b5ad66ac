"""The command ``ucm``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ucm import __version__
from ucm.doctor import command as doctor
from ucm.errors import UcmError
from ucm.store_command import command as store

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Exit code for errors of use, as argparse has it.
USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; its module adds the parser and handles what it parsed.

    Returns:
        The exit code: 0 all good, 1 a problem, 2 an error of use.
    """
    parser = argparse.ArgumentParser("ucm", description="UCM, the runtime of the overlay for vLLM.")
    parser.add_argument("--version", action="version", version=f"ucm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    store.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.handle(options)
    except UcmError as error:
        print(f"ucm: {error}", file=sys.stderr)  # noqa: T201 - a command's error goes to its terminal
        return USAGE
    return code


if __name__ == "__main__":
    sys.exit(main())
