"""What a user asks of a proof, and the arguments of its engines."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ucm.commands.options import json_object, refuse_own
from ucm.engine_process import model_config
from ucm.errors import UcmError, meant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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
        dtype: The data type; None for the model's.
    """

    model: Path
    config: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = 5.0
    longest: int = 2048
    sparse: tuple[str, Mapping[str, Any]] | None = None
    dtype: str | None = None


def engine_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for all engines.

    Raises:
        UcmError: The model does not exist, is too short, or an argument is one that the proof sets itself.
    """
    sections = model_config(request.model)
    refuse_own(request.engine, OWN, "`ucm prove`")
    if request.dtype and "dtype" in request.engine:
        raise UcmError("the data type is given twice", where="--engine-args: dtype", fix="leave one of the two out")
    wanted = request.longest + ROOM
    longest = min(wanted, _longest_context(sections), int(request.engine.get("max_model_len", wanted)))
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
        **({"dtype": request.dtype} if request.dtype else {}),
        **request.engine,
        "max_model_len": longest,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }


def _longest_context(sections: Sequence[Mapping[str, Any]]) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    values = [one[name] for one in sections for name in names if isinstance(one.get(name), int) and one[name] > 0]
    return min(values, default=1 << 30)


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
            raise ArgumentTypeError(f"{meant(text, METHODS)}there is no sparse method {text!r}")
        return text, {}
    found = json_object(text)
    if len(found) != 1 or not all(isinstance(one, dict) for one in found.values()):
        raise ArgumentTypeError('write one method: NAME, or {"NAME": {…options…}}')
    ((name, options),) = found.items()
    return name, options
