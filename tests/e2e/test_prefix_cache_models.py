"""Models with other KV caches than one group of keys and values: mixed sliding windows, latent KV, recurrent states."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_models import GATED_BLOCK, LATENT_BLOCK, RECURRENT_MODELS, SEVERAL_GROUPS
from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import Answer
    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]


def requests() -> list[list[Request]]:
    """Return batches: shorter than a window and much longer, with a common prefix, more than fit at once."""
    lengths = (5, 31, 32, 33, 64, 97, 128, 257, 400, 700)
    common = prompt(7 * BLOCK, "common")
    shared = [request([*common, *prompt(9 + n, f"shared {n}")]) for n in range(4)]
    crowd = [request(prompt(90 + 11 * n, "crowd"), 100) for n in range(12)]
    return [*([request(prompt(length, "model"), 16)] for length in lengths), [request(common)], shared, crowd]


def run(
    environment: Environment,
    directory: Path,
    engine: Mapping[str, Any],
    store: Path | None = None,
    batches: Sequence[Sequence[Request]] | None = None,
) -> tuple[list[Answer], str]:
    """Return a new engine's answers and log, once all blocks are in the store."""
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    started = PrefixEngine(environment, directory, engine, IN_PROCESS)
    with started:
        answers = [answer for batch in batches or requests() for answer in started.generate(batch)]
        if store is not None:
            started.settle()
    return answers, started.log


class Hybrid:
    """The engines of a model with several KV-cache groups, `SEVERAL_GROUPS`."""

    def __init__(self, runs: PrefixRuns, directory: Path, name: str) -> None:
        from tests.e2e.prefix_damage import damage_some  # noqa: PLC0415 - needs the build's packages
        from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415
        from tests.e2e.prefix_models import several_groups  # noqa: PLC0415
        from tests.e2e.prefix_runs import block_files  # noqa: PLC0415

        environment = runs.environments[False]
        engine, self.groups = several_groups(environment, name)
        store, damaged = directory / "store", directory / "damaged"
        self.reference, _ = run(runs.environments[None], directory / "reference", engine)
        layer_wise = connector(posix(store), "UCMLayerWiseConnector")
        self.cold, self.cold_log = run(environment, directory / "cold", {**engine, **layer_wise}, store)
        shutil.copytree(store, damaged)
        self.warm, self.warm_log = run(environment, directory / "warm", {**engine, **connector(posix(store))})
        self.damaged_blocks = damage_some(list(block_files(damaged).values()), seed=1)
        broken = connector(posix(damaged), "UCMLayerWiseConnector")
        self.damaged, self.damaged_log = run(environment, directory / "broken", {**engine, **broken})


@pytest.fixture(scope="module", params=SEVERAL_GROUPS)
def hybrid(
    request: pytest.FixtureRequest, release: str, prefix_runs: PrefixRuns, tmp_path_factory: pytest.TempPathFactory
) -> Hybrid:
    if release == "0.27.1" and request.param != "Gemma 3":
        pytest.skip("of vLLM 0.27.1, one model with several groups is run")
    return Hybrid(prefix_runs, tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.mark.parametrize("name", ["cold", "warm", "damaged"])
def test_tokens_with_several_groups(hybrid: Hybrid, name: str) -> None:
    answers: list[Answer] = getattr(hybrid, name)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in hybrid.reference]


def test_there_are_several_groups(hybrid: Hybrid) -> None:
    for log in (hybrid.cold_log, hybrid.warm_log, hybrid.damaged_log):
        assert f", {hybrid.groups} stores to look up" in log


def test_prompts_beyond_the_window_are_loaded(hybrid: Hybrid) -> None:
    prompts = [one["prompt"] for batch in requests() for one in batch]
    cached = [answer.cached for answer in hybrid.warm]
    assert cached == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in prompts]


def test_a_damaged_block_is_not_promised(hybrid: Hybrid) -> None:
    assert hybrid.damaged_blocks > 20
    assert sum(answer.cached or 0 for answer in hybrid.damaged) < sum(answer.cached or 0 for answer in hybrid.warm)
    assert "PromisedBlockLostError" not in hybrid.damaged_log


class Latent:
    """The engines of a model with latent attention."""

    def __init__(self, runs: PrefixRuns, directory: Path) -> None:
        from tests.e2e.prefix_damage import damage_some  # noqa: PLC0415 - needs the build's packages
        from tests.e2e.prefix_engine import EngineFailedError, connector, posix  # noqa: PLC0415
        from tests.e2e.prefix_models import LATENT_ENGINE, MLA, write_tiny_model  # noqa: PLC0415
        from tests.e2e.prefix_runs import block_files  # noqa: PLC0415

        environment = runs.environments[False]
        model = write_tiny_model(environment, "latent", MLA)
        engine = {"model": str(model), "num_gpu_blocks_override": None, **LATENT_ENGINE}
        store, damaged = directory / "store", directory / "damaged"
        self.reference, _ = run(runs.environments[None], directory / "reference", engine)
        self.cold, _ = run(environment, directory / "cold", {**engine, **connector(posix(store))}, store)
        shutil.copytree(store, damaged)
        self.warm, _ = run(environment, directory / "warm", {**engine, **connector(posix(store))})
        self.damaged_blocks = damage_some(list(block_files(damaged).values()), seed=1)
        self.damaged, _ = run(environment, directory / "broken", {**engine, **connector(posix(damaged))})
        rotated_wrongly = {**engine, "compilation_config": {"custom_ops": ["all"]}, **connector(posix(store))}
        with pytest.raises(EngineFailedError) as caught:
            run(environment, directory / "refused", rotated_wrongly)
        self.refusal = str(caught.value)


@pytest.fixture(scope="module")
def latent(release: str, prefix_runs: PrefixRuns, tmp_path_factory: pytest.TempPathFactory) -> Latent:
    if release == "0.27.1":
        pytest.skip("vLLM 0.27.1 has no latent attention on the CPU")
    return Latent(prefix_runs, tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize("name", ["cold", "warm", "damaged"])
def test_tokens_with_latent_attention(latent: Latent, name: str) -> None:
    answers: list[Answer] = getattr(latent, name)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in latent.reference]


def test_latent_kv_is_loaded(latent: Latent) -> None:
    prompts = [one["prompt"] for batch in requests() for one in batch]
    block = LATENT_BLOCK
    assert [answer.cached for answer in latent.warm] == [(len(tokens) - 1) // block * block for tokens in prompts]


def test_damaged_latent_kv_is_computed(latent: Latent) -> None:
    assert latent.damaged_blocks > 20
    assert sum(answer.cached or 0 for answer in latent.damaged) < sum(answer.cached or 0 for answer in latent.warm)


def test_latent_attention_that_rotates_by_other_positions_is_refused(latent: Latent) -> None:
    """On 0.32.0 without this refusal, two engines gave different tokens for the same prompts, now and then."""
    assert "by the positions of other tokens" in latent.refusal


def long_requests(block: int) -> list[list[Request]]:
    """Return batches: requests alone, each twice, shorter than a block and longer; and more than fit at once."""
    common = prompt(5 * block // 2, "common")
    alone = [prompt(count, "alone") for count in (35 * block // 16, 5 * block // 16, block, block + 1)]
    shared = [[*common, *prompt(count, "tail")] for count in (block // 4, 5 * block // 8, 3 * block // 2)]
    crowd = [
        *(prompt((25 + 4 * n) * block // 16, "crowd") for n in range(5)),
        *([*common, *prompt(9 + n, "crowd")] for n in range(5)),
    ]
    twice = [[request(tokens, 24)] for tokens in (*alone, *shared) for _ in range(2)]
    return [*twice, [request(tokens, 90) for tokens in crowd]]


#: How many of these are alone.
ALONE = 14


class Recurrent:
    """The engines of a model with recurrent layers, `RECURRENT_MODELS`."""

    def __init__(self, runs: PrefixRuns, directory: Path, name: str) -> None:
        from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415 - needs the build's packages
        from tests.e2e.prefix_models import RECURRENT_ENGINE, write_tiny_model  # noqa: PLC0415

        config, self.block = RECURRENT_MODELS[name]
        environment, batches = runs.environments[False], long_requests(self.block)
        model = write_tiny_model(environment, name.replace(" ", "-").lower(), config)
        engine = {"model": str(model), **RECURRENT_ENGINE}
        store = directory / "store"
        self.reference, _ = run(runs.environments[None], directory / "reference", engine, None, batches)
        # The crowd again, after as long hits as the stores give: of its prompts alone, and of what the others share.
        crowd = batches[-1]
        first = [[one] for one in crowd[:6]]
        hits, _ = run(runs.environments[None], directory / "hits", engine, None, [*first, crowd])
        self.hits = hits[len(first) :]
        direct = {**engine, **connector(posix(store))}
        self.cold, self.cold_log = run(environment, directory / "cold", direct, store, batches)
        layer_wise = connector(posix(store), "UCMLayerWiseConnector")
        self.warm, self.warm_log = run(environment, directory / "warm", {**engine, **layer_wise}, None, batches)
        self.rounds = campaign(environment, directory / "campaign", engine, self.block)


class Drafted:
    """The engines of a model with gated delta nets, which verify drafts of which a known number is right.

    Prompts end a few tokens before a block does, so each answer fills one, and vLLM moves the state after it to where
    it is found. The kernels that move it are Triton's, which is interpreted here.
    """

    #: How many tokens before a block's end the prompts end.
    short = (1, 2, 3, 6, 9)

    def __init__(self, release: str, directory: Path) -> None:
        from tests.e2e.environment import with_triton_and_overlay  # noqa: PLC0415 - needs the build's packages
        from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
        from tests.e2e.prefix_models import GATED, GATED_ENGINE, write_tiny_model  # noqa: PLC0415
        from tests.e2e.processes import IN_PROCESS, INSIDE  # noqa: PLC0415

        environment = with_triton_and_overlay(release)
        texts, store = directory / "texts.json", directory / "store"
        engine = {
            "model": str(write_tiny_model(environment, "gated", GATED)),
            **GATED_ENGINE,
            "prefix_cache_retention_interval": GATED_BLOCK,  # vLLM keeps states at the ends of all blocks
            "speculative_config": {"method": "custom_class", "model": "drafts.Known", "num_speculative_tokens": 3},
        }
        switches = {**IN_PROCESS, "TRITON_INTERPRET": "1", "PYTHONPATH": str(INSIDE), "UCM_TEST_DRAFTS": str(texts)}
        prompts = [prompt(2 * GATED_BLOCK - count, "drafted") for count in self.short]

        def ask(started: PrefixEngine, prompts: Sequence[list[int]]) -> list[Answer]:
            return [answer for tokens in prompts for answer in started.generate([request(tokens, 16)])]

        texts.write_text("[]", encoding="utf-8")  # no draft is right
        with PrefixEngine(environment, directory / "reference", engine, switches) as started:
            first = ask(started, prompts)
            whole = [[*tokens, *answer.tokens] for tokens, answer in zip(prompts, first, strict=True)]
            turns = [[*text, *prompt(9, "next turn")] for text in whole]
            texts.write_text(json.dumps(whole), encoding="utf-8")
            assert started.reset()
            self.reference = ask(started, [*prompts, *turns])
            self.again = ask(started, [*turns, *prompts])
        stored = {**engine, **connector(posix(store))}
        with PrefixEngine(environment, directory / "cold", stored, switches) as started:
            self.cold = ask(started, [*prompts, *turns])
            self.accepted = started.counters()["vllm:spec_decode_num_accepted_tokens_total"]
            started.settle()
            assert started.reset()
            self.reset = ask(started, [*turns, *prompts])
        with PrefixEngine(environment, directory / "restarted", stored, switches) as started:
            self.restarted = ask(started, [*turns, *prompts])


@pytest.fixture(scope="module")
def drafted(release: str, prefix_runs: PrefixRuns, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    if not (prefix_runs.environments[None].site / "vllm" / "v1" / "worker" / "cpu" / "model_runner.py").exists():
        pytest.skip(f"vLLM {release} has no interpreted kernels for the CPU")
    return Drafted(release, tmp_path_factory.mktemp("drafted"))


def test_tokens_with_states_that_move_under_drafts(drafted: Drafted) -> None:
    """After hits of equal lengths: in bfloat16, another length can give other tokens."""
    assert [answer.tokens for answer in drafted.cold] == [answer.tokens for answer in drafted.reference]
    for answers in (drafted.reset, drafted.restarted):
        alike = [pair for pair in zip(answers, drafted.again, strict=True) if pair[0].cached == pair[1].cached]
        assert len(alike) > len(drafted.short)
        assert [one.tokens for one, _ in alike] == [other.tokens for _, other in alike]
    assert drafted.accepted > 2 * len(drafted.short)


def test_states_that_drafts_have_moved_are_found(drafted: Drafted) -> None:
    """With a prompt that of its first block, with the next turn that of the block that the answer filled.

    If several drafts are accepted at once, across the block's end, vLLM itself keeps no state there until the next turn
    is computed.
    """
    half = len(drafted.short)
    kept = [answer.cached for answer in drafted.reference[half:]]
    assert set(kept) == {GATED_BLOCK, 2 * GATED_BLOCK}
    for answers in (drafted.reference, drafted.cold):
        assert [answer.cached for answer in answers] == [*[0] * half, *kept]
    for answers in (drafted.reset, drafted.restarted):
        assert [answer.cached for answer in answers] == [*[2 * GATED_BLOCK] * half, *[GATED_BLOCK] * half]


@dataclass
class Round:
    """Prompts that an engine computed, and answered again after some of their blocks were damaged or lost.

    Attributes:
        computed: The answers of the first time.
        again: Those of the second time.
        changed: How many blocks were damaged or lost.
    """

    computed: list[Answer]
    again: list[Answer]
    changed: int


#: What happens to blocks: of which groups, and whether they are lost, all of them, instead of damaged, about half.
CHANGES = {
    "damaged states": ({True}, False),
    "damaged attention": ({False}, False),
    "both damaged": ({True, False}, False),
    "lost states": ({True}, True),
    "lost attention": ({False}, True),
}
#: How often each happens, and to how many prompts at a time.
ROUNDS, PROMPTS = 1, 4


def campaign(
    environment: Environment, directory: Path, engine: Mapping[str, Any], block: int
) -> dict[str, list[Round]]:
    """Change blocks of one group or another behind an engine's back; return what it answered."""
    from tests.e2e.prefix_damage import damage_some  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    rounds: dict[str, list[Round]] = {what: [] for what in CHANGES}
    store = directory / "store"
    with PrefixEngine(environment, directory / "engine", {**engine, **connector(posix(store))}, IN_PROCESS) as started:
        for number in range(ROUNDS):
            for what, (kinds, lost) in CHANGES.items():
                # Two blocks and a half each, so that a prefix has several blocks and a state.
                prompts = [prompt(5 * block // 2, f"{what} {number} {n}") for n in range(PROMPTS)]
                batch, before = [request(tokens, 24) for tokens in prompts], set(block_files(store).values())
                computed = started.generate(batch)
                started.settle()
                files = [path for kind in kinds for path in of_group(store, states=kind) if path not in before]
                changed = len(files) if lost else damage_some(files, seed=number)
                for path in files if lost else ():
                    path.unlink()
                assert started.reset()
                rounds[what].append(Round(computed, started.generate(batch), changed))
    return rounds


def of_group(store: Path, *, states: bool) -> list[Path]:
    """Return the files of the group with states, which comes first like its layers, or of that with attention."""
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - needs the build's packages

    namespaces = [place for place in store.iterdir() if ("-g0-" in place.name) == states]
    return [path for namespace in namespaces for path in block_files(namespace).values()]


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def recurrent(
    request: pytest.FixtureRequest, prefix_runs: PrefixRuns, tmp_path_factory: pytest.TempPathFactory
) -> Recurrent:
    return Recurrent(prefix_runs, tmp_path_factory.mktemp("recurrent"), request.param)


@pytest.mark.parametrize("name", ["cold", "warm"])
def test_tokens_with_recurrent_layers(recurrent: Recurrent, name: str) -> None:
    """As plain vLLM's after a hit of the same length.

    On a processor with AVX-512 an answer of 90 tokens had another 69th token after a hit of 320 than after none, in
    plain vLLM as well.
    """
    answers: list[Answer] = getattr(recurrent, name)
    after_hits = [*recurrent.reference[:ALONE], *recurrent.hits]
    for answer, *plain in zip(answers, recurrent.reference, after_hits, strict=True):
        expected = next((of for of in plain if of.cached == answer.cached), plain[0])
        assert answer.tokens == expected.tokens


def found(answers: Sequence[Answer], place: int) -> list[int | None]:
    """Return the cached tokens of the requests alone: the first time (0), or the second (1)."""
    return [answer.cached for answer in answers[place:ALONE:2]]


def test_as_much_is_found_as_in_the_engines_own_memory(recurrent: Recurrent) -> None:
    kept = found(recurrent.reference, 1)
    assert kept == [blocks * recurrent.block for blocks in (2, 0, 0, 1, 2, 3, 3)]
    assert found(recurrent.warm, 0) == found(recurrent.warm, 1) == kept


@pytest.mark.parametrize("what", CHANGES)
def test_a_damaged_or_lost_state_or_block_is_computed(recurrent: Recurrent, what: str) -> None:
    _, lost = CHANGES[what]
    for one in recurrent.rounds[what]:
        assert one.changed >= (PROMPTS if lost else PROMPTS // 2)
        assert [answer.tokens for answer in one.again] == [answer.tokens for answer in one.computed]
        assert {answer.cached for answer in one.computed} == {0}
        cached = [answer.cached or 0 for answer in one.again]
        assert sum(cached) < PROMPTS * 2 * recurrent.block
        assert not (lost and any(cached))  # a state without attention is of no use, and the other way round
