"""ReRoPE on the installed vLLM's own layer, kernel and rotary embedding: as two whole matrices of scores have it."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from tests.ucm.integration.vllm.sparse.rerope_truth import BASE, HEAD, STYLES, Style, Way
from tests.ucm.sparse.steps import step
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.sparse import rerope
from ucm.sparse.base import Role
from ucm.sparse.rerope import LeakyReRoPE, ReRoPE
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

SIZE, LONGEST = 32, 512
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
#: Of each row: tokens before the step, and new ones.
STEPS = [
    [(300, 1), (99, 1), (100, 1), (7, 1)],
    [(0, 400)],
    [(90, 30), (0, 20), (200, 90), (150, 1), (97, 7), (98, 7)],
    [(0, 100), (0, 101), (40, 61)],
    [(130, 250), (300, 1), (411, 100)],
    [(10, 3), (30, 1)],
]
WINDOW = 100
#: Each is a kernel of its own, and takes seconds to compile: of either dtype both pairings, a whole head and a part.
ROTATED = [
    *(("float32", STYLES[number]) for number in (0, 1, 2)),
    *(("bfloat16", STYLES[number]) for number in (0, 2, 3)),
]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a kernel is compiled: in processes of one engine alone, which have a parent that started them."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba comes with vLLM for the CPU")
        monkeypatch.setattr(multiprocessing, "parent_process", object)
    return bool(request.param == "compiled")


@dataclass(frozen=True)
class Runner:
    """As much of a model runner as is looked at."""

    model: torch.nn.Module


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), request.param, SIZE, HEAD, blocks=64)


class Model(torch.nn.Module):  # type: ignore[misc] # torch has no types here
    """A layer, with its rotary embedding beside it."""

    def __init__(self, real: RealLayer, style: Style) -> None:
        super().__init__()
        self.outer = torch.nn.Module()
        self.outer.attn = real.layer
        with set_current_vllm_config(real.config):
            kind = real.kv_cache.dtype
            self.outer.rotary_emb = RotaryEmbedding(HEAD, style.rotated, LONGEST, BASE, style.neox, kind)


def method(real: RealLayer, way: Way, style: Style) -> ReRoPE:
    kind = LeakyReRoPE if way.leak < math.inf else ReRoPE
    found = kind(real.config, Role.WORKER, way.options)
    model = Model(real, style)
    runner = Runner(model)
    found.attention = AttentionLayers(real.config, runner)
    found.runner = runner  # type: ignore[attr-defined] # the view holds it weakly
    found.worker_started()
    found.layer_seen(NAME)
    return found


class Step:
    """Rows of random queries, keys and values, the latter two in the cache as vLLM has them."""

    def __init__(self, real: RealLayer, rows: list[tuple[int, int]], style: Style) -> None:
        source = torch.Generator().manual_seed(1)
        kind = real.kv_cache.dtype
        rotate = Model(real, style).outer.rotary_emb.forward_native
        real.kv_cache.fill_(1000.0)
        blocks = torch.randperm(63, generator=source).add(1).tolist()
        self.rows, self.counts, self.tables, self.kept = rows, [new for _, new in rows], [], []
        queries = []
        for computed, new in rows:
            length = computed + new
            table = [blocks.pop() for _ in range(-(-length // SIZE))]
            query = torch.randn((length, HEADS, HEAD), generator=source).to(kind)
            keys, values = (torch.randn((length, KV_HEADS, HEAD), generator=source).to(kind) for _ in range(2))
            places = torch.arange(length)
            rotated, stored = rotate(places, query.flatten(1), keys.flatten(1))
            slots = torch.tensor(table)[places // SIZE] * SIZE + places % SIZE
            real.write(stored.view_as(keys), values, slots)
            self.tables.append(table)
            self.kept.append((query[computed:], keys, values))
            queries.append(rotated.view_as(query)[computed:])
        self.query = torch.cat(queries)
        self.dense = real.metadata(self.tables, [sum(row) for row in rows], self.counts)

    def run(self, real: RealLayer, method: ReRoPE, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        rows = [(f"{n}", computed, new, computed + new) for n, (computed, new) in enumerate(self.rows)]
        monkeypatch.setattr(method.attention, "batch", lambda *_: step(*rows))
        method.execute_begin(None, None, None)
        begun = [
            method.attention_begin(NAME, self.query, self.query, self.query, real.kv_cache, self.dense)
            for _ in range(2)
        ]
        assert begun[0][3] is begun[1][3]
        output = real.attend(self.query, begun[0][3]).flatten(1)
        method.attention_finished(NAME, self.query, real.kv_cache, begun[0][3], output)
        method.execute_finished(None, None, None)
        return output.view_as(self.query)


def check(
    real: RealLayer, rows: list[tuple[int, int]], way: Way, style: Style, monkeypatch: pytest.MonkeyPatch
) -> Step:
    """Compare a step with the reference, and what lies within the window with vLLM's own to the bit."""
    of_step = Step(real, rows, style)
    made = method(real, way, style)
    found = of_step.run(real, made, monkeypatch)
    with_kernel = [kernel is not None for kernel in made._kernels.values()]
    in_own_process = multiprocessing.parent_process() is not None
    assert with_kernel == [in_own_process] * len(with_kernel)
    beyond = [max(0, computed + new - max(computed, way.window)) for computed, new in rows]
    few = sum(count for count in beyond if count <= rerope.FEW) if in_own_process else 0
    figures = made.figures()
    assert figures["rerope_tokens.compiled"] == few
    assert figures["rerope_tokens.torch"] == sum(beyond) - few
    assert figures["rerope_rows"] == sum(computed + new > way.window for computed, new in rows)
    dense = real.attend(of_step.query, of_step.dense)
    parts = zip(rows, of_step.kept, found.split(of_step.counts), dense.split(of_step.counts), strict=True)
    for (computed, _), kept, own, plain in parts:
        wanted = way.attention(*kept, computed, style)
        exact = TOLERANCE[own.dtype]
        torch.testing.assert_close(own.double(), wanted, rtol=exact, atol=exact)
        within = max(0, way.window - computed)
        assert torch.equal(own[:within], plain[:within])
    return of_step


@pytest.mark.parametrize("rows", STEPS)
def test_attention_is_the_reference_s(
    real: RealLayer, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(real, rows, Way(WINDOW), Style(), monkeypatch)


@pytest.mark.parametrize(("real", "style"), ROTATED, indirect=["real"], ids=str)
@pytest.mark.parametrize("way", [Way(WINDOW), Way(WINDOW, 4.0), Way(WINDOW, 3.5, 128)])
def test_every_style_of_rotation(real: RealLayer, way: Way, style: Style, monkeypatch: pytest.MonkeyPatch) -> None:
    check(real, STEPS[2], way, style, monkeypatch)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 379, 380, 381, 600])
def test_every_window(real: RealLayer, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(real, [(100, 280), (40, 5), (377, 4)], Way(window), Style(), monkeypatch)


@pytest.mark.parametrize("at_once", [1, 64, 100, 4096])
def test_however_many_keys_are_turned_at_once(real: RealLayer, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerope, "TURNED_AT_ONCE", at_once)
    check(real, [(0, 400), (300, 1), (130, 1), (120, 200)], Way(30), Style(), monkeypatch)


@pytest.mark.parametrize("several", [False, True])
def test_a_kernel_is_compiled_before_the_first_request(
    real: RealLayer, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """As soon as a cache is there, which older releases have in a list; the first request beyond a window waited."""
    monkeypatch.setattr(real.layer, "kv_cache", torch.tensor([]))
    made = method(real, Way(WINDOW), Style())
    assert not made._kernels
    monkeypatch.setattr(real.layer, "kv_cache", [real.kv_cache] if several else real.kv_cache)
    made.layer_seen(NAME)
    assert (made._kernels[NAME] is not None) == (multiprocessing.parent_process() is not None)
