"""Use a model's tokenizer: `chat_tokens.py MODEL`, with JSON on the standard input and the standard output.

The input has a list of ``texts`` to encode, of ``tokens`` to decode and of ``chats`` to render as prompts; the output
has the same keys.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def main(model: str) -> None:
    """Write the results."""
    # By name: it is only there where vLLM is.
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model)
    asked = json.load(sys.stdin)
    found = {
        "texts": [tokenizer.encode(text, add_special_tokens=False) for text in asked.get("texts", [])],
        "tokens": [tokenizer.decode(tokens) for tokens in asked.get("tokens", [])],
        "chats": [
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            for turns in asked.get("chats", [])
        ],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
