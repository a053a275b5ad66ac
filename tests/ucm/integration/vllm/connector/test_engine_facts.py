"""What is read of the engine's configuration, in the shapes of all releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ucm.integration.vllm.connector.engine_facts import (
    batches_in_flight,
    ranks,
    recovers_from_load_failures,
    refuse_what_cannot_work,
)
from ucm.integration.vllm.connector.errors import UnsupportedModelError


def config(
    *, tensor: int = 1, pipeline: int = 1, parallel: dict[str, int] | None = None, scheduler: Any = None, **more: Any
) -> Any:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **(parallel or {})}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), scheduler_config=SimpleNamespace(**(scheduler or {})), **more
    )


@pytest.mark.parametrize(
    ("given_config", "expected"),
    [
        (config(), 1),  # until 0.9.2 there is no asynchronous scheduling
        (config(scheduler={"async_scheduling": False}), 1),
        (config(scheduler={"async_scheduling": True}), 2),
        (config(scheduler={"async_scheduling": None}), 1),  # not decided yet
        (config(pipeline=4), 4),
        (config(pipeline=4, scheduler={"async_scheduling": True}), 5),
        (config(pipeline=4, max_concurrent_batches=4), 4),
        (config(max_concurrent_batches=2), 2),  # what the engine says of itself counts too
        (config(max_concurrent_batches=None), 1),
    ],
)
def test_batches_in_flight(given_config: Any, expected: int) -> None:
    assert batches_in_flight(given_config) == expected


def test_ranks() -> None:
    assert ranks(config()) == 1
    assert ranks(config(tensor=4, pipeline=2)) == 8


class Old:
    pass


class New:
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


def test_recovery_needs_the_interface_and_one_group() -> None:
    assert recovers_from_load_failures(New, 1)
    assert not recovers_from_load_failures(New, 2)
    assert not recovers_from_load_failures(Old, 1)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    refuse_what_cannot_work(config(parallel={name: 1}))
    with pytest.raises(UnsupportedModelError) as refused:
        refuse_what_cannot_work(config(parallel={name: 2}))
    assert refused.value.where == f"parallel_config.{name} = 2"


def test_a_release_without_context_parallelism_is_taken() -> None:
    refuse_what_cannot_work(config())
