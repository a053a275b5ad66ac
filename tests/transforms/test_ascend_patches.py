"""Three patches of vLLM Ascend as transforms: the behaviour of their hooks; `test_examples.py` has their overlays."""

from __future__ import annotations

import ast
import runpy
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.examples import EXAMPLES
from transforms.pipeline.sources.open import open_sources

HOOKS = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "ascend_patches" / "ascend_patches" / "hooks.py")))
QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"


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
