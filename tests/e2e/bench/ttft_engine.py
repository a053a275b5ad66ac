"""An engine in a process of its own, asked for one first token after another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: Seconds after which an engine that does not answer counts as hung.
PATIENCE = 240.0


class EngineFailedError(Exception):
    """An engine ended or hung; the message has the end of its log."""


@dataclass(frozen=True)
class FirstToken:
    """The answer to one request.

    Attributes:
        tokens: The generated tokens; the first alone, unless more were wanted.
        cached: How many tokens of the prompt were not computed.
        seconds: From the request to the first token.
    """

    tokens: list[int]
    cached: int
    seconds: float


class ProcessGroup:
    """A process with all that it starts, ended together.

    Args:
        command: What to run.
        environment: Its whole environment.
        directory: Where it runs and where ``log.txt`` is written.
        talking: Whether its standard input and output are pipes.
    """

    def __init__(
        self, command: Sequence[object], environment: Mapping[str, str], directory: Path, *, talking: bool = False
    ) -> None:
        self.log = directory / "log.txt"
        pipe = subprocess.PIPE if talking else subprocess.DEVNULL
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=dict(environment),
                cwd=directory,
                stdin=pipe,
                stdout=pipe if talking else output,
                stderr=output,
                start_new_session=True,
            )

    def end(self, patience: float) -> None:
        """Wait for its own end, and end by force what is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def log_end(self, characters: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]


class TimedEngine(ProcessGroup):
    """A running ``tests/e2e/inside/ttft.py``, or another program that obeys in the same way.

    Args:
        python: The interpreter of an environment with vLLM.
        arguments: Those of ``LLM``, or what else the program reads.
        environment: Environment variables, all of them.
        directory: For its files.
        program: Its file.

    Raises:
        EngineFailedError: If it does not start, here and in every call.
    """

    def __init__(
        self,
        python: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        directory: Path,
        program: str = "ttft.py",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        settings = directory / "arguments.json"
        settings.write_text(json.dumps(arguments), encoding="utf-8")
        super().__init__([python, INSIDE / program, settings], environment, directory, talking=True)

    def started(self) -> float:
        """Wait for the start; the seconds that it took inside."""
        return float(self._answer())

    def ask(self, *prompts: list[int], answer: int = 1) -> list[FirstToken]:
        """The first tokens of some prompts, requested one right after the other, or answers of so many tokens."""
        if answer == 1:
            answers = self._call("generate", *prompts, patience=PATIENCE * len(prompts))
            return [FirstToken(**one) for one in answers]
        return [FirstToken(**one) for one in self.crowd(1, answer, prompts, PATIENCE * len(prompts))["answers"]]

    def crowd(self, clients: int, answer: int, prompts: Sequence[list[int]], patience: float) -> dict[str, Any]:
        """What clients get who send prompts at the same time; see `inside/ttft.py`.

        Args:
            clients: How many.
            answer: Tokens of each answer.
            prompts: The prompts, in order.
            patience: Seconds after which the engine counts as hung.
        """
        found: dict[str, Any] = self._call("crowd", clients, answer, list(prompts), patience=patience)
        return found

    def reset(self) -> None:
        """Empty the engine's own prefix cache."""
        if not self._call("reset"):
            raise EngineFailedError("the engine's prefix cache cannot be emptied: blocks are still held")

    def stop(self, patience: float = 30.0) -> None:
        """End the engine as an operator would, by closing its input."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.end(patience)

    def _call(self, *command: Any, patience: float = PATIENCE) -> Any:
        if self.process.stdin is None:
            raise EngineFailedError("the engine was started without pipes")
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(self.log_end()) from None
        return self._answer(patience)

    def _answer(self, patience: float = PATIENCE) -> Any:
        stdout = self.process.stdout
        if stdout is None or not select.select([stdout], [], [], patience)[0]:
            raise EngineFailedError(f"no answer for {patience} s\n{self.log_end()}")
        line = stdout.readline()
        if not line:
            raise EngineFailedError(self.log_end())
        return json.loads(line)["answer"]
