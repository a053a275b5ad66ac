"""The subcommand ``ucm store`` and its own subcommands."""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ucm.commands.options import add_deployment, at_least
from ucm.errors import UcmError
from ucm.salts import is_tag_name

_EXIT_CODES = "Exit code: 0 no problem, 1 a problem was found, 2 wrong usage."
_STOPPED = 130


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    description = "Inspect, verify and clean the directories of a store. Engines may use them meanwhile."
    parser = commands.add_parser(
        "store", help="inspect, verify and clean a store of KV blocks", description=description
    )
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_places(_add(inner, "stat", "show how much a store holds, by namespace"))
    _add_ls(inner)
    _add_verify(inner)
    _add_prompt(inner, "lookup", "show which blocks of a prompt are stored, and in which tiers")
    _add_leases(inner)
    _add_moves(inner)
    _add_gc(inner)
    _add(inner, "tag", "print the tag of the cache salt that is read from standard input, for store.share_weights")
    _add_bench(inner)
    _add_serve(inner)


def _add(commands: Any, name: str, what: str, module: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_EXIT_CODES
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; `python -m pydoc ucm.commands.store` describes its keys",
    )
    parser.set_defaults(handle=partial(_handle, module or name))
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, metavar="FILE", help="the engines' configuration file")
    where.add_argument(
        "--directory", type=Path, action="append", metavar="DIR", help="a directory of the store; may be repeated"
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    _add_where(parser)
    parser.add_argument(
        "--tier", choices=("posix", "dram", "redis", "mooncake", "s3"), help="only this tier of the configuration"
    )
    parser.add_argument(
        "--namespace",
        action="append",
        metavar="PATTERN",
        help="only namespaces that match (* and ? are wildcards); may be repeated",
    )


def _add_ls(commands: Any) -> None:
    parser = _add(commands, "ls", "list blocks, most recently used first")
    _add_places(parser)
    parser.add_argument("--key", type=key_prefix, metavar="HEX", help="only keys that start with HEX")
    parser.add_argument(
        "--older-than", type=duration, metavar="AGE", help="only blocks not used for AGE, for instance 2d"
    )
    parser.add_argument(
        "--limit", type=at_least(0), default=50, metavar="N", help="list at most N blocks; 0: all (default: 50)"
    )


def _add_verify(commands: Any) -> None:
    parser = _add(commands, "verify", "read every block and compare every checksum")
    _add_places(parser)
    parser.add_argument(
        "--quarantine", action="store_true", help="quarantine damaged blocks, as an engine that reads them does"
    )
    parser.add_argument("--threads", type=at_least(1), default=4, metavar="N", help="read with N threads (default: 4)")


def _add_prompt(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser = _add(commands, name, what, module="prompt")
    parser.epilog = "It needs vLLM, whose model classes say what a block is. " + _EXIT_CODES
    add_deployment(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="this prompt, tokenized by the model's tokenizer")
    prompt.add_argument("--tokens", type=Path, metavar="FILE", help="the prompt whose token ids this JSON file lists")
    parser.add_argument(
        "--salt-file", metavar="FILE", help="FILE's first line is the cache salt of the prompt's requests"
    )
    parser.set_defaults(action=name)
    return parser


def _add_leases(commands: Any) -> None:
    for name, what in (
        ("retain", "evict the blocks of a prompt after all others, for a time"),
        ("pin", "do not evict the blocks of a prompt, for a time"),
    ):
        _add_prompt(commands, name, what).add_argument(
            "--for", type=duration, required=True, dest="seconds", metavar="TIME", help="how long, for instance 12h"
        )
    _add_from_token(_add_prompt(commands, "unpin", "end the leases of the blocks of a prompt, pinned or retained"))


def _add_moves(commands: Any) -> None:
    _add_prompt(commands, "prefetch", "copy the blocks of a prompt into the first tier, before it is asked")
    _add_prompt(commands, "demote", "delete the blocks of a prompt from the first tier, if another one has them")
    _add_from_token(_add_prompt(commands, "drop", "delete the blocks of a prompt from all tiers"))


def _add_from_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-token",
        type=at_least(0),
        default=0,
        metavar="N",
        help="leave the first N tokens, for instance of a system prompt that other prompts share (default: 0)",
    )


def _add_gc(commands: Any) -> None:
    parser = _add(commands, "gc", "delete leftovers of dead processes and damaged blocks; with options, old blocks too")
    _add_places(parser)
    parser.add_argument(
        "--older-than", type=duration, metavar="AGE", help="also delete blocks not used for AGE, for instance 30d"
    )
    parser.add_argument(
        "--to", type=size, metavar="SIZE", help="also delete the least recently used blocks until at most SIZE is used"
    )
    parser.add_argument("--all", action="store_true", help="delete the chosen namespaces completely; needs --namespace")
    parser.add_argument(
        "--salt", type=tag, metavar="TAG", help="also delete all blocks of a tenant, as `ucm store tag` names it"
    )
    parser.add_argument("--dry-run", action="store_true", help="only report what would be deleted")
    parser.add_argument(
        "--yes", action="store_true", help="delete without asking (as --json does, or without a terminal)"
    )


def _add_bench(commands: Any) -> None:
    parser = _add(commands, "bench", "measure a store on this machine, compared with plain copies and files")
    parser.epilog = "It writes to its own namespace, which it deletes at the end. Exit code: 0 measured, 2 wrong usage."
    _add_where(parser)
    parser.add_argument("--blocks", type=at_least(1), default=64, metavar="N", help="number of blocks (default: 64)")
    parser.add_argument("--block", type=size, default=4 << 20, metavar="SIZE", help="size of a block (default: 4MiB)")
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=9,
        metavar="N",
        help="rounds; the best and the median are reported (default: 9)",
    )


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer the commands about a prompt over HTTP",
        description="Answer the commands about a prompt over HTTP, until it is interrupted.",
        epilog="It needs vLLM, whose model classes say what a block is, and whose packages serve HTTP.",
    )
    add_deployment(parser)
    parser.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="unix:PATH, a socket that only this user may use; or HOST:PORT, which needs --token-file",
    )
    parser.add_argument("--token-file", metavar="FILE", help="FILE's first line is the bearer token of each request")
    parser.set_defaults(handle=partial(_handle, "serve"))


def _handle(name: str, options: argparse.Namespace) -> int:
    """Run a subcommand; import only its own module."""
    run = import_module(f"ucm.commands.store.{name}").run
    try:
        code: int = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, for instance `head`, has closed the pipe, so nothing may be written at exit.
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


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d|w)")


def duration(text: str) -> float:
    """Return the seconds of a duration such as ``30d``."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write 90s, 15min, 12h, 30d or 4w")
    return float(found[1]) * _SECONDS[found[2]]


def size(text: str) -> int:
    """Return the bytes of a size such as ``100GiB``; 0 is valid."""
    from ucm.config.settings import SIZE_HELP, parse_size  # noqa: PLC0415 - see above

    try:
        return 0 if text == "0" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; {SIZE_HELP}") from error


def key_prefix(text: str) -> str:
    """Check the start of a key, in hexadecimal digits."""
    if not re.fullmatch(r"[0-9a-f]{1,128}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a key is written in the digits 0-9 and a-f")
    return text


def tag(text: str) -> str:
    """Check the tag of a salt."""
    if not is_tag_name(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a tag is what `ucm store tag` prints, or no-salt")
    return text
