"""How answers with UCM are judged by those of an engine without it."""

from __future__ import annotations

import math

import pytest

from ucm.prove.judge import (
    Answer,
    Noise,
    Phase,
    Verdict,
    first_difference,
    judge,
    margin_between,
    measure_noise,
    shift_between,
)

EXACT, BATCHES = Noise(), Noise(alone=0.0, batches=0.1)


def answer(*tokens: int, rival: int = 99, gap: float = 2.0, moved: float = 0.0, cached: int = 0) -> Answer:
    """An engine that prefers each of its tokens to a rival by a gap."""
    logprobs = tuple({token: -0.1 + moved, rival: -0.1 - gap + moved} for token in tokens)
    return Answer(tokens, logprobs, cached, 0.5)


def phase(*answers: Answer | None, **counters: float) -> Phase:
    return Phase(answers, 1.0, counters)


def test_equal_answers() -> None:
    row = judge("alone", phase(answer(1, 2), answer(3)), [phase(answer(1, 2), answer(3))], EXACT, exact=True)
    assert (row.verdict, row.requests, row.differences, row.shift) == (Verdict.SAME, 2, (), 0.0)


def test_one_wrong_token_of_many_is_found() -> None:
    plain = phase(*(answer(*range(24)) for _ in range(12)))
    wrong = answer(*range(22), 500, 23)
    row = judge("alone", phase(*plain.answers[:11], wrong), [plain], EXACT, exact=True)
    assert row.verdict is Verdict.DIFFERS
    (found,) = row.differences
    assert (found.request, found.position, found.expected, found.got) == (11, 22, 22, 500)
    assert not found.is_noise
    assert str(found).startswith("request 11: token 22 of the answer is 500 and not 22; the runs preferred theirs by ")


@pytest.mark.parametrize(("gap", "verdict"), [(0.09, Verdict.NOISE), (0.11, Verdict.DIFFERS)])
def test_in_batches_a_token_may_differ_where_both_runs_were_undecided(gap: float, verdict: Verdict) -> None:
    """The noise of 0.1 moves each of two tokens, so two runs together may prefer theirs by 0.2."""
    plain, found = answer(1, 7, rival=8, gap=gap), answer(1, 8, rival=7, gap=gap)
    row = judge("16", phase(found), [phase(plain)], BATCHES, exact=False)
    assert row.verdict is verdict
    assert row.differences[0].margin == pytest.approx(2 * gap)
    assert row.differences[0].allowed == pytest.approx(0.2)


def test_one_at_a_time_the_noise_of_batches_explains_nothing() -> None:
    plain, found = answer(1, 7, rival=8, gap=0.01), answer(1, 8, rival=7, gap=0.01)
    assert judge("alone", phase(found), [phase(plain)], BATCHES, exact=True).verdict is Verdict.DIFFERS


def test_one_at_a_time_another_number_of_computed_tokens_is_another_batch() -> None:
    plain, found = answer(1, 7, rival=8, gap=0.01, cached=128), answer(1, 8, rival=7, gap=0.01, cached=64)
    assert judge("alone", phase(found), [phase(plain)], BATCHES, exact=True).verdict is Verdict.NOISE


def test_a_token_that_the_other_run_does_not_rank_is_never_noise() -> None:
    row = judge("16", phase(answer(1, 8)), [phase(answer(1, 7))], Noise(batches=50.0), exact=False)
    assert row.verdict is Verdict.DIFFERS
    assert row.differences[0].margin == math.inf


def test_a_fault_does_not_hide_behind_tokens_that_stay_the_same() -> None:
    row = judge("16", phase(answer(1, 2, moved=0.5)), [phase(answer(1, 2))], BATCHES, exact=False)
    assert row.verdict is Verdict.DIFFERS
    assert str(row.differences[0]) == (
        "request 0: the tokens are the same, but log-probabilities moved by 0.5; 0.4 would be noise"
    )
    assert judge("16", phase(answer(1, 2, moved=0.3)), [phase(answer(1, 2))], BATCHES, exact=False).verdict is (
        Verdict.SAME
    )


def test_an_answer_may_equal_any_of_the_plain_ones() -> None:
    plain = [phase(answer(1, 2)), phase(answer(1, 3))]
    assert judge("16", phase(answer(1, 3)), plain, BATCHES, exact=False).verdict is Verdict.SAME


def test_a_shorter_answer_differs() -> None:
    row = judge("16", phase(answer(1, 2)), [phase(answer(1, 2, 3))], BATCHES, exact=False)
    assert row.verdict is Verdict.DIFFERS
    assert (row.differences[0].expected, row.differences[0].got) == (3, None)


def test_aborted_requests_are_not_compared() -> None:
    row = judge("16", phase(answer(1), None), [phase(answer(1), answer(2))], EXACT, exact=False)
    assert (row.verdict, row.requests, row.phase and row.phase.aborted) == (Verdict.SAME, 1, 1)


def test_without_an_answer_to_compare_with_nothing_is_judged() -> None:
    row = judge("16", phase(answer(1)), [phase(None)], EXACT, exact=False)
    assert row.verdict is Verdict.NOT_JUDGED


def test_the_noise_is_what_the_plain_engine_does_by_itself() -> None:
    plain = {
        "cold": phase(answer(1), answer(2)),
        "cold again": phase(answer(1, moved=0.01)),
        "hit": phase(answer(1, moved=0.02), answer(2)),
        "hit again": phase(answer(1, moved=0.02), answer(2)),
        "crowd": phase(answer(4, 5, rival=6), None, answer(7)),
        "crowd reversed": phase(answer(4, 6, rival=5), None, answer(7, moved=-0.03)),
    }
    noise = measure_noise(plain)
    assert noise.alone == pytest.approx(0.01)
    # At the first other token, both tokens' log-probabilities are after the same tokens.
    assert noise.batches == pytest.approx(2.0)
    assert (noise.differing, noise.requests) == (1, 2)


def test_what_is_computed_again_after_a_preemption_is_noise() -> None:
    plain = {"crowd": phase(answer(1)), "crowd continued": phase(answer(1, moved=0.3))}
    assert measure_noise(plain).batches == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("dtype", "moved", "verdict"),
    [
        ("bfloat16", 0.009, Verdict.SAME),
        ("bfloat16", 0.17, Verdict.DIFFERS),
        ("float32", 0.009, Verdict.DIFFERS),
        ("float32", 5e-6, Verdict.SAME),
    ],
)
def test_noise_is_at_least_the_resolution_of_the_data_type(dtype: str, moved: float, verdict: Verdict) -> None:
    """A few requests may show none: then SmolLM2 in bfloat16 moved by 0.009 after a preemption, and UCM was blamed."""
    noise = measure_noise({"crowd": phase(answer(1)), "crowd reversed": phase(answer(1))}, dtype)
    assert noise.batches == 0.0
    assert judge("16", phase(answer(1, moved=moved)), [phase(answer(1))], noise, exact=False).verdict is verdict


def test_the_noise_of_an_engine_that_did_not_run() -> None:
    assert measure_noise({}, "float32") == Noise(resolution=2.5e-4)


def test_an_engine_that_computes_no_numbers() -> None:
    row = judge("16", phase(answer(1, moved=math.nan)), [phase(answer(1))], BATCHES, exact=False)
    assert (row.verdict, row.shift) == (Verdict.DIFFERS, math.inf)


def test_what_follows_another_token_is_not_compared() -> None:
    one, other = answer(1, 2, 3), answer(1, 4, 3, moved=9.0)
    assert first_difference(one, other) == 1
    same = Answer(one.tokens, one.logprobs[:2])
    assert shift_between(same, answer(1, 2)) == 0.0
    assert margin_between(one, answer(1), 1) == math.inf


def test_a_token_that_its_own_engine_did_not_compute_is_never_noise() -> None:
    """Both runs prefer the same token by as much, but one returned another."""
    logprobs = ({1: -0.1, 9: -3.0}, {7: -0.1, 9: -3.0})
    wrong, plain = phase(Answer((1, 9), logprobs)), phase(Answer((1, 7), logprobs))
    for exact in (True, False):
        assert judge("alone", wrong, [plain], BATCHES, exact=exact).verdict is Verdict.DIFFERS


def test_a_fault_does_not_hide_before_a_token_that_may_differ() -> None:
    plain = Answer((1, 7), ({1: -0.1, 9: -3.0}, {7: -1.0, 8: -1.01}))
    moved = Answer((1, 8), ({1: -2.1, 9: -3.0}, {7: -1.01, 8: -1.0}))
    row = judge("16", phase(moved), [phase(plain)], BATCHES, exact=False)
    assert row.verdict is Verdict.DIFFERS
    assert str(row.differences[0]).endswith("would be noise; log-probabilities moved by 2 before")


def test_an_engine_without_ucm_that_computes_no_numbers_explains_nothing() -> None:
    plain = {"crowd": phase(answer(1, moved=math.nan)), "crowd reversed": phase(answer(1))}
    row = judge("16", phase(answer(8)), [phase(answer(7))], measure_noise(plain), exact=False)
    assert (row.verdict, row.reason) == (
        Verdict.NOT_JUDGED,
        "the engine without UCM computes log-probabilities that are no numbers",
    )


def test_answers_that_are_missing_are_not_the_same() -> None:
    plain = phase(answer(1), answer(2))
    row = judge("16", phase(answer(1)), [plain], EXACT, exact=False)
    assert (row.verdict, row.reason) == (Verdict.NOT_JUDGED, "the engine answered 1 of 2 requests")
    assert judge("16", phase(answer(3)), [plain], EXACT, exact=False).verdict is Verdict.DIFFERS


def test_answers_without_tokens_say_nothing() -> None:
    row = judge("16", phase(Answer(())), [phase(Answer(()))], EXACT, exact=True)
    assert row.verdict is Verdict.NOT_JUDGED
