"""UCM's and vLLM's own connector in a MultiConnector: the tokens equal those of an engine without connectors.

Each connector loads what the other one has lost, and UCM does not save what the other one has loaded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK, TOKENS_PER_STEP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import PrefixEngine
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

OURS, EXAMPLE = "UCMConnector", "ExampleConnector"
#: The groups of prompts, by the connectors that still have them when they are repeated.
GROUPS = ("both", OURS, EXAMPLE, "neither")
#: Prompts of one step, because vLLM's example saves wrong blocks of longer ones; one ends with a full block.
LENGTHS = (2 * BLOCK + 5, 3 * BLOCK, TOKENS_PER_STEP - 1)
#: Less than a block together with a prompt's last partial block, so that only prompts have full blocks.
ANSWER = 12


def requests(group: str) -> list[Request]:
    return [request(prompt(length, group), ANSWER) for length in LENGTHS]


def connectors(first: str, ours: Path, example: Path) -> dict[str, Any]:
    """Return arguments of ``LLM`` for both connectors; the first that finds a prompt loads it."""
    from tests.e2e.prefix_engine import MODULE, posix  # noqa: PLC0415 - needs the build's packages

    settings = {"store": posix(ours), "save_decode_blocks": False}
    found: dict[str, dict[str, Any]] = {
        OURS: {"kv_connector_module_path": MODULE, "kv_connector_extra_config": settings},
        EXAMPLE: {"kv_connector_extra_config": {"shared_storage_path": str(example)}},
    }
    both = [{"kv_connector": name, "kv_role": "kv_both", **found[name]} for name in sorted(found, key=first.__ne__)]
    extra = {"connectors": both}
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


@dataclass
class Played:
    """The tokens and cached tokens of a group's requests, and how many of the latter the example loaded."""

    tokens: list[list[int]]
    cached: list[int | None]
    by_example: int


@dataclass
class Runs:
    """Three engines: one without connectors, one with empty stores, and one with the stores that it left.

    Attributes:
        reference: The tokens of the first, by group.
        cold: The results of the second with empty stores, by group.
        lost: Its results after parts of both stores were deleted, with an empty prefix cache.
        warm: The results of a new engine, with the connectors in the reverse order.
        saved: The names of UCM's blocks before and after the last.
    """

    reference: dict[str, list[list[int]]]
    cold: dict[str, Played] = field(default_factory=dict)
    lost: dict[str, Played] = field(default_factory=dict)
    warm: dict[str, Played] = field(default_factory=dict)
    saved: list[set[str]] = field(default_factory=list)


def play(engine: PrefixEngine, group: str) -> Played:
    """Run one request after the other."""
    loads = engine.log.count("Inject KV cache of")
    answers = [engine.generate([one])[0] for one in requests(group)]
    loaded = engine.log.count("Inject KV cache of") - loads
    return Played([answer.tokens for answer in answers], [answer.cached for answer in answers], loaded)


def start(environment: Environment, directory: Path, arguments: dict[str, Any] | None = None) -> PrefixEngine:
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    return PrefixEngine(environment, directory, arguments, IN_PROCESS)


@pytest.fixture(scope="module")
def runs(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from tests.e2e.prefix_runs import block_files, wait_for_blocks  # noqa: PLC0415 - needs the build's packages

    base = tmp_path_factory.mktemp("multi")
    ours, example = base / "ours", base / "example"
    example.mkdir()
    with start(environments.plain, base / "reference") as engine:
        made = Runs({group: play(engine, group).tokens for group in GROUPS})
    per_group = sum(length // BLOCK for length in LENGTHS)
    of: dict[str, tuple[set[Path], set[Path]]] = {}
    with start(environments.runtime, base / "cold", connectors(OURS, ours, example)) as engine:
        for number, group in enumerate(GROUPS, 1):
            before = set(block_files(ours).values()), set(example.iterdir())
            made.cold[group] = play(engine, group)
            prompts = set(example.iterdir()) - before[1]
            engine.generate([request([5, 6, 7], 1)])  # the last blocks become visible with the next step
            wait_for_blocks(ours, number * per_group)
            of[group] = set(block_files(ours).values()) - before[0], prompts
        for group in GROUPS:
            blocks, prompts = of[group]
            assert (len(blocks), len(prompts)) == (per_group, len(LENGTHS))
            for path in blocks if group in {EXAMPLE, "neither"} else ():
                path.unlink()
            for path in prompts if group in {OURS, "neither"} else ():
                shutil.rmtree(path)
        assert engine.reset()
        made.lost = {group: play(engine, group) for group in GROUPS[:3]}
    for path in of[OURS][1]:  # the example has saved again what it did not load itself
        shutil.rmtree(path)
    made.saved.append(set(block_files(ours)))
    with start(environments.runtime, base / "warm", connectors(EXAMPLE, ours, example)) as engine:
        made.warm = {group: play(engine, group) for group in GROUPS}
        engine.generate([request([5, 6, 7], 1)])
        wait_for_blocks(ours, 3 * per_group)
    made.saved.append(set(block_files(ours)))
    return made


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("engine", ["cold", "warm"])
def test_tokens_are_those_without_connectors(runs: Runs, engine: str, group: str) -> None:
    played: dict[str, Played] = getattr(runs, engine)
    assert played[group].tokens == runs.reference[group]


@pytest.mark.parametrize("group", GROUPS[:3])
def test_tokens_after_a_loss_are_those_without_connectors(runs: Runs, group: str) -> None:
    assert runs.lost[group].tokens == runs.reference[group]


WHOLE = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def test_a_cold_engine_loads_nothing(runs: Runs) -> None:
    assert [played.by_example for played in runs.cold.values()] == [0] * len(GROUPS)
    assert {tuple(played.cached) for played in runs.cold.values()} == {(0,) * len(LENGTHS)}


@pytest.mark.parametrize("engine", ["lost", "warm"])
@pytest.mark.parametrize("group", [OURS, EXAMPLE])
def test_what_one_has_lost_the_other_loads(runs: Runs, engine: str, group: str) -> None:
    played: dict[str, Played] = getattr(runs, engine)
    assert played[group].cached == WHOLE
    assert played[group].by_example == (len(LENGTHS) if group == EXAMPLE else 0)


def test_the_first_connector_loads_what_both_have(runs: Runs) -> None:
    assert runs.lost["both"].cached == runs.warm["both"].cached == WHOLE
    assert (runs.lost["both"].by_example, runs.warm["both"].by_example) == (0, len(LENGTHS))


def test_what_neither_has_is_computed_and_only_that_is_saved(runs: Runs) -> None:
    assert runs.warm["neither"].cached == [0] * len(LENGTHS)
    before, after = runs.saved
    per_group = sum(length // BLOCK for length in LENGTHS)
    assert (len(before), len(after)) == (2 * per_group, 3 * per_group)
    assert before < after
