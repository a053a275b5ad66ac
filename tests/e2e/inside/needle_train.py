"""Train the model of `tests.e2e.needle`: `needle_train.py DIRECTORY`, with its ``config.json`` and ``training.json``.

A model of two layers answers such questions by two steps that are well known (Olsson et al., "In-context Learning and
Induction Heads", 2022): heads of the first layer copy the previous token beside each token; heads of the second look
for the place whose previous token is the current one, and copy the token there. From random weights it takes thousands
of training steps until these heads form. So the weights start near them, and training makes them reliable and reach
far. Two traits of trained models are given to the start as well, because methods that summarise blocks of keys live by
them: a few components carry most of what tells tokens apart, and tokens that nobody looks for have much the same key.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

Weights = dict[str, torch.Tensor]
#: How strongly the heads start: of the first layer for the previous token, of the second for the same content.
PREVIOUS, CONTENT = 14.0, 2.0
#: A component that all embeddings share; the first layer's queries and keys are made of it alone.
SHARED = 4.0
#: How much of their codes' usual scale filler tokens have.
FILLER = 0.1
#: Codes are normally distributed to this power: most of a code lies in few components, as in trained models.
TAILS = 2.0
#: Rotations slower than this, in radians per token, are used to compare content.
SLOW = 1e-4
#: How much of their usual scale the weights have beside what starts the heads.
NOISE = 0.1


class Llama:
    """The weights of a Llama by the names that vLLM reads, and its forward pass.

    Args:
        config: The model's ``config.json``.
        filler: The first and the end of the filler tokens.
        source: Of the random numbers.
    """

    def __init__(self, config: dict[str, Any], filler: tuple[int, int], source: torch.Generator) -> None:
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.layers, self.vocabulary = config["num_hidden_layers"], config["vocab_size"]
        self.heads, self.kv_heads, self.head = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.epsilon = config["rms_norm_eps"]
        self.turns = config["rope_theta"] ** (-torch.arange(0, self.head, 2) / self.head)
        self.weights = self._noise(source)
        self._start_heads(source, slice(*filler))
        for weight in self.weights.values():
            weight.requires_grad_()

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The logits at some places.

        Args:
            tokens: ``[sequences, length]``, int64.
            positions: ``[sequences, length]``, float32.
            wanted: ``[n]``, int64: the places within the length.

        Returns:
            ``[sequences, n, vocabulary]``.
        """
        angles = positions[:, None, :, None] * self.turns
        turn = angles.cos(), angles.sin()
        state = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            state = state + self._attention(prefix, self._normed(state, f"{prefix}.input_layernorm"), turn)
            normed = self._normed(state, f"{prefix}.post_attention_layernorm")
            gated = functional.silu(self._linear(normed, f"{prefix}.mlp.gate_proj"))
            state = state + self._linear(
                gated * self._linear(normed, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
            )
        return self._linear(self._normed(state[:, wanted], "model.norm"), "lm_head")

    def _attention(self, prefix: str, state: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        def heads(name: str, number: int) -> torch.Tensor:
            made = self._linear(state, f"{prefix}.self_attn.{name}_proj")
            return made.view(*state.shape[:2], number, self.head).transpose(1, 2)

        query, key = _rotated(heads("q", self.heads), *turn), _rotated(heads("k", self.kv_heads), *turn)
        group = self.heads // self.kv_heads
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, heads("v", self.kv_heads)))
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._linear(read.transpose(1, 2).flatten(2), f"{prefix}.self_attn.o_proj")

    def _linear(self, state: torch.Tensor, name: str) -> torch.Tensor:
        return state @ self.weights[f"{name}.weight"].T

    def _normed(self, state: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(state, (self.hidden,), self.weights[f"{name}.weight"], self.epsilon)

    def _noise(self, source: torch.Generator) -> Weights:
        query, key = self.heads * self.head, self.kv_heads * self.head
        shapes = {"model.embed_tokens": (self.vocabulary, self.hidden), "lm_head": (self.vocabulary, self.hidden)}
        found = {"model.norm.weight": torch.ones(self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}.{name}.weight"] = torch.ones(self.hidden)
            shapes |= {
                f"{prefix}.self_attn.q_proj": (query, self.hidden),
                f"{prefix}.self_attn.k_proj": (key, self.hidden),
                f"{prefix}.self_attn.v_proj": (key, self.hidden),
                f"{prefix}.self_attn.o_proj": (self.hidden, query),
                f"{prefix}.mlp.gate_proj": (self.inner, self.hidden),
                f"{prefix}.mlp.up_proj": (self.inner, self.hidden),
                f"{prefix}.mlp.down_proj": (self.hidden, self.inner),
            }
        for name, shape in shapes.items():
            found[f"{name}.weight"] = torch.randn(shape, generator=source) * NOISE * shape[1] ** -0.5
        return found

    def _start_heads(self, source: torch.Generator, filler: slice) -> None:
        """Write the two steps into the first two layers.

        A token's state is its code, then room for the code of the previous token, then the shared component, then one
        that tells filler: nobody asks for one filler token or another, so they are much alike.
        """
        size = self.hidden // 2 - 4
        code, room, shared = slice(0, size), slice(size, 2 * size), self.hidden - 4
        drawn = torch.randn(self.vocabulary, size, generator=source)
        codes = functional.normalize(drawn * drawn.abs() ** (TAILS - 1), dim=1) * size**0.5
        embeddings = self.weights["model.embed_tokens.weight"]
        embeddings.zero_()
        embeddings[:, code], embeddings[:, shared] = codes, SHARED
        embeddings[filler, code] *= FILLER
        embeddings[filler, shared + 1] = (size * (1 - FILLER**2)) ** 0.5
        self.weights["lm_head.weight"][:, code] += 2 * codes * self.hidden**-0.5

        identity = torch.eye(size)
        first, second = ({n: self._heads(layer, n) for n in "qkvo"} for layer in range(2))
        normed = SHARED * (self.hidden / (size + SHARED**2)) ** 0.5
        # With these phases, the product of a query and a key is greatest where the key is one token before.
        phases = torch.cat((self.turns.cos(), -self.turns.sin())) * PREVIOUS / normed
        group = self.heads // self.kv_heads
        first["k"][0] = 0
        first["k"][0, : self.head // 2, shared] = PREVIOUS / normed
        first["v"][0, :size, code] += identity
        for head in range(group):
            first["q"][head] = 0
            first["q"][head, :, shared] = phases
            first["o"][head, room, :size] += identity / group
        slow = (self.turns < SLOW).repeat(2)
        for head in range(self.heads):
            kv_head = head // group
            if head % group == 0:
                compared = torch.eye(size)[torch.randperm(size, generator=source)[: int(slow.sum())]] * CONTENT
                second["k"][kv_head] = 0
                second["k"][kv_head, slow, room] = compared
                second["v"][kv_head, :size, code] += identity
            second["q"][head] = 0
            second["q"][head, slow, code] = compared
            second["o"][head, code, :size] += 2 * identity / self.heads

    def _heads(self, layer: int, name: str) -> torch.Tensor:
        """A view of a projection: ``[heads, head size, hidden]``, or with the last two exchanged for the output's."""
        weight = self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        if name == "o":
            return weight.view(self.hidden, self.heads, self.head).transpose(0, 1)
        return weight.view(-1, self.head, self.hidden)


def _rotated(state: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = state.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def batch(
    training: dict[str, Any], phase: dict[str, Any], source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of records, each behind some filler, and then a question with its answer for every record.

    Between records, and before questions, positions leap: a short sequence has the distances of a long one.

    Returns:
        Tokens and positions, ``[sequences, length]``, and the places whose next token is part of an answer.
    """
    number, records, size = phase["sequences"], phase["records"], training["record"]
    low, high = training["symbols"]
    order = torch.rand(number, high - low, generator=source).argsort(dim=1)
    symbols = (order[:, : size * records] + low).view(number, records, size)
    gap = int(torch.randint(phase["filler"][0], phase["filler"][1] + 1, (), generator=source))
    filler = torch.randint(*training["filler"], (number, records, gap), generator=source)
    context = torch.cat((filler, symbols), dim=2).flatten(1)
    asked = torch.rand(number, records, generator=source).argsort(dim=1)[:, :, None].expand(-1, -1, size)
    marks = torch.full((number, records, 1), training["question"])
    tokens = torch.cat((context, torch.cat((marks, symbols.gather(1, asked)), dim=2).flatten(1)), dim=1)

    length, begin = tokens.shape[1], context.shape[1]
    starts = torch.zeros(length)
    starts[: begin : gap + size] = 1
    starts[begin :: size + 1] = 1
    leaps = torch.rand(number, length, generator=source) * starts
    spread = torch.rand(number, 1, generator=source) * max(0, phase["positions"] - length)
    leaps = (leaps / leaps.sum(dim=1, keepdim=True) * spread).long()
    positions = torch.arange(length) + leaps.cumsum(dim=1)
    places = begin + torch.arange(records)[:, None] * (size + 1) + torch.arange(1, size)
    return tokens, positions.float(), places.flatten()


def train(model: Llama, training: dict[str, Any], source: torch.Generator) -> None:
    """Train for all steps of all phases; one line per ten steps tells of the loss."""
    phases = [phase for phase in training["phases"] for _ in range(phase["steps"])]
    optimiser = torch.optim.AdamW(model.weights.values(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, phase in enumerate(phases):
        rate = training["rate"] * min(1.0, (step + 1) / training["warm_up"]) * max(0.1, 1 - step / len(phases))
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens, positions, places = batch(training, phase, source)
        logits = model.logits(tokens, positions, places)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, places + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main(directory: Path) -> None:
    """Train, and write ``model.safetensors``."""
    torch.set_num_threads(1)  # the same sums in the same order everywhere, and no waiting for a busy processor
    config, training = (
        json.loads((directory / name).read_text(encoding="utf-8")) for name in ("config.json", "training.json")
    )
    source = torch.Generator().manual_seed(training["seed"])
    model = Llama(config, training["filler"], source)
    train(model, training, source)
    trained = {name: weight.detach().contiguous() for name, weight in model.weights.items()}
    # By name: it is only there where vLLM is.
    importlib.import_module("safetensors.torch").save_file(trained, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
