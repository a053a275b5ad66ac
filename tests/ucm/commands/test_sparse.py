"""`ucm sparse probe` without an engine: its arguments, prompts and output.

`tests/e2e/test_sparse_probe.py` runs it on a real engine.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ucm import cli
from ucm.commands import sparse as sparse_command
from ucm.errors import UcmError

if TYPE_CHECKING:
    from pathlib import Path


def layer(samples: int = 2, **kept: float) -> dict[str, Any]:
    """Return a layer as `LayerMasses.as_data` does, with one budget."""
    return {
        "samples": samples,
        "kept": {"0.1": kept} if kept else {},
        "counted": {"0.1": samples} if kept else {},
        "needed": {"0.9": 0.25, "0.99": 0.5},
        "worst": {"0.9": 0.375, "0.99": 0.75},
    }


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n\n{"prompt_token_ids": [1, 2]}\n', encoding="utf-8")
    return file


def test_prompts_are_texts_or_token_ids(prompts: Path) -> None:
    assert sparse_command.read_prompts(prompts) == [{"prompt": "Once upon a time"}, {"prompt_token_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "there are no prompts"),
        ("\n\n", "there are no prompts"),
        ("hello", "not JSON"),
        ('"hello"', "not a prompt"),
        ('{"prompt": ""}', "not a prompt"),
        ('{"prompt_token_ids": []}', "not a prompt"),
        ('{"prompt_token_ids": [1, -2]}', "not a prompt"),
        ('{"prompt_token_ids": [true]}', "not a prompt"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "not a prompt"),
    ],
)
def test_a_file_that_holds_no_prompts_is_one_error(tmp_path: Path, content: str, what: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UcmError, match=what) as caught:
        sparse_command.read_prompts(file)
    assert str(file) in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--budgets", "10"], "--budgets must be shares of the context above 0 and at most 1, not 10.0"),
        (["--budgets", "0.1", "0"], "not 0.1 0.0"),
        (["--engine-args", '{"worker_extension_cls": "a", "model": "a"}'], "sets model, worker_extension_cls itself"),
        (["--engine-args", '{"enforce_eager": false}'], "the measurement needs enforce_eager: true"),
        (["--prompts", "missing.jsonl"], "the file with prompts cannot be read"),
    ],
)
def test_a_wrong_argument_is_one_error(
    prompts: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    code = cli.main(["sparse", "probe", "--model", "model", "--prompts", str(prompts), *arguments])
    assert (code, what in (told := capsys.readouterr()).err) == (cli.USAGE, True), told.err


@pytest.mark.parametrize(
    ("option", "given", "what"),
    [
        ("--engine-args", "{", "not JSON"),
        ("--engine-args", "[]", "write a JSON object"),
        ("--max-tokens", "0", "argument --max-tokens: must be a whole number of at least 1"),
        ("--every", "0", "argument --every: must be a whole number of at least 1"),
    ],
)
def test_an_argument_of_another_kind_is_refused(
    prompts: Path, capsys: pytest.CaptureFixture[str], option: str, given: str, what: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sparse", "probe", "--model", "model", "--prompts", str(prompts), option, given])
    assert (ended.value.code, what in capsys.readouterr().err) == (cli.USAGE, True)


def test_workers_with_other_layers_are_merged() -> None:
    shared = {"model.layers.2.attn": layer(oracle=0.75)}
    first = {"lengths": [10, 20], "layers": {**shared, "model.layers.10.attn": layer()}}
    second = {"lengths": [9, 21], "layers": shared}
    found = sparse_command.merged([first, second, {"lengths": None, "layers": {}}])
    assert found["lengths"] == [9, 21]
    assert list(found["layers"]) == ["model.layers.2.attn", "model.layers.10.attn"]
    assert found["layers"]["model.layers.2.attn"] == shared["model.layers.2.attn"]


def test_a_line_per_budget_and_one_per_layer() -> None:
    layers = {
        "model.layers.0.attn": layer(oracle=1.0, bounds=0.5),
        "model.layers.1.attn": layer(oracle=0.75, bounds=0.25),
    }
    lines = sparse_command.lines_of(
        {"model": "m", "prompts": 3, "skipped": 0, "lengths": [600, 9031], "layers": layers}
    )
    assert lines[0] == ("m: 2 layers, 3 prompts, contexts of 600 to 9,031 tokens, 2 decode steps measured per layer")
    assert [line.split() for line in lines[3:5]] == [
        ["budget", "oracle", "bounds"],
        ["10%", "87.5%", "(75.0%)", "37.5%", "(25.0%)"],
    ]
    assert [line.split() for line in lines[7:]] == [
        ["layer", "90%", "99%"],
        ["0", "25.0%", "(37.5%)", "50.0%", "(75.0%)"],
        ["1", "25.0%", "(37.5%)", "50.0%", "(75.0%)"],
    ]


def test_budgets_that_cover_every_context_are_told() -> None:
    found = {"model": "m", "prompts": 1, "skipped": 0, "lengths": [9, 9], "layers": {"model.layers.0.attn": layer()}}
    assert any("every budget covers the whole context" in line for line in sparse_command.lines_of(found))


def test_nothing_measured_is_a_failure(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: dict[str, Any] = {"lengths": None, "layers": {}}
    monkeypatch.setattr(sparse_command, "_measure", lambda options, arguments, prompts: ([nothing], 0))
    arguments = ["sparse", "probe", "--model", "model", "--prompts", str(prompts)]
    assert cli.main(arguments) == 1
    assert "Nothing was measured" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "model": "model",
        "prompts": 2,
        "skipped": 0,
        "lengths": None,
        "layers": {},
    }


class Engine:
    """Stands in for vLLM's LLM with a model of eight tokens and a tokenizer that makes one of each word."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.prompts = arguments, list[Any]()
        model_config = SimpleNamespace(max_model_len=8)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
        made.append(self)

    def get_tokenizer(self) -> Engine:
        return self

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def generate(self, prompts: list[Any], sampling: object, *, use_tqdm: bool) -> None:
        if any(len(prompt["prompt_token_ids"]) >= 8 for prompt in prompts):
            raise ValueError("The decoder prompt is longer than the maximum model length of 8.")
        self.prompts = prompts

    def collective_rpc(self, name: str) -> list[dict[str, Any]]:
        layers = {"model.layers.0.attn": layer(oracle=1.0)} if self.prompts else {}
        return [{"report": {"lengths": [3, 4] if layers else None, "layers": layers}}]


made: list[Engine] = []


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    monkeypatch.setattr(sparse_command, "quieten", lambda: None)


@pytest.mark.usefixtures("vllm")
def test_a_prompt_that_is_too_long_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a bb ccc"}, {"prompt": "w " * 8}, {"prompt_token_ids": [1] * 7}, {"prompt_token_ids": [1] * 8}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    arguments = ["sparse", "probe", "--model", "model", "--prompts", str(file)]
    assert cli.main(arguments) == 0
    assert made[0].prompts == [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [1] * 7}]
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("model: 1 layers, 2 prompts, ")
    assert told[1] == "2 of the prompts skipped: too long for the model"
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["skipped"]) == (2, 2)


@pytest.mark.usefixtures("vllm")
def test_prompts_that_are_all_too_long_are_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "w " * 9}), encoding="utf-8")
    assert cli.main(["sparse", "probe", "--model", "model", "--prompts", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Nothing was measured: give shorter prompts, or raise max_model_len with --engine-args.",
        "1 of the prompts skipped: too long for the model",
    ]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("given", [{"enforce_eager": True, "seed": 1}, {"seed": 1}], ids=["named", "not-named"])
def test_the_engine_is_eager_whether_it_is_asked_or_not(prompts: Path, given: dict[str, Any]) -> None:
    arguments = ["--model", "model", "--prompts", str(prompts), "--engine-args", json.dumps(given)]
    assert cli.main(["sparse", "probe", *arguments]) == 0
    assert (made[0].arguments["enforce_eager"], made[0].arguments["seed"]) == (True, 1)
