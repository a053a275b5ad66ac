"""The log lines of `SinkWindow` about its steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import FakeView, metadata
from tests.ucm.sparse.steps import step
from ucm.sparse.base import Role
from ucm.sparse.sink_window import SinkWindow

SIZE = 16


def test_outcomes_of_requests_are_counted() -> None:
    """With dense prompts, a request may also ask for dense attention."""
    made = SinkWindow(SimpleNamespace(), Role.WORKER, {"sink_tokens": 4, "window_tokens": 20, "prefill": "dense"})
    made.attention = FakeView()
    kv_cache, query = torch.zeros(2, 8, SIZE, 1, 4), torch.zeros(2, 1, 4)
    for computed in (25, 127, 128, 129):
        batch = step(("a", computed, 1, 8), ("b", computed, 1, 8), b=False)
        made.execute_begin(None, None, batch)
        row = list(range(1, 2 + computed // SIZE))
        made.attention_begin("layer.0", query, query, query, kv_cache, metadata(batch, [row, row]))
        made.execute_finished(None, None, None)
    made.requests_finished(None, ["a", "b"])
    found = {name: value for name, value in made.figures().items() if name.startswith("requests.") and value}
    assert found == {"requests.restricted": 1, "requests.opted_out": 1}


def test_a_step_that_leaves_no_block_out_is_not_told() -> None:
    """Beyond sinks and window, but within the first tile."""
    made = SinkWindow(SimpleNamespace(), Role.WORKER, {"sink_tokens": 4, "window_tokens": 20})
    made.attention = FakeView()
    kv_cache = torch.zeros(2, 8, SIZE, 1, 4)
    query = torch.zeros(1, 1, 4)
    for computed, steps in ((25, 0), (51, 0), (127, 0), (128, 1), (129, 2)):
        batch = step(("a", computed, 1, 8))
        dense = metadata(batch, [list(range(1, 2 + computed // SIZE))])
        made.execute_begin(None, None, batch)
        used = made.attention_begin("layer.0", query, query, query, kv_cache, dense)[3]
        made.execute_finished(None, None, None)
        assert (used is dense) == (steps == 0)
        assert made.counts["steps"] == steps
