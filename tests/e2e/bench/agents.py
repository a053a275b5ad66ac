"""Agents on a real engine whose store holds a quarter of what they need: `python -m tests.e2e.bench.agents`.

An engine of a trained model in float32 gets the requests of `tests.lease_trace`, made shorter, in their order and at
their moments; time passes `SPEED` times faster, also for leases and for spans of use. An engine that is late gets the
next request at once. Its own prefix cache is emptied before each request, so that a request finds what the store has.
It computes in one thread, which other programs disturb less than several that wait for each other.

- *LRU*: no hints.
- *5 min*: a request that will wait for a tool carries ``ucm_retain_seconds``, for five minutes.
- *told*: for 30 minutes, or for ten if it will wait for a person; through `ucm store serve`, system prompts are pinned,
  and what only an ended session had is dropped.

Beside each stands what the simulated store, with the same capacity, computes again, and Belady's order, which no engine
can follow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.real import TOKEN_BYTES
from tests.e2e.engine import variables
from tests.e2e.environment import with_runtime
from tests.e2e.prefix_engine import PrefixEngine, connector, posix
from tests.e2e.processes import IN_PROCESS
from tests.e2e.real.model import real_model
from tests.lease_trace import PERSON, RETAINS, TOLD, TOOL, Scale, busiest, computed_again, had, trace
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.lease_trace import Turn

RELEASE = "0.32.0"
ORDERS = ("LRU", "5 min", TOLD)
SCALE = Scale(block=32, system=128, last=640, turns=6, spreads=(0.4, 0.6), others=(64, 480), every=15.0)
#: Each seed is another trace, which all orders replay in turn.
SESSIONS, SEEDS = 20, (21, 22)
SHARE = 1 / 4
#: How much faster time passes than in the trace.
SPEED = 16.0
#: A block's file has a header of this size before its keys and values.
HEADER = 4096
#: For how many seconds a system prompt is pinned, which no row takes.
LONG = 3600.0
VOCABULARY = 49_152


@dataclass
class Served:
    """What an engine did.

    Attributes:
        again: Tokens that it computed although an earlier request had them.
        computed: All tokens that it computed.
        first: Seconds to the first tokens of requests whose session had waited, by what for.
        answers: The first tokens.
        calls: Seconds of each call of ``ucm store serve``.
        refused: How many pins were refused, because more than half of the capacity would be pinned.
        late: How many seconds the latest request was sent too late.
        seconds: From the first request to the last answer.
    """

    again: int = 0
    computed: int = 0
    first: dict[str, list[float]] = field(default_factory=lambda: {TOOL: [], PERSON: []})
    answers: list[list[int]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    refused: int = 0
    late: float = 0.0
    seconds: float = 0.0


def tokens(chain: int, count: int) -> list[int]:
    """Return the first tokens of a chain."""
    chance = random.Random(f"agents {chain}")  # noqa: S311 - prompts, no secrets
    return [chance.randrange(100, VOCABULARY) for _ in range(count)]


def prompt(turn: Turn, scale: Scale = SCALE) -> list[int]:
    """Return the tokens of a request, and one more: an engine always computes the last one."""
    system = tokens(turn.system, scale.system) if turn.agent else []
    return [*system, *tokens(turn.chain, turn.blocks * scale.block), 0]


class Replay:
    """Sends the requests of a trace to an engine.

    Args:
        engine: The engine.
        order: One of `ORDERS`.
        post: Sends a prompt to an action of ``ucm store serve``.
    """

    def __init__(self, engine: PrefixEngine, order: str, post: Callable[..., httpx2.Response]) -> None:
        self._engine, self._order, self._post = engine, order, post
        self._waited: dict[int, str] = {}
        self.served = Served()

    def run(self, turns: Sequence[Turn]) -> None:
        """Send all requests."""
        served, begin = self.served, time.perf_counter()
        pinned = set[int]()
        for turn, known in had(turns, SCALE):
            late = time.perf_counter() - begin - turn.moment / SPEED
            time.sleep(max(0.0, -late))
            served.late = max(served.late, late)
            self._ask(turn, known * SCALE.block)
            if self._order != TOLD or not turn.agent:
                continue
            if turn.system not in pinned:
                self._tell("pin", tokens(turn.system, SCALE.system), seconds=LONG)
                pinned.add(turn.system)
            if not turn.waits:
                self._tell("drop", prompt(turn), from_token=SCALE.system)
        served.seconds = time.perf_counter() - begin

    def _ask(self, turn: Turn, known: int) -> None:
        engine, served = self._engine, self.served
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
        retained = RETAINS.get(self._order, {}).get(turn.waits, 0.0) if turn.agent else 0.0
        if retained:
            params["extra_args"] = {"kv_transfer_params": {"ucm_retain_seconds": retained / SPEED}}
        asked = prompt(turn)
        if not engine.reset():
            raise RuntimeError("the engine's prefix cache cannot be emptied: blocks are still held")
        (answer,) = engine.generate([{"prompt": asked, "params": params}])
        # Of an engine that serves nobody else, the last blocks become visible with its next step.
        engine.settle()
        cached, first = answer.cached or 0, answer.first_s or 0.0
        served.answers.append(answer.tokens)
        served.computed += len(asked) - cached
        if turn.agent:
            served.again += max(0, known - cached)
            if turn.known:
                served.first[self._waited[turn.chain]].append(first)
            self._waited[turn.chain] = turn.waits

    def _tell(self, action: str, about: list[int], **more: float) -> None:
        begin = time.perf_counter()
        answer = self._post(action, tokens=about, **more)
        self.served.calls.append(time.perf_counter() - begin)
        if action == "pin" and answer.status_code == httpx2.codes.BAD_REQUEST:
            self.served.refused += 1
        else:
            answer.raise_for_status()


def replay(environment: Environment, model: Path, order: str, turns: Sequence[Turn], directory: Path) -> Served:
    """Return what a new engine does with a new store."""
    shutil.rmtree(directory, ignore_errors=True)
    longest = max(len(prompt(turn)) for turn in turns)
    length = (-(-longest // SCALE.block) + 1) * SCALE.block
    shape = {"model": str(model), "dtype": "float32", "block_size": SCALE.block, "max_model_len": length}
    blocks = 2 * length // SCALE.block
    rest = {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": blocks * SCALE.block * TOKEN_BYTES}
    capacity = int(SHARE * busiest(turns, SCALE)) * (SCALE.block * TOKEN_BYTES + HEADER)
    store = {**posix(directory / "store"), "posix_capacity": capacity, "touch_seconds": 60.0 / SPEED}
    settings = connector(store, staging=2 * length * TOKEN_BYTES)
    arguments = {**shape, **rest, "max_num_batched_tokens": length, **settings}
    with (
        PrefixEngine(environment, directory / "engine", arguments, IN_PROCESS, forked=False) as engine,
        _steering(environment, directory, store, shape) as post,
    ):
        engine.generate([{"prompt": tokens(0, 2 * SCALE.block), "params": {"max_tokens": 1}}])  # takes longer
        one = Replay(engine, order, post)
        one.run(turns)
        print(json.dumps({name: value for name, value in engine.counters().items() if value and name[:4] == "ucm:"}))
    return one.served


@contextmanager
def _steering(
    environment: Environment, directory: Path, store: dict[str, Any], shape: dict[str, Any]
) -> Iterator[Callable[..., httpx2.Response]]:
    """Run ``ucm store serve`` beside the engine, and yield what calls it."""
    config, path = directory / "ucm.yaml", directory / "store.sock"
    config.write_text(json.dumps({"store": store}), encoding="utf-8")
    command = ["store", "serve", "--config", config, "--model", shape["model"], "--listen", f"unix:{path}"]
    arguments = {name: value for name, value in shape.items() if name != "model"}
    server = subprocess.Popen(
        [environment.python, "-m", "ucm", *command, "--engine-args", json.dumps({**arguments, "seed": 0})],
        env=variables(directory, {"PYTHONPATH": ""}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if server.stdout is None or not server.stdout.readline():
            raise RuntimeError("ucm store serve has ended")
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=60.0) as client:
            yield lambda action, **body: client.post(f"http://ucm/v1/{action}", json=body)
    finally:
        server.terminate()
        server.communicate()


def figures(release: str, orders: Sequence[str] = ORDERS, seeds: Sequence[int] = SEEDS) -> Iterator[Figure]:
    """Replay traces, each once for every order, print their tables, and compare ours with no hints."""
    environment = with_runtime(release, BUILD / "bench" / f"vllm-{release}-agents")
    for seed in seeds:
        turns, found = trace(SESSIONS, seed=seed, scale=SCALE), dict[str, Served]()
        for order in orders:
            name = f"agents-{order.replace(' ', '-')}-{seed}"
            found[order] = replay(environment, real_model(), order, turns, BUILD / "bench" / name)
            kept = BUILD / "bench" / f"{name}.json"
            kept.write_text(json.dumps(asdict(found[order]), indent=1), encoding="utf-8")
            print(f"{name}: {found[order].seconds:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        print(f"seed {seed}")
        show(turns, found)
        without = found.get(ORDERS[0])
        for order, of in found.items():
            if without is not None and of is not without:
                ratio = of.again / without.again
                yield Figure(f"agents: tokens computed again, {order} to LRU, seed {seed}", ratio, "", None)


def show(turns: Sequence[Turn], found: dict[str, Served]) -> None:
    """Print a row for each order."""
    most = busiest(turns, SCALE)
    agents = sum(turn.agent for turn in turns)
    console = Console(width=150)
    console.print(
        f"{agents} requests of agents, {len(turns) - agents} others; the store has {int(SHARE * most)} blocks"
    )
    table = Table(
        "order", "computed again", "simulated", "computed", *(f"first token after a {name}" for name in (TOOL, PERSON)),
        "calls", "latest", "in all", "other answers",
    )  # fmt: skip
    answers = next(iter(found.values())).answers
    for order, of in found.items():
        simulated = computed_again(turns, int(SHARE * most), order, SCALE)
        calls = f"{len(of.calls)}: {1e3 * statistics.median(of.calls):.0f} ms" if of.calls else ""
        calls += f", {of.refused} refused" if of.refused else ""
        other = sum(one != another for one, another in zip(of.answers, answers, strict=True))
        table.add_row(
            order, f"{of.again:,}", f"{simulated:,}", f"{of.computed:,}", *map(_percentiles, of.first.values()),
            calls, f"{of.late:.0f} s", f"{of.seconds:.0f} s", str(other),
        )  # fmt: skip
    table.add_row("Belady", "", f"{computed_again(turns, int(SHARE * most), 'Belady', SCALE):,}")
    console.print(table)


def _percentiles(seconds: list[float]) -> str:
    p50, p99 = (statistics.quantiles(seconds, n=100, method="inclusive")[at] for at in (49, 98))
    return f"{p50:.2f}, {p99:.2f} s of {len(seconds)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay some rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.agents", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for figure in figures(options.release, options.orders, options.seeds):
        print(f"{figure.name}: {figure.value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
