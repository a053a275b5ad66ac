"""The V2 block tables: which blocks a request's row gets."""

from __future__ import annotations

from transforms.engine.edits import AtStart
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform
from transforms.model_runner_v2 import ABSENT

MODULE = Module(
    id="block_table_v2",
    group="model_runner_v2",
    paths=(ModulePath("vllm/v1/worker/gpu/block_table.py"),),
    absent=ABSENT,
)
CODE = "new_block_ids, overwrite = _ucm_hooks.v2_append_block_ids(self, req_index, new_block_ids, overwrite)"
GIVEN = """\
class BlockTables:
    def append_block_ids(self, req_index, new_block_ids, overwrite):
{}        self.rows.write(req_index, new_block_ids, overwrite)
"""

TRANSFORM = Transform(
    id="block_table_v2",
    module=MODULE,
    governance=Governance(
        why="In the V2 runner a running request's blocks are replaced by writing its row anew, not by appending; the "
        "row lives on the device and is only reachable through this method.",
        how="One call at the start of append_block_ids that may return other block ids and set the method's own "
        "overwrite flag; without a method it returns what it was given.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the scheduler can tell the V2 runner to replace blocks only by a resume, so there is nothing to use",
        ),
        removal="SchedulerOutput can tell the V2 runner to replace the blocks of a running request.",
    ),
    rules=(rule("block_table_v2.append", Scope("BlockTables.append_block_ids"), AtStart(CODE)),),
    cases=(
        Case(
            "block_table_v2.append",
            GIVEN.format(""),
            GIVEN.format(f"        {CODE}  # ucm: block_table_v2.append\n"),
            "0.32.0",
        ),
    ),
    needs=("worker",),
)
