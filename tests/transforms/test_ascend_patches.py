"""Three patches of vLLM Ascend as transforms: the releases that they fit, and the behaviour of their hooks."""

from __future__ import annotations

import ast
import runpy
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import libcst as cst
import pytest

from tests.examples import EXAMPLES, registry_of
from transforms.engine.apply import apply_rule
from transforms.engine.report import Status
from transforms.pipeline.checks import check_overlay
from transforms.pipeline.conflicts import conflicts
from transforms.pipeline.product import compose
from transforms.pipeline.rewrite import rewrite
from transforms.pipeline.sources.open import open_sources
from transforms.registry import REGISTRY

PATCHES = registry_of("ascend_patches")
HOOKS = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "ascend_patches" / "ascend_patches" / "hooks.py")))
QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"


@pytest.mark.parametrize(
    ("release", "upstreamed"),
    [("0.20.2", set()), ("0.23.0", set()), ("0.27.1", {"npu.queue.recheck"}), ("0.33.0", {"npu.queue.recheck"})],
)
def test_they_apply_and_one_becomes_needless(release: str, upstreamed: set[str]) -> None:
    overlay = rewrite(open_sources(release), compose(PATCHES))
    assert not overlay.failures
    check_overlay(overlay)
    assert {o.rule for o in overlay.outcomes if o.status is Status.UPSTREAMED} == upstreamed
    assert {o.rule for o in overlay.outcomes if o.status is Status.APPLIED} >= {
        "npu.mamba.external-of-all",
        "npu.mamba.external-of-aligned",
        "npu.engine_core.started",
    }


def test_beside_ours_they_meet_where_engine_core_has_started() -> None:
    overlay = rewrite(open_sources("0.23.0"), compose(REGISTRY, PATCHES))
    assert not overlay.failures
    check_overlay(overlay)
    (told,) = (told for told in conflicts(overlay) if "one anchor has" in told)
    assert "engine_core.started and npu.engine_core.started" in told


@pytest.mark.parametrize("case", [case for t in PATCHES.transforms for case in t.cases], ids=lambda case: case.rule)
def test_the_cases_hold(case: Any) -> None:
    (rule,) = (rule for t in PATCHES.transforms for rule in t.rules if rule.id == case.rule)
    assert apply_rule(cst.parse_module(case.before), rule, "m.py", case.release)[0].code == case.after


def read_timeout(timeout: float | None, *, should_warn: bool) -> Any:
    """Return the object of one read, of vLLM's own class."""
    tree = ast.parse(open_sources("0.23.0").read(QUEUE))
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "ReadTimeoutWithWarnings")
    names: dict[str, Any] = {"sys": sys, "time": time, "VLLM_RINGBUFFER_WARNING_INTERVAL": 60}
    exec(compile(ast.Module([found], []), QUEUE, "exec"), names)  # noqa: S102 - vLLM's source
    return names["ReadTimeoutWithWarnings"](timeout, should_warn)


@pytest.mark.parametrize(
    ("timeout", "should_warn", "before"), [(None, False, None), (None, True, 60_000), (3600.0, True, 60_000)]
)
def test_a_reader_waits_no_longer_than_five_seconds(
    timeout: float | None, should_warn: bool, before: int | None
) -> None:
    read = read_timeout(timeout, should_warn=should_warn)
    assert read.timeout_ms() == before
    HOOKS.recheck(read)
    assert read.timeout_ms() == HOOKS.RECHECK_MS == 5000


def test_a_reader_s_own_deadline_holds() -> None:
    read = read_timeout(-1.0, should_warn=False)
    HOOKS.recheck(read)
    with pytest.raises(TimeoutError):
        read.timeout_ms()


@pytest.mark.parametrize(
    ("local", "computed", "wanted", "more"), [(0, 0, 8, 0), (16, 16, 20, 0), (16, 32, 40, 1), (16, 32, 32, 0)]
)
def test_a_block_more_is_asked_for_where_a_hit_is_loaded_in_its_step(
    local: int, computed: int, wanted: int, more: int
) -> None:
    """The cases: nothing found; found locally; found externally; found externally and loaded in a separate step."""
    assert HOOKS.external_blocks(local, computed, wanted) == more


def test_a_scheduler_that_measures_is_told_of_the_workers() -> None:
    scheduler = Mock(spec_set=["run_profiling_chunk_init"])
    HOOKS.engine_core_started(SimpleNamespace(scheduler=scheduler, model_executor="workers"))
    scheduler.run_profiling_chunk_init.assert_called_once_with("workers")
    HOOKS.engine_core_started(SimpleNamespace(scheduler=Mock(spec_set=["schedule"]), model_executor="workers"))
