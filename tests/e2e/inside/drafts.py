"""Drafts for speculative decoding of which a known number is right; `UCM_TEST_DRAFTS` names a file with the answers.

The file may change while the engine runs, so that an engine can learn its own answers.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

#: vLLM's tokens of the tiny models, without special ones.
TOKENS = range(3, 512)


class Known:
    """Continues known texts, with one token of most drafts replaced; for unknown texts, every draft is wrong.

    Implements vLLM's interface for proposers of one's own (``custom_class``).

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._count = int(vllm_config.speculative_config.num_speculative_tokens)
        self._file = Path(os.environ["UCM_TEST_DRAFTS"])

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""

    def propose(self, sampled: list[list[int]], num_tokens: Any, token_ids: Any, **_: Any) -> list[list[int]]:
        """Return drafts for each row of the batch; none for a row that has generated nothing in this step."""
        lengths = [int(num_tokens[row]) for row in range(len(sampled))]
        texts: list[list[int]] = json.loads(self._file.read_text(encoding="utf-8"))
        return [
            self._draft(texts, token_ids[row, :length].tolist()) if new else []
            for row, (new, length) in enumerate(zip(sampled, lengths, strict=True))
        ]

    def _draft(self, texts: list[list[int]], text: list[int]) -> list[int]:
        source = random.Random(len(text))  # noqa: S311 - no secret
        known = next((of for of in texts if of[: len(text)] == text), text)
        draft = known[len(text) : len(text) + self._count]
        draft += source.choices(TOKENS, k=self._count - len(draft))
        place = source.randrange(self._count + 1)
        if place < self._count:
            draft[place] = source.choice(TOKENS)
        return draft
