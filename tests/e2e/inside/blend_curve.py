"""Compare selections of blending without an engine: `blend_curve.py SPECIFICATION RESULTS`, both JSON.

A plain Llama in float32 computes what BlendConnector would: KV of chunks without positions, stretches filled with it,
and the selected tokens over it. So selections that the product does not have are measured as well: ideal ones, which
know the exact KV, and trivial ones.

The specification has ``model`` (a directory), ``head`` (tokens), ``chunks`` (tokens), ``questions`` (each with
``chunks`` and ``tail``, those with the same chunks are neighbours), ``tokens`` (the length of an answer) and ``ways``:
names of `WAYS`, after ``alone/`` or ``preamble/`` for how chunks were stored. The results have, for each way and
question, the computed share of the reused tokens, the equal tokens at the answer's start, and the loss: the mean
Kullback-Leibler divergence, in nats, of the next token over the exact answer.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

EDGE, GRANULE = 16, 4
#: The layer whose KV `by_deviation` compares.
CHECK_LAYER = 2


class Llama:
    """A Llama over a cache of ``[2, heads, tokens, head_dim]`` for each layer, which holds every token before a row."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        load: Any = import_module("safetensors.torch").load_file
        self._weights = {name: of.float() for name, of in load(directory / "model.safetensors").items()}
        self.layers, self.heads = self.config["num_hidden_layers"], self.config["num_key_value_heads"]
        self.size = self.config["head_dim"]
        powers = torch.arange(0, self.size, 2).double() / self.size
        angles = torch.outer(torch.arange(8192).double(), self.config["rope_theta"] ** -powers).repeat(1, 2)
        self._cos, self._sin = angles.cos().float(), angles.sin().float()

    def cache(self, tokens: int) -> list[Tensor]:
        return [torch.zeros(2, self.heads, tokens, self.size) for _ in range(self.layers)]

    def rotated(self, of: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """Return ``[heads, n, head_dim]`` rotated to some positions, or, with the sign -1, back."""
        first, second = of.chunk(2, -1)
        return of * self._cos[positions] + sign * torch.cat([-second, first], -1) * self._sin[positions]

    def run(self, tokens: Tensor, positions: Tensor, cache: list[Tensor], paid: Tensor | None = None) -> Tensor:
        """Compute tokens, in ascending order, and write their KV; return the hidden states.

        Args:
            tokens: ``[n]``.
            positions: ``[n]``.
            cache: The cache.
            paid: ``[tokens]``, to which the attention to each cached token is added, as a mean over layers and heads.
        """
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        reach = int(positions.max()) + 1
        seen = torch.arange(reach) <= positions[:, None]
        for number, layer in enumerate(cache):
            of = f"model.layers.{number}."
            normed = self._norm(hidden, f"{of}input_layernorm.weight")
            query, keys, values = (
                (normed @ self._weights[f"{of}self_attn.{name}_proj.weight"].T)
                .unflatten(1, (-1, self.size))
                .swapaxes(0, 1)
                for name in "qkv"
            )
            layer[0][:, positions], layer[1][:, positions] = self.rotated(keys, positions), values
            query, (keys, values) = self.rotated(query, positions), layer[:, :, :reach]
            if paid is not None:
                grouped = query.reshape(self.heads, -1, self.size) @ keys.swapaxes(1, 2) / math.sqrt(self.size)
                scores = grouped.view(len(query), -1, reach).masked_fill(~seen, -math.inf)
                paid += scores.softmax(-1).mean((0, 1))[: len(paid)] / self.layers
            read = functional.scaled_dot_product_attention(query[None], keys[None], values[None], seen, enable_gqa=True)
            hidden = hidden + read[0].swapaxes(0, 1).flatten(1) @ self._weights[f"{of}self_attn.o_proj.weight"].T
            normed = self._norm(hidden, f"{of}post_attention_layernorm.weight")
            gate, up = (normed @ self._weights[f"{of}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            hidden = hidden + (functional.silu(gate) * up) @ self._weights[f"{of}mlp.down_proj.weight"].T
        return hidden

    def next_tokens(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens after some hidden states, ``[n, vocabulary]``."""
        normed = self._norm(hidden, "model.norm.weight")
        return (normed @ self._weights["model.embed_tokens.weight"].T).log_softmax(-1)

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), self._weights[name], self.config["rms_norm_eps"])


class Context:
    """The chunks of some prompts, stored in some way."""

    def __init__(
        self, llama: Llama, head: Sequence[int], chunks: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> None:
        self.llama, self.numbers = llama, numbers
        ends = [len(head) + sum(len(chunks[of]) for of in numbers[:place]) for place in range(len(numbers) + 1)]
        self.spans = [slice(*pair) for pair in pairwise(ends)]
        self.tokens = torch.tensor([*head, *(token for of in numbers for token in chunks[of])])
        self.exact = llama.cache(len(self.tokens))
        llama.run(self.tokens, torch.arange(len(self.tokens)), self.exact)

    def flags(self, spans: Sequence[slice]) -> Tensor:
        found = torch.zeros(len(self.tokens), dtype=torch.bool)
        for span in spans:
            found[span] = True
        return found

    def filled(self, stored: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return a cache with stored chunks, each without positions, and the exact head."""
        cache = [layer.clone() for layer in self.exact]
        for number, span in zip(self.numbers, self.spans, strict=True):
            positions = torch.arange(span.start, span.stop)
            for layer, (keys, values) in zip(cache, stored[number], strict=True):
                layer[0][:, span], layer[1][:, span] = self.llama.rotated(keys, positions), values
        return cache

    def compute(self, cache: list[Tensor], chosen: Tensor) -> None:
        positions = chosen.nonzero()[:, 0]
        if len(positions):
            self.llama.run(self.tokens[positions], positions, cache)

    def after(self, cache: list[Tensor], more: Sequence[int], paid: Tensor | None = None) -> Tensor:
        """Return the hidden states of tokens after the chunks."""
        longer = [functional.pad(layer, (0, 0, 0, len(more))) for layer in cache]
        begin = len(self.tokens)
        return self.llama.run(torch.tensor(more), torch.arange(begin, begin + len(more)), longer, paid)

    def answer(self, tail: Sequence[int], count: int) -> list[int]:
        """Return the exact answer."""
        longer, begin = [functional.pad(layer, (0, 0, 0, len(tail) + count)) for layer in self.exact], len(self.tokens)
        found: list[int] = []
        row = list(tail)
        while len(found) < count:
            hidden = self.llama.run(torch.tensor(row), torch.arange(begin, begin + len(row)), longer)
            found.append(int(self.llama.next_tokens(hidden[-1:]).argmax()))
            begin, row = begin + len(row), found[-1:]
        return found


def highest(scores: Tensor, ratio: float, among: Tensor, granule: int = GRANULE) -> Tensor:
    """Return the share of some tokens with the highest scores."""
    masked = functional.pad(scores.masked_fill(~among, -math.inf), (0, -len(scores) % granule), value=-math.inf)
    groups = masked.view(-1, granule).amax(1)
    chosen = torch.zeros(len(groups), dtype=torch.bool)
    chosen[groups.topk(round(ratio * int(among.sum()) / granule)).indices] = True
    return chosen.repeat_interleave(granule)[: len(scores)] & among


def nothing(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
    del context, cache, tail
    return torch.zeros_like(among)


def everything(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
    del context, cache, tail
    return among


def first_chunk(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
    del cache, tail
    return context.flags([next(span for span in context.spans if among[span].any())])


def at_random(ratio: float) -> Any:
    def choose(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
        del context, cache, tail
        return highest(torch.rand(len(among), generator=torch.Generator().manual_seed(0)), ratio, among)

    return choose


def by_deviation(ratio: float, *layers: int) -> Any:
    """Choose by the deviation from the exact KV of some layers; of all layers, no selection in advance can."""

    def choose(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
        del tail
        scores = torch.zeros(len(among))
        for layer in layers or range(context.llama.layers):
            for was, now in zip(cache[layer], context.exact[layer], strict=True):
                scores += (now - was).square().sum((0, 2)) / was.square().mean()
        return highest(scores, ratio, among)

    return choose


def paid(context: Context, cache: list[Tensor], tail: Sequence[int]) -> Tensor:
    """Return the attention of a question to each token."""
    found = torch.zeros(len(context.tokens))
    context.after(cache, tail, found)
    return found


def by_question(ratio: float, granule: int = GRANULE) -> Any:
    def choose(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
        return highest(paid(context, cache, tail), ratio, among, granule)

    return choose


def whole_chunks(count: int) -> Any:
    """Choose the chunks to whose tokens the question attends most."""

    def choose(context: Context, cache: list[Tensor], tail: Sequence[int], among: Tensor) -> Tensor:
        scores = paid(context, cache, tail)
        spans = [span for span in context.spans if among[span].any()]
        return context.flags(sorted(spans, key=lambda span: -float(scores[span].mean()))[:count]) & among

    return choose


#: The tokens at each chunk's start that are computed first, and what is chosen then.
WAYS: dict[str, tuple[int, Any]] = {
    "none": (0, nothing),
    "first chunk": (0, first_chunk),
    "all": (0, everything),
    **{f"edges {count}": (count, nothing) for count in (4, 16, 32, 64, 128)},
    **{f"random {share}%": (EDGE, at_random(share / 100)) for share in (5, 15, 30, 50)},
    **{f"deviation {share}%": (EDGE, by_deviation(share / 100, CHECK_LAYER)) for share in (5, 10, 15, 20, 30, 50)},
    **{f"ideal deviation {share}%": (EDGE, by_deviation(share / 100)) for share in (15, 30)},
    **{f"question {share}%": (EDGE, by_question(share / 100)) for share in (5, 10, 15, 20, 30, 50)},
    **{f"question {share}% by 32": (EDGE, by_question(share / 100, 32)) for share in (10, 20, 30)},
    **{f"whole chunks {count}": (EDGE, whole_chunks(count)) for count in (1, 2, 3)},
}


def stored(llama: Llama, preamble: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
    """Return a chunk's KV without positions, as it is after a preamble."""
    positions = torch.arange(len(preamble) + len(tokens))
    cache = llama.cache(len(positions))
    llama.run(torch.tensor([*preamble, *tokens]), positions, cache)
    cut = positions[len(preamble) :]
    return [torch.stack([llama.rotated(of[0][:, cut], cut, -1), of[1][:, cut]]) for of in cache]


def main(specification: Path, results: Path) -> None:
    """Measure all ways on all questions."""
    torch.set_num_threads(1)
    spec = json.loads(specification.read_text(encoding="utf-8"))
    llama, head = Llama(Path(spec["model"])), spec["head"]
    kept = {
        how: [stored(llama, preamble, tokens) for tokens in spec["chunks"]]
        for how, preamble in (("alone", []), ("preamble", head))
        if any(way.startswith(how) for way in spec["ways"])
    }
    told: dict[str, list[dict[str, Any]]] = {way: [] for way in spec["ways"]}
    for numbers, group in groupby(spec["questions"], key=lambda one: one["chunks"]):
        context, questions = Context(llama, head, spec["chunks"], numbers), list(group)
        answers = [context.answer(one["tail"], spec["tokens"]) for one in questions]
        wanted = [_scored(context, context.exact, one["tail"], of) for one, of in zip(questions, answers, strict=True)]
        for way in spec["ways"]:
            how, _, name = way.partition("/")
            edge, choose = WAYS[name]
            # After the preamble, the first chunk is exact.
            among = context.flags(context.spans[how == "preamble" :])
            edges = (
                context.flags([slice(span.start, min(span.stop, span.start + edge)) for span in context.spans]) & among
            )
            filled = context.filled(kept[how])
            context.compute(filled, edges)
            for one, answer, exact in zip(questions, answers, wanted, strict=True):
                chosen = edges | choose(context, filled, one["tail"], among)
                cache = filled
                if bool((chosen & ~edges).any()):
                    cache = [layer.clone() for layer in filled]
                    context.compute(cache, chosen)
                found = _scored(context, cache, one["tail"], answer)
                same = (found.argmax(-1) == torch.tensor(answer)).int().cumprod(0).sum()
                loss = (exact.exp() * (exact - found)).sum(-1).mean()
                share = float(chosen.sum()) / sum(span.stop - span.start for span in context.spans)
                told[way].append({"share": share, "same": int(same), "loss": float(loss)})
            results.write_text(json.dumps(told), encoding="utf-8")


def _scored(context: Context, cache: list[Tensor], tail: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return the log-probabilities of the next token before each token of an answer."""
    hidden = context.after(cache, [*tail, *answer[:-1]])
    return context.llama.next_tokens(hidden[len(tail) - 1 :])


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
