"""Questions over documents, to judge what blending loses on a real model.

The documents are the handbook in chunks of about 300 tokens, each with a five-digit code. A prompt has four to eight of
them in random order. There are three kinds of questions:

- *open*: the answer is compared with the one of the full computation, token by token;
- *known*: the answer must contain a word or number of one of the chunks;
- *code*: the answer must contain the code of one of the chunks.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.text import HEAD, TAIL, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTIONS = Path(__file__).with_name("judge_questions.json")
#: Tokens of a chunk, of an open answer and of its start that is compared alone, and of the other answers.
CHUNK, ANSWER, START, SHORT = 300, 32, 4, 20
#: The numbers of chunks in a prompt, and how many questions of each kind are asked about the same chunks.
COUNTS, OPEN, OTHERS = (4, 5, 6, 7, 8), 4, 4


@dataclass(frozen=True)
class Question:
    """A question over some chunks.

    Attributes:
        kind: ``open``, ``known`` or ``code``.
        chunks: The indices of the chunks, in the prompt's order.
        tail: The tokens after the chunks: the question in the chat's form.
        answer: What a right answer contains; empty for an open question.
    """

    kind: str
    chunks: tuple[int, ...]
    tail: list[int]
    answer: str


@dataclass(frozen=True)
class Judge:
    """All questions of a judgement.

    Attributes:
        head: The tokens before the chunks.
        chunks: The tokens of each chunk.
        questions: The questions; those over the same chunks are neighbours.
    """

    head: list[int]
    chunks: list[list[int]]
    questions: list[Question]

    def prompt(self, question: Question) -> list[int]:
        """Return all tokens of a question's prompt."""
        return [*self.head, *(token for chunk in question.chunks for token in self.chunks[chunk]), *question.tail]

    def marks(self, question: Question) -> list[list[int]]:
        """Return the chunks of a question's prompt in the form of ``ucm_chunks``."""
        places = [len(self.head)]
        for chunk in question.chunks:
            places.append(places[-1] + len(self.chunks[chunk]))
        return [list(pair) for pair in pairwise(places)]


def judge(python: Path, model: Path, seed: int = 0, contexts: int = len(COUNTS)) -> Judge:
    """Return a judgement: with all contexts, 20 open questions, 20 known answers and 20 codes.

    Args:
        python: The interpreter of an environment with vLLM.
        model: The model, for its tokenizer.
        seed: The random seed of the chunks' order, the codes, and which questions are asked about which chunks.
        contexts: How many of `COUNTS` are used, from the first on.
    """
    source = random.Random(seed)  # noqa: S311 - prompts, no secrets
    asked = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    paragraphs = [part.strip() + "\n\n" for part in re.split(r"\n\n+", HANDBOOK.read_text(encoding="utf-8"))]
    texts = _packed(paragraphs, encode(python, model, paragraphs))
    things = source.sample(asked["things"], len(texts))
    codes = [f"{source.randrange(10_000, 100_000)}" for _ in texts]
    texts = [
        f"{text}The code of the {thing} is {code}.\n\n" for text, thing, code in zip(texts, things, codes, strict=True)
    ]
    open_questions = iter(source.sample(asked["open"], OPEN * len(COUNTS)))
    drafts: list[tuple[str, tuple[int, ...], str, str]] = []
    for count in COUNTS[:contexts]:
        chunks = tuple(source.sample(range(len(texts)), count))
        drafts += [("open", chunks, next(open_questions), "") for _ in range(OPEN)]
        known = [one for one in asked["known"] if any(one["in"] in texts[chunk] for chunk in chunks)]
        drafts += [("known", chunks, one["question"], one["answer"]) for one in source.sample(known, OTHERS)]
        of_code = source.sample(chunks, OTHERS)
        drafts += [("code", chunks, f"What is the code of the {things[chunk]}?", codes[chunk]) for chunk in of_code]
    tails = [TAIL.format(question=question) for _, _, question, _ in drafts]
    head, *tokens = encode(python, model, [HEAD, *texts, *tails])
    questions = [
        Question(kind, chunks, tail, answer)
        for (kind, chunks, _, answer), tail in zip(drafts, tokens[len(texts) :], strict=True)
    ]
    return Judge(head, tokens[: len(texts)], questions)


def equal_start(answer: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the number of tokens until the first difference."""
    return next(
        (place for place, pair in enumerate(zip(answer, wanted, strict=False)) if len(set(pair)) > 1), len(wanted)
    )


def _packed(paragraphs: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[str]:
    """Join paragraphs to texts of about `CHUNK` tokens."""
    texts, size = [""], 0
    for paragraph, of in zip(paragraphs, tokens, strict=True):
        if size and size + len(of) > CHUNK:
            texts.append("")
            size = 0
        texts[-1] += paragraph
        size += len(of)
    return texts
