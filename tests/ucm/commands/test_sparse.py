"""`ucm sparse probe` without an engine: its arguments, prompts and output.

`tests/e2e/test_sparse_probe.py` runs it on a real engine.
"""

from __future__ import annotations

import json
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
        (["--max-tokens", "0"], "--max-tokens and --every must be at least 1"),
        (["--every", "0"], "--max-tokens and --every must be at least 1"),
        (["--engine-args", '{"enforce_eager": false, "model": "a"}'], "sets enforce_eager, model itself"),
        (["--prompts", "missing.jsonl"], "the file with prompts cannot be read"),
    ],
)
def test_a_wrong_argument_is_one_error(
    prompts: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    code = cli.main(["sparse", "probe", "--model", "model", "--prompts", str(prompts), *arguments])
    assert (code, what in (told := capsys.readouterr()).err) == (cli.USAGE, True), told.err


@pytest.mark.parametrize(("given", "what"), [("{", "not JSON"), ("[]", "write a JSON object")])
def test_engine_arguments_are_a_json_object(
    prompts: Path, capsys: pytest.CaptureFixture[str], given: str, what: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sparse", "probe", "--model", "model", "--prompts", str(prompts), "--engine-args", given])
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
    lines = sparse_command.lines_of({"model": "m", "prompts": 3, "lengths": [600, 9031], "layers": layers})
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
    found = {"model": "m", "prompts": 1, "lengths": [9, 9], "layers": {"model.layers.0.attn": layer()}}
    assert any("every budget covers the whole context" in line for line in sparse_command.lines_of(found))


def test_nothing_measured_is_a_failure(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: dict[str, Any] = {"lengths": None, "layers": {}}
    monkeypatch.setattr(sparse_command, "_measure", lambda options, arguments, prompts: [nothing])
    arguments = ["sparse", "probe", "--model", "model", "--prompts", str(prompts)]
    assert cli.main(arguments) == 1
    assert "Nothing was measured" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"model": "model", "prompts": 2, "lengths": None, "layers": {}}
