"""UCM's metrics in a real vLLM: through its own classes, and from a running engine."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import variables
from tests.e2e.inside.metrics_engine import PROMPT
from tests.e2e.tests_inside import check_inside

if TYPE_CHECKING:
    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
#: Seconds within which a count reaches ``/metrics`` on a busy machine, once its engine has run another step.
ARRIVAL = 60.0
INSIDE = Path("tests/e2e/inside")


@pytest.fixture(scope="module")
def environment(environments: Environments) -> Environment:
    return environments.runtime


def test_with_vllms_own_classes(environment: Environment) -> None:
    check_inside(environment.python, INSIDE / "metrics_checks.py")


@dataclass(frozen=True)
class Engine:
    """The result of the engine of `tests/e2e/inside/metrics_engine.py`."""

    tokens: list[list[int]]
    block: int
    log: str
    values: list[tuple[str, dict[str, str], float]]

    def __getitem__(self, name: str) -> float:
        return sum(value for found, _, value in self.values if found == f"ucm:{name}")

    def at(self, name: str, **labels: str) -> float:
        """Return the value at given labels."""
        return sum(value for found, at, value in self.values if found == f"ucm:{name}" and at == labels)


@pytest.fixture(scope="module")
def engine(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from tests.e2e.model import write_model  # noqa: PLC0415 - only engines need it

    model = write_model(tmp_path_factory.mktemp("model"))
    command = [environment.python, ROOT / INSIDE / "metrics_engine.py", model, tmp_path_factory.mktemp("store")]
    settings = variables(tmp_path_factory.mktemp("engine"), {"PYTHONPATH": ""})
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    result: dict[str, Any] = json.loads(re.findall(r"^RESULT (.*)$", log, re.MULTILINE)[0])
    return Engine(result["tokens"], result["block"], log, [(n, at, v) for n, at, v in result["values"]])


def test_what_was_looked_up_and_found(engine: Engine) -> None:
    whole = (len(PROMPT) - 1) // engine.block * engine.block
    assert engine["queried_tokens_total"] >= 3 * len(PROMPT)
    assert engine["matched_tokens_total"] >= 2 * whole
    assert engine.at("hit_tokens_total", tier="posix") >= whole
    assert engine.at("lookups_total", outcome="hit") >= 2
    assert engine.at("lookups_total", outcome="miss") >= 1
    assert engine["lookup_duration_seconds_count"] == engine["lookups_total"]


def test_what_was_moved(engine: Engine) -> None:
    blocks = (len(PROMPT) - 1) // engine.block
    loaded = engine.at("load_blocks_total", tier="posix")
    assert loaded >= blocks
    assert engine.at("hit_tokens_total", tier="posix") == loaded * engine.block
    assert engine["load_duration_seconds_count"] >= 1
    assert engine["save_blocks_total"] >= blocks
    assert engine["save_bytes_total"] > 0
    assert engine["load_bytes_total"] % loaded == 0  # all blocks have the same size
    assert engine.at("tier_capacity_bytes", tier="posix") == 1 << 30


def test_damaged_blocks_are_counted_and_their_tokens_computed(engine: Engine) -> None:
    blocks = (len(PROMPT) - 1) // engine.block
    assert len(engine.tokens) == 4
    assert all(tokens == engine.tokens[0] for tokens in engine.tokens)
    assert engine.at("failures_total", operation="load", cause="corrupt") >= blocks
    assert engine["failures_total"] == engine.at("failures_total", operation="load", cause="corrupt")


def test_the_log_says_it(engine: Engine) -> None:
    lines = re.findall(r"\[UCM\.Connector\] (.*)", engine.log)
    assert any(re.match(r"\d+ lookups?: \d+ hits?, \d+ miss(es)?; \d+ of \d+ tokens found", line) for line in lines)
    assert any("(from posix " in line for line in lines)
    assert any("failed: load corrupt " in line for line in lines)


@pytest.mark.newest_only
def test_two_engines_behind_two_servers(release: str, tmp_path: Path) -> None:
    """A step's counts go to one of the servers, and both answer for all; a save's come with its engine's next step."""
    from tests.e2e.demo import demo_environment, prepare  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.chat import Server, chat, serve_command  # noqa: PLC0415
    from tests.e2e.real.model import real_model  # noqa: PLC0415
    from tests.ports import free_port  # noqa: PLC0415

    port = free_port()
    command = serve_command(demo_environment(release), real_model(), prepare(tmp_path / "files"), port)
    command += " --data-parallel-size 2 --api-server-count 2"
    asked = chat("Is there a rule?", text="The station has three rules. " * 100, tokens=4)
    texts, looked_up, saved = set(), dict[str, float](), 0.0
    with Server(command, port, tmp_path / "log", variables(tmp_path)) as server:
        deadline = time.monotonic() + ARRIVAL
        while not (saved and looked_up["0"] and looked_up["1"]):
            assert time.monotonic() < deadline, (looked_up, saved)
            texts.add(server.ask(asked).text)
            found = exported(port)
            looked_up, saved = found["lookups_total"], sum(found["save_blocks_total"].values())
    assert len(texts) == 1


def exported(port: int) -> dict[str, dict[str, float]]:
    """Return each engine's sums of UCM's counters on ``/metrics``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^ucm:(\w+_total)\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        (engine,) = re.findall(r'engine="(\d+)"', labels)
        of_engine = found.setdefault(name, {})
        of_engine[engine] = of_engine.get(engine, 0.0) + float(value)
    return found
