"""The hooks in model layers all fire on a tiny model of each rewritten family, and change no token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engines import Engine, Record, run_engines
from tests.e2e.model import VOCABULARY, write_tokenizer
from tests.e2e.prefix_models import LATENT_ENGINE, MLA
from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import TOKENS_PER_STEP
from ucm.sparse.probe import METADATA_RECEIVED, read_reports

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

LAYERS = 2
_QWEN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "MLA": {**MLA, "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS},
    "Qwen2": {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "Qwen3": {**_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Qwen3-MoE": {**_QWEN, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
}
ARGUMENTS = {"MLA": LATENT_ENGINE}
QWEN = [name for name in MODELS if name != "MLA"]
ATTENTION = {"attention_begin", "attention_finished"}
IN_LAYERS = {f"{part}_{end}" for part in ("layer", "ffn", "kv_write") for end in ("begin", "finished")}
LATENT = {"mla_begin", "mla_finished"}


def phases() -> dict[str, list[list[Request]]]:
    """Return a prompt in chunks, concurrent ones, and decodes."""
    lengths = (5, 40, TOKENS_PER_STEP + 70)
    return {"some": [[request(prompt(length, "models"), 6) for length in lengths]]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    found = {name: directory / name for name in MODELS}
    for name, made in found.items():
        made.mkdir()
        write_tokenizer(made, VOCABULARY)
        (made / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return found


def engines(models: dict[str, Path], reports: Path | None = None) -> dict[str, Engine]:
    """Return one engine per model, with the Probe if there is a directory for its reports."""
    found = {}
    for name, model in models.items():
        arguments: dict[str, Any] = {"model": str(model), "load_format": "dummy", **ARGUMENTS.get(name, {})}
        if reports is not None:
            arguments["additional_config"] = {"ucm_sparse_config": {"Probe": {"report_dir": str(reports / name)}}}
        found[name] = Engine(arguments, phases())
    return found


@pytest.fixture(scope="module")
def plain(
    environments: Environments, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Record]:
    return run_engines(environments.plain, tmp_path_factory.mktemp("plain") / "engines", engines(models), {})


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def probed(
    environments: Environments, models: dict[str, Path], reports: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Record]:
    directory = tmp_path_factory.mktemp("probed") / "engines"
    return run_engines(environments.all_hooks, directory, engines(models, reports), {})


def counts_of(name: str, probed: dict[str, Record], reports: Path) -> dict[str, int]:
    assert probed[name].phases, probed[name].log[-4000:]
    (report,) = read_reports(reports / name)
    counts = report.counts
    assert counts["execute_begin"] == counts["execute_finished"] > 0
    assert counts["update_states"] == counts[METADATA_RECEIVED] == counts["build_metadata"]
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_vllm(name: str, plain: dict[str, Record], probed: dict[str, Record]) -> None:
    assert plain[name].phases, plain[name].log[-4000:]
    assert probed[name].tokens == plain[name].tokens


@pytest.mark.parametrize("name", QWEN)
def test_each_layer_calls_its_hooks_in_each_forward(name: str, probed: dict[str, Record], reports: Path) -> None:
    counts = counts_of(name, probed, reports)
    inside = ATTENTION | IN_LAYERS
    assert {hook: counts[hook] for hook in inside} == dict.fromkeys(inside, LAYERS * counts["execute_begin"])
    assert not any(counts[hook] for hook in LATENT)


def test_latent_attention_calls_its_hooks_in_each_forward(probed: dict[str, Record], reports: Path) -> None:
    """Once for the operator and once for each half with tokens; the layers of DeepSeek are not rewritten."""
    counts = counts_of("MLA", probed, reports)
    forwards = LAYERS * counts["execute_begin"]
    assert {counts[hook] for hook in ATTENTION} == {forwards}
    assert forwards <= counts["mla_begin"] == counts["mla_finished"] <= 2 * forwards
    assert not any(counts[hook] for hook in IN_LAYERS)
