"""A task of `tests.e2e.judges.real` in engines: `python -m tests.e2e.judges.engines`.

The methods compute prompts densely, so the first engine saves what the others load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.environment import with_overlay
from tests.e2e.judges.real import ASKED, LENGTHS, ONE, TASKS, items
from tests.e2e.prefix_engine import connector, posix
from tests.e2e.real.model import real_model
from tests.e2e.sparse_runs import run_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment
    from tests.e2e.judges.real import Item

BLOCK = 32
#: By engine: its method's options as shares of the prompt, and what its requests ask for, by row.
SHARE, SMALL = 0.14, 0.1
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BlockTopK": (
        {"token_budget": SHARE, "min_context": 0},
        {"dense": False, "BlockTopK, 14 %": None, "BlockTopK, 10 %": {"token_budget": SMALL}},
    ),
    "ESA": ({"token_budget": SHARE, "window_tokens": 256}, {"ESA, 14 % beside a window of 256": None}),
    "SinkWindow": ({"window_tokens": SHARE, "prefill": "dense"}, {"SinkWindow, 14 %": None}),
}


def engine(length: int) -> dict[str, Any]:
    """Return arguments of ``LLM`` for one prompt of a length at a time."""
    return {
        "model": str(real_model()),
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": length + 4 * BLOCK,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 1,
        "num_gpu_blocks_override": length // BLOCK + 8,
        "enforce_eager": True,
    }


def answered(
    environment: Environment,
    directory: Path,
    arguments: Mapping[str, Any],
    asked: Sequence[tuple[Item, object]],
) -> list[dict[str, Any]]:
    """Return what an engine thinks of answers that it is given, see `inside/forced.py`.

    Args:
        environment: A vLLM with the overlay.
        directory: A new one for files.
        arguments: Those of ``LLM``.
        asked: Items, each with its ``ucm_sparse``; None for none.
    """
    given = [[item.prompt, item.answer, {} if options is None else {"ucm_sparse": options}] for item, options in asked]
    spec = {"engine": arguments, "items": given}
    found: list[dict[str, Any]] = run_script(
        environment, directory, "forced.py", spec, VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )
    return found


def right(environment: Environment, directory: Path, task: str, length: int, count: int) -> dict[str, Counter[str]]:
    """Return by row how many parts of answers were ``asked`` for, and how many were ``right``.

    Args:
        environment: A vLLM with the overlay.
        directory: A directory for files.
        task: One of `ASKED`.
        length: Tokens of a prompt.
        count: The number of prompts.
    """
    made = items(environment.python, real_model(), {(task, length): count})
    rows: dict[str, Counter[str]] = {}
    shared = connector({**posix(directory / "store"), "posix_capacity": "8GiB"})
    for name, (shares, asked) in ENGINES.items():
        method = _in_tokens(shares, length)
        if name == "ESA":
            offloaded = directory / "offloaded"
            offloaded.mkdir(mode=0o700)
            method["store"] = {"pipeline": "Posix", "directories": [str(offloaded)]}
        arguments = {**engine(length), **shared, "additional_config": {"ucm_sparse_config": {name: method}}}
        options = {row: _in_tokens(of, length) if isinstance(of, dict) else of for row, of in asked.items()}
        ways = [(item, row) for item in made for row in options]
        told = answered(environment, directory / name, arguments, [(item, options[row]) for item, row in ways])
        for (item, row), one in zip(ways, told, strict=True):
            right = [all(said for _, said in one["tokens"][begin:end]) for begin, end in item.scored]
            rows.setdefault(row, Counter()).update(asked=len(right), right=sum(right))
    return rows


def _in_tokens(options: Mapping[str, Any], length: int) -> dict[str, Any]:
    return {name: round(of * length) if isinstance(of, float) else of for name, of in options.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.judges.engines", description=__doc__)
    parser.add_argument("--task", choices=ASKED, default=ONE)
    parser.add_argument("--length", type=int, default=LENGTHS[0], help="tokens of a prompt")
    parser.add_argument("--count", type=int, help="prompts; default: as the bench")
    parser.add_argument("--release", default="0.32.0")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        count = chosen.count or TASKS[chosen.task]
        rows = right(with_overlay(chosen.release), Path(directory), chosen.task, chosen.length, count)
    for row, of in rows.items():
        print(f"| {row} | {of['right']} of {of['asked']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
