"""Engines that run the same phases: plain ones, and ones with a connector or a sparse method, on either runner.

The phases cause every kind of step, with a cache so small that requests preempt each other. Each engine is one process,
and runs once. V2 needs Triton, whose kernels are interpreted here (`tests.e2e.environment.with_triton`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tests.e2e.engines import Engine, Record, run_engines
from tests.e2e.environment import with_triton, with_triton_and_overlay
from tests.e2e.prefix_engine import connector, posix
from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
LONGEST = 320
#: One request of the greatest length, and one block more.
ENGINE = {"max_model_len": LONGEST, "num_gpu_blocks_override": LONGEST // BLOCK + 2}
CROWD, ABORTED = "crowd", "aborted"
#: Sampled with the runner's own random generator, which differs between V1 and V2.
SEEDED = "seeded"
#: Two chunks of a prompt, each alone; then both in a prompt without a known exact prefix.
CHUNKS, ORDERED = "chunks", "ordered"
#: Its tokens up to the last full block of its chunks.
BLENDED = 160
#: The phases that an engine with a connector repeats.
AGAIN = ("boundary", "chunked", "prefix", CROWD)


def phases() -> dict[str, list[list[Request]]]:
    """Return the batches of each phase; a batch is submitted when the previous one has ended."""
    shared = prompt(5 * BLOCK, "shared")
    cut = [{**request(prompt(60 + n, "cut"), 60), "abort_after": 2 + 3 * n} for n in range(3)]
    texts = [prompt(length, CHUNKS) for length in (70, 90)]
    apart = [request(text, 1, extra_args=_marked([0, len(text)])) for text in texts]
    both = [*prompt(9, ORDERED), *texts[1], *texts[0], *prompt(30, ORDERED)]
    return {
        CHUNKS: [[one] for one in apart],
        "short": [[request(prompt(n, "short"), 6) for n in (1, 2, 20)]],
        "boundary": [[request(prompt(n, "boundary"), 4) for n in (30, 31, 32, 33)]],
        "chunked": [[request(prompt(n, "chunked"), 10) for n in (150, 180)], [request(prompt(300, "chunked"), 14)]],
        "prefix": [[request(shared, 4)], [request([*shared, *prompt(n, "prefix")], 10) for n in (1, BLOCK, 70)]],
        # Together they fit up to the end of these blocks, which each reaches after some steps.
        CROWD: [[request(prompt(86 + 3 * n, "crowd"), 16) for n in range(3)]],
        SEEDED: [[request(prompt(30, f"seeded {n}"), 8, temperature=0.8, seed=n) for n in range(3)]],
        ABORTED: [[*cut, request(prompt(90, "not aborted"), 14)]],
        ORDERED: [[request(both, 8, extra_args=_marked([9, 99], [99, 169]))]],
    }


def _marked(*chunks: list[int]) -> dict[str, Any]:
    """Return chunk marks, which only `BlendConnector` uses."""
    return {"kv_transfer_params": {"ucm_chunks": list(chunks)}}


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        v2: Whether to use the V2 runner.
        overlay: The installed overlay's hooks: those of shipped features, or all; empty for no overlay.
        method: A sparse method's name and options; ``{}`` is replaced by a directory.
        connector: The connector's class; empty for none. With one, `AGAIN` is repeated when the engine's
            own prefix cache is empty.
        settings: Further settings of the connector.
        several: Whether the engine has several processes.
    """

    v2: bool = True
    overlay: Literal["", "shipped", "all"] = "shipped"
    method: dict[str, dict[str, Any]] | None = None
    connector: str = ""
    settings: dict[str, Any] | None = None
    several: bool = False


_STORE = {"pipeline": "Posix", "directories": ["{}"]}
_SMALL = {"token_budget": 128, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 1}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "BlockTopK": {"BlockTopK": _SMALL},
    "SinkWindow": {"SinkWindow": {"sink_tokens": 4, "window_tokens": 64}},
    "ESA": {"ESA": {"token_budget": 64, "sink_tokens": 4, "window_tokens": 64, "store": _STORE}},
    "ReRoPE": {"ReRoPE": {"window": 80}},
}
#: Methods that do all of their work but leave nothing out.
FULL: dict[str, dict[str, dict[str, Any]]] = {
    "BlockTopK": {"checked_topk:CheckedTopK": METHODS["BlockTopK"]["BlockTopK"]},
    "SinkWindow": {"SinkWindow": {"window_tokens": LONGEST}},
    "ESA": {"eager_esa:EagerESA": {"token_budget": LONGEST, "sink_tokens": 1, "window_tokens": 1, "store": _STORE}},
    "ReRoPE": {"ReRoPE": {"window": LONGEST}},
}
#: All blended tokens are recomputed, so no token changes.
_ALL_RECOMPUTED = {"select": "edges", "edge_tokens": LONGEST, "min_tokens": BLOCK}
CONNECTORS = {"direct": "UCMDirectConnector", "layer-wise": "UCMLayerWiseConnector", "mock": "UCMMockConnector"}
#: The scenarios, by default with the V2 runner.
SCENARIOS = {
    "V1": Scenario(v2=False, overlay=""),
    "plain": Scenario(overlay=""),
    "Probe": Scenario(overlay="all", method={"Probe": {"report_dir": "{}"}}),
    **{f"{name} full": Scenario(method=method) for name, method in FULL.items()},
    **{f"{name} V1": Scenario(v2=False, method=method) for name, method in METHODS.items()},
    **{name: Scenario(method=method) for name, method in METHODS.items()},
    **{name: Scenario(connector=found) for name, found in CONNECTORS.items() if name != "mock"},
    "mock": Scenario(connector=CONNECTORS["mock"], settings={"hit_ratio": 0.5}),
    "blend": Scenario(connector="BlendConnector", settings={"blend": _ALL_RECOMPUTED}),
}


#: The same for a release without a V2 runner on the CPU. Some (0.12.0) do not start with a connector and statistics
#: if scheduler and worker are in one process.
V1_SCENARIOS = {
    name: replace(scenario, v2=False, several=bool(scenario.connector))
    for name, scenario in SCENARIOS.items()
    if name not in {"V1", *(f"{method} V1" for method in METHODS)}
}


class Runs:
    """Some scenarios of one release; all scenarios of an environment run on the first use of one.

    Args:
        environments: The release's environments.
        directory: The directory of their files.
        scenarios: The scenarios, by name.
    """

    def __init__(self, environments: Environments, directory: Path, scenarios: Mapping[str, Scenario]) -> None:
        self._environments = environments
        self._scenarios = scenarios
        self._directory = directory
        self._known: dict[tuple[bool, str], dict[str, Record]] = {}

    def __getitem__(self, name: str) -> Record:
        key = self._scenarios[name].v2, self._scenarios[name].overlay
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key][name]

    def directory(self, name: str) -> Path:
        """Return the directory that replaces ``{}`` in a scenario."""
        return self._directory / name.replace(" ", "-")

    def environment(self, overlay: str, *, v2: bool) -> Environment:
        """Return an engine's environment."""
        known = self._environments
        if v2 and overlay:
            return with_triton_and_overlay(known.release, all_hooks=overlay == "all")
        if v2:
            return with_triton(known.release)
        return {"": known.plain, "shipped": known.overlay, "all": known.all_hooks}[overlay]

    def _run(self, v2: bool, overlay: str) -> dict[str, Record]:
        engines = {
            name: self._engine(name, scenario)
            for name, scenario in self._scenarios.items()
            if (scenario.v2, scenario.overlay) == (v2, overlay)
        }
        directory = self._directory / f"V{1 + v2} {overlay}"
        return run_engines(self.environment(overlay, v2=v2), directory, engines, V2 if v2 else {})

    def _engine(self, name: str, scenario: Scenario) -> Engine:
        own = self.directory(name)
        own.mkdir(mode=0o700)
        arguments: dict[str, Any] = {**ENGINE}
        if scenario.method:
            arguments["additional_config"] = {"ucm_sparse_config": _filled(scenario.method, str(own))}
        if scenario.connector:
            arguments |= connector(posix(own), scenario.connector, **(scenario.settings or {}))
        again = {name: batches for name, batches in phases().items() if scenario.connector and name in AGAIN}
        return Engine(arguments, phases(), again, SEVERAL if scenario.several else {})


def _filled(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, directory) for item in value]
    return directory if value == "{}" else value
