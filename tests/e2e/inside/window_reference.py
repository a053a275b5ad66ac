"""The tiny Llama in plain torch with a mask for sinks and window: `window_reference.py SPEC RESULT`, JSON files.

It knows nothing of vLLM, nor of our code: every token's keys and values are kept, and a mask says which of them a token
reads, by its position.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


class Llama:
    """The model, and the mask.

    Args:
        directory: Its configuration and its weights.
        sinks: Positions before this one are read by every token.
        window: Tokens before a token's tile that it reads, up to the start of their block.
        block: Tokens per block.
        tile: Tokens of a tile.
    """

    def __init__(self, directory: Path, sinks: int, window: int, block: int, tile: int) -> None:
        self._config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        safetensors: Any = import_module("safetensors.torch")  # by name: it is only there where vLLM is
        self._weights = safetensors.load_file(directory / "model.safetensors")
        self._sinks, self._window, self._block, self._tile = sinks, window, block, tile
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
        config, weights = self._config, self._weights
        positions = torch.arange(begin, begin + len(tokens))
        places = torch.arange(begin + len(tokens))
        tiles = positions // self._tile * self._tile
        read_from = (tiles - self._window).clamp(min=0) // self._block * self._block
        mask = ((places < self._sinks) | (places >= read_from[:, None])) & (places <= positions[:, None])
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            of = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{layer}.")}
            hidden = hidden + self._attention(
                layer, of, self._norm(hidden, of["input_layernorm.weight"]), positions, mask
            )
            inner = self._norm(hidden, of["post_attention_layernorm.weight"])
            gate = functional.silu(inner @ of["mlp.gate_proj.weight"].T) * (inner @ of["mlp.up_proj.weight"].T)
            hidden = hidden + gate @ of["mlp.down_proj.weight"].T
        last: torch.Tensor = self._norm(hidden[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T
        return last

    def _attention(
        self, layer: int, of: dict[str, torch.Tensor], inner: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        heads, kv_heads, size = (self._config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query = self._rotated((inner @ of["self_attn.q_proj.weight"].T).view(-1, heads, size), positions)
        key = self._rotated((inner @ of["self_attn.k_proj.weight"].T).view(-1, kv_heads, size), positions)
        value = (inner @ of["self_attn.v_proj.weight"].T).view(-1, kv_heads, size)
        if layer < len(self._kept):
            before = self._kept[layer]
            self._kept[layer] = torch.cat((before[0], key)), torch.cat((before[1], value))
        else:
            self._kept.append((key, value))
        keys, values = (kept.repeat_interleave(heads // kv_heads, dim=1) for kept in self._kept[layer])
        scores = torch.einsum("qhd,khd->hqk", query, keys) * size**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values).reshape(len(inner), heads * size)
        return mixed @ of["self_attn.o_proj.weight"].T

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt() * weight

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def main(spec_file: Path, result_file: Path) -> None:
    """Each entry is a model with its window; a later call of one may know what an earlier one computed."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    with torch.inference_mode():
        found = []
        for of in spec["models"]:
            model = Llama(Path(spec["model"]), spec["sinks"], of["window"], spec["block"], spec["tile"])
            found.append([model.generate(**call) for call in of["calls"]])
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
