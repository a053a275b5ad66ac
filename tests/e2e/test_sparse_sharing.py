"""KV that a sparse method shaped is found under the same settings alone, also by vLLM's own connectors.

vLLM's OffloadingConnector keeps its blocks in files, which engines with other settings find: ReRoPE with two windows,
and none. ExampleConnector hashes tokens itself, and is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.engines import Engine, Record, run_engines
from tests.e2e.model import write_model
from tests.e2e.prefix_workload import prompt, request

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

ANSWER = 16
PROMPTS = [prompt(length, "sharing") for length in (160, 241, 500)]
PHASES = {"alone": [[request(tokens, ANSWER, ignore_eos=True)] for tokens in PROMPTS]}
EXAMPLE = "ExampleConnector"


def method(window: int | None, **additional: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for ReRoPE with a window; None for dense attention."""
    sparse = {"ucm_sparse_config": {"ReRoPE": {"window": window}}} if window else {}
    return {"additional_config": {**sparse, **additional}, "num_gpu_blocks_override": 200}


def files(directory: Path) -> dict[str, Any]:
    """Return the settings of vLLM's own connector with a tier of files, and a plain copy as its worker."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "ttft_offloading",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(directory)}],
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "engine_id": "sharing",
    }


def example(directory: Path) -> dict[str, Any]:
    return {
        "kv_connector": EXAMPLE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def both(directory: Path) -> dict[str, Any]:
    offloading = {key: value for key, value in files(directory).items() if key != "engine_id"}  # it gives them its own
    inner = {"connectors": [offloading, example(directory)]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": inner}


class Runs:
    """The engines' records: without a connector, then one after the other on one directory."""

    def __init__(self, environments: Environments, directory: Path) -> None:
        directory.mkdir()
        self._environment, self._directory = environments.overlay, directory
        self._tier = directory / "tier"
        self._tier.mkdir()
        self.records: dict[str, Record] = {}
        for name, arguments in {"64": method(64), "dense": method(None)}.items():
            self.run(f"reference {name}", arguments)
        for name in ("128", "64", "dense", "128 again", "dense again"):
            window = name.partition(" ")[0]
            own = method(int(window) if window.isdigit() else None)
            self.run(name, {**own, "kv_transfer_config": files(self._tier)})
        for name, connector in {EXAMPLE: example(self._tier), "both": both(self._tier)}.items():
            self.run(name, {**method(128), "kv_transfer_config": connector})
        vouched = {**method(128, ucm_trusted_connectors=[EXAMPLE]), "kv_transfer_config": example(directory / "own")}
        self.run("vouched", vouched)

    def run(self, name: str, arguments: dict[str, Any]) -> None:
        engine = Engine({"model": str(write_model(MODEL)), **arguments}, PHASES)
        directory = self._directory / "engines"
        directory.mkdir(exist_ok=True)
        self.records |= run_engines(self._environment, directory, {name: engine}, {"VLLM_CPU_KVCACHE_SPACE": "1"})

    def tokens(self, name: str) -> list[list[int]]:
        record = self.records[name]
        assert record.phases, record.log[-4000:]
        return record.tokens["alone"]

    def cached(self, name: str) -> list[int]:
        """Return how many tokens of each prompt were found."""
        return [int(answer.cached or 0) for answer in self.records[name].phases["alone"].answers]


@pytest.fixture(scope="module")
def runs(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(environments, tmp_path_factory.mktemp("sharing") / "runs")


def test_engines_with_other_settings_find_nothing_and_answer_as_alone(runs: Runs) -> None:
    assert runs.cached("128") == runs.cached("64") == runs.cached("dense") == [0, 0, 0]
    assert runs.tokens("64") == runs.tokens("reference 64")
    assert runs.tokens("dense") == runs.tokens("reference dense")
    assert runs.tokens("128") not in (runs.tokens("64"), runs.tokens("dense"))


@pytest.mark.parametrize("name", ["128", "dense"])
def test_engines_with_the_same_settings_find_their_blocks(runs: Runs, name: str) -> None:
    assert all(runs.cached(f"{name} again"))
    assert runs.tokens(f"{name} again") == runs.tokens(name)


@pytest.mark.parametrize("name", [EXAMPLE, "both"])
def test_a_connector_that_hashes_tokens_itself_is_refused_by_name(runs: Runs, name: str) -> None:
    record = runs.records[name]
    assert not record.phases
    assert f"{EXAMPLE} does not find KV by vLLM's block hashes" in record.log
    assert f'"ucm_trusted_connectors": ["{EXAMPLE}"]' in record.log


def test_an_operator_can_vouch_for_it(runs: Runs) -> None:
    assert runs.tokens("vouched") == runs.tokens("128")
