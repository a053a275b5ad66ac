"""Judge what restricted decode steps lose, on a trained model: `real_judge.py SPEC RESULT`, JSON files.

The tokens of an answer are given (teacher forcing): of each, the result has the loss and whether the model would have
said it. An answer is right if the model would have said all of its tokens: then greedy decoding says the answer.

A prompt is computed once for each way of computing prompts, and its answer once for all variants: each is a row of one
batch, with queries and new keys of its own, and reads what its selector chooses. The layers, the positions and the
rounding to blocks are those of the engine's methods (`ucm.sparse.topk.selection.BlockBudget`,
`ucm.sparse.blocks.SinksAndWindow`), and so are the codes; tests compare this judge with engines.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from ucm.sparse.blocks import SinksAndWindow
from ucm.sparse.topk.codes import KeyCodes, cpu_kernel, ranked, shares_of
from ucm.sparse.topk.selection import BlockBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tests.e2e.inside.key_means import KeyMeans
else:
    from key_means import KeyMeans

#: Selectors that read a window, and everything.
WINDOW, DENSE = "window", "dense"
SELECTED = ("oracle", "codes", "bounds", "mean", "random")


@dataclass(frozen=True)
class Variant:
    """What the decode steps of a row read.

    Attributes:
        name: For the result.
        selector: One of `SELECTED`, `WINDOW` or `DENSE`.
        block: Tokens in a block.
        tokens: Tokens that a step reads, sinks and recent ones among them; with a tile, besides them.
        budget: These tokens as a share of the prompt, for the result.
        recent: Tokens before the newest that are always read.
        tile: Tokens whose windows begin at the same block; 0 if the recent tokens are counted in blocks.
        dense_layers: The number of first layers that read everything.
        sinks: Tokens from the start that are always read.
    """

    name: str
    selector: str
    block: int
    tokens: int
    budget: float = 1.0
    recent: int = 64
    tile: int = 0
    dense_layers: int = 2
    sinks: int = 4

    def layout(self, length: int) -> tuple[int, int, int]:
        """Return the sinks and the first recent block of a context, and how many blocks between them are chosen."""
        if self.selector == DENSE:
            return 0, 0, 0
        blocks = -(-length // self.block)
        if self.tile:
            window = SinksAndWindow(self.sinks, self.recent, tile=self.tile)
            first = window.sink_blocks(self.block)
            skipped = window.skipped(length - 1, 0, self.block)
            return first, first + skipped, min(skipped, self.tokens // self.block)
        budget = BlockBudget.of_tokens(self.block, self.tokens, self.sinks, self.recent)
        if blocks <= budget.total:
            return 0, 0, 0
        if budget.chosen < 1:  # too few to choose from: a window
            return budget.sinks, blocks - max(budget.total - budget.sinks, 1), 0
        if self.selector == WINDOW:
            return budget.sinks, blocks - budget.total + budget.sinks, 0
        return budget.sinks, blocks - budget.recent, budget.chosen


class Model:
    """A Llama: products with weights in bfloat16, all else in float32."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        # By name: it is only there where vLLM is.
        weights = importlib.import_module("safetensors.torch").load_file(directory / "model.safetensors")
        self._weights = {name.removeprefix("model."): of.bfloat16() for name, of in weights.items()}
        self.layers, self._epsilon = int(config["num_hidden_layers"]), float(config["rms_norm_eps"])
        self._size, self.heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        self.kv_heads, self.head = int(config["num_key_value_heads"]), self._size // self.heads
        self.base = float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])

    def run(self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the last hidden states, ``[n, hidden]``.

        Args:
            tokens: ``[n]``.
            positions: ``[n]``.
            attend: From a layer and its queries, ``[n, num_heads, head]``, keys and values,
                ``[n, num_kv_heads, head]``, the attention's output, as the queries.
        """
        turn = self.turning(positions)
        hidden = self._weights["embed_tokens.weight"][tokens].float()
        for layer in range(self.layers):
            q, k, v = (
                self._times(self._norm(hidden, layer, "input"), layer, f"self_attn.{name}_proj").unflatten(
                    -1, (-1, self.head)
                )
                for name in "qkv"
            )
            read = attend(layer, turn(q), turn(k), v)
            hidden = hidden + self._times(read.flatten(1), layer, "self_attn.o_proj")
            inner = self._norm(hidden, layer, "post_attention")
            gate, up = (self._times(inner, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
            hidden = hidden + self._times(silu(gate) * up, layer, "mlp.down_proj")
        return rms_norm(hidden, (self._size,), self._weights["norm.weight"].float(), self._epsilon)

    def turning(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what rotates queries or keys, ``[n, heads, head]``, at some positions, ``[n]``."""
        return turning(positions, self.base ** -(torch.arange(0, self.head, 2).double() / self.head))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token."""
        weights = self._weights.get("lm_head.weight", self._weights["embed_tokens.weight"])
        return (hidden.bfloat16() @ weights.T).float()

    def _of(self, layer: int, name: str) -> Tensor:
        return self._weights[f"layers.{layer}.{name}.weight"]

    def _times(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        return (hidden.bfloat16() @ self._of(layer, name).T).float()

    def _norm(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        return rms_norm(hidden, (self._size,), self._of(layer, f"{name}_layernorm").float(), self._epsilon)


def turning(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return what rotates queries or keys by some frequencies, ``[head / 2]``, and scales them; see `Model.turning`."""
    turns = positions[:, None].double() * frequencies
    cos, sin = (scale * of.float()[:, None] for of in (turns.cos(), turns.sin()))

    def turn(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    return turn


class Prompt:
    """The KV of a prompt's tokens, and the summaries of its blocks.

    Args:
        model: The model.
        tokens: The prompt.

    Attributes:
        keys: By layer, ``[num_kv_heads, tokens, head]``.
        values: As ``keys``.
        hidden: ``[1, hidden]``: the hidden state of the last token.
    """

    def __init__(self, model: Model, tokens: Sequence[int]) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.length = len(tokens)
        self._made: dict[tuple[str, int, int], Any] = {}

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (of.transpose(0, 1) for of in (q, k, v))
            self.keys.append(k.contiguous())
            self.values.append(v.contiguous())
            read = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
            return read[0].transpose(0, 1)

        self.hidden = model.run(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1:]

    def scores(self, selector: str, block: int, layer: int, query: Tensor) -> Tensor:
        """Return how strongly heads attend to each whole block, ``[num_kv_heads, rows, group, blocks]``."""
        rows, _, head = query.shape
        keys = self.keys[layer]
        whole = keys[:, : self.length // block * block].unflatten(1, (-1, block))
        grouped = query.view(rows, len(keys), -1, head).transpose(0, 1) * head**-0.5
        if selector == "random":
            source = torch.Generator().manual_seed(layer + 1000 * int(query.abs().sum() * 1e3) % 2**31)
            return (torch.rand(1, rows, 1, whole.shape[1], generator=source) * 20).expand(len(keys), -1, 1, -1)
        if selector == "oracle":
            products = grouped.flatten(1, 2) @ whole.flatten(1, 2).transpose(1, 2)
            return products.view(*grouped.shape[:3], -1, block).logsumexp(-1)
        if selector == "bounds":
            signed = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), -1).flatten(1, 2)
            bounds = self._summaries(selector, block, layer, lambda: torch.cat((whole.amax(2), whole.amin(2)), -1))
            return (signed @ bounds.transpose(1, 2)).view(*grouped.shape[:3], -1)
        by_block = whole.permute(1, 2, 0, 3)
        made = self._summaries(selector, block, layer, lambda: _representatives(selector, by_block))
        ids = torch.arange(len(by_block)).expand(rows, -1)
        found: Tensor = made.scores(query, ids)
        return found

    def _summaries(self, selector: str, block: int, layer: int, make: Callable[[], Any]) -> Any:
        key = selector, block, layer
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _representatives(selector: str, keys: Tensor) -> Any:
    """Return the summaries of blocks, ``[blocks, block_size, num_kv_heads, head]``."""
    made = (KeyMeans if selector == "mean" else KeyCodes)(len(keys), keys[:1])
    made._kernel = cpu_kernel(made._codes.shape[2])  # this process runs no engine
    made.put(torch.arange(len(keys)), keys)
    return made


def judged(model: Model, prompt: Prompt, answer: Sequence[int], variants: Sequence[Variant]) -> Iterator[Any]:
    """Yield of each variant and token of an answer its loss, and whether the model would have said it."""
    rows, steps = len(variants), len(answer)
    shape = (model.layers, rows, model.kv_heads, steps, model.head)
    new_keys, new_values = torch.zeros(shape), torch.zeros(shape)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, variant in enumerate(variants):
        groups[variant.selector, variant.block].append(row)
    hidden = prompt.hidden.expand(rows, -1)
    for step, token in enumerate(answer):
        logits = model.logits(hidden)
        losses = logits.log_softmax(-1)[:, token].neg()
        yield [[float(loss), bool(best == token)] for loss, best in zip(losses, logits.argmax(-1), strict=True)]
        if step + 1 == steps:
            return
        length = prompt.length + step + 1
        layouts = [variant.layout(length) for variant in variants]

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, step: int = step, layouts: list[Any] = layouts
        ) -> Tensor:
            new_keys[layer, :, :, step], new_values[layer, :, :, step] = k, v
            hidden = torch.zeros(rows, prompt.length, dtype=torch.bool)
            for (selector, block), members in groups.items():
                some = [row for row in members if layouts[row][1] and variants[row].dense_layers <= layer]
                if not some:
                    continue
                scores = None if selector in (WINDOW, DENSE) else prompt.scores(selector, block, layer, q[some])
                for place, row in enumerate(some):
                    sinks, recent, chosen = layouts[row]
                    of_row = hidden[row]
                    of_row[sinks * block : recent * block] = True
                    if scores is not None and chosen:
                        order = ranked(shares_of(scores[:, place : place + 1, :, sinks:recent], None))[0]
                        best = order.topk(min(chosen, len(order))).indices + sinks
                        of_row[(best[:, None] * block + torch.arange(block)).flatten()] = False
            grouped = q.view(rows, model.kv_heads, -1, model.head) * model.head**-0.5
            old = (grouped.transpose(0, 1).flatten(1, 2) @ prompt.keys[layer].transpose(1, 2)).view(
                model.kv_heads, rows, -1, prompt.length
            )
            old = old.transpose(0, 1).masked_fill(hidden[:, None, None], float("-inf"))
            new = grouped @ new_keys[layer, :, :, : step + 1].transpose(2, 3)
            weights = torch.cat((old, new), -1).softmax(-1)
            of_old = weights[..., : prompt.length].transpose(0, 1).flatten(1, 2) @ prompt.values[layer]
            of_new = weights[..., prompt.length :] @ new_values[layer, :, :, : step + 1]
            read = of_old.view(model.kv_heads, rows, -1, model.head).transpose(0, 1) + of_new
            return read.flatten(1, 2)

        hidden = model.run(torch.full((rows,), token), torch.full((rows,), length - 1), attend)


def main(spec_file: Path, result_file: Path) -> None:
    """Judge all items."""
    torch.set_num_threads(1)
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    model = Model(Path(spec["model"]))
    with torch.no_grad(), result_file.open("a", encoding="utf-8") as results:
        for number, item in enumerate(spec["items"]):
            variants = [Variant(**of) for of in item["variants"]]
            found = list(zip(*judged(model, Prompt(model, item["prompt"]), item["answer"], variants), strict=True))
            for variant, tokens in zip(variants, found, strict=True):
                about = {"item": number, "name": variant.name, "budget": variant.budget}
                print(json.dumps({**about, "tokens": tokens}), file=results)
            results.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
