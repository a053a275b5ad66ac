"""The tiny Llama in plain torch with a mask for sinks and window: `window_reference.py SPEC RESULT`, JSON files.

It knows nothing of vLLM, nor of our code: every token's keys and values are kept, and a mask says which of them a token
reads, by its position.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.e2e.inside.rerope_reference import Llama
else:  # run by its path, beside the other one
    Llama = import_module("rerope_reference").Llama


class Windowed(Llama):
    """The model, and the mask.

    Args:
        directory: Its configuration and its weights.
        sinks: Positions before this one are read by every token.
        reach: Tokens before a token's tile that it reads, up to the start of their block.
        block: Tokens per block.
        tile: Tokens of a tile.
    """

    def __init__(self, directory: Path, sinks: int, reach: int, block: int, tile: int) -> None:
        super().__init__(directory)
        self._sinks, self._reach, self._block, self._tile = sinks, reach, block, tile

    def _scores(self, query: torch.Tensor, keys: torch.Tensor, begin: int) -> torch.Tensor:
        positions, places = torch.arange(begin, begin + len(query)), torch.arange(len(keys))
        tiles = positions // self._tile * self._tile
        read_from = (tiles - self._reach).clamp(min=0) // self._block * self._block
        mask = (places < self._sinks) | (places >= read_from[:, None])
        return super()._scores(query, keys, begin).masked_fill(~mask, float("-inf"))


def main(spec_file: Path, result_file: Path) -> None:
    """Each entry is a model with its window; a later call of one may know what an earlier one computed."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    with torch.inference_mode():
        found = []
        for of in spec["models"]:
            model = Windowed(Path(spec["model"]), spec["sinks"], of["window"], spec["block"], spec["tile"])
            found.append([model.generate(**call) for call in of["calls"]])
    result_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
