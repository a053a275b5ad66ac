"""The options of ESA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.store.frozen import FrozenDirectory
from ucm.errors import ConfigError, SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.attention import CopyingView
from ucm.sparse.base import Role
from ucm.sparse.esa.method import ESA
from ucm.sparse.esa.offloaded import Losses
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import SimulatedClock


def config(**others: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(block_size=16), **others)


@pytest.mark.parametrize("name", ["ESA", "BlockRetrieval"])
def test_both_names_lead_here(name: str) -> None:
    assert isinstance(method_class(name)(config(), Role.WORKER, {}), ESA)


def test_the_store_is_in_shared_memory_apart_from_the_prefix_cache_by_default() -> None:
    store = ESA(config(), Role.WORKER, {})._options.store
    assert store.pipeline == "Dram"
    assert store.dram_directory.startswith("/dev/shm/")  # noqa: S108 - shared memory is meant
    assert store.dram_directory.endswith("-offloaded")


def test_a_store_is_written_as_the_connector_s() -> None:
    options = {"store": {"pipeline": "Posix", "directories": "/data/kv", "posix_capacity": "2GiB"}}
    found = ESA(config(), Role.WORKER, options)._options.store.as_store_config()
    assert (found.directories, found.posix_capacity_bytes) == (("/data/kv",), 2 << 30)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"token_budget": 0}, "token_budget: 0"),
        ({"token_budget": "64"}, "token_budget"),
        ({"budget": 64}, "ESA has no option 'budget'"),
        ({"store": {"pipeline": "Posix"}}, "needs a directory"),
        ({"store": {"pipeline": "Nothing"}}, "there is no such store"),
        ({"store": 3}, "ucm_sparse_config.ESA.store"),
        ({"store": {"directory": "/x"}}, "remove it, or correct it: store: a `store` section, as the connector's"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ESA(config(), Role.WORKER, options)
    assert part in str(caught.value)


def test_a_budget_below_a_block_is_refused() -> None:
    method = ESA(config(), Role.SCHEDULER, {"token_budget": 15})
    with pytest.raises(ConfigError, match="leaves no block of 16") as caught:
        method.scheduler_started(SimpleNamespace(connector=None))
    assert "set it to 16 or more" in str(caught.value)


def test_a_worker_refuses_it_before_it_loads_a_model() -> None:
    method = ESA(config(), Role.WORKER, {"token_budget": 15})
    method.attention = create_autospec(CopyingView, instance=True)
    with pytest.raises(ConfigError, match="leaves no block of 16"):
        method.worker_started()


def start_beside_a_frozen_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock, store: dict[str, Any]
) -> list[object]:
    """Start a worker; return its error, or that it has started; nothing if it waits for the directory."""
    path.mkdir()
    options = {"store": {"pipeline": "Posix", "directories": str(path), "stuck_seconds": 1.0, **store}}
    method = ESA(config(parallel_config=SimpleNamespace(rank=0)), Role.WORKER, options, clock=clock)
    method.attention = create_autospec(CopyingView, instance=True)
    FrozenDirectory(monkeypatch, str(path), clock=clock)
    ended: list[object] = []

    def start() -> None:
        try:
            method.worker_started()
        except ConfigError as error:
            ended.append(error)
        else:
            ended.append(method)

    clock.thread(start, "start").start()
    clock.advance(60)
    return ended


def test_a_worker_starts_beside_a_directory_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: SimulatedClock
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    [started] = start_beside_a_frozen_directory(tmp_path / "kv", monkeypatch, clock, {})
    assert not isinstance(started, ConfigError)
    assert f"has not answered for 1.0 s ({tmp_path / 'kv'})" in caplog.text


def test_a_wrong_option_is_told_beside_a_directory_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    wrong = {"pipeline": "Posix|Redis", "tiers": {"Redis": {"no_such_option": 1}}}
    [refusal] = start_beside_a_frozen_directory(tmp_path / "kv", monkeypatch, clock, wrong)
    assert isinstance(refusal, ConfigError)
    assert "no_such_option" in refusal.where


def test_a_worker_elsewhere_does_not_reach_the_file_for_losses(tmp_path: Path) -> None:
    worker, losses, elsewhere = ESA(config(), Role.WORKER, {}), Losses(), str(tmp_path / "none")
    assert worker.confirms((losses.path, "engine")) == ""
    assert f"it cannot write to the scheduler's {elsewhere}, where" in worker.confirms((elsewhere, "engine"))


@pytest.mark.parametrize("group", ["SCHEDULER", "ATTENTION", "MODEL_RUNNER"])
def test_hooks_that_are_off_are_refused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
    with pytest.raises(SparseMethodError, match="ESA needs hooks that are switched off"):
        ESA(config(), Role.SCHEDULER, {})
