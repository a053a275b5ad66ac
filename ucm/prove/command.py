"""The subcommand ``ucm prove``: what a user asks of a proof, and the arguments of its engines."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import add_engine_args, answer, at_least, json_object, positive, say_aside
from ucm.engine_process import handled, model_config
from ucm.errors import UcmError, meant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Engine arguments that a proof sets, because it depends on them.
OWN = frozenset({"model", "kv_transfer_config", "worker_extension_cls", "disable_log_stats", "enable_prefix_caching"})
#: Engine arguments that a user's own replace.
DEFAULTS: dict[str, Any] = {"max_num_seqs": 16, "seed": 0}
#: A context has room for an answer, and for the prompts that warm the engine up.
ROOM, ANSWERS = 64, 32
#: Blocks that vLLM keeps for itself, and one more.
SPARE = 2
#: The options by which sparse methods say how much they read.
BUDGETS = ("token_budget", "window_tokens", "window")
MINUTES, TOKENS = 5.0, 2048
#: The exit code after Ctrl-C or an end by a signal, as shells have it.
INTERRUPTED = 130
_EPILOG = (
    "Exit code: 0 every answer is the one without UCM, 1 an answer differs, 2 wrong usage, 3 something was not judged "
    "(the table says what and why), 130 interrupted."
)


@dataclass(frozen=True)
class Request:
    """What a user asks to be proved.

    Attributes:
        model: The model's directory.
        config: The settings file; None for files in a temporary directory.
        engine: Further arguments of vLLM's ``LLM``.
        minutes: The time limit of everything.
        longest: Tokens of a prompt, at most.
        sparse: A sparse method with its options; None for none.
    """

    model: Path
    config: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = 5.0
    longest: int = 2048
    sparse: tuple[str, Mapping[str, Any]] | None = None


def engine_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for all engines.

    Raises:
        UcmError: The model does not exist, is too short, or an argument is one that the proof sets itself.
    """
    sections = model_config(request.model)
    if taken := sorted(OWN & request.engine.keys()):
        raise UcmError(f"`ucm prove` sets {', '.join(taken)} itself", where="--engine-args", fix="leave it out")
    wanted = request.longest + ROOM
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    contexts = [one[name] for one in sections for name in names if isinstance(one.get(name), int) and one[name] > 0]
    longest = min(wanted, *contexts, int(request.engine.get("max_model_len", wanted)))
    if longest < 2 * ROOM:
        raise UcmError(
            f"the model's context of {longest} tokens is too short for a proof",
            where=f"--model {request.model}",
            fix=f"prove a model with at least {2 * ROOM} tokens",
        )
    tokenizer = any(any(request.model.glob(name)) for name in ("tokenizer*", "vocab*", "*.model", "tekken*"))
    return {
        **DEFAULTS,
        **({} if tokenizer else {"skip_tokenizer_init": True}),
        **request.engine,
        "max_model_len": longest,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }


def pool_size(prompts: Mapping[str, Any], groups: Sequence[Mapping[str, int]], longest: int) -> int:
    """Return a number of blocks in which the first prompts of a crowd fit exactly, so that their answers preempt some.

    The prompts alone fit as well, one after the other: they stay in vLLM's own cache until they are asked again.

    Args:
        prompts: The prompts; see `ucm.prove.engine.make_prompts`.
        groups: The tokens of a block of each KV-cache group.
        longest: The longest context.
    """

    def blocks(tokens: int) -> int:
        return sum(math.ceil(tokens / group["tokens"]) for group in groups)

    least = max(sum(blocks(len(prompt) + ANSWERS) for prompt in prompts["alone"]), blocks(longest)) + SPARE
    held = accumulate(blocks(len(prompt)) for prompt in prompts["crowd"])
    return next((total for total in held if total >= least), least) + SPARE


def full_budget(name: str, options: Mapping[str, Any], tokens: int, store: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sparse method's options with a budget that covers a whole context.

    Raises:
        ConfigError: There is no such method.
        UcmError: The method has none of `BUDGETS`, and its options are not given.
    """
    from ucm.sparse.factory import method_class  # noqa: PLC0415 - few proofs try a method

    kind = method_class(name).options_type
    known = kind.model_fields if kind is not None else {}
    budgets = {option: 2 * tokens for option in BUDGETS if option in known}
    if not budgets and not options:
        fix = f"""give its options: --sparse '{{"{name}": {{…}}}}'"""
        raise UcmError(f"the sparse method {name!r} has no budget that could be made full", where="--sparse", fix=fix)
    return {**budgets, **options, **({"store": dict(store)} if "store" in known else {})}


def parse_sparse(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``--sparse``: a name, or ``{"<name>": {…options…}}``.

    Raises:
        ArgumentTypeError: It is neither.
    """
    if not text.lstrip().startswith("{"):
        from ucm.sparse.factory import METHODS  # noqa: PLC0415 - few proofs try a method

        if not text or (text not in METHODS and meant(text, METHODS) and ":" not in text):
            raise argparse.ArgumentTypeError(f"{meant(text, METHODS)}there is no sparse method {text!r}")
        return text, {}
    found = json_object(text)
    if len(found) != 1 or not all(isinstance(one, dict) for one in found.values()):
        raise argparse.ArgumentTypeError('write one method: NAME, or {"NAME": {…options…}}')
    ((name, options),) = found.items()
    return name, options


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prove",
        help="run your model with and without UCM, and compare the answers",
        description="Run your own model on your own device in engines without UCM and with it, one at a time and 16 at "
        "a time, with aborts and preemptions, after a reset of vLLM's prefix cache and after a restart. Compare the "
        "tokens, and show times to the first token. Its own stores are deleted.",
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
        help=f"the longest prompt; give fewer on a slow device (default: {TOKENS})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; `python -m pydoc ucm.prove` describes its keys"
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

    model, minutes, longest = options.model.absolute(), options.minutes, options.tokens
    request = Request(model, options.config, options.engine_args, minutes, longest, options.sparse)
    try:
        # As Ctrl-C, these end the command, so that engines are ended and files deleted.
        with handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
            proof = prove(request, say=say_aside)
    except KeyboardInterrupt:
        sys.stderr.write("ucm: interrupted; the engines are ended, and their store is deleted\n")
        return INTERRUPTED
    answer(options, as_data(proof), render(proof))
    return proof.code
