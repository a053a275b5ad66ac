"""The examples that change vLLM: their reviewed overlays are what their rules make, alone and behind UCM's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
import pytest

from tests.examples import registry_of, reviewed_examples
from transforms.engine.apply import apply_rule
from transforms.pipeline.generate import overlay_files
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import compose
from transforms.registry import REGISTRY

if TYPE_CHECKING:
    from transforms.engine.cases import Case
    from transforms.engine.rule import Rule
    from transforms.pipeline.product import Product

REVIEWED = reviewed_examples()
OVERLAYS = [pytest.param(one, release, id=one.named(release)) for one, releases in REVIEWED for release in releases]
CASES = [
    pytest.param(case, {rule.id: rule for rule in transform.rules}, id=case.rule)
    for project in ("early_kv", "ascend_patches")
    for transform in registry_of(project).transforms
    for case in transform.cases
]


@pytest.mark.parametrize(("product", "release"), OVERLAYS)
def test_a_lock_its_diff_and_its_census_are_up_to_date(product: Product, release: str) -> None:
    """`nox -s regenerate` writes them."""
    for path, text in overlay_files(release, product).items():
        assert path.read_text(encoding="utf-8") == text, path


@pytest.mark.parametrize(("product", "releases"), REVIEWED, ids=lambda one: getattr(one, "module", ""))
def test_no_other_release_has_a_lock(product: Product, releases: tuple[str, ...]) -> None:
    assert product.reviewed() == list(releases)


@pytest.mark.parametrize(("case", "rules"), CASES)
def test_the_cases_hold(case: Case, rules: dict[str, Rule]) -> None:
    assert apply_rule(cst.parse_module(case.before), rules[case.rule], "m.py", case.release)[0].code == case.after


@pytest.mark.parametrize(
    ("project", "release", "met"),
    [
        ("early_kv", "0.32.0", "scheduler.request-added and early.scheduler.admitted"),
        ("ascend_patches", "0.23.0", "engine_core.started and npu.engine_core.started"),
    ],
)
def test_beside_ours_each_meets_one_of_our_anchors(project: str, release: str, met: str) -> None:
    lock = read_lock(release, compose(REGISTRY, registry_of(project)))
    assert lock is not None
    (told,) = (told for told in lock["conflicts"] if "one anchor has" in told)
    assert met in told


def test_patches_are_needless_where_vllm_has_their_fix() -> None:
    npu = compose(registry_of("ascend_patches"))
    needless = {
        release: [one["rule"] for one in lock["not_inserted"] if one["status"] == "upstreamed"]
        for release in npu.reviewed()
        if (lock := read_lock(release, npu))
    }
    fixed = ["npu.queue.recheck", "npu.eagle_llama.layers", "npu.eagle_deepseek.layers"]
    assert needless == {"0.23.0": [], "0.24.0": [], "0.30.0": fixed}
