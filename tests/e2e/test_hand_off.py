"""Prefill engines hand prompts over to a decode engine through a store; the tokens are those of one engine alone.

Also if a prefill engine is killed while it computes or saves, or saves nothing of what it has announced.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK, TOKENS_PER_STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import Answer, PrefixEngine
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

ANSWER = 16
#: The decode engine's deadline, and the one where nothing comes; a busy machine may take seconds to save.
LONG, SHORT = 60.0, 2.0
#: In one step and in several, with whole blocks only, and less than a block.
LENGTHS = (TOKENS_PER_STEP - 1, 5 * TOKENS_PER_STEP + 7, 4 * BLOCK, BLOCK - 1)
PROMPTS = [prompt(length, f"handed {number}") for number, length in enumerate(LENGTHS)]
CROWD = [prompt(3 * TOKENS_PER_STEP + number, f"crowd {number}") for number in range(6)]
#: Computed by engines that are killed meanwhile, or just after they have answered.
DOOMED = [prompt(5 * TOKENS_PER_STEP, f"doomed {number}") for number in range(3)]
NEVER = prompt(3 * TOKENS_PER_STEP, "never saved")
EVERY = [*PROMPTS, *CROWD, *DOOMED, NEVER]


def connector(role: str, store: Mapping[str, Any], seconds: float = LONG) -> dict[str, Any]:
    from tests.e2e.prefix_engine import connector  # noqa: PLC0415 - needs the build's packages

    arguments = connector(store, "UCMConnector", staging_deadline=seconds)
    arguments["kv_transfer_config"]["kv_role"] = role
    return arguments


def start(
    environment: Environment,
    directory: Path,
    arguments: dict[str, Any] | None = None,
    switches: Mapping[str, str] | None = None,
) -> PrefixEngine:
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    return PrefixEngine(environment, directory, arguments, {**IN_PROCESS, **(switches or {})})


def prefill(engine: PrefixEngine, prompts: list[list[int]]) -> list[Answer]:
    marks = {"do_remote_decode": True, "do_remote_prefill": False}
    return engine.generate([request(one, 1, extra_args={"kv_transfer_params": marks}) for one in prompts])


def decode(engine: PrefixEngine, prompts: list[list[int]], handed: list[dict[str, Any] | None]) -> list[Answer]:
    pairs = zip(prompts, handed, strict=True)
    return engine.generate([request(one, ANSWER, extra_args={"kv_transfer_params": params}) for one, params in pairs])


def whole(prompts: list[list[int]]) -> list[int]:
    """Return the tokens of each prompt that are loaded if all of its blocks are: the last token is computed."""
    return [(len(one) - 1) // BLOCK * BLOCK for one in prompts]


@dataclass
class Runs:
    """What one engine generates for each prompt, and what the two kinds of engines did.

    Attributes:
        reference: The tokens of one engine without a connector, by prompt.
        prefilled: The answers of the prefill engines to all prompts but those in ``doomed``.
        decoded: The answers of the decode engine to the same prompts.
        blocks: The numbers of blocks in the store: after the prefills, and after the decode engine has ended.
        doomed: The decode engine's answers to prompts whose prefill engines were killed.
        never: Its answer to a prompt of which nothing was saved, with a shorter deadline.
        lost: How many blocks it counts as announced and not found.
    """

    reference: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    prefilled: list[Answer] = field(default_factory=list)
    decoded: list[Answer] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    doomed: list[Answer] = field(default_factory=list)
    never: list[Answer] = field(default_factory=list)
    lost: float = 0

    def expected(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self.reference[tuple(one)] for one in prompts]


def prefill_until_killed(engine: PrefixEngine, tokens: list[int], seconds: float) -> dict[str, Any] | None:
    """Return what a prefill engine hands over, which is killed after so many seconds, or with its answer."""
    from tests.e2e.prefix_engine import EngineFailedError  # noqa: PLC0415 - needs the build's packages

    timer = threading.Timer(seconds, engine.kill)
    timer.start()
    try:
        return prefill(engine, [tokens])[0].handed_over
    except EngineFailedError:
        return None
    finally:
        timer.cancel()
        engine.kill()


@pytest.fixture(scope="module")
def runs(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from tests.e2e.prefix_engine import posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415

    base, made, source = tmp_path_factory.mktemp("hand_off"), Runs(), random.Random(3)  # noqa: S311 - no secrets
    store = posix(base / "store")
    with start(environments.plain, base / "reference") as engine:
        for one in EVERY:
            made.reference[tuple(one)] = engine.generate([request(one, ANSWER)])[0].tokens
    producers = [
        start(environments.runtime, base / f"prefill {number}", connector("kv_producer", store)) for number in range(3)
    ]
    with start(environments.runtime, base / "decode", connector("kv_consumer", store)) as consumer:
        for number, one in enumerate(PROMPTS):
            (found,) = prefill(producers[number % 2], [one])
            made.prefilled.append(found)
            made.decoded += decode(consumer, [one], [found.handed_over])
        found_for_all = prefill(producers[0], CROWD)
        made.prefilled += found_for_all
        made.decoded += decode(consumer, CROWD, [found.handed_over for found in found_for_all])
        consumer.settle()
        made.blocks.append(len(block_files(base / "store")))
        assert consumer.reset()
        decode(consumer, PROMPTS, [None] * len(PROMPTS))
        made.blocks.append(len(block_files(base / "store")))
    with start(environments.runtime, base / "short", connector("kv_consumer", store, SHORT)) as consumer:
        consumer.wait_until_started()
        for engine, one, seconds in zip(producers, DOOMED, (source.random(), source.random(), LONG), strict=True):
            handed = prefill_until_killed(engine, one, seconds)
            engine.close()
            made.doomed += decode(consumer, [one], [handed])
        made.never = decode(consumer, [NEVER], [{"ucm_saved_tokens": len(NEVER)}])
        made.lost = consumer.counters()["ucm:failures_total{cause=awaited,operation=load}"]
    return made


def test_each_prompt_s_tokens_are_those_of_one_engine(runs: Runs) -> None:
    assert [answer.tokens for answer in runs.decoded] == runs.expected([*PROMPTS, *CROWD])


def test_the_decode_engine_computes_only_the_last_block(runs: Runs) -> None:
    """Though it is asked at once, before all blocks are visible, and has not seen any of the prompts."""
    assert [answer.cached for answer in runs.decoded] == whole([*PROMPTS, *CROWD])


def test_the_prefill_engine_says_how_much_it_saves(runs: Runs) -> None:
    said = [(answer.handed_over or {}).get("ucm_saved_tokens", 0) for answer in runs.prefilled]
    assert said == [len(one) // BLOCK * BLOCK for one in (*PROMPTS, *CROWD)]


def test_only_the_prefill_engines_save(runs: Runs) -> None:
    assert runs.blocks == [sum(len(one) // BLOCK for one in (*PROMPTS, *CROWD))] * 2


def test_a_killed_prefill_engine_costs_no_token(runs: Runs) -> None:
    assert [answer.tokens for answer in runs.doomed] == runs.expected(DOOMED)


def test_what_never_comes_is_computed_after_the_deadline(runs: Runs) -> None:
    (answer,) = runs.never
    assert [answer.tokens] == runs.expected([NEVER])
    assert answer.cached == 0
    assert answer.first_s is not None
    assert answer.first_s >= SHORT
    assert runs.lost >= len(NEVER) // BLOCK - 1


def test_over_a_server(runs: Runs, environments: Environments, tmp_path: Path) -> None:
    """Engines of both roles on one Redis; the prefill engine also loads what was saved before."""
    from tests.ucm.store.servers import RedisServer  # noqa: PLC0415 - needs the build's packages

    server = RedisServer(tmp_path / "redis")
    # The environment has no client of servers; that of the tests is pure Python.
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "redis").symlink_to(Path(import_module("redis").__path__[0]))
    clients = {"PYTHONPATH": str(tmp_path / "clients")}
    limits = {"timeout": LONG, "transfer_timeout": LONG}
    store = {"pipeline": "Redis", "tiers": {"Redis": {"address": server.address, **limits}}}
    try:
        with (
            start(environments.runtime, tmp_path / "prefill", connector("kv_both", store), clients) as producer,
            start(environments.runtime, tmp_path / "decode", connector("kv_consumer", store), clients) as consumer,
        ):
            handed = [answer.handed_over for answer in prefill(producer, PROMPTS)]
            decoded = decode(consumer, PROMPTS, handed)
            assert [answer.tokens for answer in decoded] == runs.expected(PROMPTS)
            assert [answer.cached for answer in decoded] == whole(PROMPTS)
            assert producer.reset()
            again = prefill(producer, PROMPTS)
            assert [answer.cached for answer in again] == whole(PROMPTS)
            assert [answer.handed_over for answer in again] == handed
    finally:
        server.kill()
