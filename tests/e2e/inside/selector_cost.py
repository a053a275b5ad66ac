"""What it costs to score a layer's blocks: `selector_cost.py SPEC RESULT`, JSON files.

Processor seconds of one thread, the least of many scorings: what else the machine does then counts little.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from ucm.sparse.topk.codes import KeyCodes

ROUNDS = 150


def seconds(tokens: int, block: int, heads: int, head_size: int) -> float:
    """One scoring of one request, whose blocks lie in order, in bfloat16, with as many query heads as KV heads."""
    source = torch.Generator().manual_seed(0)
    made = KeyCodes(tokens // block, torch.zeros((1, block, heads, head_size), dtype=torch.bfloat16))
    ids = torch.arange(tokens // block)
    made.update(ids, lambda some: torch.randn((len(some), block, heads, head_size), generator=source).bfloat16())
    query = torch.randn((1, heads, head_size), generator=source).bfloat16()
    found = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        made.shares(query, ids[None], None)
        found.append(time.thread_time() - begin)
    return min(found)


def main(spec_file: Path, result_file: Path) -> None:
    """Time all cases."""
    torch.set_num_threads(1)
    cases = json.loads(spec_file.read_text(encoding="utf-8"))
    result_file.write_text(json.dumps([seconds(**case) for case in cases]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
