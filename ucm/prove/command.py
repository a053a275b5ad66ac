"""The subcommand ``ucm prove``."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import add_engine_args, answer, at_least, positive, say_aside
from ucm.engine_process import handled
from ucm.errors import UcmError
from ucm.prove.arguments import Request, parse_sparse

if TYPE_CHECKING:
    import argparse

MINUTES, TOKENS = 5.0, 2048
#: The exit code after Ctrl-C or an end by a signal, as shells have it.
INTERRUPTED = 130
_EPILOG = (
    "Exit code: 0 every answer is the one without UCM, 1 an answer differs, 2 wrong usage, 3 something was not judged "
    "(the table says what and why), 130 interrupted."
)


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prove",
        help="run your model with and without UCM, and compare the answers",
        description="Run your own model on your own device in engines without UCM and with it, one at a time and 16 at "
        "a time, with aborts and preemptions, after a reset of vLLM's prefix cache and after a restart. Compare the "
        "tokens, and show times and speeds. Its own stores are deleted.",
        epilog=_EPILOG,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model's directory")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the connector's settings; the proof's directories are beside or inside theirs (default: files in a "
        "temporary directory)",
    )
    add_engine_args(parser, '{"tensor_parallel_size": 2}')
    parser.add_argument(
        "--dtype", metavar="TYPE", help="the data type; float32 makes batches comparable (default: the model's)"
    )
    parser.add_argument(
        "--sparse",
        type=parse_sparse,
        metavar="METHOD",
        help="also prove a sparse method with a full budget: its name, or JSON with its options",
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        default=MINUTES,
        metavar="N",
        help=f"the time limit of everything (default: {MINUTES:.0f})",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(128),
        default=TOKENS,
        metavar="N",
        help=f"the longest prompt; shorter on a device that is slow for --minutes (default: {TOKENS})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; `pydoc ucm.prove` describes its keys"
    )
    parser.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the proof, and print the result.

    Raises:
        UcmError: vLLM is not installed, or the model, the settings or the arguments are wrong.
    """
    if find_spec("vllm") is None:
        raise UcmError("vLLM is not installed here", fix="run this in the environment that serves the model")
    from ucm.prove.report import as_data, render  # noqa: PLC0415 - every ``ucm`` command imports this module
    from ucm.prove.run import prove  # noqa: PLC0415 - likewise

    request = Request(
        options.model.absolute(),
        options.config,
        options.engine_args,
        options.minutes,
        options.tokens,
        options.sparse,
        options.dtype,
    )
    try:
        # As Ctrl-C, these end the command, so that engines are ended and files deleted.
        with handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
            proof = prove(request, say=say_aside)
    except KeyboardInterrupt:
        sys.stderr.write("ucm: interrupted; the engines are ended, and their store is deleted\n")
        return INTERRUPTED
    answer(options, as_data(proof), render(proof))
    return proof.code
