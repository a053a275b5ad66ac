"""The example of a patch moved to an overlay: its hooks and connector in a real engine, together with UCM's hooks."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import Run, run_engine
from tests.e2e.environment import WHEELS, Environment, beside
from tests.e2e.install_vllm import ENVIRONMENTS
from tests.e2e.model import VOCABULARY
from tests.e2e.processes import IN_PROCESS
from tests.e2e.workload import BLOCK
from tests.examples import EXAMPLES, registry_of
from transforms.pipeline.build import build_overlay
from transforms.pipeline.package import build_runtime, build_wheel
from transforms.pipeline.product import compose
from transforms.registry import REGISTRY
from ucm.sparse.probe import read_reports

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: One of less than a block, which is not stored; one whose last block is not fetched, because one token is computed.
LENGTHS = (20, 100, 128, 150)
FETCHED = ((0, 20), (96, 100), (96, 128), (128, 150))
ANSWER = 12


def prompts() -> dict[str, Any]:
    source = random.Random("early")  # noqa: S311 - prompts, no secrets
    params = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    tokens = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return {"prompts": [[{"prompt": prompt, "params": params}] for prompt in tokens]}


@pytest.fixture(scope="module")
def composed(release: str) -> Environment:
    """vLLM with the reviewed overlay that has UCM's rules and then the example's."""
    out = WHEELS / f"{release}-early-kv"
    built = build_overlay(release, product=compose(REGISTRY, registry_of("early_kv")), out=out).wheel
    wheels = [built, build_runtime(out), build_wheel(EXAMPLES / "early_kv", out)]
    return beside(release, ENVIRONMENTS / f"vllm-{release}-early-kv", wheels)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


def run(environment: Environment, place: Path, directory: Path, **switches: str) -> Run:
    """Run an engine with the example's connector, and the Probe, which counts UCM's hooks."""
    place.mkdir(parents=True)
    connector = {
        "kv_connector": "EarlyKVConnector",
        "kv_connector_module_path": "early_kv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"directory": str(directory)},
    }
    probe = {"ucm_sparse_config": {"Probe": {"report_dir": str(place / "probe")}}}
    engine = {"kv_transfer_config": connector, "additional_config": probe, "max_num_batched_tokens": 512}
    return run_engine(environment, place, engine=engine, switches={**IN_PROCESS, **switches}, batches=prompts())


@pytest.fixture(scope="module")
def cold(composed: Environment, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(composed, tmp_path_factory.mktemp("cold") / "engine", directory)


def fetched(done: Run) -> list[tuple[int, int]]:
    assert done.code == 0, done.log[-4000:]
    told = [line.partition("early KV: fetched ")[2].split() for line in done.log.splitlines() if "early KV:" in line]
    return [(int(words[0]), int(words[3])) for words in told]


def test_what_another_engine_computed_is_fetched_and_not_computed(
    composed: Environment, cold: Run, directory: Path, tmp_path: Path
) -> None:
    assert fetched(cold) == [(0, length) for length in LENGTHS]
    assert len(list(directory.iterdir())) == sum(length // BLOCK for length in LENGTHS)
    warm = run(composed, tmp_path / "engine", directory)
    assert fetched(warm) == list(FETCHED)
    assert warm.tokens == cold.tokens
    (report,) = read_reports(tmp_path / "engine" / "probe")
    assert report.counts["request_freed"] == len(LENGTHS)
    assert report.counts["execute_begin"] >= len(LENGTHS) * ANSWER


def test_what_was_fetched_is_what_is_read(composed: Environment, cold: Run, directory: Path, tmp_path: Path) -> None:
    """Each prompt gets the blocks of another one; a truncated block and everything after it are computed."""
    other = tmp_path / "blocks"
    other.mkdir()
    assert cold.code == 0
    files = sorted(directory.iterdir(), key=lambda path: path.name)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        (other / path.name).write_bytes(content)
    mixed = run(composed, tmp_path / "mixed", other)
    assert fetched(mixed) == list(FETCHED)
    assert mixed.tokens["prompts"][0] == cold.tokens["prompts"][0]
    assert mixed.tokens["prompts"][1:] != cold.tokens["prompts"][1:]
    for path in files:
        (other / path.name).write_bytes(path.read_bytes()[:-100])
    cut = run(composed, tmp_path / "cut", other)
    assert fetched(cut) == [(0, length) for length in LENGTHS]
    assert cut.tokens == cold.tokens


def test_without_its_overlay_it_says_so(environments: Environments, tmp_path: Path) -> None:
    place = tmp_path / "engine"
    path = os.pathsep.join((str(place / "plugin"), str(EXAMPLES / "early_kv")))
    done = run(environments.overlay, place, tmp_path / "blocks", PYTHONPATH=path)
    assert done.code != 0
    assert "before_update_states was not called; install early-kv-vllm-overlay" in done.log
