"""Real text as prompts of a chat, in tokens."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

from tests.e2e.processes import INSIDE
from tests.e2e.real.chat import HANDBOOK

if TYPE_CHECKING:
    from pathlib import Path

#: What a prompt begins and ends with; the text is between.
HEAD = "<|im_start|>system\nYou answer questions about a handbook.<|im_end|>\n<|im_start|>user\nRead this handbook.\n\n"
TAIL = "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def sections() -> list[str]:
    """Return the sections of the handbook, in order."""
    text = HANDBOOK.read_text(encoding="utf-8")
    return re.split(r"(?m)^(?=\d+\. [A-Z].*$)", text)[1:]


def with_tokenizer(python: Path, model: Path, **asked: Any) -> dict[str, Any]:
    """Encode, decode and render with a model's tokenizer; see `inside/chat_tokens.py`.

    Args:
        python: The interpreter of an environment with vLLM.
        model: The model.
        asked: The input.
    """
    done = subprocess.run(
        [python, INSIDE / "chat_tokens.py", model],
        input=json.dumps(asked),
        env={"HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def encode(python: Path, model: Path, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts, special ones included."""
    tokens: list[list[int]] = with_tokenizer(python, model, texts=texts)["texts"]
    return tokens
