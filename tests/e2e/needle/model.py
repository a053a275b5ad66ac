"""The models that answer the questions: Llamas of two layers, each trained here within a minute or two.

All start near the heads that look things up. They differ in what else they are given, for that decides which selectors
look good:

- `HELPED` has two traits that are easy on whatever summarises a block's keys: most of a token's code lies in a few
  components, and filler tokens, which nobody looks for, have much the same key. It learned to look one record up.
- `PLAIN` has neither: all codes are of independent normal components, of one length, those of filler as well. It also
  learned chains and keys with several values.
- `SHIFTED` is `PLAIN` with a vector that all keys share and that is four times as long as what tells them apart, as
  trained models have it where keys have a bias (Qwen2) or just a mean (arXiv:2410.02367).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.model import CONFIG, write_tokenizer
from tests.e2e.needle import task
from tests.e2e.processes import INSIDE
from tests.e2e.shared import publish
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRAINER = INSIDE / "needle_train.py"
#: The longest prompt with its answer.
MAX_LENGTH = 4_608

LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": task.VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    # Half of the rotations are so slow that they hardly turn within the context: what is compared by content needs
    # them. The fastest ones tell the previous token from all others.
    "rope_theta": 1e8,
}

#: Of positions: short sequences are stretched over as many as the model is to serve.
STRETCHED = 4_500
COMMON: dict[str, Any] = {
    "seed": 0,
    "rate": 1e-3,
    "warm_up": 10,
    "question": task.QUESTION,
    "filler": [task.FILLER.start, task.FILLER.stop],
    "symbols": [task.SYMBOLS.start, task.SYMBOLS.stop],
    "record": task.RECORD,
}


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a model is made.

    Attributes:
        name: The start of its directory's name.
        traits: What its start is given; see ``needle_train.py``.
        phases: Of its training: short sequences first, then those of true lengths.
        model: What its ``config.json`` has beside `LLAMA`.
        trainer: The script that trains it.
    """

    name: str
    traits: Mapping[str, float]
    phases: Sequence[Mapping[str, Any]]
    model: Mapping[str, Any] = field(default_factory=dict)
    trainer: Path = TRAINER


def _phase(steps: int, sequences: int, records: int, filler: tuple[int, int], **about: int) -> dict[str, Any]:
    found = {"steps": steps, "sequences": sequences, "records": records, "filler": list(filler)}
    return {**found, "positions": STRETCHED, **about}


HELPED = Recipe(
    "needle",
    {"filler": 0.1, "tails": 2.0, "shift": 0.0, "copy": 2.0},
    [_phase(60, 8, 16, (0, 8)), _phase(30, 2, 16, (118, 124)), _phase(20, 1, 32, (118, 124))],
)
PLAIN = Recipe(
    "plain",
    {"filler": 1.0, "tails": 1.0, "shift": 0.0, "copy": 8.0},
    [
        _phase(20, 8, 16, (0, 8)),
        _phase(80, 8, 16, (0, 8), values=4),
        _phase(100, 8, 16, (0, 8), hops=8, mentions=1),
        _phase(10, 2, 16, (118, 124)),
        _phase(20, 2, 32, (60, 64), values=4),
        _phase(30, 2, 16, (60, 64), hops=8, mentions=1),
    ],
)
SHIFTED = Recipe("shifted", {**PLAIN.traits, "shift": 4.0}, PLAIN.phases, {"attention_bias": True})

#: Trained with 512 positions and the usual base: what lies behind them it has never seen.
TRAINED = 512
SHORT = Recipe(
    "short",
    HELPED.traits,
    [
        _phase(100, 8, 16, (0, 8), positions=TRAINED),
        _phase(60, 8, 3, (118, 124), positions=TRAINED),
    ],
    {"rope_theta": 1e4, "max_position_embeddings": TRAINED},
    INSIDE / "rerope_train.py",
)


def write_model(python: Path, recipe: Recipe = HELPED) -> Path:
    """The directory of a trained model; training it for the first time takes a minute or two.

    Args:
        python: An interpreter that has torch and safetensors.
        recipe: How it is made.
    """
    config = {**LLAMA, **recipe.model}
    training = {**COMMON, "traits": dict(recipe.traits), "phases": list(recipe.phases)}
    key = hashlib.sha256(
        json.dumps([config, training], sort_keys=True).encode() + recipe.trainer.read_bytes()
    ).hexdigest()[:16]
    directory = BUILD / "e2e" / f"{recipe.name}-{key}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
        write_tokenizer(draft, task.VOCABULARY)
        (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (draft / "training.json").write_text(json.dumps(training), encoding="utf-8")
        subprocess.run([python, recipe.trainer, draft], check=True, stdout=subprocess.DEVNULL)
        try:
            publish(draft, directory)
        except OSError:  # another process was faster, with the same model
            shutil.rmtree(draft)
    return directory
