"""The V1 block table: a method that clears a row, for releases before 0.19.0, which lack one."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Method
from transforms.engine.rule import Module, ModulePath, Rule, Upstreamed, Variant
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(id="block_table", group="model_runner", paths=(ModulePath("vllm/v1/worker/block_table.py"),))

CODE = """\
def clear_row(self, row_idx: int) -> None:
    _ucm_hooks.clear_row(self, row_idx)
"""


def _rule(name: str, cls: str) -> Rule:
    native = Upstreamed(Scope(f"{cls}.clear_row"), f"{cls}.clear_row is vLLM's own from 0.19.0")
    return Rule(f"block_table.{name}", (Variant(Scope(cls), Method("add_row", CODE)),), upstreamed=native)


TRANSFORM = Transform(
    id="block_table",
    module=MODULE,
    governance=Governance(
        why="When a sparse method replaces a running request's blocks, attention must not read the stale tail of its "
        "row. Before 0.19.0 the table can overwrite a row but not clear it.",
        how="One method on each of the two table classes, with one call as its body. Releases that have the method "
        "keep theirs, and the rule reports that.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.RELEASED,
            "vLLM 0.19.0 and later have clear_row on both classes, with the same meaning",
        ),
        removal="The oldest supported release is 0.19.0 or newer, all of which have clear_row.",
    ),
    not_counted="The rules add to two classes a method that later releases have; there are no other such places.",
    rules=(_rule("clear-row", "BlockTable"), _rule("clear-row-groups", "MultiGroupBlockTable")),
    cases=cases_beside(__file__, "block_table"),
    engine_tests=(EngineTest("tests/e2e/test_block_table.py::test_a_row_is_emptied_as_vllm_does"),),
    opt_in=("block_table",),
)
