"""The conformance suites of sparse methods; see ``ucm.testing`` for how to use them.

`SparseMethodConformance` checks what a class declares, without torch and vLLM. `SparseAttentionConformance` also runs
the method's worker side on one attention layer of the installed vLLM for the CPU: prompts in chunks, then decode steps,
with random queries, keys and values. It knows neither the method's scheduler side nor several ranks, and is for methods
whose result depends only on the batch of each step and the tokens in the cache.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ucm.errors import ConfigError, SparseMethodError
from ucm.sparse.attention import StepBatch
from ucm.sparse.base import Role, SparseMethod
from ucm.sparse.options import MethodOptions
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, real_layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from ucm.testing.attention_layer import RealLayer

#: Tokens per block, the size of a head, and blocks of the layer.
BLOCK, HEAD, BLOCKS = 32, 64, 96
#: The requests: their prompts' lengths, of parts of blocks and of whole ones, and how many tokens they generate.
PROMPTS = {"short": 20, "one block": 32, "long": 400, "odd": 333}
GENERATED = 6
#: The relative and absolute error of a float32 output whose terms were added in another order.
ERROR = 2e-5


class SparseMethodConformance:
    @pytest.fixture
    def method(self) -> type[SparseMethod]:
        """The class that is tested; a derived class returns it."""
        raise NotImplementedError("return your method's class from the fixture `method`")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Options, as an operator writes them; with them, decode steps of 400 tokens must leave something out."""
        return {}

    def test_its_calls_fit_those_of_the_base(self, method: type[SparseMethod]) -> None:
        wrong = [
            name
            for name, call in inspect.getmembers(SparseMethod, inspect.isfunction)
            if not name.startswith("_") and not _accepts(getattr(method, name), call)
        ]
        assert wrong == []

    def test_it_declares_its_options(self, method: type[SparseMethod]) -> None:
        assert method.options_type is not None, "without options_type, `ucm doctor` cannot check them"
        assert issubclass(method.options_type, MethodOptions)
        missing = [name for name, field in method.options_type.model_fields.items() if not field.description]
        assert missing == [], "errors show the descriptions"

    def test_an_unknown_option_is_refused_by_name(self, method: type[SparseMethod], options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            method.identity({**options, "no_such_option": 1})

    def test_its_identity_is_plain_and_says_what_shapes_the_kv(
        self, method: type[SparseMethod], options: dict[str, Any]
    ) -> None:
        identity = method.identity(options)
        assert json.loads(json.dumps(identity)) == identity
        assert method.identity(dict(options)) == identity
        assert method.options_type is not None
        defaults = method.options_type.model_validate(options).model_dump()
        assert method.identity(defaults) == identity, "written defaults count like omitted ones"
        raised: Any = type(
            method.__name__, (method,), {"revision": method.revision + 1, "__module__": method.__module__}
        )
        raised.__qualname__ = method.__qualname__
        assert raised.identity(options) != identity

    def test_what_it_says_of_prompts_agrees(self, method: type[SparseMethod], options: dict[str, Any]) -> None:
        for length in (1, 31, 32, 1000):
            lasting = method.lasting_tokens(options, length)
            assert lasting >= 0
            if method.prompts_are_dense(options):
                assert lasting >= length, "the KV of a dense prompt depends on nothing behind it"

    def test_its_advice_is_text(self, method: type[SparseMethod], options: dict[str, Any]) -> None:
        assert all(isinstance(line, str) and line for line in method.advice(options))


class SparseAttentionConformance(SparseMethodConformance):
    @pytest.fixture
    def everything(self) -> dict[str, Any] | None:
        """Options with which a step reads everything of 512 tokens; None if there are none."""
        return None

    @pytest.fixture
    def layer(self) -> RealLayer:
        pytest.importorskip("vllm", reason="vLLM for the CPU is not installed")
        return one_layer()

    @pytest.fixture
    def attention(self, method: type[SparseMethod], layer: RealLayer, monkeypatch: pytest.MonkeyPatch) -> Attention:
        return Attention(method, layer, monkeypatch)

    def test_it_is_refused_without_its_hooks(
        self, method: type[SparseMethod], options: dict[str, Any], layer: RealLayer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for group in method.needed_hooks:
            monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
            with pytest.raises(SparseMethodError, match=f"UCM_DISABLE_{group}_PATCH"):
                method(layer.config, Role.WORKER, options)
            monkeypatch.delenv(f"UCM_DISABLE_{group}_PATCH")

    def test_it_leaves_something_out(self, attention: Attention, options: dict[str, Any]) -> None:
        dense, found = attention.run(None), attention.run(options)
        assert found.keys() == dense.keys()
        differing = {request for request, of in found.items() if not _equal(of[-GENERATED:], dense[request])}
        assert differing & {"long", "odd"}, "every decode step was dense"

    def test_a_budget_for_everything_changes_nothing(
        self, attention: Attention, everything: dict[str, Any] | None
    ) -> None:
        if everything is None:
            pytest.skip("the fixture `everything` has no options")
        dense, found = attention.run(None), attention.run(everything)
        assert all(_same(found[request], of) for request, of in dense.items())

    def test_dense_prompts_are_dense(
        self, method: type[SparseMethod], attention: Attention, options: dict[str, Any]
    ) -> None:
        if not method.prompts_are_dense(options):
            return  # it does not claim that they are
        for chunk in (512, 50):
            dense, found = attention.run(None, chunk=chunk), attention.run(options, chunk=chunk)
            assert all(_same(found[request][:length], dense[request][:length]) for request, length in PROMPTS.items())

    def test_other_requests_change_nothing(self, attention: Attention, options: dict[str, Any]) -> None:
        crowd = attention.run(options)
        for request, of in crowd.items():
            assert _equal(attention.run(options, [request])[request], of), request

    def test_chunks_change_nothing(self, attention: Attention, options: dict[str, Any]) -> None:
        whole = attention.run(options)
        for chunk in (32, 50, 128):
            found = attention.run(options, chunk=chunk)
            assert all(_equal(found[request], of) for request, of in whole.items()), chunk


@functools.cache
def one_layer() -> RealLayer:
    """Return the layer of all tests of a process."""
    with tempfile.TemporaryDirectory() as directory:
        return real_layer(Path(directory), "float32", BLOCK, HEAD, blocks=BLOCKS)


class Attention:
    """A layer whose attention runs under a method, step by step as in an engine.

    Args:
        method: The method's class.
        layer: The layer; what an earlier run left in its cache does not matter.
        monkeypatch: Puts the batch of each step into the layer's view.
    """

    def __init__(self, method: type[SparseMethod], layer: RealLayer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._method, self._layer, self._patch = method, layer, monkeypatch

    def run(
        self, options: Mapping[str, Any] | None, requests: list[str] | None = None, chunk: int = 512
    ) -> dict[str, torch.Tensor]:
        """Compute prompts, then decode steps; without options, densely.

        Args:
            options: The method's options.
            requests: Some of `PROMPTS`; default: all.
            chunk: The most tokens of a prompt in a step.

        Returns:
            The attention's output for each token of each request, ``[num_tokens, num_heads, head_size]``, float32.
        """
        import torch  # noqa: PLC0415

        wanted = list(PROMPTS) if requests is None else requests
        tensors = {request: _tensors(request) for request in wanted}
        free = list(range(1, BLOCKS))
        random.Random(f"{wanted} {chunk}").shuffle(free)  # noqa: S311 - places of blocks, no secret
        tables: dict[str, list[int]] = {request: [] for request in wanted}
        outputs: dict[str, list[torch.Tensor]] = {request: [] for request in wanted}
        method = None if options is None else self._started(options)
        for computed, new in _steps(wanted, chunk):
            for request, count in new.items():
                held, needed = len(tables[request]), -(-(computed[request] + count) // BLOCK)
                tables[request] += [free.pop() for _ in range(needed - held)]
            parts = {r: [of[computed[r] : computed[r] + count] for of in tensors[r]] for r, count in new.items()}
            output = self._step(
                method, computed, new, tables, [torch.cat(of) for of in zip(*parts.values(), strict=True)]
            )
            for request, of in zip(new, output.split(list(new.values())), strict=True):
                outputs[request].append(of)
        if method is not None:
            method.requests_finished(None, wanted)
        return {request: torch.cat(of) for request, of in outputs.items()}

    def _started(self, options: Mapping[str, Any]) -> SparseMethod:
        method = self._method(self._layer.config, Role.WORKER, options)
        method.attention = self._layer.view
        method.worker_started()
        method.layer_seen(NAME)
        method.layers_seen()
        return method

    def _step(
        self,
        method: SparseMethod | None,
        computed: dict[str, int],
        new: dict[str, int],
        tables: dict[str, list[int]],
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Write a step's keys and values, as vLLM does before its attention, and run its attention."""
        import torch  # noqa: PLC0415

        layer, (query, key, value) = self._layer, tensors
        places = [np.arange(computed[r], computed[r] + count) for r, count in new.items()]
        slots = [np.array(tables[r])[of // BLOCK] * BLOCK + of % BLOCK for r, of in zip(new, places, strict=True)]
        layer.write(key, value, torch.from_numpy(np.concatenate(slots)))
        rows = [tables[request] for request in new]
        metadata = layer.metadata(rows, [computed[r] + count for r, count in new.items()], list(new.values()))
        if method is None:
            return layer.attend(query, metadata)
        batch = StepBatch(
            list(new),
            np.array(list(new.values()), np.int64),
            np.array([computed[request] for request in new], np.int64),
            np.array([PROMPTS[request] for request in new], np.int64),
            np.zeros(len(new), np.bool_),
            {},
        )
        self._patch.setattr(layer.view, "batch", lambda *_: batch)
        given = [of.clone() for of in (query, key, value, layer.kv_cache)]
        scheduled = SimpleNamespace(num_scheduled_tokens=dict(new), finished_req_ids=set(), preempted_req_ids=set())
        method.update_states(None, scheduled)
        method.execute_begin(None, scheduled, None)
        used = method.attention_begin(NAME, query, key, value, layer.kv_cache, metadata)
        output = layer.attend(used[0], used[3])
        method.attention_finished(NAME, used[0], layer.kv_cache, used[3], output)
        method.execute_finished(None, scheduled, None)
        written = [_equal(of, was) for of, was in zip((query, key, value, layer.kv_cache), given, strict=True)]
        assert written == [True] * len(given), "attention_begin wrote to query, key, value or cache"
        return output


def _steps(requests: list[str], chunk: int) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Yield steps: how many tokens of each request are computed, and how many the step computes."""
    computed = dict.fromkeys(requests, 0)
    while True:
        left = {request: PROMPTS[request] + GENERATED - done for request, done in computed.items()}
        new = {r: min(chunk, max(PROMPTS[r] - computed[r], 1)) for r, count in left.items() if count}
        if not new:
            return
        yield dict(computed), new
        for request, count in new.items():
            computed[request] += count


def _tensors(request: str) -> list[torch.Tensor]:
    """Return queries, keys and values of all tokens of a request, the same in each run."""
    import torch  # noqa: PLC0415

    source = torch.Generator().manual_seed(PROMPTS[request])
    length = PROMPTS[request] + GENERATED
    return [torch.randn((length, heads, HEAD), generator=source) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the last tokens of two outputs are equal but for rounding."""
    return bool(((found - wanted[-len(found) :]).abs() <= ERROR * (1 + found.abs())).all())


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two outputs are equal, bit for bit."""
    return bool((found == wanted).all())


def _accepts(ours: Any, theirs: Any) -> bool:
    """Whether a call can be called as that of the base class: by place and by name."""
    parameters = list(inspect.signature(theirs).parameters)
    try:
        inspect.signature(ours).bind(*parameters)
        inspect.signature(ours).bind(parameters[0], **dict.fromkeys(parameters[1:]))
    except TypeError:
        return False
    return True
