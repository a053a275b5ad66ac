"""Judge the settings of blending with a real model in one engine: answers beside the full computation's."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.blend.asking import connector
from tests.e2e.prefix_engine import PrefixEngine
from tests.e2e.prefix_workload import request
from tests.e2e.processes import IN_PROCESS, INSIDE
from tests.e2e.real.judge import ANSWER, COUNTS, SHORT, START, equal_start, judge
from tests.e2e.real.text import with_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment
    from tests.e2e.real.judge import Judge, Question

BLOCK, LONGEST = 32, 3072
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 2 * LONGEST // BLOCK,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": LONGEST,
    "max_num_seqs": 1,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
}
#: The settings that are judged. The last is the ideal.
WAYS: dict[str, dict[str, Any]] = {
    "none": {"select": "none"},
    "edges 16": {"select": "edges", "edge_tokens": 16},
    "edges 64": {"select": "edges", "edge_tokens": 64},
    "question 10%": {"select": "question", "edge_tokens": 16, "ratio": 0.1},
    "question 20%": {"select": "question", "edge_tokens": 16, "ratio": 0.2},
    "all": {"select": "edges", "edge_tokens": LONGEST},
}
#: What the comparison without an engine adds: trivial and ideal selections, and chunks stored after the preamble.
CURVE = (
    *(f"{how}/{way}" for how in ("alone", "preamble") for way in ("none", "edges 16", "question 20%")),
    *(f"alone/{way}" for way in ("first chunk", "edges 64", "ideal deviation 15%", "whole chunks 1", "all")),
    *(f"alone/random {share}%" for share in (15, 30)),
    *(f"alone/deviation {share}%" for share in (15, 30)),
    *(f"alone/question {share}%" for share in (5, 10, 30)),
)
REUSED, COMPUTED = "ucm:blend_reused_tokens_total", "ucm:blend_computed_tokens_total"
#: The time limit for saved chunks to become visible, in seconds.
SAVED = 120.0


@dataclass(frozen=True)
class Verdict:
    """What a setting loses.

    Attributes:
        equal: Open answers that are the full computation's.
        same: Tokens of open answers until the first difference, on average.
        start: Open answers whose first `START` tokens are the full computation's.
        known: Known answers that are right.
        codes: Codes that are right.
        share: The computed share of the blended stretches, 0 to 1.
    """

    equal: int
    same: float
    start: int
    known: int
    codes: int
    share: float

    @property
    def row(self) -> list[str]:
        """Return its figures as a table's cells."""
        counts = self.equal, f"{self.same:.1f}", self.start, self.known, self.codes
        return [f"{self.share:.1%}", *map(str, counts)]


def judged(
    environment: Environment,
    model: Path,
    ways: Mapping[str, dict[str, Any]],
    seed: int = 0,
    contexts: int = len(COUNTS),
) -> dict[str, Verdict]:
    """Judge some settings, and vLLM itself under ``plain``.

    Args:
        environment: An environment with vLLM and the runtime.
        model: The model's directory.
        ways: The settings.
        seed: The seed of the questions.
        contexts: How many of the orders of chunks are asked about, with twelve questions each.
    """
    asked = judge(environment.python, model, seed, contexts)
    answers: dict[str, list[list[int]]] = {}
    shares = {"plain": 1.0}
    with tempfile.TemporaryDirectory() as name:
        store = connector(Path(name, "store"), min_tokens=2 * BLOCK, select="question")
        arguments = {"model": str(model), **ENGINE, **store}
        with PrefixEngine(environment, Path(name, "engine"), arguments, IN_PROCESS) as engine:
            _store(engine, asked)
            # Nobody else finds what is computed with this salt.
            answers["plain"] = [_answer(engine, asked, one, salt="plain") for one in asked.questions]
            for way, settings in ways.items():
                engine.blend(settings)
                before = engine.counters()
                answers[way] = [_answer(engine, asked, one) for one in asked.questions]
                after = engine.counters()
                reused, computed = (after[of] - before[of] for of in (REUSED, COMPUTED))
                shares[way] = computed / (reused + computed)
    return {way: _verdict(environment, model, asked, of, answers["plain"], shares[way]) for way, of in answers.items()}


def _answer(engine: PrefixEngine, asked: Judge, question: Question, **more: Any) -> list[int]:
    marks = {"ucm_chunks": asked.marks(question)}
    number = ANSWER if question.kind == "open" else SHORT
    engine.reset()
    (answer,) = engine.generate([{**_request(asked.prompt(question), number, marks), **more}])
    return answer.tokens


def _request(tokens: list[int], number: int, marks: Mapping[str, Any]) -> dict[str, Any]:
    return request(tokens, number, extra_args={"kv_transfer_params": marks})


def _store(engine: PrefixEngine, asked: Judge) -> None:
    """Store all chunks, until a prompt with all of them reuses them; see `tests.e2e.bench.blend`."""
    engine.blend({"select": "none"})
    until = time.monotonic() + SAVED
    while time.monotonic() < until:
        for chunk in asked.chunks:
            engine.generate([_request(chunk, 1, {"ucm_chunks": [[0, len(chunk)]]})])
        found, wanted = engine.counters()[REUSED], 0
        for question in {one.chunks: one for one in asked.questions}.values():
            engine.reset()
            engine.generate([_request(asked.prompt(question), 1, {"ucm_chunks": asked.marks(question)})])
            wanted += sum(len(asked.chunks[chunk]) for chunk in question.chunks)
        if engine.counters()[REUSED] - found > 0.95 * wanted:
            return
    raise AssertionError(f"not all chunks are found\n{engine.log[-4000:]}")


def _verdict(
    environment: Environment,
    model: Path,
    asked: Judge,
    answers: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    share: float,
) -> Verdict:
    texts = with_tokenizer(environment.python, model, tokens=answers)["tokens"]
    by_kind: dict[str, list[int]] = {"open": [], "known": [], "code": []}
    for question, answer, wanted, text in zip(asked.questions, answers, plain, texts, strict=True):
        of_open = question.kind == "open"
        by_kind[question.kind].append(equal_start(answer, wanted) if of_open else question.answer in text)
    same = by_kind["open"]
    return Verdict(
        sum(count == ANSWER for count in same),
        sum(same) / len(same),
        sum(count >= START for count in same),
        sum(by_kind["known"]),
        sum(by_kind["code"]),
        share,
    )


def curve(environment: Environment, model: Path, ways: Sequence[str], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return the computed share and the loss of selections by name, without an engine; see `inside/blend_curve.py`.

    Returns:
        For each way, as a mean over the open questions: ``share``, ``same`` (tokens) and ``loss`` (nats); and ``start``
        and ``equal``, the numbers of answers whose first `START` tokens, or all, are exact.
    """
    asked = judge(environment.python, model, seed)
    of_open = [{"chunks": one.chunks, "tail": one.tail} for one in asked.questions if one.kind == "open"]
    spec = {"model": str(model), "head": asked.head, "chunks": asked.chunks, "questions": of_open}
    with tempfile.TemporaryDirectory() as name:
        specification, results = Path(name, "spec.json"), Path(name, "results.json")
        specification.write_text(json.dumps({**spec, "tokens": ANSWER, "ways": ways}), encoding="utf-8")
        subprocess.run([environment.python, INSIDE / "blend_curve.py", specification, results], check=True)
        told = json.loads(results.read_text(encoding="utf-8"))
    found = {}
    for way, rows in told.items():
        means = {of: sum(row[of] for row in rows) / len(rows) for of in ("share", "same", "loss")}
        counts = {of: sum(row["same"] >= least for row in rows) for of, least in (("start", START), ("equal", ANSWER))}
        found[way] = {**means, **counts}
    return found
