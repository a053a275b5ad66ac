"""The V2 block tables: the blocks that are written to a request's row."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtStart
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform
from transforms.model_runner_v2 import ABSENT, UNUSED

MODULE = Module(
    id="block_table_v2",
    group="model_runner_v2",
    paths=(ModulePath("vllm/v1/worker/gpu/block_table.py"),),
    absent=ABSENT,
    unused=UNUSED,
)
CODE = "new_block_ids, overwrite = _ucm_hooks.v2_append_block_ids(self, req_index, new_block_ids, overwrite)"

CENSUS = (
    Census(
        "block_table_v2.rows",
        "places that write a request's blocks to its row",
        ("def append_block_ids", "_.block_tables.append_block_ids(...)"),
        rules=("block_table_v2.append",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.*",),
                Consequence.REACHES,
                "the runner writes rows through the hooked BlockTables.append_block_ids",
                releases=Releases(since="0.16.0"),
            ),
            Elsewhere(
                (
                    "vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.*",
                    "vllm/v1/worker/gpu/block_table.py:BlockTables.append_block_ids",
                ),
                Consequence.REFUSED,
                "in these releases the V2 runner is experimental and has no hooks; a method refuses to run on it",
                refused_by=refusals.RUNNER,
                releases=Releases("0.12.0", "0.16.0"),
            ),
            Elsewhere(
                ("vllm/distributed/kv_transfer/kv_connector/*:*",),
                Consequence.HARMLESS,
                "a connector's own list of a request's blocks; attention does not read it",
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="block_table_v2",
    module=MODULE,
    governance=Governance(
        why="In the V2 runner a sparse method replaces a running request's blocks by overwriting its row, not by "
        "appending to it. The row is on the device, and only append_block_ids writes to it.",
        how="One call at the start of append_block_ids that may return other block ids and set its overwrite flag; "
        "without a sparse method it returns its arguments.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the scheduler can make the V2 runner replace blocks only by resuming a request, which is no substitute",
        ),
        removal="SchedulerOutput can make the V2 runner replace the blocks of a running request.",
    ),
    rules=(rule("block_table_v2.append", Scope("BlockTables.append_block_ids"), AtStart(CODE)),),
    census=CENSUS,
    cases=cases_beside(__file__, "block_table_v2"),
    engine_tests=(EngineTest("tests/e2e/test_v2_runner.py::test_hooks_fire_as_often_as_they_must"),),
    needs=("worker",),
    opt_in=("block_table_v2",),
)
