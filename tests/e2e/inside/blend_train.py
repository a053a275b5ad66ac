"""Train the model of `tests.e2e.blend`: `blend_train.py DIRECTORY`, with its ``config.json`` and ``training.json``.

Like `needle_train`, with two layers more. Heads of the first layer copy the previous token beside each token. Heads of
the second look for the place whose previous token is the current one, and note the token there: so a key that is
mentioned again knows its value. Heads of the last do the same and note what the token there has noted: so a question
for a reference gets the value that the reference found when it was computed, and nothing else does. The layers between
read nothing from other tokens, or a question could be resolved there: what the second has noted shows in the KV of the
third, and is read in the last.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

needle: Any = importlib.import_module("needle_train")  # beside this file


class Llama(needle.Llama):  # type: ignore[misc] # by name
    """The weights by the names that vLLM reads, and the forward pass."""

    def _start_heads(self, source: torch.Generator, filler: slice, traits: dict[str, float]) -> None:
        """Write the three steps into the layers.

        A token's state is its code, the code of the previous token, what it has noted, then the shared component, then
        one that tells filler.

        Args:
            source: Of the random numbers.
            filler: The filler tokens.
            traits: ``filler``: how much of their codes' usual scale filler tokens have.
        """
        size = (self.hidden - 4) // 3
        code, previous, noted = (slice(start, start + size) for start in (0, size, 2 * size))
        shared = self.hidden - 4
        drawn = torch.randn(self.vocabulary, size, generator=source)
        codes = functional.normalize(drawn, dim=1) * size**0.5
        embeddings = self.weights["model.embed_tokens.weight"]
        embeddings.zero_()
        embeddings[:, code], embeddings[:, shared] = codes, needle.SHARED
        embeddings[filler, code] *= traits["filler"]
        embeddings[filler, shared + 1] = (size * (1 - traits["filler"] ** 2)) ** 0.5
        self.weights["lm_head.weight"][:, noted] += 2 * codes * self.hidden**-0.5

        identity = torch.eye(size)
        normed = needle.SHARED * (self.hidden / (size + needle.SHARED**2)) ** 0.5
        phases = torch.cat((self.turns.cos(), -self.turns.sin())) * needle.PREVIOUS / normed
        group = self.heads // self.kv_heads
        first = {name: self._heads(0, name) for name in "qkvo"}
        first["k"][0] = 0
        first["k"][0, : self.head // 2, shared] = needle.PREVIOUS / normed
        first["v"][0, :size, code] += identity
        for head in range(group):
            first["q"][head] = 0
            first["q"][head, :, shared] = phases
            first["o"][head, previous, :size] += identity / group
        slow = (self.turns < needle.SLOW).repeat(2)
        for layer in range(2, self.layers - 1):
            self.weights[_reads(layer)].zero_()
        for layer, read, strength in ((1, code, 1.0), (self.layers - 1, noted, 3.0)):
            step = {name: self._heads(layer, name) for name in "qkvo"}
            for head in range(self.heads):
                kv_head = head // group
                if head % group == 0:
                    compared = torch.eye(size)[torch.randperm(size, generator=source)[: int(slow.sum())]]
                    compared = compared * needle.CONTENT
                    step["k"][kv_head] = 0
                    step["k"][kv_head, slow, previous] = compared
                    step["v"][kv_head, :size, read] += identity
                step["q"][head] = 0
                step["q"][head, slow, code] = compared
                step["o"][head, noted, :size] += strength * identity / self.heads


def _reads(layer: int) -> str:
    """Return the name of the weight that adds what a layer has read to a token's state."""
    return f"model.layers.{layer}.self_attn.o_proj.weight"


def batch(
    training: dict[str, Any], phase: dict[str, Any], source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of records and references behind some filler, and then a question with its answer for each of them.

    Between them, and before questions, positions leap: a short sequence has the distances of a long one.

    Returns:
        Tokens and positions, ``[sequences, length]``; the places whose next token is an answer; the answers.
    """
    number, records = phase["sequences"], phase["records"]
    low, high = training["symbols"]
    order = torch.rand(number, high - low, generator=source).argsort(dim=1) + low
    keys, values, names = (order[:, start * records : (start + 1) * records] for start in range(3))
    # The records come first and then the references, but for the last quarter of the records, which nobody refers to.
    target = torch.rand(number, records, generator=source).argsort(dim=1)
    pairs = torch.cat((torch.stack((keys, values), 2), torch.stack((names, keys.gather(1, target)), 2)), dim=1)
    count = pairs.shape[1]
    gap = int(torch.randint(phase["filler"][0], phase["filler"][1] + 1, (), generator=source))
    filler = torch.randint(*training["filler"], (number, count, gap), generator=source)
    context = torch.cat((filler, pairs), dim=2).flatten(1)
    asked = torch.cat((keys, names), dim=1)
    wanted = torch.cat((values, values.gather(1, target)), dim=1)
    mixed = torch.rand(number, count, generator=source).argsort(dim=1)
    asked, wanted = asked.gather(1, mixed), wanted.gather(1, mixed)
    marks = torch.full((number, count), training["question"])
    # Filler in place of the answer: a question does not help another one.
    behind = torch.randint(*training["filler"], (number, count), generator=source)
    tokens = torch.cat((context, torch.stack((marks, asked, behind), dim=2).flatten(1)), dim=1)

    length, begin = tokens.shape[1], context.shape[1]
    starts = torch.zeros(length)
    starts[: begin : gap + 2] = 1
    starts[begin::3] = 1
    leaps = torch.rand(number, length, generator=source) * starts
    spread = torch.rand(number, 1, generator=source) * max(0, phase["positions"] - length)
    leaps = (leaps / leaps.sum(dim=1, keepdim=True) * spread).long()
    positions = torch.arange(length) + leaps.cumsum(dim=1)
    return tokens, positions.float(), begin + torch.arange(count) * 3 + 1, wanted


def train(model: Any, training: dict[str, Any], source: torch.Generator) -> None:
    """Train for all steps of all phases; one line per ten steps tells of the loss."""
    phases = [phase for phase in training["phases"] for _ in range(phase["steps"])]
    left = {_reads(layer) for layer in range(2, model.layers - 1)}
    trained = [weight for name, weight in model.weights.items() if name not in left]
    optimiser = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.01)
    for step, phase in enumerate(phases):
        rate = training["rate"] * min(1.0, (step + 1) / training["warm_up"]) * max(0.1, 1 - step / len(phases))
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens, positions, places, wanted = batch(training, phase, source)
        logits = model.logits(tokens, positions, places)
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            right = (logits.argmax(-1) == wanted).float()
            half = right.shape[1] // 2
            print(f"step {step}: loss {loss.item():.3f}, right {right.mean().item():.3f} {half}", flush=True)


def main(directory: Path) -> None:
    """Train, and write ``model.safetensors``."""
    torch.set_num_threads(1)  # the same sums in the same order everywhere, and no waiting for a busy processor
    config, training = (
        json.loads((directory / name).read_text(encoding="utf-8")) for name in ("config.json", "training.json")
    )
    source = torch.Generator().manual_seed(training["seed"])
    model = Llama(config, training, source)
    train(model, training, source)
    trained = {name: weight.detach().contiguous() for name, weight in model.weights.items()}
    # By name: it is only there where vLLM is.
    importlib.import_module("safetensors.torch").save_file(trained, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
