"""Run questions on a real engine with several blend settings, and count the right answers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.blend.model import MAX_LENGTH, write_model
from tests.e2e.blend.task import KINDS, questions
from tests.e2e.engine import variables
from tests.e2e.prefix_engine import posix
from tests.e2e.processes import IN_PROCESS, INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.blend.task import Question
    from tests.e2e.environment import Environment

BLOCK = 32
FULL, NAIVE = "full", "naive reuse"
#: The settings; None computes everything and comes last, because then the store has every prompt as a whole.
WAYS: dict[str, dict[str, Any] | None] = {
    NAIVE: {"select": "none"},
    **{f"edges {tokens}": {"select": "edges", "edge_tokens": tokens} for tokens in (8, 16, 32)},
    **{
        f"question {share:.0%}": {"select": "question", "edge_tokens": 8, "ratio": share} for share in (0.05, 0.15, 0.3)
    },
    "all recomputed": {"select": "edges", "edge_tokens": MAX_LENGTH},
    FULL: None,
}
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 4 * MAX_LENGTH // BLOCK,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": MAX_LENGTH,
    "max_num_batched_tokens": 1_024,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "seed": 0,
}
MODULE = "ucm.integration.vllm.blend_connector"
PATIENCE = 900.0


@dataclass(frozen=True)
class Result:
    """The result of one setting.

    Attributes:
        questions: The questions.
        answers: The first token of each answer.
        cached: The prompt tokens of each that vLLM did not compute.
        reused: Tokens taken from chunks.
        computed: Tokens of the blended stretches that were computed.
        gate_failures: Chunks that failed the check.
    """

    questions: Sequence[Question]
    answers: Sequence[int]
    cached: Sequence[int]
    reused: int
    computed: int
    gate_failures: int

    @property
    def accuracy(self) -> dict[str, float]:
        """Return the share of right answers for each kind of question, 0 to 1."""
        both = list(zip(self.questions, self.answers, strict=True))
        found = {}
        for kind in KINDS:
            right = [answer == question.answer for question, answer in both if question.kind == kind]
            found[kind] = sum(right) / len(right)
        return found

    @property
    def share(self) -> float:
        """The computed share of the blended stretches, 0 to 1."""
        return self.computed / max(1, self.computed + self.reused)


def connector(directory: Path, **blend: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for BlendConnector with a store in a directory."""
    # On a busy machine, a chunk that is not staged in time would be computed, and the answer say nothing.
    extra = {"store": posix(directory), "blend": blend, "staging_deadline": PATIENCE}
    transfer = {"kv_connector": "BlendConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
    return {"kv_transfer_config": {**transfer, "kv_connector_extra_config": extra}}


def ask(
    environment: Environment, chunks: int, count: int, ways: Mapping[str, dict[str, Any] | None]
) -> dict[str, Result]:
    """Run some settings on one engine; return their results.

    Args:
        environment: An environment with vLLM and the runtime.
        chunks: The number of chunks in each prompt.
        count: The number of questions.
        ways: See `WAYS`.

    Raises:
        RuntimeError: If the engine failed; with the end of its log.
    """
    asked = questions(chunks, count)
    model = write_model(environment.python)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = {
            # The scheduler sends questions, which only some ways use.
            "engine": {
                "model": str(model),
                **ENGINE,
                **connector(directory / "store", min_tokens=64, select="question"),
            },
            "chunks": [chunk for question in asked for chunk in question.chunks],
            "prompts": [{"prompt": question.prompt, "marks": question.marks} for question in asked],
            "ways": list(ways.values()),
        }
        specification, results, log = directory / "spec.json", directory / "results.json", directory / "log.txt"
        specification.write_text(json.dumps(spec), encoding="utf-8")
        with log.open("wb") as output:
            subprocess.run(
                [environment.python, INSIDE / "blend_engine.py", specification, results],
                env=variables(directory, {"PYTHONPATH": "", **IN_PROCESS}),
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            )
        told = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        if len(told) < len(ways):
            raise RuntimeError(f"the engine ended early\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
    return {way: Result(asked, **one) for way, one in zip(ways, told, strict=True)}
