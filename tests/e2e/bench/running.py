"""The costs at run time: the scheduler alone, and decoding in a whole engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure, alternate, median_ratio
from tests.e2e.engine import MODEL, Run, run_engine, variables
from tests.e2e.model import VOCABULARY, write_model
from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.environment import Environment

SCHEDULER_PROCESSES = 5
REQUESTS, STEPS = 256, 600
ENGINE_PAIRS = 2
DECODE_REPEATS, DECODE_REQUESTS, DECODE_TOKENS = 6, 16, 400
ROOMY = {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


def scheduler(overlay: Environment) -> Iterator[Figure]:
    """`Scheduler.schedule()` with many running requests: calls that alternate, in several fresh processes."""
    write_model(MODEL)
    medians = [_schedule_medians(overlay) for _ in range(SCHEDULER_PROCESSES)]
    detail = {"requests": REQUESTS, "steps": STEPS, "medians_us": medians}
    ratio = statistics.median(sides["with"] / sides["without"] for sides in medians)
    yield Figure("Scheduler.schedule(), ratio", ratio, "", 1.01, detail)


def _schedule_medians(environment: Environment) -> dict[str, float]:
    """The median call of each side in one process, in microseconds."""
    with tempfile.TemporaryDirectory() as directory:
        command = [environment.python, INSIDE / "schedule.py", MODEL, REQUESTS, STEPS]
        done = subprocess.run(
            [str(word) for word in command],
            env={**variables(Path(directory)), "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
    return {name: 1e6 * statistics.median(many) for name, many in json.loads(done.stdout.splitlines()[-1]).items()}


def decoding(plain: Environment, overlay: Environment) -> Iterator[Figure | Run]:
    """Measure the decode throughput of whole engines; also yield the last engine with the overlay, for its modules."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    last: list[Run] = []

    def side(name: str, environment: Environment) -> float:
        with tempfile.TemporaryDirectory() as directory:
            run = run_engine(environment, Path(directory), engine=ROOMY, batches=_batches(), forked=False)
        if run.code:
            raise RuntimeError(run.log[-2000:])
        seconds[name] += [phase["seconds"] for phase in list(run.phases.values())[1:]]
        last[:] = [run] if name == "with" else last
        return run.seconds

    alternate([lambda: side("without", plain), lambda: side("with", overlay)], ENGINE_PAIRS)
    tokens = DECODE_REQUESTS * DECODE_TOKENS
    detail = {name: {"tokens_per_s": [tokens / one for one in many]} for name, many in seconds.items()}
    yield Figure(
        "decoding in an engine, time ratio", median_ratio(seconds["without"], seconds["with"]), "", None, detail
    )
    yield from last


def _batches() -> dict[str, list[list[dict[str, Any]]]]:
    params = {"max_tokens": DECODE_TOKENS, "ignore_eos": True, "temperature": 0.0}
    requests = [{"prompt": [3 + n, VOCABULARY - 1 - n, 9], "params": params} for n in range(DECODE_REQUESTS)]
    return {f"decode {number}": [requests] for number in range(DECODE_REPEATS + 1)}
