"""UCM's own methods and the example pass the conformance suites for sparse methods, and broken ones do not."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from ucm.sparse.attention import StepBatch
from ucm.sparse.base import SparseMethod
from ucm.sparse.sink_window import SinkWindow
from ucm.sparse.topk.method import BlockTopK
from ucm.testing import SparseAttentionConformance
from ucm.testing.sparse import Attention, one_layer

FILE = Path(__file__).parents[3] / "examples" / "sparse_method" / "ucm_first_and_recent.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("ucm_first_and_recent", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FirstAndRecent


FirstAndRecent = _example()


class TestFirstAndRecent(SparseAttentionConformance):
    @pytest.fixture
    def method(self) -> Any:
        return FirstAndRecent

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"recent_blocks": 3}

    @pytest.fixture
    def everything(self) -> dict[str, Any]:
        return {"recent_blocks": 16}


class TestSinkWindow(SparseAttentionConformance):
    @pytest.fixture
    def method(self) -> type[SinkWindow]:
        return SinkWindow

    @pytest.fixture(params=["window", "dense"])
    def options(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"sink_tokens": 4, "window_tokens": 60, "prefill": request.param}

    @pytest.fixture
    def everything(self) -> dict[str, Any]:
        return {"sink_tokens": 4, "window_tokens": 512}


class TestBlockTopK(SparseAttentionConformance):
    @pytest.fixture
    def method(self) -> type[BlockTopK]:
        return BlockTopK

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"token_budget": 160, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 0}

    @pytest.fixture
    def everything(self) -> dict[str, Any]:
        return {"token_budget": 512, "min_context": 0, "dense_layers": 0}


class Broken(SparseMethod):
    """The base of what is put before the example's class to break it."""

    _batch: Any
    _recent: int


class WritesToItsQuery(Broken):
    def attention_begin(self, layer_name: str, query: Any, *rest: Any) -> Any:
        query *= 2
        return super().attention_begin(layer_name, query, *rest)


class LooksAtTheCrowd(Broken):
    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        super().execute_begin(runner, scheduler_output, input_batch)
        self._recent = 3 + len(self._batch.request_ids)


class AllDecode(StepBatch):
    @property
    def decodes(self) -> Any:
        return self.num_computed_tokens > 0


class RestrictsPrompts(Broken):
    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        super().execute_begin(runner, scheduler_output, input_batch)
        self._batch = AllDecode(**vars(self._batch))


class IsAlwaysDense(Broken):
    def _restricted(self, layer_name: Any, kv_cache: Any, attn_metadata: Any) -> Any:
        del layer_name, kv_cache
        return attn_metadata


class ReadsTooLittle(Broken):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._recent -= 8


class HasOtherParameters(Broken):
    def worker_started(self, runner: Any) -> None:  # type: ignore[override]
        del runner


SUITE = SparseAttentionConformance
#: Broken methods, and the tests that find them.
BROKEN: list[tuple[type[Broken], str]] = [
    (WritesToItsQuery, "test_it_leaves_something_out"),
    (LooksAtTheCrowd, "test_other_requests_change_nothing"),
    (RestrictsPrompts, "test_dense_prompts_are_dense"),
    (RestrictsPrompts, "test_chunks_change_nothing"),
    (IsAlwaysDense, "test_it_leaves_something_out"),
    (ReadsTooLittle, "test_a_budget_for_everything_changes_nothing"),
    (HasOtherParameters, "test_its_calls_fit_those_of_the_base"),
]


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=[f"{broken.__name__}-{name}" for broken, name in BROKEN])
def test_a_broken_method_is_found(broken: type[Broken], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = type(broken.__name__, (broken, FirstAndRecent), {})
    options = {"recent_blocks": 16 if "everything" in name else 3}
    known = {
        "method": method,
        "options": options,
        "everything": options,
        "attention": Attention(method, one_layer(), monkeypatch),
    }
    test = getattr(SUITE(), name)
    with pytest.raises(AssertionError):
        test(**{of: known[of] for of in inspect.signature(test).parameters})
