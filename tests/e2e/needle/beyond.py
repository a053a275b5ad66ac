"""What a model answers beyond its trained length, by each way to see distances: `python -m tests.e2e.needle.beyond`.

The model knows 512 positions. It is asked for a record of contexts up to eight times as long. Two baselines need no
engine: whoever guesses among the symbols of a context, and whoever answers each question that its last 512 tokens hold
the record of. The ideal is the model within its trained length.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.needle import task
from tests.e2e.needle.model import MAX_LENGTH, SHORT, TRAINED, write_model
from tests.e2e.sparse_runs import run_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment

LENGTHS = (TRAINED - 2 * task.VALUE, 1024, 2048, 4096)
COUNT = 12
#: NTK-aware scaling: the base that makes the slowest rotation turn over the longest context as it did in training.
SCALE = max(LENGTHS) / TRAINED
HEAD = 64
NTK = 1e4 * SCALE ** (HEAD / (HEAD - 2))
#: By name: what differs in the model's configuration, and the method.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RoPE": ({}, {}),
    "NTK": ({"rope_theta": NTK}, {}),
    "ReRoPE, window 128": ({}, {"ReRoPE": {"window": 128}}),
    "ReRoPE, window 256": ({}, {"ReRoPE": {"window": 256}}),
}


@dataclass(frozen=True)
class Score:
    """How one way did at one length.

    Attributes:
        loss: Nats per token of an answer, on average.
        right: The share of questions of whose answers each token was the likeliest.
    """

    loss: float
    right: float


Scores = dict[str, dict[int, Score]]


def scores(environment: Environment, directory: Path, count: int = COUNT, lengths: Sequence[int] = LENGTHS) -> Scores:
    """Of each way, and of the baselines, by length.

    Args:
        environment: A vLLM with the overlay.
        directory: A new one for files.
        count: Questions of each length.
        lengths: Tokens of a prompt.
    """
    asked = {length: task.questions(length, count) for length in lengths}
    texts = [question.prompt + question.answer for of_length in asked.values() for question in of_length]
    spec = {
        "texts": texts,
        "answer": task.VALUE,
        "common": _engine(write_model(environment.python, SHORT)),
        "engines": {name: _differing(*way) for name, way in WAYS.items()},
    }
    told = run_script(environment, directory, "rerope_quality.py", spec, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    found: Scores = {"a guess": {}, "the last 512 tokens, at best": {}}
    for length, of_length in asked.items():
        guess = 1 / (task.RECORD * (length // task.SPACING))
        found["a guess"][length] = Score(-math.log(guess), guess**task.VALUE)
        held = statistics.mean(question.behind + task.RECORD <= TRAINED for question in of_length)
        found["the last 512 tokens, at best"][length] = Score((1 - held) * -math.log(guess), held)
    for name, answers in told.items():
        found[name] = {}
        for number, length in enumerate(lengths):
            own = answers[number * count : (number + 1) * count]
            loss = statistics.mean(loss for answer in own for loss, _ in answer)
            found[name][length] = Score(loss, statistics.mean(all(likeliest for _, likeliest in of) for of in own))
    return found


def table(found: Mapping[str, Mapping[int, Score]]) -> str:
    """For the documentation."""
    lengths = list(next(iter(found.values())))
    head = " | ".join(f"{length:,}" for length in lengths)
    lines = [f"| tokens | {head} |", "|---" * (1 + len(lengths)) + "|"]
    for name, of in found.items():
        cells = " | ".join(f"{score.loss:.2f} ({score.right:.0%})" for score in of.values())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def plot(found: Mapping[str, Mapping[int, Score]], file: Path) -> None:
    """Loss over length."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only here

    axes = (figure := Figure(figsize=(7, 4))).subplots()
    for name, of in found.items():
        baseline = name not in WAYS
        axes.plot(list(of), [score.loss for score in of.values()], "--" if baseline else "o-", label=name)
    axes.axvline(TRAINED, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens of the context; trained with 512", ylabel="loss of answers, nats per token")
    axes.set_xticks([*next(iter(found.values()))], [f"{length:,}" for length in next(iter(found.values()))])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def _engine(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "block_size": 32,
        "num_gpu_blocks_override": 4 * MAX_LENGTH // 32,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }


def _differing(config: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"hf_overrides": {"max_position_embeddings": MAX_LENGTH, **_rope(config)}}
    return {**found, "additional_config": {"ucm_sparse_config": dict(method)}} if method else found


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    if "rope_theta" not in config:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}, **config}


def main() -> None:
    """Print the table, and draw the plot."""
    from tests.e2e.scenarios import make_environments  # noqa: PLC0415 - it builds wheels

    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = scores(make_environments("0.32.0").overlay, Path(directory, "files"), given.count)
    print(table(found))
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
