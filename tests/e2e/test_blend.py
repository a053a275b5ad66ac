"""BlendConnector in real engines: fully recomputed stretches are exact, and no other request hits blended blocks.

A model with random weights reveals every difference of KV; a trained one measures how much blending loses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.prefix_engine import PrefixEngine
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = pytest.mark.e2e

#: Chunks whose lengths are not multiples of the block size, and their questions.
CHUNKS = {name: prompt(length, f"chunk {name}") for name, length in {"A": 100, "B": 90, "C": 75, "D": 131}.items()}
SYSTEM, QUESTION = prompt(40, "system"), prompt(20, "question")
#: Settings that recompute all of a blended stretch.
ALL: dict[str, Any] = {"select": "edges", "edge_tokens": 4096}
#: The same, after the tokens behind the stretch were run over the reused KV, to choose by their attention.
ALL_ASKED: dict[str, Any] = {"select": "question", "edge_tokens": 8, "ratio": 1.0}
REUSED, COMPUTED = "ucm:blend_reused_tokens_total", "ucm:blend_computed_tokens_total"
GATE_FAILURES = "ucm:blend_gate_failures_total"
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True)
class Case:
    """A prompt of parts: names of `CHUNKS`, or tokens outside of chunks."""

    pieces: tuple[Any, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in CHUNKS.get(piece, piece)] if self.pieces else []

    @property
    def marks(self) -> list[list[int]]:
        place, found = 0, []
        for piece in self.pieces:
            length = len(CHUNKS[piece] if isinstance(piece, str) else piece)
            if isinstance(piece, str):
                found.append([place, place + length])
            place += length
        return found

    def plain(self, number: int = 8, **params: Any) -> Request:
        return request(self.tokens, number, **params)

    def marked(self, number: int = 8, **params: Any) -> Request:
        extra = {"kv_transfer_params": {"ucm_chunks": self.marks}}
        return request(self.tokens, number, extra_args=extra, **params)


def case(*pieces: Any) -> Case:
    return Case(tuple(piece if isinstance(piece, str) else tuple(piece) for piece in pieces))


ALONE = [case(name) for name in CHUNKS]
#: Chunks in new orders, with and without gaps; one that is not stored; a prompt that ends within a chunk.
ORDERS = [
    case("B", "C", "A", QUESTION),
    case(SYSTEM, "C", "A", "B", QUESTION),
    case("A", prompt(9, "gap"), "D", prompt(70, "wide gap"), "B", QUESTION),
    case("D", "C", prompt(200, "long question")),
    case("C", "D"),
]
#: More requests than fit once they have generated this many tokens.
LONG = 120
CROWD = [
    case(*random.Random(number).sample(sorted(CHUNKS), 3), prompt(8 + number, "crowd"))  # noqa: S311 - no secrets
    for number in range(6)
]


@pytest.fixture(scope="module")
def reference(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixEngine]:
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    directory = tmp_path_factory.mktemp("blend") / "reference"
    with PrefixEngine(environments.plain, directory, {"enable_prefix_caching": False}, IN_PROCESS) as engine:
        yield engine


def blending(
    environments: Environments, directory: Path, store: Path, engine: dict[str, Any] | None = None, **settings: Any
) -> PrefixEngine:
    from tests.e2e.blend.asking import connector  # noqa: PLC0415
    from tests.e2e.prefix_engine import PrefixEngine  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    arguments = {**(engine or {}), **connector(store, min_tokens=BLOCK, **settings)}
    return PrefixEngine(environments.runtime, directory, arguments, None if engine else IN_PROCESS)


def store_chunks(engine: PrefixEngine) -> None:
    """Save each chunk with its own request, and wait until all can be found."""
    engine.generate([each.marked(1) for each in ALONE])
    for attempt in range(100):
        before = engine.counters()
        # No other prompt starts like this, so no other request hits these blocks.
        engine.generate([case(prompt(9, f"attempt {attempt}"), *CHUNKS, QUESTION).marked(1)])
        after = engine.counters()
        if (
            after[REUSED] + after[COMPUTED] - before[REUSED] - before[COMPUTED]
            >= sum(map(len, CHUNKS.values())) - BLOCK
        ):
            return
    raise AssertionError(engine.log[-4000:])


def test_what_is_recomputed_as_a_whole_is_exact(
    environments: Environments, reference: PrefixEngine, tmp_path: Path
) -> None:
    """In new orders, after exact prefixes of any length, two in a step, in several steps, aborted and preempted."""
    wanted = [answer.tokens for answer in reference.generate([each.plain() for each in ORDERS])]
    crowd = [answer.tokens for answer in reference.generate([each.plain(LONG) for each in CROWD])]
    with blending(environments, tmp_path / "engine", tmp_path / "store", **ALL) as engine:
        store_chunks(engine)
        for one, tokens in zip(ORDERS, wanted, strict=True):
            engine.reset()
            before = engine.counters()
            (answer,) = engine.generate([one.marked()])
            assert answer.tokens == tokens
            end = one.marks[-1][1] if one.tokens[-1] == QUESTION[-1] or len(one.pieces) == 3 else len(one.tokens) - 1
            assert answer.cached == end // BLOCK * BLOCK
            assert engine.counters()[COMPUTED] - before[COMPUTED] > 0
        # After an exact prefix that ends within a chunk, at its end, or in a gap (UCM's issues 867 and 906).
        for known in (BLOCK, 3 * BLOCK, 4 * BLOCK, 6 * BLOCK):
            engine.reset()
            prefix = ORDERS[1].tokens[:known]
            engine.generate([request([*prefix, 5], 1)])
            (answer,) = engine.generate([ORDERS[1].marked()])
            assert answer.tokens == wanted[1]
        engine.reset()
        answers = engine.generate([each.marked() for each in ORDERS] + [each.plain() for each in ORDERS[:2]])
        assert [answer.tokens for answer in answers] == [*wanted, *wanted[:2]]
        engine.reset()
        aborted = [{**each.marked(), "abort_after": number % 3} for number, each in enumerate(ORDERS)]
        answers = engine.generate([*aborted, ORDERS[0].marked()])
        assert answers[-1].tokens == wanted[0]
        engine.reset()
        before = engine.counters()
        answers = engine.generate([each.marked(LONG) for each in CROWD])
        assert [answer.tokens for answer in answers] == crowd
        assert engine.counters()[PREEMPTIONS] > before[PREEMPTIONS]
    assert "[UCM.Blend]" not in engine.log


def test_what_was_blended_is_found_by_nobody(
    environments: Environments, reference: PrefixEngine, tmp_path: Path
) -> None:
    """Not under exact hashes: in vLLM's own cache, in the store, after a restart; nor tokens generated after it."""
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    store = tmp_path / "store"
    one = ORDERS[1]
    with blending(environments, tmp_path / "engine", store, select="none") as engine:
        store_chunks(engine)
        (blended,) = engine.generate([one.marked(2 * BLOCK)])
        longer = case(one.tokens, blended.tokens, QUESTION)
        shorter = case(one.tokens[: 6 * BLOCK], QUESTION)
        (exact, behind, sharing) = reference.generate([one.plain(2 * BLOCK), longer.plain(), shorter.plain()])
        # The blended result differs from the exact one, so the test can fail.
        assert blended.tokens != exact.tokens
        answers = engine.generate([longer.plain(), shorter.plain()])
        assert [answer.tokens for answer in answers] == [behind.tokens, sharing.tokens]
        (plain,) = engine.generate([one.plain(2 * BLOCK)])
        assert plain.tokens == exact.tokens
        # Conversely, exact blocks take precedence over chunks.
        (again,) = engine.generate([one.marked(2 * BLOCK)])
        assert again.tokens == exact.tokens
    arguments = connector(posix(store))
    with PrefixEngine(environments.runtime, tmp_path / "exact", arguments, IN_PROCESS) as engine:
        answers = engine.generate([longer.plain(), shorter.plain(), one.plain(2 * BLOCK)])
        assert [answer.tokens for answer in answers] == [behind.tokens, sharing.tokens, exact.tokens]


def test_what_the_question_selects_is_exact_if_it_is_all(
    environments: Environments, reference: PrefixEngine, tmp_path: Path
) -> None:
    """In steps that compute all of the tokens behind the stretch, or some, for one request or two."""
    wanted = [answer.tokens for answer in reference.generate([each.plain() for each in ORDERS])]
    with blending(environments, tmp_path / "engine", tmp_path / "store", **ALL_ASKED) as engine:
        store_chunks(engine)
        for one, tokens in zip(ORDERS, wanted, strict=True):
            engine.reset()
            (answer,) = engine.generate([one.marked()])
            assert answer.tokens == tokens
        engine.reset()
        answers = engine.generate([each.marked() for each in ORDERS])
        assert [answer.tokens for answer in answers] == wanted
    assert "[UCM.Blend]" not in engine.log


@pytest.mark.newest_only
def test_two_workers(environments: Environments, tmp_path: Path) -> None:
    """Each has its own heads and chunks; they must agree on what to compute, or all-reduces would hang."""
    from tests.e2e.prefix_models import SHARED, write_tiny_model  # noqa: PLC0415 - needs the build's packages

    model = write_tiny_model(environments.runtime, "shared", SHARED)
    two = {"model": str(model), "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with blending(environments, tmp_path / "engine", tmp_path / "store", two, **ALL) as engine:
        # With a separate salt, so that no other request hits these blocks.
        wanted = engine.generate([{**each.plain(), "salt": "exact"} for each in ORDERS])
        store_chunks(engine)
        before = engine.counters()
        answers = engine.generate([each.marked() for each in ORDERS])
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        assert engine.counters()[COMPUTED] - before[COMPUTED] > sum(map(len, CHUNKS.values()))


@pytest.mark.newest_only
@pytest.mark.parametrize("settings", [ALL, ALL_ASKED], ids=["edges", "question"])
def test_a_compiled_model(environments: Environments, tmp_path: Path, settings: dict[str, Any]) -> None:
    """vLLM's default: it has no guards, so tokens of another dtype than the runner's were read as other tokens."""
    compiled = {"enforce_eager": False}
    with blending(environments, tmp_path / "engine", tmp_path / "store", compiled, **settings) as engine:
        wanted = engine.generate([{**each.plain(), "salt": "exact"} for each in ORDERS[:2]])
        store_chunks(engine)
        before = engine.counters()
        answers = engine.generate([each.marked() for each in ORDERS[:2]])
        after = engine.counters()
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        assert after[COMPUTED] > before[COMPUTED]
        assert not after[GATE_FAILURES]
        assert "[UCM.Blend]" not in engine.log


@pytest.mark.newest_only
def test_what_it_loses_is_what_the_table_says(environments: Environments) -> None:
    """Uses a model that can fail: split records need edges, references to other chunks what the question reads."""
    from tests.e2e.blend.asking import FULL, NAIVE, WAYS, ask  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.blend.task import CHUNK  # noqa: PLC0415 - likewise

    wrong_base = {"select": "edges", "edge_tokens": 8, "wrong_table": True}
    chosen = (NAIVE, "edges 8", "question 15%", "all recomputed", FULL)
    ways = {
        **{name: WAYS[name] for name in chosen[:-1]},
        "wrong": wrong_base,
        "refused": wrong_base,
        FULL: WAYS[FULL],
    }
    chunks, questions = 4, 24
    results = ask(environments.runtime, chunks, questions, ways)
    full = results[FULL]
    assert full.accuracy == {"inside": 1.0, "split": 1.0, "reference": 1.0}
    assert results["all recomputed"].answers == full.answers
    assert results[NAIVE].reused > 0.8 * questions * chunks * CHUNK, results[NAIVE]
    assert results[NAIVE].accuracy["inside"] == 1.0
    assert results[NAIVE].accuracy["split"] < 0.5
    assert results[NAIVE].accuracy["reference"] < 0.5
    assert results["edges 8"].accuracy["split"] == 1.0
    assert results["edges 8"].accuracy["reference"] < 0.5
    assert results["edges 8"].share < 0.15
    assert results["question 15%"].accuracy == full.accuracy
    assert results["question 15%"].share < 0.25
    # Wrongly rotated keys are detected and recomputed; then the model is refused.
    assert results["wrong"].answers == full.answers
    assert results["wrong"].gate_failures
    assert results["refused"].answers == full.answers
    assert not results["refused"].gate_failures
    assert not results["refused"].reused
