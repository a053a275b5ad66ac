"""Block top-k in real engines: with a full budget the tokens equal dense ones, with a small one it reads fewer blocks.

The workload mixes dense and sparse requests, prompts in chunks, prefix hits, preemption with
resumption, and requests that start and end while others run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.scenarios import ONE_REQUEST
from tests.e2e.sparse_runs import prompts, run_sparse

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.engine import Run
    from tests.e2e.prefix_engine import Answer
    from tests.e2e.scenarios import Environments, Runs

pytestmark = pytest.mark.e2e

#: Blocks are of 32 tokens: one of sinks, two recent ones, one to choose.
SMALL = {"token_budget": 128, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 1}
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"GSAOnDevice": {**SMALL, "token_budget": 768}},
    "checked": {"checked_topk:CheckedTopK": SMALL},
    "small": {"BlockTopK": SMALL},
}
SUMMARY = re.compile(
    r"\[UCM\.Sparse\] \w+ restricted (\d+) decodes in (\d+) steps: (\d+) of (\d+) blocks read \([\d.]+%\), "
    r"(\d+) representatives made, (\d+) requests dense after (\d+) failures"
)


#: Room for sinks and recent blocks, but none to choose.
TOO_SMALL = {"BlockTopK": {**SMALL, "token_budget": 127}}


@pytest.fixture(scope="module")
def engines(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The engines; two run in separate processes, as by default. All are compared with plain vLLM."""
    directory: Path = tmp_path_factory.mktemp("block-topk")
    environment = runs.environments.overlay
    found = {
        name: run_sparse(environment, directory / name, method, in_process=not name.startswith("checked"))
        for name, method in ENGINES.items()
    }
    for run in found.values():
        assert run.code == 0, run.log[-4000:]
    return {"dense": runs["plain"], **found}


def last_summary(run: Run) -> list[int]:
    """Return decodes, steps, blocks read, blocks held, representatives, failed requests, failures."""
    return [int(number) for number in SUMMARY.findall(run.log)[-1]]


def test_a_full_budget_gives_a_dense_engines_tokens(engines: dict[str, Run]) -> None:
    assert engines["full"].tokens == engines["dense"].tokens
    assert prompts() >= 40
    assert not SUMMARY.search(engines["full"].log)


def test_all_of_the_work_changes_no_token_where_everything_is_read(engines: dict[str, Run]) -> None:
    """Representatives are made, blocks scored and tables restricted; a stale representative counts as a failure."""
    run = engines["checked"]
    assert "scored slowly" not in run.log
    assert run.tokens == engines["dense"].tokens
    assert "stale" not in run.log
    assert "AssertionError" not in run.log
    assert last_summary(run)[0] > 200


def test_the_workload_is_what_it_is_said_to_be(engines: dict[str, Run]) -> None:
    counters = {name: phase["counters"] for name, phase in engines["checked"].phases.items()}
    assert counters["preempted"]["vllm:num_preemptions"] > 0
    assert counters["prefix"]["vllm:prefix_cache_hits"] > 0
    assert engines["checked"].about["chunked_prefill"]


def test_requests_of_a_failed_step_end_densely_and_the_others_go_on(engines: dict[str, Run]) -> None:
    """Three steps fail for one cause: it is logged once, counted each time, and later requests are sparse again."""
    run = engines["checked"]
    told = [line for line in run.log.splitlines() if "CheckedTopK failed in" in line]
    assert len(told) == 1
    assert "model.layers.3." in told[0]
    assert "requests are dense from here on: RuntimeError: a failure on purpose" in told[0]
    _, steps, _, _, _, requests, failures = last_summary(run)
    assert failures == 3
    assert 3 <= requests < prompts()
    assert steps >= 128


def test_a_small_budget_reads_fewer_blocks(engines: dict[str, Run]) -> None:
    decodes, _, read, held, made, _, failures = last_summary(engines["small"])
    assert read == 3 * 4 * decodes, "three layers, four blocks each"
    assert read < held
    assert made > 0
    assert failures == 0


def test_a_small_budget_changes_tokens_but_not_those_before_it_applies(engines: dict[str, Run]) -> None:
    """Prompts are dense, so first tokens are the same; requests within the budget are the same to their end."""
    dense, small = engines["dense"].tokens, engines["small"].tokens
    assert small["short"] == dense["short"]
    for name, batch in dense.items():
        if name != "preempted":  # a resumed request recomputes its tokens from its prompt on
            assert [tokens[0] for tokens in small[name]] == [tokens[0] for tokens in batch]
    assert small["chunked"] != dense["chunked"]


def test_an_engine_that_cannot_be_served_does_not_start(environments: Environments, tmp_path: Path) -> None:
    run = run_sparse(environments.overlay, tmp_path / "refused", TOO_SMALL, batches=ONE_REQUEST)
    assert run.code != 0
    assert not run.phases
    assert "a budget of 127 tokens leaves no block of 32 to choose" in run.log
    assert "where: ucm_sparse_config.BlockTopK.token_budget" in run.log


@pytest.mark.parametrize("name", ["Gemma 3", pytest.param("GPT-OSS", marks=pytest.mark.newest_only)])
def test_only_layers_without_a_window_are_restricted(environments: Environments, tmp_path: Path, name: str) -> None:
    """A model with several KV-cache groups; GPT-OSS has learned sinks as well, which every row keeps."""
    from tests.e2e.prefix_models import several_groups  # noqa: PLC0415 - only this test needs it

    engine, _ = several_groups(environments.overlay, name)
    methods = {"dense": None, "checked": {"checked_topk:CheckedTopK": SMALL}, "small": {"BlockTopK": SMALL}}
    found = {
        name: run_sparse(environments.overlay, tmp_path / name, method, engine=engine)
        for name, method in methods.items()
    }
    for run in found.values():
        assert run.code == 0, run.log[-4000:]
    assert found["checked"].tokens == found["dense"].tokens
    assert "AssertionError" not in found["checked"].log
    assert found["small"].tokens != found["dense"].tokens
    _, _, read, held, *_, failures = last_summary(found["small"])
    assert (read < held, failures) == (True, 0)


@pytest.mark.newest_only  # on the CPU, vLLM 0.27.1 cannot run Mamba's convolution where it caches states
def test_only_the_attention_of_a_model_with_recurrent_layers_is_restricted(
    environments: Environments, tmp_path: Path
) -> None:
    """Beside the connector, which stores attention and states: answers from memory, and from the store after a reset.

    Blocks are of 160 tokens: one of sinks, two recent ones, one to choose.
    """
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - only this test needs these
    from tests.e2e.prefix_models import RECURRENT, RECURRENT_ENGINE, STATE_BLOCK, write_tiny_model  # noqa: PLC0415
    from tests.e2e.prefix_workload import prompt, request  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS, INSIDE  # noqa: PLC0415

    model = write_tiny_model(environments.overlay, "recurrent", RECURRENT)
    engine = {"model": str(model), **RECURRENT_ENGINE, "max_model_len": 2048}
    lengths = (50, 3 * STATE_BLOCK, 9 * STATE_BLOCK + 30, 11 * STATE_BLOCK - 7)
    batch = [request(prompt(length, "beside states"), 40) for length in lengths]
    switches = {**IN_PROCESS, "PYTHONPATH": str(INSIDE)}

    def answer(name: str, **arguments: Any) -> tuple[list[list[Answer]], str]:
        with PrefixEngine(environments.overlay, tmp_path / name, {**engine, **arguments}, switches) as started:
            answers = [started.generate(batch)]
            if "kv_transfer_config" in arguments:
                started.settle()
            assert started.reset()
            answers.append(started.generate(batch))
        return answers, started.log

    def sparse(method: str) -> dict[str, Any]:
        return {"additional_config": {"ucm_sparse_config": {method: {**SMALL, "token_budget": 4 * STATE_BLOCK}}}}

    dense, _ = answer("dense")
    store = connector(posix(tmp_path / "store"))
    checked, checked_log = answer("checked", **sparse("checked_topk:CheckedTopK"), **store)
    small, small_log = answer("small", **sparse("BlockTopK"), **store)
    tokens = [one.tokens for one in dense[0]]
    assert [[one.tokens for one in answers] for answers in (*dense, *checked)] == [tokens] * 4
    assert "AssertionError" not in checked_log
    stored = [(length - 1) // STATE_BLOCK * STATE_BLOCK for length in lengths]
    assert [[one.cached for one in answers] for answers in (*checked, *small)] == [[0] * len(batch), *[stored] * 3]
    assert [one.tokens for one in small[0]] == [one.tokens for one in small[1]] != tokens
    assert [one.tokens for one in small[0][:2]] == tokens[:2], "within the budget"
    decodes, _, read, held, made, _, failures = (int(number) for number in SUMMARY.findall(small_log)[-1])
    assert (read, failures) == (2 * 4 * decodes, 0), "two layers, four blocks each"
    assert decodes > 0 < made
    assert read < held / 2
    assert "[UCM.Sparse] BlockTopK is active on the worker side" in small_log


def test_summaries_are_allocated_at_the_start_from_the_kv_caches_memory(engines: dict[str, Run]) -> None:
    log = engines["small"].log
    taken = log.index("for the KV cache of a worker, BlockTopK takes")
    assert taken < log.index("BlockTopK: summaries of blocks take") < log.index("run BlockTopK as the scheduler does")


def test_both_names_are_one_method(engines: dict[str, Run]) -> None:
    assert "[UCM.Sparse] GSAOnDevice is active on the worker side" in engines["full"].log
    assert "[UCM.Sparse] BlockTopK is active on the scheduler side" in engines["small"].log
