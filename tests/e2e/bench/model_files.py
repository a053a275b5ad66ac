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


def write_llama(python: Path, directory: Path, config: Mapping[str, Any], attention: float = 1.0) -> None:
    """Write a model of a configuration, unless it is there.

    Args:
        python: An interpreter that has torch.
        directory: The model's.
        config: Its configuration.
        attention: What attention adds to the hidden states, as a multiple.
    """
    if not (directory / "model.safetensors").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory, config["vocab_size"])
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        subprocess.run([python, INSIDE / "ttft_model.py", directory, str(attention)], check=True)
