"""The subcommand ``ucm store`` and its own subcommands."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError
from ucm.store_command.arguments import count, duration, key_prefix, size

if TYPE_CHECKING:
    import argparse

_EXIT_CODES = "Exit code: 0 all good, 1 a problem was found, 2 an error of use."
_STOPPED = 130


def add_parser(commands: Any) -> None:
    """Add the subcommand.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` returned.
    """
    description = "Look after the directories of a store, also while engines use them."
    parser = commands.add_parser("store", help="look after a store of KV blocks", description=description)
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_stat(inner)
    _add_ls(inner)
    _add_verify(inner)
    _add_gc(inner)
    _add_bench(inner)


def _add(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_EXIT_CODES
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; its keys: pydoc ucm.store_command")
    parser.set_defaults(handle=partial(_handle, name))
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, metavar="FILE", help="the configuration file that engines use")
    where.add_argument("--directory", type=Path, action="append", metavar="DIR", help="a store's directory; repeatable")


def _add_places(parser: argparse.ArgumentParser) -> None:
    _add_where(parser)
    parser.add_argument("--tier", choices=("posix", "dram"), help="only this tier of the configuration's")
    parser.add_argument(
        "--namespace", action="append", metavar="PATTERN", help="only namespaces like this (with * and ?); repeatable"
    )


def _add_stat(commands: Any) -> None:
    _add_places(_add(commands, "stat", "how much a store holds, and whose blocks they are"))


def _add_ls(commands: Any) -> None:
    parser = _add(commands, "ls", "list blocks, the most recently used first")
    _add_places(parser)
    parser.add_argument("--key", type=key_prefix, metavar="HEX", help="only keys that begin so")
    parser.add_argument("--older-than", type=duration, metavar="AGE", help="only blocks not used for so long, as in 2d")
    parser.add_argument("--newer-than", type=duration, metavar="AGE", help="only blocks used since then")
    parser.add_argument("--larger-than", type=size, metavar="SIZE", help="only larger blocks, as in 4MiB")
    parser.add_argument("--sort", choices=("used", "size", "key"), default="used", help="default: used")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="at most so many; 0: all (default: 50)")


def _add_verify(commands: Any) -> None:
    parser = _add(commands, "verify", "read every block and compare every checksum")
    _add_places(parser)
    parser.add_argument(
        "--set-aside", action="store_true", help="take what is damaged out of the way, as an engine that meets it does"
    )
    parser.add_argument("--threads", type=count, default=4, metavar="N", help="that read (default: 4)")


def _add_gc(commands: Any) -> None:
    parser = _add(commands, "gc", "delete what dead processes left and damaged blocks; with options also old blocks")
    _add_places(parser)
    parser.add_argument(
        "--older-than", type=duration, metavar="AGE", help="also blocks not used for so long, as in 30d"
    )
    parser.add_argument(
        "--to", type=size, metavar="SIZE", help="also the least recently used blocks, until they take no more than this"
    )
    parser.add_argument("--all", action="store_true", help="the chosen namespaces altogether; needs --namespace")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    parser.add_argument(
        "--yes", action="store_true", help="do not ask; nothing is asked without a terminal either, nor with --json"
    )


def _add_bench(commands: Any) -> None:
    parser = _add(commands, "bench", "how fast a store on this machine is, beside plain copies and files")
    parser.epilog = "It writes into a namespace of its own and deletes that. Exit code: 0, however fast; 2 for misuse."
    _add_where(parser)
    parser.add_argument("--blocks", type=count, default=64, metavar="N", help="default: 64")
    parser.add_argument("--block", type=size, default=4 << 20, metavar="SIZE", help="of one block (default: 4MiB)")
    parser.add_argument("--rounds", type=count, default=9, metavar="N", help="default: 9")
    parser.add_argument(
        "--lookup", type=count, default=0, metavar="N", help="also measure lookups with so many blocks stored"
    )


def _handle(name: str, options: argparse.Namespace) -> int:
    """Run a subcommand; what it needs is imported only now."""
    run = import_module(f"ucm.store_command.{name}").run
    try:
        code: int = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has read enough, for instance `head`; nothing more is to be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("ucm: stopped\n")
        return _STOPPED
    except OSError as error:
        raise UcmError(
            f"the store cannot be read: {error.strerror or error}",
            where=str(error.filename or ""),
            fix="run this as the user who runs the engines",
        ) from error
    return code
