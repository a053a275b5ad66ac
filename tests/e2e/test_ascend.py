"""vLLM Ascend on the CPU, in real engines, through both overlays: `nox -s e2e -- 0.23.0`.

torch-npu is a stand-in (`inside/torch_npu`), so nothing here is tested on an NPU. The schedulers run on vLLM's platform
for the CPU; the other tests have vLLM Ascend's whole platform, with torch in the place of kernels
(`inside/npu_on_cpu.py`).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import Run, run_engine, variables
from tests.e2e.model import LAYERS, VOCABULARY
from tests.e2e.prefix_engine import connector, posix
from tests.e2e.processes import IN_PROCESS
from tests.e2e.tests_inside import run_inside
from tests.moved import moved
from ucm.sparse.probe import METADATA_RECEIVED, read_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.environment import Environment

pytestmark = [pytest.mark.e2e, pytest.mark.older]

RELEASE = "0.23.0"
REQUESTS, PROMPT, ANSWER = 4, 60, 80
#: So few blocks of 32 tokens that four requests of up to five blocks preempt each other.
SCARCE: dict[str, Any] = {"num_gpu_blocks_override": 13, "max_model_len": 256, "async_scheduling": False}
#: Each scheduler, as an installed platform would set it up. The first relies on a patch of vLLM's own, which wraps
#: functions that vLLM's overlay hooks. The second does not know an argument of this vLLM's. The third derives from the
#: scheduler that a patch puts in the place of vLLM's. `DraftsRecomputeScheduler` counts a waiting request's tokens as
#: on a node that receives KV and drafts.
PATCHED = {
    "RecomputeScheduler": """\
import vllm_ascend.patch.platform.patch_async_swa_kv_lifetime
from vllm_ascend.core.recompute_scheduler import RecomputeScheduler
""",
    "DraftsRecomputeScheduler": """\
import vllm_ascend.patch.platform.patch_async_swa_kv_lifetime
from vllm_ascend.core import recompute_scheduler

class DraftsRecomputeScheduler(recompute_scheduler.RecomputeScheduler):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.is_mtp_kv_consumer = True
        self.num_spec_tokens = 0
""",
    "SchedulerDynamicBatch": """\
from vllm_ascend.core import scheduler_dynamic_batch

class SchedulerDynamicBatch(scheduler_dynamic_batch.SchedulerDynamicBatch):
    def __init__(self, vllm_config, *args, hash_block_size, **settings):
        vllm_config.scheduler_config.SLO_limits_for_dynamic_batch = -1
        super().__init__(vllm_config, *args, **settings)
""",
    "ProfilingChunkScheduler": """\
import vllm_ascend.patch.platform.patch_balance_schedule
from vllm_ascend.core.scheduler_profiling_chunk import ProfilingChunkScheduler
""",
    "BalanceScheduler": """\
from vllm_ascend.patch.platform.patch_balance_schedule import BalanceScheduler
""",
}
#: The settings that a user of the platform makes.
SETTINGS: dict[str, dict[str, Any]] = {"BalanceScheduler": {"enable_balance_scheduling": True}}
#: It keeps two of the four or five blocks of a request.
ESA: dict[str, Any] = {"ESA": {"token_budget": 32, "sink_tokens": 4, "window_tokens": 32}}
PREEMPTIONS = "vllm:num_preemptions"
ACCOUNTING = "tests/ucm/sparse/accounting/test_accounting.py"
#: The variable that names the scheduler of these tests; `tests/ucm/stepping/vllm_objects.py` needs vLLM.
ANOTHER = "UCM_TEST_SCHEDULER"
BLOCK_TABLE = "vllm_ascend.worker.block_table"
SCHEDULERS = (
    "vllm_ascend.core.recompute_scheduler",
    "vllm_ascend.core.scheduler_dynamic_batch",
    "vllm_ascend.core.scheduler_profiling_chunk",
    "vllm_ascend.patch.platform.patch_balance_schedule",
)


@pytest.fixture(scope="module")
def ascend(release: str) -> Environment:
    if release != RELEASE:
        pytest.skip(f"vLLM Ascend's schedulers are run on {RELEASE}: nox -s e2e -- {RELEASE}")
    from tests.e2e.ascend import with_ascend  # noqa: PLC0415 - only engines need the build's packages

    return with_ascend(release)


def overlay_of(ascend: Environment) -> Path:
    return ascend.site / "ucm_vllm_ascend_overlay" / "modules"


def test_the_schedulers_are_imported_from_the_overlay(ascend: Environment, tmp_path: Path) -> None:
    """Checked in one interpreter; the platform and, by default, the block tables are vLLM Ascend's own."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__spec__.origin)"
    command = [str(ascend.python), "-c", code, "vllm_ascend.platform", BLOCK_TABLE, *SCHEDULERS]
    done = subprocess.run(command, cwd=tmp_path, env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    origins = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    places = [ascend.site, ascend.site, *[overlay_of(ascend)] * len(SCHEDULERS)]
    names = ["vllm_ascend.platform", BLOCK_TABLE, *SCHEDULERS]
    wanted = [str(place / f"{name.replace('.', '/')}.py") for place, name in zip(places, names, strict=True)]
    assert origins == wanted


def requests(prompt: int = PROMPT) -> dict[str, Any]:
    source = random.Random(1)  # noqa: S311 - prompts, no secrets
    params = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(prompt)] for _ in range(REQUESTS)]
    return {"crowd": [[{"prompt": prompt, "params": params} for prompt in prompts]]}


@dataclass(frozen=True)
class Engines:
    """Engines with one of vLLM Ascend's schedulers."""

    ascend: Environment
    scheduler: str

    def run(
        self, directory: Path, method: dict[str, Any], batches: dict[str, Any], engine: dict[str, Any], code: int = 0
    ) -> Run:
        """Run one engine to its end, in one process."""
        (directory / "plugin").mkdir(parents=True)
        (directory / "plugin" / "patched.py").write_text(PATCHED[self.scheduler], encoding="utf-8")
        settings = {"ucm_sparse_config": method, **SETTINGS.get(self.scheduler, {})}
        arguments = {**engine, "scheduler_cls": f"patched.{self.scheduler}", "additional_config": settings}
        done = run_engine(self.ascend, directory, engine=arguments, switches=IN_PROCESS, batches=batches, forked=False)
        assert done.code == code, done.log[-3000:]
        return done


@pytest.fixture(scope="module", params=PATCHED)
def engines(ascend: Environment, request: pytest.FixtureRequest) -> Engines:
    return Engines(ascend, request.param)


def test_the_hooks_of_a_step_and_of_a_preemption(engines: Engines, tmp_path: Path) -> None:
    """The Probe counts the hooks of both overlays."""
    probe = {"Probe": {"report_dir": str(tmp_path / "probe")}}
    done = engines.run(tmp_path / "engine", probe, requests(), SCARCE)
    (report,) = read_reports(tmp_path / "probe")
    preemptions = done.phases["crowd"]["counters"][PREEMPTIONS]
    assert preemptions > 0
    assert report.counts["request_preempted"] == preemptions
    assert report.counts["request_freed"] == REQUESTS
    assert report.counts["limit_new_tokens"] > report.counts["build_metadata"]
    assert report.counts["before_allocation"] > report.counts["build_metadata"] >= ANSWER
    steps = {report.counts[name] for name in ("build_metadata", "metadata_received", "execute_begin")}
    assert len(steps) == 1


def test_no_block_is_lost_under_a_scheduler(engines: Engines, tmp_path: Path) -> None:
    """Thousands of random steps with `SinkWindow`, in one interpreter, with the tests' own device."""
    (tmp_path / "patched.py").write_text(PATCHED[engines.scheduler], encoding="utf-8")
    about = {ANOTHER: f"patched:{engines.scheduler}", "PYTHONPATH": str(tmp_path)}
    only = "random_steps and not asynchronous"
    if engines.scheduler == "SchedulerDynamicBatch":
        # By priority, it preempts a request that it has just scheduled, and leaves its tokens in the step.
        only += " and not priority"
    wrong = run_inside(engines.ascend.python, [ACCOUNTING], only=only, **about)
    assert not wrong, wrong[ACCOUNTING]


@pytest.mark.parametrize("scheduler", ["RecomputeScheduler", "DraftsRecomputeScheduler", "BalanceScheduler"])
def test_esa_answers_alike_after_a_preemption(ascend: Environment, tmp_path: Path, scheduler: str) -> None:
    """A request that was preempted while it generated recomputes its answer token by token.

    It is preempted with five blocks; of four, ESA reads all, so that an answer may be recomputed in one step.
    """
    engines = Engines(ascend, scheduler)
    batches = requests(100)
    one_by_one = {"alone": [[request] for request in batches["crowd"][0]]}
    roomy = engines.run(tmp_path / "roomy", ESA, one_by_one, {**SCARCE, "num_gpu_blocks_override": 60})
    tight = engines.run(tmp_path / "tight", ESA, batches, SCARCE)
    assert tight.phases["crowd"]["counters"][PREEMPTIONS] > 0
    assert roomy.phases["alone"]["counters"][PREEMPTIONS] == 0
    assert tight.tokens["crowd"] == roomy.tokens["alone"]


RUNNER = "vllm_ascend.worker.model_runner_v1"
#: The hooks of each step, in EngineCore and in the worker, and those of its forward pass.
STEP = ("build_metadata", "update_states", METADATA_RECEIVED)
FORWARD = ("execute_begin", "execute_finished")
#: vLLM Ascend's own block size, which its platform sets.
BLOCK = {"block_size": 128}
#: Each a fraction of the longest request.
METHODS: dict[str, dict[str, Any]] = {
    "SinkWindow": {"SinkWindow": {"sink_tokens": 32, "window_tokens": 96, "prefill": "window"}},
    "GSAOnDevice": {
        "GSAOnDevice": {"token_budget": 512, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 1}
    },
    "ESA": {"ESA": {"token_budget": 128, "sink_tokens": 32, "window_tokens": 64}},
}
INSIDE = Path(__file__).parent / "inside"
PLUG_IN = "npu_on_cpu"
#: The plug-in that tells of attributes, and the variable that names these.
WATCH, WATCH_VARIABLE = "rebound", "UCM_E2E_ATTRIBUTES"
#: vLLM Ascend's own entry points, besides its platform's, which the plug-in names.
ENTRY_POINTS = f"""\
[vllm.platform_plugins]
{PLUG_IN} = {PLUG_IN}:register
[vllm.general_plugins]
ascend_kv_connector = vllm_ascend:register_connector
ascend_model = vllm_ascend:register_model
{PLUG_IN} = {PLUG_IN}:start
"""


def run_with(
    environment: Environment,
    directory: Path,
    engine: dict[str, Any],
    *,
    of_ascend: bool,
    batches: dict[str, Any] | None = None,
    switches: dict[str, str] | None = None,
    attributes: Sequence[str] = (),
    code: int = 0,
) -> Run:
    """Run an engine on vLLM Ascend's platform, or on vLLM's own for the CPU; its processes may tell of attributes."""
    plug_in = directory / "plugin"
    known = {WATCH_VARIABLE: json.dumps(attributes)} if attributes else {}
    if of_ascend:
        about = plug_in / f"{PLUG_IN}-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUG_IN}\nVersion: 0\n", encoding="utf-8")
        watched = f"{WATCH} = {WATCH}:start\n" * bool(attributes)
        (about / "entry_points.txt").write_text(ENTRY_POINTS + watched, encoding="utf-8")
        for name in (PLUG_IN, WATCH):
            shutil.copy(INSIDE / f"{name}.py", plug_in)
    else:
        directory.mkdir(parents=True)
    done = run_engine(
        environment,
        directory,
        engine={**BLOCK, **engine},
        switches={**IN_PROCESS, **known, **(switches or {})},
        batches=batches or lengths(),
        forked=False,
    )
    assert done.code == code, done.log[-3000:]
    return done


def lengths() -> dict[str, Any]:
    """Prompts of several lengths in one batch, the same again, where vLLM has most of each, and one of them alone."""
    source = random.Random(2)  # noqa: S311 - prompts, no secrets
    params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in (30, 700, 90, 300)]
    crowd = [{"prompt": prompt, "params": params} for prompt in prompts]
    return {"crowd": [crowd], "again": [crowd], "alone": [crowd[1:2]]}


def forward_passes(counts: dict[str, int]) -> int:
    """Return their number; each batch ends with a step that has none, because it computes no token."""
    (steps,) = {counts[name] for name in STEP}
    (forwards,) = {counts[name] for name in FORWARD}
    assert steps == forwards + len(lengths())
    return forwards


def with_method(method: dict[str, Any]) -> dict[str, Any]:
    return {"additional_config": {"ucm_sparse_config": method}}


@pytest.fixture(scope="module")
def dense(ascend: Environment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """vLLM's own runner and attention for the CPU."""
    return run_with(ascend, tmp_path_factory.mktemp("dense") / "engine", {}, of_ascend=False)


def test_each_step_of_its_runner_calls_its_hooks(ascend: Environment, dense: Run, tmp_path: Path) -> None:
    """Its platform, worker, runner, layers and sampler generate the tokens of vLLM's own for the CPU."""
    probe = with_method({"Probe": {"report_dir": str(tmp_path / "probe")}})
    found = run_with(ascend, tmp_path / "engine", probe, of_ascend=True)
    assert found.tokens == dense.tokens
    (report,) = read_reports(tmp_path / "probe")
    counts = report.counts
    forwards = forward_passes(counts)
    assert {counts[name] for name in ("attention_begin", "attention_finished")} == {LAYERS * forwards}
    (process,) = found.reports
    assert process["modules"][RUNNER] == str(overlay_of(ascend) / f"{RUNNER.replace('.', '/')}.py")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_on_vllm_ascends_runner(ascend: Environment, dense: Run, tmp_path: Path, name: str) -> None:
    """The tokens of the method in vLLM's own runner, which are not those of dense attention."""
    engine = with_method(METHODS[name])
    own = run_with(ascend, tmp_path / "own", engine, of_ascend=False)
    found = run_with(ascend, tmp_path / "ascend", engine, of_ascend=True)
    assert found.tokens == own.tokens != dense.tokens


@pytest.fixture(scope="module")
def published(ascend: Environment) -> Environment:
    from tests.e2e.ascend import as_published  # noqa: PLC0415 - as above

    return as_published(ascend.release)


@pytest.mark.parametrize("name", METHODS)
def test_its_published_runner_is_refused(published: Environment, tmp_path: Path, name: str) -> None:
    """Without the rules, a method would generate dense tokens, or wrong ones."""
    done = run_with(published, tmp_path / "engine", with_method(METHODS[name]), of_ascend=True, code=1)
    assert f"{name} needs hooks that another package has taken out" in done.log
    assert f"GPUModelRunner.execute_model is replaced by {RUNNER}.NPUModelRunner.execute_model" in done.log
    assert not done.phases


def test_its_published_scheduler_is_refused(published: Environment, tmp_path: Path) -> None:
    """The scenario of `test_esa_answers_alike_after_a_preemption`, without the rules that it needs."""
    done = Engines(published, "RecomputeScheduler").run(tmp_path / "engine", ESA, requests(), SCARCE, code=1)
    assert "ESA needs hooks that another package has taken out" in done.log
    assert "is replaced by vllm_ascend.core.recompute_scheduler.RecomputeScheduler.schedule" in done.log


def test_a_prefix_is_saved_and_loaded_where_keys_and_values_are_two_tensors(
    ascend: Environment, tmp_path: Path
) -> None:
    """The second engine finds what the first one saved."""
    stored = {"kv_transfer_config": connector(posix(tmp_path / "store"), "UCMConnector")["kv_transfer_config"]}
    reference = run_with(ascend, tmp_path / "reference", {}, of_ascend=True)
    cold = run_with(ascend, tmp_path / "cold", stored, of_ascend=True)
    warm = run_with(ascend, tmp_path / "warm", stored, of_ascend=True)
    assert reference.tokens == cold.tokens == warm.tokens
    assert cold.phases["crowd"]["cached"] == [0, 0, 0, 0]
    assert warm.phases["crowd"]["cached"] == [0, 640, 0, 256]


CHUNKS = {name: random.Random(name).sample(range(3, VOCABULARY), 112) for name in "ABC"}  # noqa: S311 - no secrets
QUESTION = list(range(7, 27))


def marked(names: str, more: list[int], answer: int) -> dict[str, Any]:
    """Return a request of chunks and more tokens behind them."""
    size = len(CHUNKS["A"])
    marks = [[size * place, size * (place + 1)] for place in range(len(names))]
    params: dict[str, Any] = {"max_tokens": answer, "temperature": 0.0, "ignore_eos": True}
    params["extra_args"] = {"kv_transfer_params": {"ucm_chunks": marks}}
    return {"prompt": [token for name in names for token in CHUNKS[name]] + more, "params": params}


def test_chunks_are_blended_where_keys_and_values_are_two_tensors(ascend: Environment, tmp_path: Path) -> None:
    """What is recomputed as a whole is exact; what is not answers as on vLLM's own attention."""

    def run(name: str, batches: dict[str, Any], *, of_ascend: bool, **settings: Any) -> Run:
        store = posix(tmp_path / f"store {of_ascend}")
        engine = connector(store, "BlendConnector", blend={"min_tokens": 32, **settings})
        return run_with(ascend, tmp_path / f"{name} {of_ascend}", engine, of_ascend=of_ascend, batches=batches)

    stored = {"chunks": [[marked(name, [], 1) for name in CHUNKS]]}
    # The last leaves one token to the step itself, which then is one of decoding.
    asked = {"orders": [[marked("BCA", QUESTION, 12)], [marked("CA", QUESTION, 12), marked("AC", QUESTION, 12)]]}
    asked["one"] = [[marked("CB", QUESTION[:1], 12)]]
    for of_ascend in (True, False):
        run("stored", stored, of_ascend=of_ascend)
    reference = run_with(ascend, tmp_path / "reference", {}, of_ascend=True, batches=asked)
    whole = run("whole", asked, of_ascend=True, edge_tokens=4096)
    edges, own = (run("edges", asked, of_ascend=of_ascend, edge_tokens=8) for of_ascend in (True, False))
    assert whole.tokens == reference.tokens
    assert edges.tokens == own.tokens != reference.tokens
    for done in (whole, edges, own):
        assert done.phases["orders"]["cached"] == [256, 128, 128]
        assert done.phases["one"]["cached"] == [128]
        assert "[UCM.Blend]" not in done.log


@pytest.fixture(scope="module")
def patches(ascend: Environment) -> Environment:
    """An environment whose overlay has UCM's transforms and those of the example in the place of patches."""
    from tests.e2e.ascend import with_patches  # noqa: PLC0415 - as above

    return with_patches(ascend.release)


MEASURES = "Running startup profiling with real model forward"


def test_a_scheduler_measures_its_chunks_in_a_spawned_engine_core(patches: Environment, tmp_path: Path) -> None:
    """A run-time patch would have to be applied in that process, too; a CPU worker cannot measure anything then."""
    (tmp_path / "plugin").mkdir()
    scheduler = "ProfilingChunkScheduler"
    (tmp_path / "plugin" / "patched.py").write_text(PATCHED[scheduler], encoding="utf-8")
    engine = {**SCARCE, "scheduler_cls": f"patched.{scheduler}"}
    done = run_engine(
        patches,
        tmp_path,
        engine=engine,
        switches={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        batches=requests(),
        forked=False,
    )
    assert done.code == 0, done.log[-3000:]
    told = [line for line in done.log.splitlines() if MEASURES in line]
    assert len(told) == 1
    assert "EngineCore" in told[0]


def test_readers_of_two_ranks_look_again(patches: Environment, tmp_path: Path) -> None:
    """An idle worker in its own process waits through the rewritten queue."""
    code = """\
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from ascend_patches import hooks
import multiprocessing as mp

def read(handle, waits):
    capped = hooks.recheck
    def recheck(read_timeout):
        capped(read_timeout)
        waits.put(read_timeout.timeout_ms())
    hooks.recheck = recheck
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()
    print(queue.dequeue(indefinite=True), flush=True)

if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue, waits = MessageQueue(1, 1), context.Queue()
    reader = context.Process(target=read, args=(queue.export_handle(), waits))
    reader.start()
    queue.wait_until_ready()
    print(waits.get(timeout=60), flush=True)
    queue.enqueue("a message")
    reader.join(60)
    print(reader.exitcode)
"""
    script = tmp_path / "queue_of_two.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [patches.python, script], cwd=tmp_path, env=variables(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-4:] == ["5000", "a message", "0", ""]


def test_a_mamba_group_asks_for_the_block_of_a_load(patches: Environment, tmp_path: Path) -> None:
    """Uses vLLM's own manager and pool, with local hits, external hits, and hits loaded in the step."""
    code = """\
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
import torch

for mode in ("none", "align"):
    spec = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    pool = BlockPool(num_gpu_blocks=20, enable_caching=False, hash_block_size=16)
    about = {"enable_caching": False, "kv_cache_group_id": 0, "scheduler_block_size": 16}
    manager = MambaManager(spec, block_pool=pool, **about)
    for computed in (0, 16):
        print(manager.get_num_blocks_to_allocate("a", 40, [], computed, 40))
"""
    done = subprocess.run(
        [patches.python, "-c", code], cwd=tmp_path, env=variables(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    none, none_loaded, aligned, aligned_loaded = map(int, done.stdout.split()[-4:])
    assert (none_loaded, aligned_loaded) == (none + 1, aligned + 1)


#: vLLM's own processes beside the first, each started anew; with the last, workers may have children.
IN_FOUR_PROCESSES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "EXPERT_MAP_RECORD": "true",
}
#: Two stages, which the scheduler that measures its chunks demands; grammars need a tokenizer.
STAGED: dict[str, Any] = {
    "additional_config": {"profiling_chunk_config": {"enabled": True}},
    "pipeline_parallel_size": 2,
    "skip_tokenizer_init": False,
}
#: A patch replaces it only while it checks a model.
WHILE_IT_CHECKS = "vllm.platforms.current_platform.verify_quantization"
#: The hooks of the example that each kind of process calls.
CALLED = {
    "MainProcess": {"on_npu", "v2_runner_is_chosen", "quantization", "expand_collectives", "keep_backend"},
    "EngineCore": {
        *("on_npu", "v2_runner_is_chosen", "recheck", "engine_core_started", "let_have_children"),
        "keep_grammar_backend",
    },
    "VllmWorker": {"on_npu", "v2_runner_is_chosen", "recheck", "has_latent_attention"},
}


def grammars() -> dict[str, Any]:
    """A request whose grammar xgrammar compiles, and one whose grammar it cannot, which one engine may not mix."""
    params = {"max_tokens": 4, "temperature": 0.0}
    kinds: dict[str, dict[str, Any]] = {
        "grammar": {"choice": ["w10w11", "w12w13"]},
        "another": {"json": {"type": "integer", "multipleOf": 3}},
    }
    return {
        name: [[{"prompt": [5, 6, 7], "params": {**params, "structured_outputs": kind}, "may_be_refused": True}]]
        for name, kind in kinds.items()
    }


@pytest.fixture(scope="module")
def engines_of_patches(
    ascend: Environment, patches: Environment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """The same engine with vLLM Ascend's patches, and with the overlay in the place of those that were moved."""
    directory, names = tmp_path_factory.mktemp("patches"), [one.name for one in moved(RELEASE)]
    return {
        name: run_with(
            environment,
            directory / name,
            STAGED,
            of_ascend=True,
            batches={**lengths(), **grammars()},
            switches=IN_FOUR_PROCESSES,
            attributes=names,
        )
        for name, environment in (("patched", ascend), ("moved", patches))
    }


def of_process(run: Run, kind: str) -> list[dict[str, Any]]:
    return [report for report in run.reports if report["process"].partition("-")[0] == kind]


def test_the_tokens_are_those_of_the_patches(engines_of_patches: dict[str, Run]) -> None:
    tokens = {name: run.tokens for name, run in engines_of_patches.items()}
    assert tokens["moved"] == tokens["patched"]
    assert len(tokens["moved"]["grammar"]) == 1
    refused = {name: [bool(of["refused"]) for of in run.phases.values()] for name, run in engines_of_patches.items()}
    assert refused["moved"] == refused["patched"] == [False] * 4 + [True]


def test_no_process_has_a_moved_patch(engines_of_patches: dict[str, Run]) -> None:
    """Patched, each attribute has its patch's code in some process; moved, none has in any."""
    of_patches = {one.name: one.path for one in moved(RELEASE)}
    rebound = {
        name: {
            attribute
            for report in run.reports
            for attribute, files in report["files"].items()
            if any(file.endswith(of_patches[attribute]) for file in files)
        }
        for name, run in engines_of_patches.items()
    }
    assert rebound == {"patched": set(of_patches) - {WHILE_IT_CHECKS}, "moved": set()}
    for run in engines_of_patches.values():
        assert [len(of_process(run, kind)) for kind in CALLED] == [1, 1, 2]
        assert set().union(*(report["files"] for report in run.reports)) == set(of_patches)


def test_each_process_runs_the_overlay(engines_of_patches: dict[str, Run]) -> None:
    for kind, hooks in CALLED.items():
        for report in of_process(engines_of_patches["moved"], kind):
            assert set(report["calls"]) == hooks
    for run in engines_of_patches.values():
        told = [line for line in run.log.splitlines() if MEASURES in line]
        assert len(told) == 1
        assert "EngineCore" in told[0]
        assert not any(report["daemon"] for report in of_process(run, "VllmWorker"))
