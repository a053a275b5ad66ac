"""The view of latent attention on the installed vLLM's own metadata and CPU kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no latent attention for the CPU")

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.integration.vllm import handshake
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.sparse.attention import QuerySplit
from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK

NAME = "model.layers.0.self_attn.attn"
HEADS, PLAIN, ROTATED, LATENT, BLOCK = 3, 32, 64, 512, 16
SCALE = (PLAIN + ROTATED) ** -0.5
SOURCE = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def without_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is called by hooks; the environment's overlay has none for latent attention."""
    monkeypatch.setattr(handshake, "_manifests", list)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=SOURCE)


#: One block of sinks, two recent ones, three to choose.
OPTIONS = {"token_budget": 6 * BLOCK, "min_context": 0, "sink_tokens": 1, "recent_tokens": 1, "dense_layers": 0}


def layer(heads: int = HEADS, scale: float = 1.0) -> Any:
    impl = object.__new__(CPUMLAImpl)
    impl.scale, impl.kv_lora_rank = SCALE, LATENT
    return SimpleNamespace(
        impl=impl, use_mla=True, num_kv_heads=1, kv_cache_dtype="auto", W_UK_T=random(heads, PLAIN, LATENT) * scale
    )


@pytest.fixture
def served() -> tuple[Any, AttentionLayers]:
    found = layer()
    return found, view(found)


def view(found: Any, *, latent: bool = True) -> AttentionLayers:
    compilation = SimpleNamespace(static_forward_context={NAME: found}, cudagraph_mode=None, full_cuda_graph=False)
    model = SimpleNamespace(model="m", use_mla=True, is_encoder_decoder=False, enforce_eager=True)
    config = SimpleNamespace(
        compilation_config=compilation,
        model_config=model,
        cache_config=SimpleNamespace(sliding_window=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    made = AttentionLayers(config)
    made.require_engine(latent=latent)
    return made


def metadata(decodes: list[list[int]], lens: list[int], prefill: list[int] | None = None, tokens: int = 0) -> Any:
    """The metadata of a step with some decodes and one prompt."""
    starts = torch.tensor([*range(len(decodes) + 1), len(decodes) + tokens], dtype=torch.int32)
    return MLACommonMetadata(
        num_reqs=len(decodes) + (prefill is not None),
        max_query_len=max(1, tokens),
        max_seq_len=max(lens),
        num_actual_tokens=len(decodes) + tokens,
        query_start_loc=starts,
        slot_mapping=torch.zeros(len(decodes) + tokens, dtype=torch.int64),
        num_decodes=len(decodes),
        num_decode_tokens=len(decodes),
        num_prefills=int(prefill is not None),
        decode=MLACommonDecodeMetadata(torch.tensor(decodes, dtype=torch.int32), torch.tensor(lens).int(), None),
        prefill=None
        if prefill is None
        else MLACommonPrefillMetadata(torch.tensor([prefill], dtype=torch.int32), starts[-2:], tokens),
    )


def test_products_with_latent_keys_are_those_with_ordinary_keys(served: tuple[Any, AttentionLayers]) -> None:
    """A key's first part is made from the latent vector for each head, as in a prompt; the second is rotated."""
    found, layers = served
    step = metadata([[0, 0]], [1], [0, 0], tokens=4)
    query, vectors, rotated = random(5, HEADS, PLAIN + ROTATED), random(5, LATENT), random(5, 1, ROTATED)
    wanted = layers.scored(NAME, query, step)
    assert wanted.shape == (1, HEADS, LATENT + ROTATED)  # the decode's only
    cached = torch.cat((vectors, rotated[:, 0]), -1)
    ordinary = torch.cat((torch.einsum("hpl,tl->thp", found.W_UK_T, vectors), rotated.expand(-1, HEADS, -1)), -1)
    scores = (query * ordinary).sum(-1)[:1] * SCALE
    torch.testing.assert_close((wanted * cached[:1, None]).sum(-1) * wanted.shape[-1] ** -0.5, scores)


def test_the_table_of_all_requests_has_decodes_first(served: tuple[Any, AttentionLayers]) -> None:
    step = metadata([[3, 1], [2, 5]], [20, 30], [4, 6], tokens=9)
    assert served[1].block_table(step).tolist() == [[3, 1], [2, 5], [4, 6]]


def test_a_restricted_decode_reads_exactly_its_blocks(served: tuple[Any, AttentionLayers]) -> None:
    """vLLM's kernel, compared with attention in 64 bits over the tokens of the chosen blocks."""
    found, layers = served
    cache = random(12, BLOCK, LATENT + ROTATED)
    assert (layers.block_size(NAME, cache), layers.num_blocks(NAME, cache)) == (BLOCK, 12)
    ids = torch.tensor([7, 2])
    assert torch.equal(layers.read_keys(NAME, cache, ids)[:, :, 0], cache[ids])
    step = metadata([[7, 2, 11, 4], [1, 3, 5, 6]], [60, 64], [8, 9, 10, 0], tokens=40)
    whole = torch.tensor([[7, 11, 4, 4], [1, 3, 5, 6], [8, 9, 10, 0]], dtype=torch.int32)
    lens = torch.tensor([60 - BLOCK, 64, 40], dtype=torch.int32)
    restricted = layers.restricted(NAME, step, whole, lens, 64)
    assert restricted.prefill is step.prefill
    assert step.decode.block_table.tolist() == [[7, 2, 11, 4], [1, 3, 5, 6]]
    query = random(2, HEADS, LATENT + ROTATED)
    output, _ = found.impl.forward_mqa(query, cache, restricted, found)
    for row, (blocks, length) in enumerate((([7, 11, 4], 44), ([1, 3, 5, 6], 64))):
        ids = torch.tensor(blocks)
        keys = layers.read_keys(NAME, cache, ids).flatten(0, 1)[:length, 0].double()
        weights = (query[row].double() @ keys.T * SCALE).softmax(-1)
        torch.testing.assert_close(output[row].double(), weights @ keys[:, :LATENT], rtol=0, atol=2e-5)


def test_what_only_decodes_can_do_is_refused_otherwise(served: tuple[Any, AttentionLayers]) -> None:
    _, layers = served
    step = metadata([[0, 1]], [20])
    split = QuerySplit(torch.tensor([0, 1, 2], dtype=torch.int32), 1)
    with pytest.raises(SparseMethodError, match="tokens of a prompt"):
        layers.restricted(NAME, step, torch.zeros(2, 2, dtype=torch.int32), torch.ones(2).int(), 1, split)
    step.num_decode_tokens = 2
    with pytest.raises(SparseMethodError, match="several tokens"):
        layers.block_table(step)


def test_other_methods_and_back_ends_are_refused_by_name() -> None:
    with pytest.raises(SparseMethodError, match="only BlockTopK"):
        view(layer(), latent=False)
    other = layer()
    other.impl = type("FlashMLAImpl", (), {})()
    with pytest.raises(SparseMethodError, match="FlashMLAImpl") as caught:
        view(other).require(NAME, reads_keys=True)
    assert "without ucm_sparse_config" in caught.value.fix
    with pytest.raises(SparseMethodError, match="only BlockTopK"):
        view(layer()).require_parts(NAME)


class Requests:
    """The method on a layer, with requests whose latent keys are in its cache.

    Args:
        found: The layer.
        options: The method's options.
        lengths: The tokens of each request after the next step.
    """

    def __init__(
        self, found: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], lengths: list[int]
    ) -> None:
        self.view, self.layer, self.lengths = view(found), found, lengths
        counts = [-(-length // BLOCK) + 4 for length in lengths]
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.rows = [list(range(end - count, end))[::-1] for end, count in zip(ends, counts, strict=True)]
        self.keys = [random(BLOCK * count, LATENT + ROTATED) for count in counts]
        self.cache = torch.zeros(ends[-1], BLOCK, LATENT + ROTATED)
        self.prompts = [length - 1 for length in lengths]
        for row, length in enumerate(lengths):
            self.write(row, 0, length - 1)
        config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True), cache_config=SimpleNamespace())
        self.method = BlockTopK(config, Role.WORKER, options)
        self.method.attention = self.view
        found.kv_cache = self.cache
        self.method.layer_seen(NAME)
        self.method.layers_seen()
        monkeypatch.setattr(self.view, "batch", lambda *_: self.batch)
        self.batch: Any = None

    def write(self, row: int, begin: int, end: int) -> None:
        """Write tokens of a request to its blocks."""
        for place in range(begin, end):
            self.cache[self.rows[row][place // BLOCK], place % BLOCK] = self.keys[row][place]

    def decode(self, query: torch.Tensor, *, written: bool = True) -> tuple[Any, Any]:
        """Run a step of one token for each request; return the dense and the restricted metadata."""
        ids = range(len(self.rows))
        self.batch = step(*[(f"{n}", self.lengths[n] - 1, 1, self.prompts[n]) for n in ids])
        width = max(map(len, self.rows))
        dense = metadata([[*row, *[0] * (width - len(row))] for row in self.rows], self.lengths)
        new = torch.stack([self.keys[n][self.lengths[n] - 1] for n in ids])
        if written:
            for n in ids:
                self.write(n, self.lengths[n] - 1, self.lengths[n])
        self.method.execute_begin(None, None, None)
        vectors, rotated = new[:, :LATENT], new[:, None, LATENT:]
        used = self.method.attention_begin(NAME, query, vectors, rotated, self.cache, dense)[3]
        for n in ids:
            self.write(n, self.lengths[n] - 1, self.lengths[n])
        self.method.attention_finished(NAME, query, self.cache, used, query)
        self.method.execute_finished(None, None, None)
        return dense, used

    def attended(self, row: int, query: torch.Tensor) -> torch.Tensor:
        """The attention of a row's heads to all of its tokens, in 64 bits: ``[num_heads, tokens]``."""
        plain, rotated = query[row].double().split([PLAIN, ROTATED], -1)
        keys = self.keys[row][: self.lengths[row]].double()
        products = torch.einsum("hp,hpl,tl->ht", plain, self.layer.W_UK_T.double(), keys[:, :LATENT])
        return ((products + rotated @ keys[:, LATENT:].T) * SCALE).softmax(-1)


def read_of(requests: Requests, used: Any, row: int) -> list[int]:
    """The positions of the blocks that a row reads."""
    count = -(-int(used.decode.seq_lens[row]) // BLOCK)
    return [requests.rows[row].index(block) for block in used.decode.block_table[row, :count].tolist()]


@pytest.mark.parametrize("written", [True, False], ids=["written before", "written by the attention"])
def test_attention_is_that_of_the_chosen_tokens_in_every_step(
    monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    """A long request and one that becomes sparse on the way, over the ends of blocks."""
    requests = Requests(layer(scale=0.15), monkeypatch, OPTIONS, [20 * BLOCK - 3, 5 * BLOCK + 12])
    for _ in range(24):
        query = random(2, HEADS, PLAIN + ROTATED)
        _, used = requests.decode(query, written=written)
        latent = requests.view.scored(NAME, query, used)
        absorbed = latent / (SCALE * latent.shape[-1] ** 0.5)
        output, _ = requests.layer.impl.forward_mqa(absorbed, requests.cache, used, requests.layer)
        for row, length in enumerate(requests.lengths):
            places = read_of(requests, used, row)
            assert len(places) == min(6, -(-length // BLOCK))
            assert places == sorted(set(places))
            read = [p for block in places for p in range(block * BLOCK, min(length, (block + 1) * BLOCK))]
            weights = requests.attended(row, query)[:, read]
            wanted = weights / weights.sum(-1, keepdim=True) @ requests.keys[row][read, :LATENT].double()
            torch.testing.assert_close(output[row].double(), wanted, rtol=0, atol=5e-5)
        requests.lengths = [length + 1 for length in requests.lengths]
    assert requests.method.counts["failures"] == 0
    assert requests.method.counts["rows"] > 24


def test_a_sample_measures_the_attention_to_latent_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(layer(scale=0.15), monkeypatch, {**OPTIONS, "sample_every": 1}, [20 * BLOCK])
    query = random(1, HEADS, PLAIN + ROTATED)
    _, used = requests.decode(query)
    earlier = requests.attended(0, query)
    earlier[:, -1] = 0
    shares = (earlier / earlier.sum(-1, keepdim=True)).mean(0).unflatten(0, (-1, BLOCK)).sum(-1)
    found = requests.method.figures()
    assert (found["attention_samples"], requests.method.counts["failures"]) == (1, 0)
    assert found["attention_kept"] == pytest.approx(float(shares[read_of(requests, used, 0)].sum()), abs=1e-5)


def test_a_budget_of_the_whole_context_leaves_the_metadata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(layer(scale=0.15), monkeypatch, {**OPTIONS, "token_budget": 30 * BLOCK}, [20 * BLOCK])
    dense, used = requests.decode(random(1, HEADS, PLAIN + ROTATED))
    assert used is dense


@pytest.mark.parametrize(("scale", "least"), [(0.15, 0.65), (0.5, 0.3)], ids=["flat", "peaked"])
def test_codes_keep_more_of_the_attention_than_means_and_random_blocks(
    monkeypatch: pytest.MonkeyPatch, scale: float, least: float
) -> None:
    """Of 64 blocks, three are chosen beside those that are always read; the oracle ranks by the true attention.

    The keys are independent, so nothing makes their codes or means look good: the codes' errors grow with the scores.
    """
    kept: dict[str, list[float]] = {"oracle": [], "codes": [], "mean": [], "random": []}
    for _ in range(20):
        requests = Requests(layer(scale=scale), monkeypatch, OPTIONS, [64 * BLOCK])
        query = random(1, HEADS, PLAIN + ROTATED)
        _, used = requests.decode(query)
        mass = requests.attended(0, query).unflatten(-1, (-1, BLOCK)).sum(-1)[:, 1:-2]
        wanted = requests.view.scored(NAME, query, used)
        means = requests.keys[0][: 64 * BLOCK].unflatten(0, (-1, BLOCK)).mean(1)[1:-2]
        of_means = (wanted[0] @ means.T * wanted.shape[-1] ** -0.5).softmax(-1)
        chosen = {
            "oracle": mass.sum(0).topk(3).indices,
            "codes": torch.tensor(read_of(requests, used, 0)[1:-2]) - 1,
            "mean": of_means.sum(0).topk(3).indices,
            "random": torch.randperm(mass.shape[1], generator=SOURCE)[:3],
        }
        for name, blocks in chosen.items():
            kept[name].append(float((mass / mass.sum(-1, keepdim=True))[:, blocks].sum(-1).mean()))
    found = {name: sum(of) / len(of) for name, of in kept.items()}
    assert found["oracle"] >= found["codes"] > least * found["oracle"], found
    assert found["codes"] > found["mean"] > found["random"], found


def test_ranks_with_other_heads_choose_the_blocks_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has all latent keys and some of the heads; the heads' shares are integers, which are added up."""
    whole = layer(4, scale=0.15)
    query = random(1, 4, PLAIN + ROTATED)
    alone = Requests(whole, monkeypatch, OPTIONS, [40 * BLOCK])
    _, used = alone.decode(query)
    parts: list[torch.Tensor] = []

    def added(counts: torch.Tensor) -> torch.Tensor:
        parts.append(counts)
        return torch.stack(parts).sum(0)

    for heads in (slice(0, 2), slice(2, 4)):
        part = layer(2)
        part.W_UK_T = whole.W_UK_T[heads]
        rank = Requests(part, monkeypatch, OPTIONS, [40 * BLOCK])
        rank.keys, rank.cache = alone.keys, alone.cache
        monkeypatch.setattr(rank.view, "sum_over_ranks", added)
        _, of_rank = rank.decode(query[:, heads])
    assert torch.equal(of_rank.decode.block_table, used.decode.block_table)
