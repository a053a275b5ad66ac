"""Models with random weights for measuring, written once."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from tests.e2e.model import write_tokenizer
from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_llama(python: Path, directory: Path, config: Mapping[str, Any]) -> None:
    """Write a model of a configuration, with an interpreter that has torch, unless it is there."""
    if not (directory / "model.safetensors").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory, config["vocab_size"])
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        subprocess.run([python, INSIDE / "ttft_model.py", directory], check=True)
