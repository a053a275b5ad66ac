"""NIXL moves KV from prefill engines to a decode engine, with UCM beside it; the tokens are those of one engine alone.

On a trained model, through `examples/hand_off/proxy.py`, with one prefill engine and with two; also when these are
killed. No answer may take longer than `tests.e2e.real.chat.ANSWER` seconds.
"""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.real.chat import Server
    from tests.e2e.real.fleet import Fleet
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

BLOCK, STEP, LONGEST, ANSWER = 32, 128, 1024, 4
Prompt = tuple[int, ...]


def prompt(name: str, length: int) -> Prompt:
    """Return random tokens, which a trained model continues like any others: in one way."""
    chance = random.Random(f"{name} {length}")  # noqa: S311 - prompts, no secrets
    return tuple(chance.randrange(100, 49_000) for _ in range(length))


#: In one step and in several, and less than a block.
ALONE = [prompt("alone", length) for length in (STEP - 1, 2 * STEP + 7, BLOCK - 1)]
TURNS = [prompt("turns", length) for length in (STEP, STEP + 9, 5 * BLOCK + 1)]
REFUSED = [prompt("refused", length) for length in (2 * BLOCK, 2 * BLOCK + 1)]
SAVED, ANSWERED = prompt("saved", 8 * BLOCK), prompt("answered", 8 * BLOCK)
#: Takes a while, in which its engine is killed.
LONG = prompt("long", LONGEST - ANSWER)


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        tokens: The generated tokens.
        cached: How many of the prompt's were not computed: with vLLM's transports, by the prefill engine.
        handed_over: Its ``kv_transfer_params``.
    """

    tokens: list[int]
    cached: int
    handed_over: dict[str, Any] | None


def ask(server: Server, tokens: Prompt, count: int = ANSWER, handed: dict[str, Any] | None = None) -> Answer:
    from tests.e2e.real.chat import SERVED  # noqa: PLC0415 - needs the build's packages

    greedy = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    body = {"model": SERVED, "prompt": tokens, "kv_transfer_params": handed, **greedy}
    found = json.loads(server.post("/v1/completions", body))
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(found["choices"][0]["token_ids"], cached, found.get("kv_transfer_params"))


def prefill(server: Server, tokens: Prompt) -> dict[str, Any] | None:
    """Return what a prefill engine hands over; see the proxy."""
    return ask(server, tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False}).handed_over


def ask_all(server: Server, prompts: Sequence[Prompt]) -> list[Answer]:
    from tests.e2e.real.fleet import at_once  # noqa: PLC0415 - needs the build's packages

    return at_once([partial(ask, server, one) for one in prompts])


def counted(server: Server, name: str, label: str = "") -> float:
    """Return the sum of a server's counters of a name, with a label."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)


@pytest.fixture(scope="module")
def wanted(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[Prompt, list[int]]:
    """The tokens of one engine without a connector, by prompt."""
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415
    from tests.e2e.real.model import real_model  # noqa: PLC0415

    shape = {"max_model_len": LONGEST, "max_num_batched_tokens": STEP, "num_gpu_blocks_override": 2 * LONGEST // BLOCK}
    arguments = {"model": str(real_model()), "block_size": BLOCK, **shape}
    directory, every = tmp_path_factory.mktemp("alone"), [*ALONE, *TURNS, *REFUSED, SAVED, ANSWERED, LONG]
    with PrefixEngine(environments.plain, directory / "engine", arguments, IN_PROCESS) as engine:
        return {one: engine.generate([request(list(one), ANSWER)])[0].tokens for one in every}


@pytest.fixture(scope="module")
def fleet(wanted: object, release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    from tests.e2e.environment import with_nixl  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.fleet import Fleet  # noqa: PLC0415
    from tests.e2e.real.model import real_model  # noqa: PLC0415

    del wanted  # one engine after the other
    options = f"--block-size {BLOCK} --max-model-len {LONGEST} --max-num-batched-tokens {STEP}"
    directory = tmp_path_factory.mktemp("fleet")
    with Fleet(with_nixl(release), real_model(), directory, transport=True, options=options) as one:
        yield one


def saved(store: Path, number: int) -> int:
    """Return how many blocks are visible: at least so many, unless that takes too long."""
    from tests.e2e.prefix_runs import block_files, wait_for_blocks  # noqa: PLC0415 - needs the build's packages

    wait_for_blocks(store, number)
    return len(block_files(store))


def test_tokens_are_those_of_one_engine_and_each_prompt_is_saved_once(
    fleet: Fleet, wanted: dict[Prompt, list[int]]
) -> None:
    first, second = fleet.prefills
    one, both = fleet.proxy(first), fleet.proxy(first, second)
    assert [ask(one, asked).tokens for asked in ALONE] == [wanted[asked] for asked in ALONE]
    count = sum(len(asked) // BLOCK for asked in ALONE)
    assert saved(fleet.store, count) == count
    assert [answer.tokens for answer in ask_all(both, TURNS)] == [wanted[asked] for asked in TURNS]
    count += sum(len(asked) // BLOCK for asked in TURNS)
    assert saved(fleet.store, count) == count
    mine = counted(fleet.decode, "vllm:prompt_tokens_by_source_total", "local_compute")
    assert mine < 2 * BLOCK, "NIXL has brought nearly all"
    # What one has computed, the other finds in the store, and neither saves it again.
    loaded = ask(second, ALONE[1], 1)
    assert (loaded.tokens, loaded.cached) == (wanted[ALONE[1]][:1], len(ALONE[1]) // BLOCK * BLOCK)
    assert [answer.tokens for answer in ask_all(both, ALONE)] == [wanted[asked] for asked in ALONE]
    assert saved(fleet.store, count) == count


def test_killed_prefill_engines_cost_no_token(fleet: Fleet, wanted: dict[Prompt, list[int]]) -> None:
    """After the blocks were saved, while half of the requests go there, while one computes, and after an answer."""
    first, second = fleet.prefills
    before = saved(fleet.store, 0)
    handed = prefill(first, SAVED)
    assert saved(fleet.store, before + len(SAVED) // BLOCK) == before + len(SAVED) // BLOCK
    first.kill()
    loaded = counted(fleet.decode, "ucm:hit_tokens_total")
    answers = {SAVED: ask(fleet.decode, SAVED, handed=handed)}
    assert counted(fleet.decode, "ucm:hit_tokens_total") - loaded == len(SAVED) - BLOCK, "the last block is computed"
    both, alone = fleet.proxy(first, second), fleet.proxy(second)
    answers |= {asked: ask(both, asked) for asked in REFUSED}
    handed = prefill(second, ANSWERED)
    killing = threading.Timer(random.Random(31).uniform(0.2, 2.0), second.kill)  # noqa: S311 - no secret
    killing.start()
    answers[LONG] = ask(alone, LONG)
    killing.join()
    answers[ANSWERED] = ask(fleet.decode, ANSWERED, handed=handed)
    assert {asked: answer.tokens for asked, answer in answers.items()} == {asked: wanted[asked] for asked in answers}
