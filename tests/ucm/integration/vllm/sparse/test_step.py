"""Steps of V1 and V2 runners as batches, in the shapes that releases give them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ucm.integration.vllm.sparse.layers import step_batch

IDS = ["running", "new", "resumed"]
SCHEDULED = {"resumed": 9, "running": 1, "new": 5}


def output(shape: str) -> Any:
    """One request that runs, one that is new, one that resumes, told as a group of releases does."""
    params = SimpleNamespace(extra_args={"ucm_sparse": False})
    new = SimpleNamespace(req_id="new", block_ids=([4],), num_computed_tokens=32, sampling_params=params)
    blocks: list[Any] = [None, ([7, 8],)]
    if shape == "one object per request":
        cached: Any = [
            SimpleNamespace(
                req_id="running", resumed_from_preemption=False, new_block_ids=([],), num_computed_tokens=40
            ),
            SimpleNamespace(
                req_id="resumed", resumed_from_preemption=True, new_block_ids=([7, 8],), num_computed_tokens=16
            ),
        ]
    else:
        cached = SimpleNamespace(req_ids=["running", "resumed"], new_block_ids=blocks, num_computed_tokens=[40, 16])
        if shape == "flags":
            cached.resumed_from_preemption = [False, True]
        else:
            cached.resumed_req_ids = {"resumed"}
    return SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens=SCHEDULED)


def assert_right(batch: Any) -> None:
    assert batch.request_ids == IDS
    assert batch.num_new_tokens.tolist() == [1, 5, 9]
    assert batch.num_computed_tokens.tolist() == [40, 32, 16]
    assert batch.num_prompt_tokens.tolist() == [30, 60, 20]
    assert batch.admitted.tolist() == [False, True, True]
    assert batch.asked == {"new": False}
    assert batch.seq_lens.tolist() == [41, 37, 25]
    assert batch.decodes.tolist() == [True, False, False]
    assert {array.dtype for array in (batch.num_new_tokens, batch.num_computed_tokens, batch.num_prompt_tokens)} == {
        np.dtype(np.int64)
    }


@pytest.mark.parametrize("shape", ["one object per request", "flags", "a set"])
def test_a_v1_runner(shape: str) -> None:
    """Its batch has room for more requests than it holds, and is changed in place afterwards."""
    batch = SimpleNamespace(
        req_ids=list(IDS),
        num_computed_tokens_cpu=np.array([40, 32, 16, 99], np.int32),
        num_prompt_tokens=np.array([30, 60, 20, 99], np.int32),
    )
    found = step_batch(SimpleNamespace(input_batch=batch), output(shape), batch)
    batch.num_computed_tokens_cpu += 1
    batch.req_ids.pop()
    assert_right(found)


@pytest.mark.parametrize("seen_by_the_device", [False, True])
def test_a_v2_runner(*, seen_by_the_device: bool) -> None:
    """Its batch points to the rows of the states; a resumed request comes as a new one."""
    told = output("a set")
    told.scheduled_new_reqs.append(
        SimpleNamespace(req_id="resumed", block_ids=([7, 8],), num_computed_tokens=16, sampling_params=None)
    )
    told.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["running"], new_block_ids=[None], num_computed_tokens=[40], resumed_req_ids=set()
    )
    lengths: Any = np.array([60, 0, 20, 30], np.int32)
    if seen_by_the_device:
        lengths = SimpleNamespace(np=lengths)
    runner = SimpleNamespace(req_states=SimpleNamespace(prompt_len=lengths))
    batch = SimpleNamespace(req_ids=IDS, idx_mapping_np=np.array([3, 0, 2], np.int32))
    assert_right(step_batch(runner, told, batch))


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """Nor is a chunk of several tokens behind it, which a resumed request computes again."""
    ids = ["last", "first generated", "computed again"]
    batch = SimpleNamespace(
        req_ids=ids, num_computed_tokens_cpu=np.array([9, 10, 10]), num_prompt_tokens=np.array([10, 10, 10])
    )
    told = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=()),
        num_scheduled_tokens=dict(zip(ids, (1, 1, 4), strict=True)),
    )
    assert step_batch(None, told, batch).decodes.tolist() == [False, True, False]
