"""One side of the comparison of sparse methods: an engine with a method, or without one."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.sparse_model import engine, prompt
from tests.e2e.bench.ttft_engine import EngineFailedError, TimedEngine
from tests.e2e.bench.ttft_quiet import Others
from tests.e2e.engine import variables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.bench.ttft_quiet import Quiet

#: Steps that are timed together, and those before them that are not.
STEPS, WARM_UP = 24, 3


@dataclass(frozen=True)
class Choice:
    """What one side runs.

    Attributes:
        name: As the tables call it.
        method: The value of ``ucm_sparse_config``; None for an engine without a method.
        timed: Whether its attention and its method's calls are timed, which costs a few microseconds per layer.
        token: The token that it generates in every step; None for those of the model.
    """

    name: str
    method: Mapping[str, Any] | None
    timed: bool
    token: int | None = None


@dataclass(frozen=True)
class Sample:
    """Some decode steps of one side, right after each other; the medians of the steps.

    Attributes:
        side: The name of the side.
        round: Samples of one round were taken one right after the other.
        step: Seconds of a step.
        attention: Seconds of it in attention, all layers together; 0 where that is not timed.
        method: Seconds of it in the method's own calls, on either side; 0 likewise.
        others: The share of all processors that others used meanwhile, 0 to 1.
        disturbed: Whether that was enough to disturb.
        fetched: Of the blocks between sinks and window that it read, the share that it had to fetch, 0 to 1.
    """

    side: str
    round: int
    step: float
    attention: float
    method: float
    others: float
    disturbed: bool
    fetched: float = 0.0


class Side(TimedEngine):
    """An engine in a process of its own, with one request.

    Args:
        python: The interpreter of an environment with vLLM and the overlay.
        choice: What it runs.
        length: Tokens of the prompt.
        directory: For its files.
        quiet: What waits for a quiet machine.

    Raises:
        EngineFailedError: If it does not start, here and in every call.
    """

    def __init__(self, python: Path, choice: Choice, length: int, directory: Path, quiet: Quiet) -> None:
        self.choice = choice
        self.tokens: list[int] = []
        self._length, self._quiet = length, quiet
        arguments = engine(length)
        if choice.method is not None:
            arguments["additional_config"] = {"ucm_sparse_config": choice.method}
        processors = os.cpu_count() or 1
        environment = {
            **variables(directory),
            "OMP_NUM_THREADS": str(processors),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{processors - 1}",
            "PYTHONPATH": "",
        }
        settings = {"engine": arguments, "timed": choice.timed, "token": choice.token}
        super().__init__(python, settings, environment, directory, "sparse_decode.py")

    def prefill(self) -> dict[str, Any]:
        """Compute the prompt; what ``sparse_decode.py`` tells of it."""
        told: dict[str, Any] = self._call("prefill", [prompt(self._length)])
        return told

    def sample(self, number: int) -> Sample:
        """Some decode steps, from a quiet machine."""
        self._quiet.wait()
        others = Others([self.process.pid])
        told = self._call("decode", WARM_UP + STEPS)
        used, disturbed = others.used()
        self.tokens += told["tokens"]
        step, attention, method = (statistics.median(told[name][WARM_UP:]) for name in ("step", "attention", "method"))
        return Sample(self.choice.name, number, step, attention, method, used, disturbed, told["fetched"])

    def held(self, steps: int = 2) -> int:
        """The blocks that the request holds after some more steps."""
        return int(self._call("decode", steps)["held"])

    def finish(self) -> None:
        """End the request.

        Raises:
            EngineFailedError: If blocks are not free again.
        """
        if not self._call("finish"):
            raise EngineFailedError(f"{self.choice.name}: blocks are still held after the request has ended")

    def bandwidth(self) -> float:
        """Bytes per second at which the engine's threads read memory."""
        return float(self._call("bandwidth"))
