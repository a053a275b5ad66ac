"""Train a model that knows 512 positions: `rerope_train.py DIRECTORY`, as `needle_train.py` does.

With a base of 10,000 no rotation is as slow as those that the longer model compares content with. This one compares it
with the slowest quarter, which hardly turn within its 512 positions, and far behind them do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

#: In radians per token: half a radian in 512 tokens.
SLOW = 1e-3


def main(directory: Path) -> None:
    """Train, and write ``model.safetensors``."""
    trainer: Any = import_module("needle_train")
    trainer.SLOW = SLOW
    trainer.main(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
