"""The subcommand ``ucm sparse``: measure on your own model and prompts which budget keeps how much attention."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import add_engine_args, at_least, is_tokens, quieten, refuse_own, say, say_json
from ucm.compat import optional
from ucm.engine import Engine
from ucm.errors import UcmError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

BUDGETS = (0.05, 0.1, 0.25, 0.5)
TOKENS, EVERY = 32, 4
#: Engine arguments that the measurement sets itself.
_OWN = frozenset({"model", "additional_config", "worker_extension_cls"})
#: An engine argument that it needs: a replayed graph would skip the measurement.
_EAGER = "enforce_eager"
_METHOD = "ucm.sparse.topk.attention_share:MassProbe"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "sparse",
        help="measure how much attention a sparse method's budget would keep on your model",
        description="Find a budget for sparse attention.",
    )
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    probe = inner.add_parser(
        "probe",
        help="run a model on prompts and measure the attention that budgets keep",
        description="Run a model densely on your prompts. In some decode steps, compute in every layer what share of "
        "the attention the blocks hold that each selector of BlockTopK would read within a budget, beside the best "
        "possible choice (oracle), blocks ranked by their mean key (mean), and chance (random).",
        epilog="Prompts that are too long for the model are skipped and counted. Exit code: 0 measured, 1 nothing was "
        "measured, 2 wrong usage.",
    )
    probe.add_argument("--model", required=True, metavar="MODEL", help="a model's directory or name, as for vLLM")
    probe.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help='prompts, one JSON object per line: {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}',
    )
    probe.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=list(BUDGETS),
        metavar="SHARE",
        help=f"shares of the context that a step may read (default: {' '.join(map(str, BUDGETS))})",
    )
    for name, default, what in (
        ("--max-tokens", TOKENS, "tokens to generate"),
        ("--every", EVERY, "measure every Nth decode step"),
    ):
        more = f"{what} (default: {default})"
        probe.add_argument(name, type=at_least(1), default=default, metavar="N", help=more)
    add_engine_args(probe, '{"max_model_len": 32768}')
    probe.add_argument("--json", action="store_true", help="print one JSON object; see docs/sparse_attention.md")
    probe.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Measure, and print the result.

    Raises:
        UcmError: An argument is wrong, the engine does not start, or the overlay is not active.
    """
    arguments = options.engine_args
    refuse_own(arguments, _OWN, "the measurement")
    if arguments.get(_EAGER, True) is not True:
        raise UcmError(
            f"the measurement needs {_EAGER}: true", where="--engine-args", fix="remove it: that is what is set"
        )
    if not all(0 < share <= 1 for share in options.budgets):
        raise UcmError(
            f"--budgets must be shares of the context above 0 and at most 1, not {_spaced(options.budgets)}",
            fix="write 0.1 for a tenth of the context",
        )
    prompts = read_prompts(options.prompts)
    quieten()
    reports, skipped = _measure(options, arguments, prompts)
    found = {"model": options.model, "prompts": len(prompts) - skipped, "skipped": skipped, **merged(reports)}
    if options.json:
        say_json(found)
    else:
        say(lines_of(found))
    return 0 if found["layers"] else 1


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Return the prompts in a file, in the form that vLLM takes.

    Raises:
        UcmError: The file cannot be read, is empty, or has a line that is not a prompt.
    """
    fix = 'write one {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]} per line'
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UcmError(f"the file with prompts cannot be read: {error}", where=f"--prompts {file}", fix=fix) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise UcmError(f"the line is not JSON: {error}", where=f"{file}:{number}", fix=fix) from error
        if not _is_prompt(prompt):
            raise UcmError("the line is not a prompt", where=f"{file}:{number}", fix=fix)
        found.append(prompt)
    if not found:
        raise UcmError("there are no prompts in the file", where=f"--prompts {file}", fix=fix)
    return found


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the reports of all workers of an engine; workers that share the heads of a layer are averaged.

    Returns:
        ``lengths``, the shortest and the longest context in tokens or None; ``layers``, by name in the model's order,
        with the keys of `LayerMasses`.
    """
    layers: dict[str, Mapping[str, Any]] = {}
    for report in reports:
        layers |= report["layers"]
    lengths = [report["lengths"] for report in reports if report["lengths"]]
    return {
        "lengths": [min(least for least, _ in lengths), max(most for _, most in lengths)] if lengths else None,
        "layers": {name: layers[name] for name in sorted(layers, key=_place)},
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Return the printed lines: one per budget, the needed shares of the context, and one per layer."""
    layers: Mapping[str, Any] = found["layers"]
    skipped = [f"{found['skipped']} of the prompts skipped: too long for the model"] if found["skipped"] else []
    if not layers:
        more = "generate more tokens with --max-tokens, or measure every step with --every 1"
        if not found["prompts"]:
            more = "give shorter prompts, or raise max_model_len with --engine-args"
        return [f"Nothing was measured: {more}.", *skipped]
    samples = min(layer["samples"] for layer in layers.values())
    least, most = found["lengths"]
    head = f"{found['model']}: {len(layers)} layers, {found['prompts']} prompts"
    lines = [
        f"{head}, contexts of {least:,} to {most:,} tokens, {samples:,} decode steps measured per layer",
        *skipped,
        "",
        "Attention that is kept, mean over layers (worst layer):",
    ]
    by_budget = defaultdict(list)
    for layer in layers.values():
        for share, kept in layer["kept"].items():
            by_budget[float(share)].append(kept)
    if by_budget:
        names = list(next(iter(by_budget.values()))[0])
        lines.append(_row("budget", names))
        for share, kept in sorted(by_budget.items()):
            cells = [[one[name] for one in kept] for name in names]
            lines.append(_row(f"{share * 100:g}%", [f"{sum(of) / len(of):.1%} ({min(of):.1%})" for of in cells]))
    else:
        lines.append("  every budget covers the whole context: give longer prompts, or smaller --budgets")
    targets = list(next(iter(layers.values()))["needed"])
    lines += ["", "Share of the context that holds so much of the attention, mean (worst step):"]
    lines.append(_row("layer", [f"{float(target):.0%}" for target in targets]))
    for name, layer in layers.items():
        cells_of = [f"{layer['needed'][target]:.1%} ({layer['worst'][target]:.1%})" for target in targets]
        lines.append(_row(_short(name), cells_of))
    return lines


def _measure(
    options: argparse.Namespace, arguments: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """Run the engine, and return its workers' reports and how many prompts were too long for it."""
    method = {_METHOD: {"budgets": options.budgets, "every": options.every}}
    try:
        engine = Engine(options.model, additional_config={"ucm_sparse_config": method}, **{**arguments, _EAGER: True})
        fitting = _fitting(engine.llm, prompts)
        if fitting:
            engine.generate(fitting, [options.max_tokens] * len(fitting))
    except ImportError as error:
        raise UcmError(
            f"vLLM cannot be imported: {error}", fix="run this command in the environment of vLLM"
        ) from error
    except Exception as error:
        raise UcmError(
            f"the engine failed: {type(error).__name__}: {error}",
            where=f"--model {options.model}",
            fix="see vLLM's messages above; other engine arguments are given with --engine-args",
        ) from error
    reports = [worker["report"] for worker in engine.workers("ucm_method")]
    if any(report is None for report in reports):
        raise UcmError(
            "no probe ran in the workers: the overlay is not active in this environment",
            fix="install the overlay's wheel beside vLLM, and run `ucm doctor`",
        )
    return reports, len(prompts) - len(fitting)


def _fitting(engine: Any, prompts: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return the prompts that leave room for a token, as token ids; vLLM would refuse all because of one."""
    most = optional(engine, "llm_engine.vllm_config.model_config.max_model_len")
    tokens = [
        prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else engine.get_tokenizer().encode(prompt["prompt"])
        for prompt in prompts
    ]
    return [ids for ids in tokens if len(ids) < most]


def _is_prompt(prompt: object) -> bool:
    if not isinstance(prompt, dict) or len(prompt) != 1:
        return False
    text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if isinstance(text, str) and text:
        return True
    return is_tokens(tokens)


def _place(name: str) -> tuple[int, str]:
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else -1, name


def _short(name: str) -> str:
    place, _ = _place(name)
    return str(place) if place >= 0 else name


def _row(first: str, cells: Iterable[str]) -> str:
    return "".join([f"  {first:<8}", *(f"{cell:>18}" for cell in cells)])


def _spaced(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
