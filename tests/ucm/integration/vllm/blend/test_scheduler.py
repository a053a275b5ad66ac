"""Which requests are blended and how far, and which chunks are saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.integration.vllm.blend.scene import BLOCK, Request, Scene, chained, tokens
from ucm.blend import PIECE, Chunk
from ucm.integration.vllm.blend.scheduler import BlendPlan
from ucm.integration.vllm.connector.staging import Query

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.integration.vllm.connector.staging import Lookup

A, B, C, QUESTION = tokens(1, 70), tokens(2, 40), tokens(3, 50), tokens(9, 10)
PROMPT = [*B, *A, *C, *QUESTION]
MARKS = [[0, 40], [40, 110], [110, 160]]


@pytest.fixture
def scene(clock: SimulatedClock, tmp_path: Path) -> Iterator[Scene]:
    with Scene(clock, tmp_path) as made:
        made.begin()
        yield made


def request(name: str = "r", **more: Any) -> Request:
    return Request(name, list(PROMPT), MARKS, more=more)


def put_all(scene: Scene) -> None:
    for chunk in (A, B, C):
        scene.put(chunk)


def blended(scene: Scene, one: Request, computed: int = 0) -> Any:
    """Return a request's blend, planned in one step."""
    found = scene.matched(one, computed)
    ids = list(range(100, 112))
    assert scene.admit(one, computed, found, ids)
    (blend,) = scene.step((one, ids, computed + found, 10)).blends
    return blend


def test_chunks_in_a_new_order_are_one_hit(scene: Scene) -> None:
    """They are found by their content, whatever preceded them when they were stored (LMCache's issue 4663)."""
    put_all(scene)
    blend = blended(scene, request())
    assert (blend.start, blend.end) == (0, 160)
    assert blend.token_ids == PROMPT[:160]
    assert blend.block_ids == list(range(100, 110))
    assert blend.chunks == [Chunk(0, 40), Chunk(40, 110), Chunk(110, 160)]
    assert [len(places) for places in blend.places] == [1, 2, 1]
    assert len({place for places in blend.places for place in places}) == 4
    assert scene.counted.outcomes == ["blended"]


@pytest.mark.parametrize("computed", range(0, 161, BLOCK))
def test_a_stretch_begins_where_the_exact_prefix_ends(scene: Scene, computed: int) -> None:
    """Even within a chunk, where UCM gives wrong answers (its issues 867 and 906)."""
    put_all(scene)
    one = request()
    found = scene.matched(one, computed)
    assert found == (160 - computed if 160 - computed >= 32 else 0)
    if found:
        ids = list(range(12))
        assert scene.admit(one, computed, found, ids)
        (blend,) = scene.step((one, ids, computed + found, 10)).blends
        assert (blend.start, blend.end) == (computed, 160)
        assert blend.token_ids == PROMPT[computed:160]
        assert all(chunk.end > computed for chunk in blend.chunks)
        assert scene.scheduler.written(BlendPlan([blend])) == set(ids[computed // BLOCK : 10])


@pytest.mark.parametrize(("computed", "tokens", "found"), [(0, 160, 120), (0, 100, 60), (48, 112, 112), (48, 30, 30)])
def test_the_tiers_that_a_stretch_comes_from(scene: Scene, computed: int, tokens: int, found: int) -> None:
    """A gap comes from none."""
    scene.put(A)
    scene.put(C)
    one = request()
    assert scene.matched(one, computed) == 160 - computed
    assert scene.scheduler.tiers(one, tokens) is None
    assert scene.admit(one, computed, 160 - computed, list(range(12)))
    assert scene.scheduler.tiers(one, tokens) == {"posix": found}


@pytest.mark.parametrize("answers", [True, False])
def test_a_store_that_takes_long_to_open_keeps_no_request_waiting(
    clock: SimulatedClock, tmp_path: Path, *, answers: bool
) -> None:
    opens = clock.event()
    with Scene(clock, tmp_path, seconds=10.0) as scene:
        put_all(scene)
        scene.open_late(opens, None if answers else OSError("it is gone"))
        one = request()
        assert scene.scheduler.matched(one, 0, 0) is None
        clock.advance(scene.stager.seconds)
        assert scene.scheduler.matched(one, 0, 0) == 0
        opens.set()
        clock.run_until_idle()
        assert (scene.matched(request("next")) > 0) == answers
        assert scene.counted.outcomes == ["miss", "miss"][: 2 - answers]


def test_once_requests_have_waited_for_a_store_no_further_one_does(clock: SimulatedClock, tmp_path: Path) -> None:
    opens = clock.event()
    with Scene(clock, tmp_path, seconds=2.0) as scene:
        put_all(scene)
        scene.open_late(opens)
        waiting = [request(str(number)) for number in range(3)]
        assert [scene.scheduler.matched(one, 0, 0) for one in waiting] == [None] * 3
        clock.advance(2.0)
        assert [scene.scheduler.matched(one, 0, 0) for one in waiting] == [0] * 3
        assert scene.scheduler.matched(request("next"), 0, 0) == 0
        opens.set()
        clock.run_until_idle()
        assert scene.matched(request("last")) > 0


def test_a_system_that_allows_no_more_threads_ends_no_engine(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scene(clock, tmp_path, seconds=10.0) as scene:
        put_all(scene)
        refuse = create_autospec(clock.thread)
        refuse.return_value.start.side_effect = RuntimeError("can't start new thread")
        monkeypatch.setattr(clock, "thread", refuse)
        scene.begin()
        assert scene.matched(request()) == 0
        assert scene.counted.outcomes == ["miss"]


def test_a_prefix_that_the_same_step_computes_for_another_is_computed_ahead(scene: Scene) -> None:
    """Other requests hit blocks as soon as vLLM allocates them, but a stretch is filled before the forward."""
    put_all(scene)
    shared = list(range(200, 204))
    plain, one = Request("plain", list(PROMPT)), request()
    assert scene.matched(plain, BLOCK) == 0
    plain_ids = [*shared, *range(300, 308)]
    scene.admit(plain, BLOCK, 0, plain_ids)
    found = scene.matched(one, 3 * BLOCK)
    ids = [*shared[:3], *range(103, 112)]
    assert scene.admit(one, 3 * BLOCK, found, ids)
    (blend,) = scene.step((plain, plain_ids, BLOCK, 100), (one, ids, 3 * BLOCK + found, 10)).blends
    assert (blend.unwritten, blend.start, blend.end) == (BLOCK, 3 * BLOCK, 160)
    assert blend.token_ids == PROMPT[BLOCK:160]


def test_a_prefix_that_an_earlier_step_has_computed_is_read(scene: Scene) -> None:
    put_all(scene)
    plain, one = Request("plain", list(PROMPT)), request()
    plain_ids = list(range(200, 212))
    scene.matched(plain, 0)
    scene.admit(plain, 0, 0, plain_ids)
    scene.step((plain, plain_ids, 0, 3 * BLOCK))
    plain.num_computed_tokens = 3 * BLOCK
    found = scene.matched(one, 3 * BLOCK)
    ids = [*plain_ids[:3], *range(103, 112)]
    assert scene.admit(one, 3 * BLOCK, found, ids)
    (blend,) = scene.step((one, ids, 3 * BLOCK + found, 10)).blends
    assert blend.unwritten == blend.start == 3 * BLOCK


def test_an_exact_hit_that_reaches_as_far_wins(scene: Scene) -> None:
    put_all(scene)
    assert scene.matched(request(), 0, exact=160) == 0
    assert scene.matched(request("other"), 0, exact=144) == 0  # not worth it
    assert scene.matched(request("third"), 0, exact=96) == 160


def test_a_chunk_that_is_missing_is_a_gap(scene: Scene) -> None:
    scene.put(A)
    scene.put(C)
    blend = blended(scene, request())
    assert blend.chunks == [Chunk(40, 110), Chunk(110, 160)]
    assert blend.start == 0


def test_a_damaged_chunk_is_a_gap(scene: Scene, tmp_path: Path) -> None:
    """Its bytes are verified before a hit is reported."""
    put_all(scene)
    (key,) = scene.put(B)
    name = key.hex()
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name + path.name == name]
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert blended(scene, request()).chunks == [Chunk(40, 110), Chunk(110, 160)]


def test_a_chunk_that_one_rank_lacks_is_a_gap_for_all(clock: SimulatedClock, tmp_path: Path) -> None:
    with Scene(clock, tmp_path, ranks=2) as scene:
        scene.begin()
        scene.put(A, ranks=(0, 1))
        scene.put(B, ranks=(0,))
        scene.put(C, ranks=(0, 1))
        blend = blended(scene, request())
        assert blend.chunks == [Chunk(40, 110), Chunk(110, 160)]
        assert scene.idle().shares == (0, 8192)


def test_nothing_is_blended_before_all_workers_have_answered(clock: SimulatedClock, tmp_path: Path) -> None:
    with Scene(clock, tmp_path) as scene:
        put_all(scene)
        assert scene.scheduler.matched(request(), 0, 0) == 0
        assert scene.counted.outcomes == []
        scene.begin()
        assert scene.matched(request("next")) == 160


def test_a_model_that_a_worker_refused(scene: Scene) -> None:
    """LMCache's issue 4666: some models generate garbage without any error."""
    put_all(scene)
    blended(scene, request())
    scene.scheduler.off = "gate"
    assert scene.matched(request("next")) == 0
    assert scene.matched(request("third")) == 0
    assert scene.counted.outcomes == ["blended", "gate", "gate"]


# Names


def test_blended_blocks_have_names_of_their_own(scene: Scene) -> None:
    put_all(scene)
    one, other = request(), request("other")
    exact = list(one.block_hashes)
    blended(scene, one, computed=48)
    assert one.block_hashes[:3] == exact[:3]
    assert not set(one.block_hashes[3:]) & set(exact)
    assert other.block_hashes == exact
    blended(scene, other, computed=48)
    assert not set(one.block_hashes[3:]) & set(other.block_hashes)


def test_blocks_of_generated_tokens_follow_from_them(scene: Scene) -> None:
    put_all(scene)
    one = request()
    exact = Request("exact", list(PROMPT))
    blended(scene, one)
    for each in (one, exact):
        each.generate(tokens(7, 40))
    assert len(one.block_hashes) == len(exact.block_hashes) == 13
    assert not set(one.block_hashes) & set(exact.block_hashes)
    assert one.block_hashes[-1] == chained(one.block_hashes[-2], one.all_token_ids[192:208])


def test_a_request_that_got_no_blocks_and_then_is_not_blended_has_its_exact_names(scene: Scene) -> None:
    put_all(scene)
    one = request()
    exact = list(one.block_hashes)
    assert scene.matched(one) == 160
    assert one.block_hashes != exact
    assert scene.matched(one, 0, exact=160) == 0
    assert one.block_hashes == exact
    assert not scene.admit(one, 0, 160, list(range(12)))


def test_a_preempted_request_keeps_its_names(scene: Scene) -> None:
    """Its KV may still be in vLLM's cache under these; KV computed after it must not get exact hashes."""
    put_all(scene)
    one = request()
    exact = list(one.block_hashes)
    blended(scene, one, computed=48)
    own = list(one.block_hashes)
    one.generate(tokens(7, 20))
    # It finds all of its own blocks again.
    assert scene.matched(one, 160) == 0
    assert one.block_hashes[: len(own)] == own
    # It finds none, and is blended from its beginning.
    assert scene.matched(one, 0) == 160
    assert one.block_hashes[3 : len(own)] == own[3:]
    assert not set(one.block_hashes) & set(exact)
    # It is computed completely: the hashes stay, although its KV is exact now.
    scene.scheduler.start_anew()
    assert scene.matched(one, 0) == 0
    assert not set(one.block_hashes) & set(exact)


def test_a_request_that_waits_for_room_counts_once(scene: Scene) -> None:
    one = request()
    for _ in range(3):
        assert scene.matched(one) == 0
    assert scene.counted.outcomes == ["miss"]


# Freed blocks


def test_an_aborted_request_holds_nothing(scene: Scene) -> None:
    put_all(scene)
    for number in range(3):
        one = request(f"aborted {number}")
        assert scene.matched(one) == 160
        if number:
            scene.admit(one, 0, 160, list(range(12)))
        scene.scheduler.finished(one)
        assert not scene.step().blends
    keys = scene.put(A)
    rows = scene.stager.submit(Query((keys,), 0, len(keys), len(keys))).rows[0]
    assert [row.users for row in rows.values()] == [1, 1]


def test_staged_chunks_are_held_until_the_step_has_run(scene: Scene) -> None:
    put_all(scene)
    one = request()
    assert scene.matched(one) == 160
    rows = [row for lookup in scene.scheduler._requests["r"].lookups for row in lookup.rows[0].values()]
    assert len(rows) == sum(-(-len(chunk) // PIECE) for chunk in (A, B, C))
    scene.admit(one, 0, 160, list(range(12)))
    scene.step((one, list(range(12)), 160, 10))
    assert all(row.users == 1 for row in rows)
    scene.idle()
    assert all(row.users == 0 for row in rows)


def test_two_requests_in_a_step(scene: Scene) -> None:
    put_all(scene)
    one, other = request(), request("other")
    plans = []
    for each, ids in ((one, list(range(12))), (other, list(range(20, 32)))):
        assert scene.admit(each, 0, scene.matched(each), ids)
        plans.append((each, ids, 160, 10))
    blends = scene.step(*plans).blends
    assert [blend.request_id for blend in blends] == ["r", "other"]
    assert blends[0].places == blends[1].places
    assert blends[0].block_ids != blends[1].block_ids


# Saves


def test_the_chunk_that_begins_a_prompt_is_saved_once_it_is_computed(scene: Scene) -> None:
    one = Request("r", [*A, *B], [[0, 70], [70, 110]])
    ids = list(range(7))
    assert scene.matched(one) == 0
    scene.step((one, ids, 0, 64))
    assert not scene.saves
    one.num_computed_tokens = 64
    scene.go_on(one, 46)
    (save,) = scene.saves
    assert (save.depths, save.block_ids) == ([64, 70], ids[:5])
    assert save.keys == scene.put(A)
    assert len(save.keys) == -(-70 // PIECE)
    one.num_computed_tokens = 110
    scene.go_on(one, 1)
    assert not scene.saves


def test_what_vllm_had_itself_is_saved_too(scene: Scene) -> None:
    one = Request("r", [*A, *B], [[0, 70]])
    scene.matched(one, 96)
    scene.step((one, list(range(7)), 96, 14))
    assert scene.saves


def test_what_vllm_may_have_found_under_another_contents_name_is_not_saved(scene: Scene) -> None:
    """For instance behind prompt embeddings, in a release whose block hashes leave them out."""
    one = Request("r", [*A, *B], [[0, 70]])
    scene.excluded.append(one)
    scene.matched(one, 96)
    scene.step((one, list(range(7)), 96, 14))
    assert not scene.saves


def test_a_chunk_behind_others_is_not_saved(scene: Scene) -> None:
    """Its KV depends on them."""
    one = Request("r", [*A, *B], [[70, 110]])
    scene.matched(one)
    scene.step((one, list(range(7)), 0, 110))
    assert not scene.saves


def test_a_question_goes_to_the_workers_as_far_as_the_step_computes_it(clock: SimulatedClock, tmp_path: Path) -> None:
    with Scene(clock, tmp_path, select="question") as scene:
        scene.begin()
        put_all(scene)
        for name, number in (("whole", 10), ("part", 4)):
            one, ids = request(name), list(range(12))
            assert scene.admit(one, 0, scene.matched(one), ids)
            (blend,) = scene.step((one, ids, 160, number)).blends
            assert (blend.end, blend.token_ids, blend.question) == (160, PROMPT[:160], QUESTION[:number])
            # The workers write its KV before the step's forward writes it again.
            assert blend.block_ids == ids[:11]
            assert scene.scheduler.written(BlendPlan([blend])) == set(ids[:11])


def test_a_blended_request_saves_nothing(scene: Scene) -> None:
    scene.put(A)
    scene.put(C)
    one = request()
    ids = list(range(12))
    found = scene.matched(one)
    assert scene.admit(one, 0, found, ids)
    plan = scene.step((one, ids, found, 10))
    assert plan.blends
    assert not scene.saves


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"lora_request": object()}, "lora"),
        ({"prompt_embeds": [[0.0]]}, "prompt_embeds"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming"),
    ],
)
def test_requests_whose_kv_is_not_of_their_tokens_alone(scene: Scene, more: dict[str, Any], outcome: str) -> None:
    put_all(scene)
    one = request(**more)
    assert scene.matched(one) == 0
    assert scene.counted.outcomes == [outcome]
    scene.step((one, list(range(12)), 0, 170))
    assert not scene.saves


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=1)}, "prompt_logprobs"),
    ],
)
def test_requests_whose_tokens_must_all_be_computed(scene: Scene, more: dict[str, Any], outcome: str) -> None:
    put_all(scene)
    one = request(**more)
    assert scene.matched(one) == 0
    assert scene.counted.outcomes == [outcome]
    scene.step((one, list(range(12)), 0, 170))
    assert scene.saves


def test_another_tenants_chunks_are_not_found(scene: Scene) -> None:
    scene.put(A, salt="one")
    prompt = [*A, *QUESTION]
    assert scene.matched(Request("r", prompt, [[0, 70]], more={"cache_salt": "two"})) == 0
    assert scene.matched(Request("s", prompt, [[0, 70]], more={"cache_salt": "one"})) == 64


def test_marks_that_cannot_be_followed_are_ignored(scene: Scene) -> None:
    put_all(scene)
    one = Request("r", list(PROMPT), [[0, 4000]])
    assert scene.matched(one) == 0
    assert scene.counted.outcomes == ["marks"]


def test_separators_in_place_of_marks(clock: SimulatedClock, tmp_path: Path) -> None:
    with Scene(clock, tmp_path, chunk_end_token_ids=(5,)) as scene:
        scene.begin()
        scene.put([*A, 5])
        scene.put([*B, 5])
        assert scene.matched(Request("r", [*B, 5, *A, 5, *QUESTION])) == 112
        # Marks take precedence, even if they mark no chunks.
        assert scene.matched(Request("s", [*B, 5, *A, 5, *QUESTION], [])) == 0


def test_after_a_start_anew_nothing_is_found(scene: Scene) -> None:
    put_all(scene)
    scene.scheduler.start_anew()
    assert scene.matched(request()) == 0


def test_a_store_that_does_not_answer_holds_nobody_up(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = clock.event()
    with Scene(clock, tmp_path) as scene:
        scene.begin()
        put_all(scene)
        held, submit, lookups = scene.stores[0].lookup_on_prefix, scene.stager.submit, []

        def stuck(keys: Any) -> int:
            answers.wait()
            return held(keys)

        def submitted(query: Query) -> Lookup:
            lookups.append(submit(query))
            return lookups[-1]

        monkeypatch.setattr(scene.stores[0], "lookup_on_prefix", stuck)
        monkeypatch.setattr(scene.stager, "submit", submitted)
        one = request()
        assert scene.scheduler.matched(one, 0, 0) is None
        assert lookups
        clock.advance(scene.stager.seconds - 1)
        assert scene.scheduler.matched(one, 0, 0) is None
        clock.advance(1)
        assert scene.scheduler.matched(one, 0, 0) == 0
        answers.set()
