"""Write a model with random weights: `tiny_model.py DIRECTORY`, which has its ``config.json`` already.

The shapes are those of the transformers library. The weights are drawn at a scale at which attention matters, as those
of `tests.e2e.model` are, so that wrong KV changes the tokens.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def main(directory: Path) -> None:
    """Write ``model.safetensors``."""
    transformers: Any = import_module("transformers")  # by name: it is only there where vLLM is
    config = transformers.AutoConfig.from_pretrained(directory)
    model = getattr(transformers, config.architectures[0])(config).float()
    source = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            limit = 1.0 if "embed" in name else 2.5 / weight.shape[-1] ** 0.5
            weight.data = torch.rand(weight.shape, generator=source) * 2 * limit - limit
    model.save_pretrained(directory)
    # Within a multimodal model, transformers 5 writes a prefix of the language model twice.
    safetensors, path = import_module("safetensors.torch"), directory / "model.safetensors"
    weights = {name.replace(".model.model.", ".model."): weight for name, weight in safetensors.load_file(path).items()}
    safetensors.save_file(weights, path, {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
