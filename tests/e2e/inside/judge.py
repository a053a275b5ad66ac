"""Let a trained model answer with what a selector leaves it to read: `judge.py SPEC RESULT`.

Prompts are computed densely. The last token of a prompt and those that follow are decode steps; in each, the second
layer reads what `BlockTopK` would let it read: recent blocks, and the best of the others within the budget, one set for
all heads. Selectors are the shipped ones, and three to compare them with: ``oracle`` ranks blocks by their true share
of the attention, ``mean`` by the product with the mean of their keys, ``random`` by chance.

Beside the answers, the share of the attention that a selection keeps over what the oracle's keeps is told of each
layer, along the answers of dense attention.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ucm.sparse.topk.codes import KeyCodes, ranked
from ucm.sparse.topk.selection import BlockBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.inside.key_means import KeyMeans
    from tests.e2e.inside.needle_train import Llama, causal
else:
    from key_means import KeyMeans
    from needle_train import Llama, causal

#: The layer that is restricted: the one before looks at the previous token, which is among the recent ones.
RESTRICTED = 1
#: Tokens before the newest that are always read.
RECENT = 64


class Oracle(KeyMeans):
    """All keys: the logarithm of the sum of each block's attention weights."""

    def __init__(self, num_blocks: int, keys: torch.Tensor) -> None:
        super().__init__(num_blocks, keys)
        self._kept = keys.new_zeros((num_blocks, *keys.shape[1:]))

    def put(self, block_ids: torch.Tensor, keys: torch.Tensor) -> None:
        self._kept[block_ids] = keys

    def scores(self, query: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        grouped = query.unflatten(1, (self._kept.shape[2], -1))
        products = torch.einsum("rkgd,rbskd->krgbs", grouped, self._kept[block_ids])
        return (products * query.shape[-1] ** -0.5).logsumexp(-1)


class Bounds(KeyMeans):
    """The largest and the smallest value of each channel of a block's keys, which bound products (Quest)."""

    def __init__(self, num_blocks: int, keys: torch.Tensor) -> None:
        super().__init__(num_blocks, keys)
        self._kept = keys.new_zeros((num_blocks, keys.shape[2], 2 * keys.shape[3]))

    def put(self, block_ids: torch.Tensor, keys: torch.Tensor) -> None:
        self._kept[block_ids] = torch.cat((keys.amax(1), keys.amin(1)), -1)

    def scores(self, query: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        grouped = query.unflatten(1, (self._kept.shape[1], -1)) * query.shape[-1] ** -0.5
        signed = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), -1)
        return torch.einsum("rkgd,rbkd->krgb", signed, self._kept[block_ids])


class Random(KeyMeans):
    """Nothing."""

    def __init__(self, num_blocks: int, keys: torch.Tensor) -> None:
        super().__init__(num_blocks, keys)
        self._source = torch.Generator().manual_seed(0)

    def scores(self, query: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return torch.rand(self._kept.shape[1], len(query), 1, block_ids.shape[1], generator=self._source) * 20


SELECTORS: dict[str, Callable[[int, torch.Tensor], KeyCodes]] = {
    "oracle": Oracle,
    "hash": KeyCodes,
    "bounds": Bounds,
    "mean": KeyMeans,
    "random": Random,
}


class Prompts:
    """Prompts of one length, all but the last token of each computed.

    Attributes:
        keys: By layer, ``[prompts, room, num_kv_heads, head_size]``.
        values: The same.
    """

    def __init__(self, model: Llama, prompts: list[list[int]], room: int) -> None:
        self.model, self.tokens = model, torch.tensor(prompts)
        shape = (len(prompts), room, model.kv_heads, model.head)
        self.keys, self.values = ([torch.zeros(shape) for _ in range(model.layers)] for _ in range(2))
        self.length = self.tokens.shape[1] - 1
        for number, prompt in enumerate(self.tokens[:, :-1]):

            def read(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int = number) -> torch.Tensor:
                self.keys[layer][at, : self.length] = k[0].transpose(0, 1)
                self.values[layer][at, : self.length] = v[0].transpose(0, 1)
                return causal(q, k, v)

            model.run(prompt[None], torch.arange(self.length)[None].float(), read)

    def decode(
        self, steps: int, select: Callable[[int, int, torch.Tensor], torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on from the last token of each prompt.

        Args:
            steps: How many tokens.
            select: From a layer, the tokens of a prompt, and queries, ``[prompts, num_heads, head_size]``, the tokens
                that are read, ``[prompts, tokens]``, or None for all.

        Returns:
            The tokens that the model says, ``[prompts, steps]``, and the logits of the first,
            ``[prompts, vocabulary]``.
        """
        token, said, first = self.tokens[:, -1], [], None
        for step in range(steps):
            place = self.length + step

            def read(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int = place) -> torch.Tensor:
                self.keys[layer][:, at], self.values[layer][:, at] = k[:, :, 0], v[:, :, 0]
                keep = select(layer, at + 1, q[:, :, 0])
                key, value = (each[layer][:, : at + 1].transpose(1, 2) for each in (self.keys, self.values))
                grouped = q.unflatten(1, (key.shape[1], -1))[:, :, :, 0]
                products = grouped @ key.transpose(2, 3) * q.shape[-1] ** -0.5
                if keep is not None:
                    products = products.masked_fill(~keep[:, None, None], float("-inf"))
                return (products.softmax(-1) @ value).flatten(1, 2)[:, :, None]

            positions = torch.full((len(token), 1), float(place))
            logits = self.model.predicted(self.model.run(token[:, None], positions, read)[:, 0])
            first = logits if first is None else first
            said.append(logits.argmax(-1))
            token = said[-1]
        assert first is not None
        return torch.stack(said, 1), first


class Selector:
    """What one kind of representatives chooses.

    Args:
        kind: One of `SELECTORS`.
        prompts: Their keys are looked at.
        block_size: Tokens in a block.
    """

    def __init__(self, kind: str, prompts: Prompts, block_size: int) -> None:
        self._size = block_size
        count, room = prompts.keys[0].shape[:2]
        #: ``[prompts, blocks]``: where each block lies.
        self._ids = torch.arange(count * room // block_size).view(count, -1)
        self._pages = [keys.view(-1, block_size, *keys.shape[2:]) for keys in prompts.keys]
        self._made = [SELECTORS[kind](len(pages), pages[:1]) for pages in self._pages]
        self._known = [0] * len(self._made)
        self._prompt_blocks = prompts.length // block_size

    def chosen(self, layer: int, tokens: int, query: torch.Tensor, budget: BlockBudget) -> torch.Tensor:
        """The blocks that are read, ``[prompts, blocks]``, bool."""
        blocks = -(-tokens // self._size)
        end = blocks - budget.recent
        keep = torch.zeros(len(query), blocks, dtype=torch.bool)
        keep[:, end:] = True
        known = min(self._known[layer], self._prompt_blocks)  # what was answered before may have been something else
        if known < end:
            self._made[layer].update(self._ids[:, known:end].flatten(), lambda ids: self._pages[layer][ids])
            self._known[layer] = end
        wanted = ranked(self._made[layer].shares(query, self._ids[:, :end], None))
        return keep.scatter(1, wanted.topk(min(budget.chosen, end), -1).indices, value=True)

    def masses(self, layer: int, tokens: int, query: torch.Tensor) -> torch.Tensor:
        """The true share of the attention of each block, ``[prompts, blocks]``."""
        ids = self._ids[:, : -(-tokens // self._size)]
        keys = self._pages[layer][ids].flatten(1, 2).permute(0, 2, 3, 1)  # [prompts, num_kv_heads, head_size, tokens]
        grouped = query.view(len(query), keys.shape[1], -1, keys.shape[2])
        scores = grouped @ keys * keys.shape[2] ** -0.5
        scores[..., tokens:] = float("-inf")
        return scores.softmax(-1).unflatten(-1, (-1, self._size)).sum(-1).mean((1, 2))

    def restrict(self, budget: BlockBudget) -> Callable[[int, int, torch.Tensor], torch.Tensor | None]:
        """For `Prompts.decode`."""

        def select(layer: int, tokens: int, query: torch.Tensor) -> torch.Tensor | None:
            if layer != RESTRICTED:
                return None
            return self.chosen(layer, tokens, query, budget).repeat_interleave(self._size, 1)[:, :tokens]

        return select


def recall(selectors: dict[str, Selector], budget: BlockBudget, steps: int, prompts: Prompts) -> dict[str, list[float]]:
    """Of each selector and layer, what its choice keeps of the attention, over what the oracle's keeps."""
    kept = {name: [0.0] * prompts.model.layers for name in selectors}

    def watch(layer: int, tokens: int, query: torch.Tensor) -> None:
        for name, selector in selectors.items():
            masses = selector.masses(layer, tokens, query)
            masses[:, masses.shape[1] - budget.recent :] = 0
            kept[name][layer] += float(masses[selector.chosen(layer, tokens, query, budget)].sum())

    prompts.decode(steps, watch)
    return {name: [a / b for a, b in zip(of, kept["oracle"], strict=True)] for name, of in kept.items()}


def judged(model: Llama, task: dict[str, Any], spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What was said with dense attention, and with each selector, block size and budget; then what was kept."""
    steps, best = task["steps"], task["best"]
    length = len(task["prompts"][0])
    largest = max(spec["blocks"])
    prompts = Prompts(model, task["prompts"], -(-(length + steps) // largest) * largest)

    def said(select: Callable[[int, int, torch.Tensor], torch.Tensor | None]) -> dict[str, Any]:
        tokens, first = prompts.decode(steps, select)
        return {"task": task["name"], "said": tokens.tolist(), "best": first.topk(best).indices.tolist()}

    yield {**said(lambda *_: None), "selector": "dense", "block": 0, "budget": 1.0}
    for block in spec["blocks"]:
        made = {kind: Selector(kind, prompts, block) for kind in spec["selectors"]}
        for share in spec["budgets"]:
            budget = BlockBudget.of_tokens(block, int(share * length), 0, RECENT)
            if budget.chosen < 1:
                continue
            kept = recall(made, budget, steps, prompts) if "oracle" in made else {}
            for kind, selector in made.items():
                about = {"selector": kind, "block": block, "budget": share, "recall": kept.get(kind)}
                yield {**said(selector.restrict(budget)), **about}


def main(spec_file: Path, result_file: Path) -> None:
    """Judge all tasks of all models."""
    torch.set_num_threads(1)
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    results = []
    with torch.no_grad():
        for name, directory in spec["models"].items():
            model = load(Path(directory))
            results += [{**one, "model": name} for task in spec["tasks"] for one in judged(model, task, spec)]
    result_file.write_text(json.dumps(results), encoding="utf-8")


def load(directory: Path) -> Llama:
    """A trained model."""
    config, training = (
        json.loads((directory / name).read_text(encoding="utf-8")) for name in ("config.json", "training.json")
    )
    model = Llama(config, training, torch.Generator().manual_seed(0))
    # By name: it is only there where vLLM is.
    model.weights = importlib.import_module("safetensors.torch").load_file(directory / "model.safetensors")
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
