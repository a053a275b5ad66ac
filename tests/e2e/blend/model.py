"""The model of the blend tests: a Llama of four layers, trained here in about two minutes."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from tests.e2e.blend import task
from tests.e2e.model import CONFIG, write_tokenizer
from tests.e2e.processes import INSIDE
from tests.e2e.shared import locked, publish
from transforms.place import BUILD

if TYPE_CHECKING:
    from pathlib import Path

TRAINERS = (INSIDE / "blend_train.py", INSIDE / "needle_train.py")
#: The maximum length of a prompt with its answer.
MAX_LENGTH = 2_048

LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 192,
    "intermediate_size": 128,
    # The notes of the second layer show in the KV of the third, and are read in the fourth.
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": task.VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    # As in `tests.e2e.needle.model`: half of the rotations are slow enough for matching by content.
    "rope_theta": 1e8,
}

#: First short sequences with positions spread over the model's full range, then full lengths.
TRAINING: dict[str, Any] = {
    "seed": 0,
    "rate": 1e-3,
    "warm_up": 10,
    "question": task.QUESTION,
    "filler": [task.FILLER.start, task.FILLER.stop],
    "symbols": [task.SYMBOLS.start, task.SYMBOLS.stop],
    "traits": {"filler": 0.1},
    "phases": [
        {"steps": 80, "sequences": 8, "records": 12, "filler": [0, 8], "positions": 2_000},
        {"steps": 30, "sequences": 2, "records": 16, "filler": [12, 20], "positions": 2_000},
        {"steps": 20, "sequences": 1, "records": 40, "filler": [12, 18], "positions": 2_000},
    ],
}


def write_model(python: Path) -> Path:
    """Return the directory of the trained model; the first call trains it in about a minute.

    Args:
        python: An interpreter with torch and safetensors.
    """
    recipe = json.dumps({"model": LLAMA, "training": TRAINING}, sort_keys=True)
    made_by = b"".join(trainer.read_bytes() for trainer in TRAINERS)
    key = hashlib.sha256(recipe.encode() + made_by).hexdigest()[:16]
    directory = BUILD / "e2e" / f"blend-{key}"
    with locked(directory.with_suffix(".lock")):
        if not (directory / "model.safetensors").exists():
            draft = directory.with_suffix(".part")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            write_tokenizer(draft, task.VOCABULARY)
            (draft / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
            (draft / "training.json").write_text(json.dumps(TRAINING), encoding="utf-8")
            subprocess.run([python, TRAINERS[0], draft], check=True, stdout=subprocess.DEVNULL)
            publish(draft, directory)
    return directory
