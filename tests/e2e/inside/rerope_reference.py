"""The tiny Llama in plain torch under ReRoPE: `rerope_reference.py SPEC RESULT`, JSON files.

It knows nothing of vLLM, nor of our code. It keeps keys that were never rotated, and has two whole matrices of scores:
one with every distance as it is, one with every distance as it is before the window. A mask chooses between them.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


class Llama:
    """The model, and the distances that it sees.

    Args:
        directory: Its configuration and its weights.
        window: Distances below this one are as they are; None for all.
        leak: Tokens before the window to one more of distance; None if it does not grow.
        training_length: Later queries' scores grow with the logarithm of their position; None if they do not.
    """

    def __init__(
        self,
        directory: Path,
        window: int | None = None,
        leak: float | None = None,
        training_length: int | None = None,
        rotated: float = 1.0,
        neighbours: bool = False,
    ) -> None:
        self._config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        safetensors: Any = import_module("safetensors.torch")  # by name: it is only there where vLLM is
        self._weights = safetensors.load_file(directory / "model.safetensors")
        self._window, self._leak, self._training_length = window, leak, training_length
        self._rotated, self._neighbours = rotated, neighbours
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def generate(self, tokens: list[int], count: int, *, known: int = 0) -> list[int]:
        """The tokens that follow, the likeliest each time.

        Args:
            tokens: The prompt.
            count: How many tokens to generate.
            known: Tokens of the prompt whose keys and values are kept from the call before.
        """
        self._kept = [(keys[:known], values[:known]) for keys, values in self._kept] if known else []
        logits = self._step(tokens[known:], known)
        found = [int(logits.argmax())]
        while len(found) < count:
            logits = self._step(found[-1:], len(tokens) + len(found) - 1)
            found.append(int(logits.argmax()))
        return found

    def _step(self, tokens: list[int], begin: int) -> torch.Tensor:
        """The logits behind the last of these tokens."""
        weights = self._weights
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(self._config["num_hidden_layers"]):
            of = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{layer}.")}
            hidden = hidden + self._attention(layer, of, self._norm(hidden, of["input_layernorm.weight"]), begin)
            inner = self._norm(hidden, of["post_attention_layernorm.weight"])
            gate = functional.silu(inner @ of["mlp.gate_proj.weight"].T) * (inner @ of["mlp.up_proj.weight"].T)
            hidden = hidden + gate @ of["mlp.down_proj.weight"].T
        last: torch.Tensor = self._norm(hidden[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T
        return last

    def _attention(self, layer: int, of: dict[str, torch.Tensor], inner: torch.Tensor, begin: int) -> torch.Tensor:
        heads, kv_heads, size = (self._config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query = (inner @ of["self_attn.q_proj.weight"].T).view(-1, heads, size)
        key = (inner @ of["self_attn.k_proj.weight"].T).view(-1, kv_heads, size)
        value = (inner @ of["self_attn.v_proj.weight"].T).view(-1, kv_heads, size)
        if layer < len(self._kept):
            before = self._kept[layer]
            self._kept[layer] = torch.cat((before[0], key)), torch.cat((before[1], value))
        else:
            self._kept.append((key, value))
        keys, values = (kept.repeat_interleave(heads // kv_heads, dim=1) for kept in self._kept[layer])
        scores = self._scores(query, keys, begin) * size**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(len(inner), heads * size)
        return mixed @ of["self_attn.o_proj.weight"].T

    def _scores(self, query: torch.Tensor, keys: torch.Tensor, begin: int) -> torch.Tensor:
        own, other = torch.arange(begin, begin + len(query)), torch.arange(len(keys))
        distance = own[:, None] - other
        scores = torch.einsum("qhd,khd->hqk", self._turned(query, own), self._turned(keys, other))
        if self._window is not None:
            # A query that stands at the window, and keys at zero; with a leak both move on, by a part of a position.
            slow = 0.0 if self._leak is None else 1 / self._leak
            at = self._turned(query, self._window * (1 - slow) + own * slow), self._turned(keys, other * slow)
            scores = torch.where(distance < self._window, scores, torch.einsum("qhd,khd->hqk", *at))
        if self._training_length is not None:
            scores = scores * (torch.log(own + 1.0) / math.log(self._training_length)).clamp(min=1)[:, None]
        return scores.masked_fill(distance < 0, float("-inf"))

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt() * weight

    def _turned(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size = int(heads.shape[-1] * self._rotated)
        half = size // 2
        frequencies = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        turn = torch.polar(torch.ones(len(heads), half), positions[:, None].float() * frequencies)[:, None]
        part = heads[..., :size]
        # As pairs: of neighbours, or of the first half with the second.
        pairs = part.unflatten(-1, (half, 2)) if self._neighbours else part.unflatten(-1, (2, half)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = (turned if self._neighbours else turned.transpose(-1, -2)).flatten(-2)
        return torch.cat((turned, heads[..., size:]), dim=-1)


def main(spec_file: Path, result_file: Path) -> None:
    """For each way to see distances the answers to each prompt."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    with torch.inference_mode():
        found = []
        for ways in spec["ways"]:
            model = Llama(Path(spec["model"]), **ways)
            found.append([model.generate(prompt, spec["count"]) for prompt in spec["prompts"]])
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
