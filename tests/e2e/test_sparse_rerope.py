"""ReRoPE in real engines: every plain rotary embedding equals a reference, and others are refused.

`test_sparse_company.py` compares answers in any company, after hits, restarts and preemptions, and with two ranks;
`test_v2_runner.py` tests the V2 runner.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import FP8_NEEDS, MODEL
from tests.e2e.engines import Engine, Record, run_engines
from tests.e2e.model import MAX_LENGTH, write_model
from tests.e2e.prefix_workload import prompt, request
from tests.e2e.sparse_runs import run_script, run_sparse

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

WINDOW, ANSWER = 120, 16
METHOD = {"ReRoPE": {"window": WINDOW}}
#: From less than a window to six windows; one ends with it, one crosses it while generating.
PROMPTS = [prompt(length, "rerope") for length in (50, WINDOW - ANSWER, WINDOW - 5, WINDOW, 130, 241, 500, 6 * WINDOW)]
WITHIN = 2


@dataclass(frozen=True)
class Style:
    """A model with some rotary embedding, and the reference's arguments.

    Attributes:
        config: The differences in its configuration.
        reference: Arguments of the reference.
    """

    config: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        """Write the tiny model with this configuration."""
        plain = write_model(MODEL)
        directory.mkdir()
        for file in plain.iterdir():
            if file.name != "config.json":
                (directory / file.name).symlink_to(file)
        config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
        (directory / "config.json").write_text(json.dumps({**config, **self.config}), encoding="utf-8")
        return directory


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ERNIE = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "use_bias": False}
STYLES = {
    "whole": Style(),
    "a part of each head": Style({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, {"rotated": 0.5}),
    "neighbours": Style(ERNIE, {"neighbours": True}),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": MAX_LENGTH}
#: Arguments of ``LLM``, variables, and the expected log text.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "another rotary embedding": (
        {"hf_overrides": {"rope_parameters": YARN, "max_position_embeddings": 2 * MAX_LENGTH}},
        {},
        "the layer's rotary embedding is a YaRNScalingRotaryEmbedding; only a plain one",
    ),
    "a short table": (
        {"max_model_len": 2 * MAX_LENGTH},
        {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        f"start vLLM with --hf-overrides '{{\"max_position_embeddings\": {2 * MAX_LENGTH}}}'",
    ),
    "a quantised cache": ({"kv_cache_dtype": "fp8_e5m2"}, {}, "keys stored as 'fp8_e5m2' cannot be read back"),
}


def with_method(method: dict[str, Any]) -> dict[str, Any]:
    return {"additional_config": {"ucm_sparse_config": method}, "num_gpu_blocks_override": 200}


@pytest.fixture(scope="module")
def records(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    directory = tmp_path_factory.mktemp("rerope")
    # First each prompt alone; then all at once, in chunks.
    alone = [[request(tokens, ANSWER, ignore_eos=True)] for tokens in PROMPTS]
    together = [[request(tokens, ANSWER, ignore_eos=True) for tokens in PROMPTS]]
    engines = {
        name: Engine(
            {**with_method(METHOD), "model": str(style.write(directory / f"model {name}"))},
            {"alone": alone, "together": together},
        )
        for name, style in STYLES.items()
    }
    engines["dense"] = Engine({"num_gpu_blocks_override": 200}, {"alone": alone})
    for name, (arguments, switches, _) in REFUSED.items():
        # One request, for problems that only a running layer reveals.
        engines[name] = Engine({**with_method(METHOD), **arguments}, {"alone": alone[:1]}, switches=switches)
    return run_engines(environments.overlay, directory / "engines", engines, {"VLLM_CPU_KVCACHE_SPACE": "1"})


@pytest.mark.parametrize("name", STYLES)
def test_answers_are_the_reference_s(
    records: dict[str, Record], environments: Environments, tmp_path: Path, name: str
) -> None:
    reference = STYLES[name].reference
    spec = {
        "model": str(write_model(MODEL)),
        "ways": [{**reference, "window": WINDOW}, reference],
        "prompts": PROMPTS,
        "count": ANSWER,
    }
    found, dense = run_script(environments.plain, tmp_path / "reference", "rerope_reference.py", spec)
    record = records[name]
    assert record.phases, record.log[-4000:]
    assert record.tokens == {"alone": found, "together": found}
    assert found[:WITHIN] == dense[:WITHIN]
    assert all(one != other for one, other in zip(found[-3:], dense[-3:], strict=True))


def test_within_the_window_tokens_are_those_of_a_dense_engine(records: dict[str, Record]) -> None:
    assert records["whole"].tokens["alone"][:WITHIN] == records["dense"].tokens["alone"][:WITHIN]


def test_an_engine_in_processes_of_its_own_answers_by_a_compiled_kernel(
    environments: Environments, tmp_path: Path
) -> None:
    """It serves decode steps, torch the chunks of prompts. The other engines here share a process; nothing compiles."""
    run = run_sparse(environments.overlay, tmp_path / "engine", METHOD, in_process=False)
    told = re.findall(r"put the attention of (\d+) tokens together, (\d+) of them by a compiled kernel", run.log)
    assert told, run.log[-4000:]
    assert any(int(compiled) > 0 for _, compiled in told)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_before_the_first_request(records: dict[str, Record], name: str) -> None:
    record = records[name]
    assert not record.phases
    if "fp8" in str(REFUSED[name][0]) and FP8_NEEDS in record.log:
        pytest.skip(f"this processor cannot store KV so, and vLLM refuses first: {FP8_NEEDS}")
    assert REFUSED[name][2] in record.log
