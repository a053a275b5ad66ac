"""Adopting a release: what a person must decide, each with the nearest place and the edit that would do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.transforms.pipeline.memory import WORKER, DictTree, product_of
from transforms import worker
from transforms.pipeline.adopt import Adoption, Row, check_not_older, releases_page
from transforms.pipeline.census import current, hooks_of_outcomes, judge
from transforms.pipeline.cli import main
from transforms.pipeline.decisions import decisions, file_of
from transforms.pipeline.product import UCM
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.trial import CaseError, check_cases

SMALL = product_of(worker.TRANSFORM)
MOVED = """\
class WorkerWrapperBase:
    def init_device(self):
        self.worker.set_up_device()
"""


def left(source: str, path: str = WORKER) -> list[str]:
    tree = DictTree("0.32.0", {path: source})
    overlay = rewrite(tree, SMALL)
    sites = judge(current(tree, SMALL), hooks_of_outcomes(overlay.outcomes, SMALL), "0.32.0", SMALL)
    found = decisions(overlay, tree, sites, [])
    page = Adoption("0.32.0", "vLLM 0.32.0", decisions=found).markdown()
    assert all(one.what in page and one.edit in page for one in found)
    return [f"{one.what}\n{one.near}\n{one.edit}\n{one.code}" for one in found]


def test_a_rule_whose_anchor_has_another_form_gets_a_variant_of_the_nearest_statement() -> None:
    (one,) = left(MOVED)
    assert "worker.init is missing" in one
    assert f"{WORKER}:3: self.worker.set_up_device()" in one
    assert "in transforms/worker.py" in one
    assert "after('self.worker.set_up_device()', '_ucm_hooks.worker_init(self)')" in one


def test_a_class_that_moved_is_found() -> None:
    (one,) = left(MOVED, "vllm/v1/worker/elsewhere.py")
    assert "is ended" in one
    assert 'ModulePath("vllm/v1/worker/elsewhere.py", Releases(since="0.32.0")),' in one


@pytest.mark.parametrize("release", ["0.8.5", "ascend-0.8.5rc1"])
def test_a_release_before_all_rules_is_refused_with_a_way_out_of_its_package(
    release: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adopt", release]) == 1
    told = capsys.readouterr().err
    assert "is older than every rule" in told
    assert ("vLLM Ascend 0.9.1 or newer" if "ascend" in release else "vLLM 0.9.0 or newer") in " ".join(told.split())


def test_candidates_of_the_first_release_are_tried() -> None:
    check_not_older("0.9.0rc1", UCM)


def test_the_file_of_a_rule_is_found_by_its_census_or_transform() -> None:
    assert file_of("model_runner_v2.states", UCM) == "transforms/model_runner_v2.py"
    assert file_of("block_table_v2.append", UCM) == "transforms/block_table_v2.py"


def test_the_table_says_what_is_open() -> None:
    rows = [Row("0.9.0", "", 3, reviewed=True), Row("0.9.1", "", 3), Row("0.9.2", "", 3, failed=1)]
    page = releases_page({"vLLM": rows})
    assert "| 0.9.0 | 3 | 0 | 0 | reviewed |\n| 0.9.1 | 3 | 0 | 0 | ready to adopt |" in page
    assert "| 0.9.2 | 3 | 1 | 0 | decisions are missing |" in page


def test_cases_of_every_owner_are_tried() -> None:
    case = replace(worker.TRANSFORM.cases[0], before="class Unknown:\n    pass\n")
    wrong = product_of(replace(worker.TRANSFORM, cases=(case,)))
    with pytest.raises(CaseError, match=r"worker\.init in 0\.32\.0: ended: there is no"):
        check_cases(wrong)
