"""Run the questions on real engines, and count the right answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import variables
from tests.e2e.needle.model import MAX_LENGTH, write_model
from tests.e2e.needle.settings import BLOCK, DENSE, Setting
from tests.e2e.needle.task import VALUE, Question, accuracy, questions
from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.environment import Environment

#: Requests at a time, and room for all of them.
REQUESTS = 8
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": REQUESTS * MAX_LENGTH // BLOCK,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": MAX_LENGTH,
    # Less than a prompt: other requests decode in the steps of its chunks.
    "max_num_batched_tokens": 1_024,
    "max_num_seqs": REQUESTS,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}
#: Seconds for an engine to start, and for one question.
START_PATIENCE, QUESTION_PATIENCE = 120.0, 5.0


@dataclass(frozen=True)
class Result:
    """What came of one setting.

    Attributes:
        setting: What was asked.
        questions: The questions.
        answers: The tokens of each answer; empty if the engine failed.
        error: Why it did.
        seconds: What answering took.
    """

    setting: Setting
    questions: Sequence[Question]
    answers: Sequence[Sequence[int]]
    error: str = ""
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0 to 1; NaN if the engine failed."""
        return self.accuracy_of(0, self.setting.length)

    def accuracy_of(self, nearest: int, farthest: int) -> float:
        """The share of right answers among the questions whose record is so many tokens back, the ends included."""
        if self.error:
            return float("nan")
        both = zip(self.questions, self.answers, strict=True)
        chosen = [(question, given) for question, given in both if nearest <= question.behind <= farthest]
        return accuracy([question for question, _ in chosen], [given for _, given in chosen])


def ask(
    environment: Environment,
    settings: Sequence[Setting],
    *,
    count: int,
    of_full: int | None = None,
    dtype: str = "float32",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Result]:
    """The results of some settings, one engine each; a failure of one is a result.

    Args:
        environment: A vLLM with the overlay.
        settings: What to ask.
        count: Questions for each.
        of_full: So many of them, at all depths, for a method with a full budget; default: all.
        dtype: Of the model and its KV cache.
        options: By method, what replaces the options of `tests.e2e.needle.settings`.
    """
    model = write_model(environment.python)
    asked = {length: questions(length, count) for length in sorted({setting.length for setting in settings})}
    full = slice(None, None, count // (of_full or count))
    chosen = [asked[of.length][full] if of.budget == 1 and of.method != DENSE else asked[of.length] for of in settings]
    runs = [
        {
            "method": setting.config(options or {}),
            "prompts": [question.prompt for question in given],
            "tokens": VALUE,
        }
        for setting, given in zip(settings, chosen, strict=True)
    ]
    spec = {"engine": {"model": str(model), "dtype": dtype, **ENGINE}, "runs": runs}
    patience = len(runs) * (START_PATIENCE + count * QUESTION_PATIENCE)
    told, log = _run(environment.python, spec, patience)
    missing = {"error": f"the process ended before\n{log[-3000:]}"}
    told += [missing] * (len(settings) - len(told))
    return [
        Result(setting, given, one.get("tokens", []), one.get("error", ""), one.get("seconds", 0.0))
        for setting, given, one in zip(settings, chosen, told, strict=True)
    ]


def settings_for(methods: Sequence[str], lengths: Sequence[int], budgets: Sequence[float]) -> list[Setting]:
    """Dense at each length, and each method at each length and budget."""
    dense = [Setting(DENSE, length, 1.0) for length in lengths]
    return dense + [Setting(method, length, b) for method in methods for length in lengths for b in budgets]


def _run(python: Path, spec: Mapping[str, Any], patience: float) -> tuple[list[dict[str, Any]], str]:
    """What each run told, and the log; a process that hangs is ended."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        specification, results, log = directory / "spec.json", directory / "results.jsonl", directory / "log.txt"
        specification.write_text(json.dumps(spec), encoding="utf-8")
        results.touch()
        switches = {"PYTHONPATH": ""}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, INSIDE / "needle_engines.py", specification, results],
                env=variables(directory, switches),
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        lines = results.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines], log.read_text(encoding="utf-8", errors="replace")
