"""Train a model of `tests.e2e.needle`: `needle_train.py DIRECTORY`, with its ``config.json`` and ``training.json``.

A model of two layers answers such questions by two steps that are well known (Olsson et al., "In-context Learning and
Induction Heads", 2022): heads of the first layer copy the previous token beside each token; heads of the second look
for the place whose previous token is the current one, and copy the token there. From random weights it takes thousands
of training steps until these heads form. So the weights start near them, and training makes them reliable and reach
far. ``training.json`` says what else the start is given (`tests.e2e.needle.model` says why).
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

Weights = dict[str, torch.Tensor]
#: Of a layer, from queries, keys and values, ``[sequences, heads, length, head size]``, what the heads read.
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: How strongly the heads start: of the first layer for the previous token, of the second for the same content.
PREVIOUS, CONTENT = 14.0, 2.0
#: A component that all embeddings share; the first layer's queries and keys are made of it alone.
SHARED = 4.0
#: Rotations slower than this, in radians per token, are used to compare content.
SLOW = 1e-4
#: How much of their usual scale the weights have beside what starts the heads.
NOISE = 0.1


class Llama:
    """The weights of a Llama by the names that vLLM reads, and its forward pass.

    Args:
        config: The model's ``config.json``.
        training: Its ``training.json``.
        source: Of the random numbers.
    """

    def __init__(self, config: dict[str, Any], training: dict[str, Any], source: torch.Generator) -> None:
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.layers, self.vocabulary = config["num_hidden_layers"], config["vocab_size"]
        self.heads, self.kv_heads, self.head = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.epsilon = config["rms_norm_eps"]
        self.biased = config.get("attention_bias", False)
        self.turns = config["rope_theta"] ** (-torch.arange(0, self.head, 2) / self.head)
        self.weights = self._noise(source)
        self._start_heads(source, slice(*training["filler"]), training["traits"])
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
        return self.predicted(self.run(tokens, positions, lambda _, *projected: causal(*projected))[:, wanted])

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """The state behind the last layer, ``[sequences, length, hidden]``, with attention as a function."""
        angles = positions[:, None, :, None] * self.turns
        turn = angles.cos(), angles.sin()
        state = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            normed = self._normed(state, f"{prefix}.input_layernorm")
            query, key, value = (
                self._linear(normed, f"{prefix}.self_attn.{name}_proj").unflatten(-1, (-1, self.head)).transpose(1, 2)
                for name in "qkv"
            )
            read = attention(layer, _rotated(query, *turn), _rotated(key, *turn), value)
            state = state + self._linear(read.transpose(1, 2).flatten(2), f"{prefix}.self_attn.o_proj")
            normed = self._normed(state, f"{prefix}.post_attention_layernorm")
            gated = functional.silu(self._linear(normed, f"{prefix}.mlp.gate_proj"))
            inner = gated * self._linear(normed, f"{prefix}.mlp.up_proj")
            state = state + self._linear(inner, f"{prefix}.mlp.down_proj")
        return state

    def predicted(self, state: torch.Tensor) -> torch.Tensor:
        """The logits of the next token."""
        return self._linear(self._normed(state, "model.norm"), "lm_head")

    def _linear(self, state: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = state @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias

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
            if self.biased:
                for name in "qkvo":
                    of = f"{prefix}.self_attn.{name}_proj"
                    found[f"{of}.bias"] = torch.zeros(shapes[of][0])
        for name, shape in shapes.items():
            found[f"{name}.weight"] = torch.randn(shape, generator=source) * NOISE * shape[1] ** -0.5
        return found

    def _start_heads(self, source: torch.Generator, filler: slice, traits: dict[str, float]) -> None:
        """Write the two steps into the first two layers.

        A token's state is its code, then room for the code of the previous token, then the shared component, then one
        that tells filler.

        Args:
            source: Of the random numbers.
            filler: The filler tokens.
            traits: ``filler``: how much of their codes' usual scale filler tokens have; ``tails``: codes are normally
                distributed to this power; ``shift``: how long a vector all keys of the second layer share, in the
                components that hardly turn, in units of a key's own length; ``copy``: how strongly the second layer
                writes what it has found.
        """
        size = self.hidden // 2 - 4
        code, room, shared = slice(0, size), slice(size, 2 * size), self.hidden - 4
        drawn = torch.randn(self.vocabulary, size, generator=source)
        codes = functional.normalize(drawn * drawn.abs() ** (traits["tails"] - 1), dim=1) * size**0.5
        embeddings = self.weights["model.embed_tokens.weight"]
        embeddings.zero_()
        embeddings[:, code], embeddings[:, shared] = codes, SHARED
        embeddings[filler, code] *= traits["filler"]
        embeddings[filler, shared + 1] = (size * (1 - traits["filler"] ** 2)) ** 0.5
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
            second["o"][head, code, :size] += traits["copy"] * identity / self.heads
        if "model.layers.1.self_attn.k_proj.bias" in self.weights:
            direction = torch.randn(self.kv_heads, self.head, generator=source) * slow
            length = traits["shift"] * CONTENT * float(slow.sum()) ** 0.5
            shift = functional.normalize(direction, dim=1) * length
            self.weights["model.layers.1.self_attn.k_proj.bias"].copy_(shift.flatten())

    def _heads(self, layer: int, name: str) -> torch.Tensor:
        """A view of a projection: ``[heads, head size, hidden]``, or with the last two exchanged for the output's."""
        weight = self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        if name == "o":
            return weight.view(self.hidden, self.heads, self.head).transpose(0, 1)
        return weight.view(-1, self.head, self.hidden)


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of each token to itself and those before; all ``[sequences, heads, length, head size]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _rotated(state: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = state.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def batch(
    training: dict[str, Any], phase: dict[str, Any], source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of records, each behind some filler, and then questions with their answers for all of them.

    Between records, and before questions, positions leap: a short sequence has the distances of a long one.

    Returns:
        Tokens and positions, ``[sequences, length]``, and the places whose next token is part of an answer.
    """
    number, (low, high) = int(phase["sequences"]), training["symbols"]
    symbols = torch.rand(number, high - low, generator=source).argsort(dim=1) + low
    gap = int(torch.randint(phase["filler"][0], phase["filler"][1] + 1, (), generator=source))
    if "hops" in phase:
        chain = phase["hops"] + 1
        answers = symbols[:, : phase["records"] // phase["hops"] * chain].view(number, -1, chain)
        pairs = torch.stack((answers[:, :, :-1], answers[:, :, 1:]), dim=3).flatten(1, 2)
        mentioned = pairs[:, :, :1].repeat(1, phase["mentions"], 1)
        beside = torch.randint(*training["filler"], mentioned.shape, generator=source)
        records = _shuffled(torch.cat((pairs, torch.cat((mentioned, beside), dim=2)), dim=1), source)
    elif "values" in phase:
        keys, values = symbols[:, : 2 * phase["records"]].split(phase["records"], dim=1)
        keys = keys[:, : phase["records"] // phase["values"]].repeat_interleave(phase["values"], dim=1)
        answers = torch.stack((keys, values), dim=2)
        records = _shuffled(answers, source)
    else:
        answers = symbols[:, : training["record"] * phase["records"]].view(number, phase["records"], -1)
        records = answers
    filler = torch.randint(*training["filler"], (*records.shape[:2], gap), generator=source)
    context = torch.cat((filler, records), dim=2).flatten(1)
    answers = _shuffled(answers, source)
    count, size = answers.shape[1:]
    marks = torch.full((number, count, 1), training["question"])
    tokens = torch.cat((context, torch.cat((marks, answers), dim=2).flatten(1)), dim=1)

    length, begin = tokens.shape[1], context.shape[1]
    starts = torch.zeros(length)
    starts[: begin : gap + records.shape[2]] = 1
    starts[begin :: size + 1] = 1
    leaps = torch.rand(number, length, generator=source) * starts
    spread = torch.rand(number, 1, generator=source) * max(0, phase["positions"] - length)
    leaps = (leaps / leaps.sum(dim=1, keepdim=True) * spread).long()
    positions = torch.arange(length) + leaps.cumsum(dim=1)
    places = begin + torch.arange(count)[:, None] * (size + 1) + torch.arange(1, size)
    return tokens, positions.float(), places.flatten()


def _shuffled(rows: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """The rows of each sequence in an order of its own: ``[sequences, rows, tokens]``."""
    order = torch.rand(rows.shape[:2], generator=source).argsort(dim=1)
    return rows.gather(1, order[:, :, None].expand(rows.shape))


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
    model = Llama(config, training, source)
    train(model, training, source)
    trained = {name: weight.detach().contiguous() for name, weight in model.weights.items()}
    # By name: it is only there where vLLM is.
    importlib.import_module("safetensors.torch").save_file(trained, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
