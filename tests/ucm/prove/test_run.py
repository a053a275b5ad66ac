"""A whole proof, with engines that report what is written down."""

from __future__ import annotations

import json
import re
import tempfile
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.prove.engines import GROUPS, PROMPTS, Engines
from ucm.engine_process import FAILED, TIMED_OUT, Ended
from ucm.errors import ConfigError, UcmError
from ucm.prove.command import Request, full_budget, parse_sparse, pool_size
from ucm.prove.judge import Verdict
from ucm.prove.report import as_data, render
from ucm.prove.run import SPARSE, Proof, prove, why
from ucm.prove.store import ProofStore

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSAL = """\
(EngineCore pid=7) ERROR 11-26 [UCM.Config] refused: kv_cache_dtype 'turboquant' is not supported
(EngineCore pid=7)   where: --kv-cache-dtype
(EngineCore pid=7)   to do: leave it out
(EngineCore pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""
MEMORY = """\
(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory; temporary files lie beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return directory


def proof(model: Path, engines: Engines, **asked: Any) -> Proof:
    return prove(Request(model, **asked), run=engines, clock=lambda: 0.0)


def verdicts(found: Proof) -> dict[str, Verdict]:
    return {row.name: row.verdict for row in found.rows}


def cells(line: str) -> list[str]:
    """The cells of a line of the table."""
    return re.split(r"  +", line)


def change(engine: str, phase: str, how: Callable[[dict[str, Any]], object]) -> Engines:
    """Engines of which one reports something else in one phase."""

    def changed(name: str, phases: list[dict[str, Any]]) -> None:
        for one in phases:
            if (name, one["phase"]) == (engine, phase):
                how(one)

    return Engines(changed)


def test_all_answers_are_the_same(model: Path) -> None:
    found = proof(model, Engines())
    assert set(verdicts(found).values()) == {Verdict.SAME}
    assert found.code == 0
    lines = render(found)
    assert lines[-1] == "All answers with UCM are those without it."
    assert "device       NVIDIA H100" in lines
    ran = "model runner V1 (vllm.v1.worker.gpu_model_runner), FlashAttentionBackend, graphs FULL_AND_PIECEWISE"
    assert f"what ran     {ran}, blocks of 16 tokens (without UCM, with UCM, restart)" in lines
    row = next(line for line in lines if line.startswith("16 at a time, after a reset"))
    assert "12 of 12 same" in row
    assert row.endswith("4 KiB loaded, 4 aborted, 3 preemptions")
    assert cells(row)[1] == "same"
    assert any(line.startswith("first token, loaded after a restart") and "250 ms" in line for line in lines)


def test_the_result_as_json(model: Path) -> None:
    data = json.loads(json.dumps(as_data(proof(model, Engines())), allow_nan=False))
    assert (data["schema"], data["code"], data["device"]) == (1, 0, "NVIDIA H100")
    assert [row["verdict"] for row in data["rows"]] == ["same"] * 6
    assert data["rows"][4]["preemptions"] == 3
    assert data["prompts"]["alone"] == [100, 99, 98]


@pytest.mark.parametrize("phase", ["cold", "reset", "crowd", "crowd reset"])
def test_an_engine_that_returns_one_wrong_token(model: Path, phase: str) -> None:
    engines = change("first", phase, lambda one: one["answers"][2].update(tokens=[2, 4]))
    found = proof(model, engines)
    assert list(verdicts(found).values()).count(Verdict.DIFFERS) == 1
    assert found.code == 1
    lines = render(found)
    assert lines[-1].startswith("Answers with UCM DIFFER from those without it: ")
    assert any("request 2: token 1 of the answer is 4 and not 3" in line for line in lines)
    json.dumps(as_data(found), allow_nan=False)


def test_a_wrong_token_counts_more_than_what_was_not_judged(model: Path) -> None:
    engines = change("first", "cold", lambda one: one["answers"][0].update(tokens=[0, 4]))
    engines.outcomes = {"restart": (FAILED, MEMORY)}
    assert proof(model, engines).code == 1


def test_tokens_that_requests_share_are_not_taken_for_loaded_ones(model: Path) -> None:
    """Requests of a crowd find them in vLLM's own cache; some releases drop UCM's counts of some steps."""
    for phase, verdict in (("crowd reset", Verdict.NOT_JUDGED), ("reset", Verdict.SAME)):
        engines = change("first", phase, lambda one: one["counters"].update(load_bytes=0))
        row = "16 at a time, after a reset" if phase.startswith("crowd") else "one at a time, after a reset"
        assert verdicts(proof(model, engines))[row] is verdict


@pytest.mark.parametrize(("cached", "code"), [(16, 3), (32, 0)])
def test_without_counts_a_crowd_must_find_more_than_without_ucm(model: Path, cached: int, code: int) -> None:
    def changed(name: str, phases: list[dict[str, Any]]) -> None:
        for one in phases:
            found = cached if (name, one["phase"]) == ("first", "crowd reset") else 16
            for number, answer in enumerate(one["answers"] if one["phase"].startswith("crowd") else ()):
                if answer is not None:
                    answer["cached"] = found if number == 15 else 0
            if (name, one["phase"]) == ("first", "crowd reset"):
                del one["counters"]["load_bytes"]

    assert proof(model, Engines(changed)).code == code


def test_nothing_was_loaded_after_a_restart(model: Path) -> None:
    def nothing(one: dict[str, Any]) -> None:
        one["counters"].pop("load_bytes")
        for answer in one["answers"]:
            answer["cached"] = 0

    engines = change("restart", "restart", nothing)
    found = proof(model, engines)
    assert verdicts(found)["one at a time, after a restart"] is Verdict.NOT_JUDGED
    assert found.code == 3
    assert render(found)[-1].endswith("not judged: one at a time, after a restart")


def test_that_no_request_was_preempted_is_said(model: Path) -> None:
    engines = change("first", "crowd", lambda one: one["counters"].update(preemptions=0))
    found = proof(model, engines)
    assert found.code == 0
    assert "16 at a time, cold: vLLM counted no preemption, so answers after one were not judged there" in found.notes


def test_blocks_that_failed_are_said(model: Path) -> None:
    engines = change("first", "reset", lambda one: one["counters"].update(failures=2))
    assert any("2 blocks that it could not save or load" in note for note in proof(model, engines).notes)


def test_another_graph_mode_makes_requests_alone_comparable_as_batches_only(model: Path) -> None:
    """Else a kernel's rounding would be blamed on UCM."""
    undecided = [{0: -0.1, 99: -3.0}, {1: -1.0, 50: -1.01}]
    other = [{0: -0.1, 99: -3.0}, {1: -1.01, 50: -1.0}]

    def changed(name: str, phases: list[dict[str, Any]]) -> None:
        for one in phases:
            if "crowd" not in one["phase"]:
                one["answers"][0]["logprobs"] = undecided
            if one["phase"] == "crowd reversed":
                one["answers"][0]["logprobs"][0][0] = -0.15
            if name == "first" and one["phase"] == "cold":
                one["answers"][0] = {**one["answers"][0], "tokens": [0, 50], "logprobs": other}

    class Other(Engines):
        def __call__(self, module: str, directory: Path, *rest: Any) -> Ended:
            found = super().__call__(module, directory, *rest)
            file = directory / "result.json"
            if directory.name == "first":
                file.write_text(file.read_text().replace("FULL_AND_PIECEWISE", "PIECEWISE"))
            return found

    blamed, excused = proof(model, Engines(changed)), proof(model, Other(changed))
    assert verdicts(blamed)["one at a time, cold"] is Verdict.DIFFERS
    assert verdicts(excused)["one at a time, cold"] is Verdict.NOISE
    assert any(note.startswith("the engines with UCM compute in another way") for note in excused.notes)
    assert render(excused)[-1].endswith(", but for what differs between batches without UCM as well.")


@pytest.mark.parametrize(
    ("engine", "output", "reason"),
    [
        ("first", REFUSAL, "UCM refused: kv_cache_dtype 'turboquant' is not supported where: --kv-cache-dtype to do: "),
        ("plain", MEMORY, "the engine without UCM: out of memory: torch.OutOfMemoryError: CUDA out of memory."),
        ("plain", "ValueError: no such architecture\n", "the engine without UCM: vLLM failed: ValueError: no such "),
        ("plain", "", "the engine without UCM: vLLM failed: it printed no error"),
    ],
)
def test_why_an_engine_did_not_run(model: Path, engine: str, output: str, reason: str) -> None:
    found = proof(model, Engines(outcomes={engine: (FAILED, output)}))
    assert found.code == 3
    assert set(verdicts(found).values()) == {Verdict.NOT_JUDGED}
    assert {row.reason[: len(reason)] for row in found.rows} == {reason}
    assert render(found)[-1] == "Nothing could be judged."


def test_what_did_not_fit_into_the_time_is_not_judged(model: Path) -> None:
    found = proof(model, Engines(outcomes={"restart": (TIMED_OUT, "")}))
    assert found.code == 3
    missing = [name for name, verdict in verdicts(found).items() if verdict is Verdict.NOT_JUDGED]
    assert missing == ["one at a time, after a restart", "16 at a time, after a restart"]
    assert "give more --minutes" in found.rows[2].reason


def test_no_engine_is_started_when_the_time_is_over(model: Path) -> None:
    now = [0.0]
    engines = Engines(spend=lambda: now.__setitem__(0, now[0] + 110))
    found = prove(Request(model, minutes=2.0), run=engines, clock=lambda: now[0])
    assert list(engines.plans) == ["plain"]
    assert found.code == 3
    assert {row.reason for row in found.rows} == {"no time was left: give more --minutes"}
    assert sum(engines.seconds.values()) <= 2 * 60


def test_what_was_done_before_the_time_was_over_is_judged(model: Path) -> None:
    class Late(Engines):
        def __call__(self, module: str, directory: Path, *rest: Any) -> Ended:
            found = super().__call__(module, directory, *rest)
            if directory.name != "first":
                return found
            file = directory / "result.json"
            file.write_text("\n".join(file.read_text().splitlines()[:3]) + '\n{"phase": "res')
            return Ended(TIMED_OUT, directory)

    found = proof(model, Late())
    assert verdicts(found)["one at a time, cold"] is Verdict.SAME
    assert verdicts(found)["one at a time, after a reset"] is Verdict.NOT_JUDGED


def test_nothing_is_left_behind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    config = tmp_path / "ucm_config.yaml"
    config.write_text(f"store: {{pipeline: Posix, directories: {tmp_path / 'store'}}}\n")
    proof(model, Engines(), config=config)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        proof(model, Engines(spend=interrupted), config=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "store", "ucm_config.yaml"]
    assert not list((tmp_path / "store").iterdir())


def test_what_an_interrupted_engine_stored_on_a_server_is_deleted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ucm_config.yaml"
    config.write_text("store: {pipeline: Redis, tiers: {Redis: {address: '127.0.0.1:1'}}}\n")
    deleted: list[tuple[set[str], set[str]]] = []

    def remove(self: ProofStore, tags: set[str]) -> list[str]:
        deleted.append((self.namespaces, tags))
        return []

    monkeypatch.setattr(ProofStore, "remove", remove)

    class Interrupted(Engines):
        def __call__(self, module: str, directory: Path, *rest: Any) -> Ended:
            found = super().__call__(module, directory, *rest)
            if directory.name == "first":
                (directory / "output.log").write_text("INFO [UCM.Connector] namespace model-1, 1 store to look up\n")
                raise KeyboardInterrupt
            return found

    with pytest.raises(KeyboardInterrupt):
        proof(model, Interrupted(), config=config)
    assert deleted == [({"model-1"}, {"tp0of1-pp0of1-g0-b16"})]


def test_the_engines_get_what_the_user_says_and_a_small_kv_cache(model: Path) -> None:
    engines = Engines()
    proof(model, engines, engine={"tensor_parallel_size": 2, "max_num_seqs": 32}, longest=512)
    assert list(engines.plans) == ["plain", "first", "restart"]
    plain, first = engines.plans["plain"]["engine"], engines.plans["first"]["engine"]
    assert (plain["tensor_parallel_size"], plain["max_num_seqs"], plain["seed"]) == (2, 32, 0)
    assert plain["max_model_len"] == 512 + 64
    assert "kv_transfer_config" not in plain
    assert "num_gpu_blocks_override" not in plain
    assert first["kv_transfer_config"]["kv_connector"] == "UCMConnector"
    assert first["num_gpu_blocks_override"] == pool_size(PROMPTS, GROUPS, 576)


@pytest.mark.parametrize(("sizes", "each"), [([16], 13), ([16, 32], 13 + 7), ([128], 2)])
def test_a_pool_is_full_of_the_first_prompts_of_a_crowd(sizes: list[int], each: int) -> None:
    prompts = {"alone": [[0] * 600] * 3, "crowd": [[0] * 205] * 16}
    size = pool_size(prompts, [{"tokens": tokens} for tokens in sizes], 700)
    assert size % each == 2 % each
    assert 3 * sum(632 // tokens for tokens in sizes) < size < 16 * 2 * each


def test_a_sparse_method_gets_a_full_budget(model: Path) -> None:
    engines = Engines()
    found = proof(model, engines, sparse=("BlockTopK", {}))
    method = engines.plans["sparse-full-budget"]["engine"]["additional_config"]["ucm_sparse_config"]
    assert method == {"BlockTopK": {"token_budget": 2 * (2048 + 64)}}
    assert verdicts(found)[f"one at a time, {SPARSE}"] is Verdict.SAME


def test_a_method_that_left_something_out_is_not_judged(model: Path) -> None:
    class Restricting(Engines):
        def __call__(self, module: str, directory: Path, *rest: Any) -> Ended:
            found = super().__call__(module, directory, *rest)
            file = directory / "result.json"
            file.write_text(file.read_text().replace('"requests.restricted": 0', '"requests.restricted": 4'))
            return found

    found = proof(model, Restricting(), sparse=("SinkWindow", {}))
    assert verdicts(found)[f"16 at a time, {SPARSE}"] is Verdict.NOT_JUDGED
    assert "the budget is not full: of 4 requests" in found.rows[-1].reason


def test_a_method_that_did_not_run_is_not_judged(model: Path) -> None:
    """Without an overlay vLLM ignores the setting, and its dense answers would prove nothing."""

    class Ignoring(Engines):
        def __call__(self, module: str, directory: Path, *rest: Any) -> Ended:
            found = super().__call__(module, directory, *rest)
            file = directory / "result.json"
            file.write_text(file.read_text().replace('"method": "BlockTopK"', '"method": ""'))
            return found

    found = proof(model, Ignoring(), sparse=("BlockTopK", {}))
    assert found.rows[-1].verdict is Verdict.NOT_JUDGED
    assert found.rows[-1].reason.startswith("the sparse method did not run: install the overlay")


def test_a_method_that_offloads_gets_a_store_of_its_own() -> None:
    store = {"pipeline": "Posix", "directories": ["/somewhere"]}
    assert full_budget("ESA", {}, 100, store) == {"token_budget": 200, "window_tokens": 200, "store": store}


def test_a_method_without_a_budget_needs_its_options() -> None:
    with pytest.raises(UcmError, match="no budget that could be made full"):
        full_budget("Probe", {}, 100, {})
    assert full_budget("Probe", {"report_dir": "x"}, 100, {}) == {"report_dir": "x"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("BlockTopK", ("BlockTopK", {})),
        ("mine.module:Method", ("mine.module:Method", {})),
        ('{"LeakyReRoPE": {"leak": 2}}', ("LeakyReRoPE", {"leak": 2})),
    ],
)
def test_a_method_and_its_options(text: str, found: tuple[str, dict[str, Any]]) -> None:
    assert parse_sparse(text) == found


@pytest.mark.parametrize("text", ["", "BlockTopk", "{", "{}", '{"A": {}, "B": {}}', '{"A": 1}'])
def test_what_is_no_method(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse_sparse(text)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"model": Path("/nowhere")}, "/nowhere/config.json cannot be read"),
        ({"engine": {"kv_transfer_config": {}}}, "sets kv_transfer_config itself"),
        ({"engine": {"max_model_len": 100}}, "is too short for a proof"),
        ({"sparse": ("BlockTopk", {})}, "there is no sparse method"),
    ],
)
def test_wrong_requests(model: Path, asked: dict[str, Any], what: str) -> None:
    engines = Engines()
    with pytest.raises(UcmError, match=what):
        prove(Request(**{"model": model, **asked}), run=engines)
    assert not engines.plans


def test_wrong_settings(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "ucm_config.yaml"
    config.write_text("store: {directorys: /x}\n")
    with pytest.raises(ConfigError, match="directorys"):
        proof(model, Engines(), config=config)
    assert not list(tmp_path.glob("ucm-prove-*"))


def test_a_models_configuration_that_cannot_be_read(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(UcmError, match=r"config\.json is not JSON"):
        proof(model, Engines())


def test_the_first_error_of_an_engine_is_the_one_that_tells() -> None:
    lines = ["(Worker) ValueError: the cause", "RuntimeError: Engine core initialization failed. See root cause above."]
    assert why(lines) == "vLLM failed: ValueError: the cause"
    assert why(lines[1:]).endswith("Engine core initialization failed. See root cause above.")
