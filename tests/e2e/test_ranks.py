"""Engines of two workers, each with its own heads, stored blocks and part of a method.

They are compared with an engine of two workers without UCM, because all-reduces round differently.
Pipeline parallelism cannot be tested here: vLLM 0.32.0 itself fails on the CPU, because its second stage has no tensors
to receive into.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK, ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import Answer
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

RANKS = 2
#: Selects among all blocks, checks its representatives, and reads all blocks.
TOP_K: dict[str, Any] = {
    "checked_topk:CheckedTopK": {
        "token_budget": 4 * BLOCK,
        "min_context": 0,
        "sink_tokens": 1,
        "recent_tokens": 1,
        "dense_layers": 0,
    }
}
#: Moves all computed KV to a store, and loads all of it back.
ESA, ESA_OPTIONS = "eager_esa:EagerESA", {"token_budget": 700, "sink_tokens": 1, "window_tokens": 1}


def batches() -> list[list[Request]]:
    """Return requests alone and together, in chunks, with a common prefix, and more than fit at once."""
    common = prompt(4 * BLOCK, "common to ranks")
    alone = [[request(prompt(length, "ranks"), 8)] for length in (7, BLOCK, 5 * BLOCK + 1, 600)]
    shared = [request([*common, *prompt(11 + 30 * n, f"shared {n}")], 8) for n in range(4)]
    crowd = [request(prompt(200 + 13 * n, "crowd of ranks"), 40) for n in range(6)]
    return [*alone, [request(common)], shared, crowd]


@dataclass(frozen=True)
class Played:
    """The result of one engine."""

    answers: list[Answer]
    preemptions: float
    log: str
    last: list[Answer]

    @property
    def tokens(self) -> list[list[int]]:
        """The generated tokens of each request."""
        return [answer.tokens for answer in self.answers]


class TwoWorkers:
    """Engines with tensor parallelism.

    Args:
        environment: An environment with the overlay.
        directory: The directory of their files.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        from tests.e2e.prefix_models import SHARED, write_tiny_model  # noqa: PLC0415 - needs the build's packages

        self.environment, self.directory = environment, directory
        self.model = {"model": str(write_tiny_model(environment, "shared", SHARED))}
        self.engine = {**self.model, "tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}

    @cached_property
    def reference(self) -> Played:
        """The result without UCM's settings; runs on first use."""
        return self.run("reference")

    def run(
        self,
        name: str,
        method: Mapping[str, Any] | None = None,
        store: str = "",
        workers: int = RANKS,
        last: Sequence[Request] = (),
        **extra: Any,
    ) -> Played:
        """Run one engine.

        Args:
            name: The name of its directory.
            method: The value of ``ucm_sparse_config``, if any.
            store: The name of the connector's store; empty for no connector.
            workers: One, or two.
            last: More requests, each alone, after all others.
            **extra: More settings of the connector.
        """
        from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
        from tests.e2e.processes import INSIDE  # noqa: PLC0415 - needs the build's packages

        settings = dict(self.engine if workers == RANKS else self.model)
        if method:
            settings["additional_config"] = {"ucm_sparse_config": dict(method)}
        if store:
            settings |= connector(posix(self.directory / store), **extra)
        switches = {"PYTHONPATH": os.fspath(INSIDE)}
        engine = PrefixEngine(self.environment, self.directory / name, settings, switches)
        with engine:
            answers = [answer for batch in batches() for answer in engine.generate(batch)]
            more = [answer for one in last for answer in engine.generate([one])]
            if store:
                engine.settle()
            preemptions = engine.counters()["vllm:num_preemptions_total"]
        return Played(answers, preemptions, engine.log, more)

    def esa(self, name: str) -> dict[str, Any]:
        """Return ESA's settings with a separate store."""
        from tests.e2e.prefix_engine import posix  # noqa: PLC0415 - needs the build's packages

        return {ESA: {**ESA_OPTIONS, "store": posix(self.directory / name)}}


@pytest.fixture(scope="module")
def two(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> TwoWorkers:
    return TwoWorkers(environments.overlay, tmp_path_factory.mktemp("two"))


def found(played: Played) -> list[int | None]:
    return [answer.cached for answer in played.answers]


def all_whole_blocks() -> list[int]:
    """Return the tokens of each prompt that can be hit: not the last one, which must be computed."""
    return [(len(one["prompt"]) - 1) // BLOCK * BLOCK for batch in batches() for one in batch]


def test_what_two_workers_store_two_others_load(two: TwoWorkers) -> None:
    """An engine of one worker, between them on the same store, finds nothing of theirs, and they nothing of its own."""
    cold = two.run("cold", store="store")
    of_one = [request(prompt(10 * BLOCK, "of one worker"), 8)]
    one = two.run("one", store="store", workers=1, last=of_one)
    warm = two.run("warm", store="store", last=of_one)
    assert cold.tokens == warm.tokens == two.reference.tokens
    assert cold.preemptions > 0, "more at once than there is room for"
    assert found(warm) == all_whole_blocks()
    assert warm.last[0].cached == 0
    assert found(one)[:4] == [0] * 4, "those that share no block with earlier requests of this engine"
    commands_find_them(two, of_one[0]["prompt"])


@pytest.mark.parametrize("sizes", [(1, RANKS), (RANKS, 1)], ids=["to two workers", "to one worker"])
def test_slices_of_heads_that_engines_of_one_size_store_those_of_another_load(
    two: TwoWorkers, sizes: tuple[int, int]
) -> None:
    """Tokens are compared with an engine of the size that loads; then some blocks lack a slice, or have a wrong one."""
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - needs the build's packages

    name = "slices-of-{}-for-{}".format(*sizes)

    def run(when: str, workers: int) -> Played:
        return two.run(f"{name}-{when}", store=name, workers=workers, kv_head_shards=RANKS)

    reference = two.reference if sizes[1] == RANKS else two.run(f"{name}-reference", workers=1)
    cold, warm = run("cold", sizes[0]), run("warm", sizes[1])
    assert found(cold)[:4] == [0] * 4
    assert found(warm) == all_whole_blocks()
    assert warm.tokens == reference.tokens
    for ranks in (1, RANKS):
        said = command(two, name, "lookup", longest(), ranks, f"kv_head_shards: {RANKS}")
        assert said["found_tokens"] == (len(longest()) - 1) // BLOCK * BLOCK
    slices = [sorted(block_files(of).values()) for of in sorted((two.directory / name).glob("*kv?of2*"))]
    assert len(slices) == RANKS
    for lost, files in enumerate(slices):
        for path in files[lost::6]:
            path.unlink()
        for path in files[lost + 3 :: 6]:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = run("damaged", sizes[1])
    assert damaged.tokens == reference.tokens
    assert 0 < sum(cached or 0 for cached in found(damaged)) < sum(all_whole_blocks())


def command(two: TwoWorkers, store: str, name: str, prompt: list[int], ranks: int, settings: str = "") -> Any:
    """Return what a command about a prompt says of a store, for engines of some ranks with more settings, in YAML."""
    from tests.e2e.test_try import ucm  # noqa: PLC0415 - needs the build's packages

    config, tokens = two.directory / "ucm_config.yaml", two.directory / "tokens.json"
    config.write_text(f"store: {{directories: {two.directory / store}}}\n{settings}\n", encoding="utf-8")
    tokens.write_text(json.dumps(prompt), encoding="utf-8")
    arguments: dict[str, Any] = {name: ENGINE[name] for name in ("block_size", "dtype", "max_model_len", "seed")}
    where = ("--config", config, "--model", two.model["model"], "--tokens", tokens, "--json")
    sizes = {**arguments, "tensor_parallel_size": ranks}
    done = ucm(two.environment, two.directory, "store", name, *where, "--engine-args", json.dumps(sizes))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def longest() -> list[int]:
    """Return the longest prompt."""
    return max((one["prompt"] for batch in batches() for one in batch), key=len)


def commands_find_them(two: TwoWorkers, of_one: list[int]) -> None:
    """The commands about a prompt, in one process, name the blocks of both workers."""
    blocks = len(longest()) // BLOCK
    assert command(two, "store", "lookup", longest(), RANKS)["found_tokens"] == (len(longest()) - 1) // BLOCK * BLOCK
    assert command(two, "store", "drop", longest(), RANKS)["dropped"] == {"Posix": RANKS * blocks}
    assert command(two, "store", "lookup", longest(), RANKS)["found_tokens"] == 0
    assert command(two, "store", "lookup", of_one, 1)["found_tokens"] > 0, "of the engine of one worker"


def test_a_state_is_found_if_both_workers_have_their_part_of_it(two: TwoWorkers) -> None:
    """A model with recurrent layers; then what prefixes need is deleted for one worker, of one group at a time."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_models import RECURRENT, RECURRENT_ENGINE, STATE_BLOCK, write_tiny_model  # noqa: PLC0415
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415

    def prompts(name: str) -> list[list[Request]]:
        alone = [[request(prompt(count, name), 16)] for count in (STATE_BLOCK + 1, 3 * STATE_BLOCK - 7)]
        return [*alone, [request(prompt(2 * STATE_BLOCK + 30 * n, name), 24) for n in range(1, 5)]]

    def play(engine: PrefixEngine, name: str) -> tuple[list[list[int]], list[int | None]]:
        answers = [answer for batch in prompts(name) for answer in engine.generate(batch)]
        return [answer.tokens for answer in answers], [answer.cached for answer in answers]

    whole = [(len(one["prompt"]) - 1) // STATE_BLOCK * STATE_BLOCK for batch in prompts("") for one in batch]
    model = write_tiny_model(two.environment, "recurrent", RECURRENT)
    settings = {**two.engine, **RECURRENT_ENGINE, "model": str(model)}
    with PrefixEngine(two.environment, two.directory / "states-reference", settings) as engine:
        reference = [play(engine, "whole") for _ in range(2)]
    assert [cached for _, cached in reference] == [[0] * len(whole), whole]
    store = two.directory / "states-store"
    with PrefixEngine(two.environment, two.directory / "states", {**settings, **connector(posix(store))}) as engine:

        def stored(name: str, lost: str = "") -> list[tuple[list[list[int]], list[int | None]]]:
            """Return what is answered when nothing is stored, and when all is but the blocks of some namespaces."""
            before, first = set(block_files(store).values()), play(engine, name)
            engine.settle()
            assert engine.reset()
            of = [path for namespace in store.glob(lost or "no") for path in block_files(namespace).values()]
            gone = [path for path in of if path not in before]
            assert bool(gone) == bool(lost)
            for path in gone:
                path.unlink()
            return [first, play(engine, name)]

        assert stored("whole") == reference
        for rank in range(RANKS):
            for group in range(2):
                lost = f"*tp{rank}of2-pp0of1-g{group}-*"
                computed, again = stored(lost, lost)
                assert again == computed
                assert not any(again[1])


def test_nothing_is_saved_once_one_of_two_workers_has_changed_weights(two: TwoWorkers) -> None:
    changed_in_one_worker(two)


def changed_in_one_worker(two: TwoWorkers) -> None:
    """Change weights in the second worker only, which the first does not see, and look for what is stored after it."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages

    store = two.directory / "changed-store"
    before, after = ([request(prompt(20 * BLOCK + 5, when), 8)] for when in ("before", "after"))
    settings = {**two.engine, **connector(posix(store))}
    with PrefixEngine(two.environment, two.directory / "changing", settings) as engine:
        (old,) = engine.generate(before)
        engine.settle()
        assert engine.reset()
        (again,) = engine.generate(before)
        engine.scale("model.layers.1.input_layernorm.weight", -1.0, RANKS - 1)
        assert engine.reset()
        (new,) = engine.generate(before)
        engine.generate(after)
        engine.settle()
        log = engine.log
    with PrefixEngine(two.environment, two.directory / "unchanged", settings) as engine:
        answers = [answer for batch in (before, after) for answer in engine.generate(batch)]
    assert (again.tokens, again.cached) == (old.tokens, 20 * BLOCK)
    assert new.tokens != old.tokens
    assert "the weights were changed in place" in log
    assert answers[0].tokens == old.tokens
    assert [answer.cached for answer in answers] == [20 * BLOCK, 0], "what followed the change is not there"


def test_block_top_k_of_two_workers(two: TwoWorkers) -> None:
    played = two.run("top-k", TOP_K)
    assert played.tokens == two.reference.tokens
    assert f"[UCM.Sparse] {RANKS} worker(s) run checked_topk:CheckedTopK as the scheduler does" in played.log
    rows = re.findall(r"CheckedTopK restricted (\d+) decodes in 32 steps", played.log)
    assert len(rows) == RANKS
    assert all(int(count) > 32 for count in rows), "several requests in a step"


def test_esa_of_two_workers_beside_the_connector(two: TwoWorkers) -> None:
    """An engine with the method loads what an earlier one stored, moves it out of the cache and back."""
    cold = two.run("esa-cold", two.esa("middle-cold"), "esa-store")
    warm = two.run("esa-warm", two.esa("middle-warm"), "esa-store")
    assert cold.tokens == warm.tokens == two.reference.tokens
    assert found(warm) == all_whole_blocks()
    for played in (cold, warm):
        assert played.log.count("ESA restricted 1 rows in 1 steps") == RANKS
