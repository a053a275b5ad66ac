"""First token and whole answer of prompts that other engines prefill, beside one engine: `-- hand_off`.

Servers of a trained model in float32, on one machine: two that prefill, and one that decodes. In each round two
documents are asked about at once: the decode server alone, through `examples/hand_off/proxy.py` with one prefill
server, and with both. First with a store in a directory, then with NIXL and UCM beside it. All share the processors,
so nothing is gained by the split itself. A prefill server then answers the same questions: all answers must be equal.
With NIXL, vLLM's answers say how many tokens the *prefill* server did not compute.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.ttft import RELEASE
from tests.e2e.environment import with_nixl
from tests.e2e.real.chat import BOAT, HANDBOOK, chat
from tests.e2e.real.fleet import Fleet, at_once
from tests.e2e.real.model import real_model
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.real.chat import Reply

ALONE = "one engine"
#: Documents that are asked about at once, rounds after the first, which takes longer, and the size of a document.
AT_ONCE, ROUNDS, CHARACTERS = 2, 3, 9_000
ANSWER = 16


@dataclass
class Row:
    """The replies of one composition, and whether all were those of a prefill server."""

    replies: list[Reply] = field(default_factory=list)
    load: float = 0.0
    right: bool = True

    @property
    def first_s(self) -> float:
        """Median seconds to the first token."""
        return median(reply.first_s for reply in self.replies)


def measure(release: str, *, transport: bool, rounds: int, characters: int) -> dict[str, Row]:
    """Return a row for each composition over a store, or over NIXL with UCM beside it."""
    text = HANDBOOK.read_text(encoding="utf-8")[:characters]
    environment = with_nixl(release, BUILD / "bench" / f"vllm-{release}-hand-off")
    with (
        tempfile.TemporaryDirectory(dir=BUILD / "bench") as directory,
        Fleet(environment, real_model(), Path(directory), transport=transport, options="--max-model-len 6144") as fleet,
    ):
        over = "NIXL" if transport else "a store"
        doors = {
            ALONE: fleet.decode,
            f"1P1D over {over}": fleet.proxy(fleet.prefills[0]),
            f"2P1D over {over}": fleet.proxy(*fleet.prefills),
        }
        rows = {name: Row() for name in doors}
        for number in range(rounds + 1):
            for name, door in doors.items():
                about = [chat(BOAT, text=f"{name} {number}, {one}. {text}", tokens=ANSWER) for one in range(AT_ONCE)]
                replies = at_once([partial(door.ask, one) for one in about])
                again = [fleet.prefills[0].ask(one) for one in about]
                rows[name].right &= [one.text for one in again] == [one.text for one in replies]
                rows[name].replies += replies if number else []
                rows[name].load = os.getloadavg()[0]
                print(number, name, [(round(one.first_s, 2), round(one.whole_s, 2)) for one in replies], flush=True)
    return rows


def show(rows: dict[str, Row]) -> None:
    """Print the table."""
    table = Table("", "first token", "from", "to", "whole answer", "from", "to", "not computed", "load", "answers")
    for name, row in rows.items():
        seconds = [[one.first_s for one in row.replies], [one.whole_s for one in row.replies]]
        cells = [f"{of(one):.2f} s" for one in seconds for of in (median, min, max)]
        cached = sorted({f"{one.cached} of {one.prompt}" for one in row.replies})
        table.add_row(name, *cells, ", ".join(cached), f"{row.load:.1f}", "right" if row.right else "WRONG")
    Console(width=150).print(table)


def figures(release: str, rounds: int = ROUNDS, characters: int = CHARACTERS) -> Iterator[Figure]:
    """Measure both, print the tables, and compare with one engine."""
    for transport in (False, True):
        rows = measure(release, transport=transport, rounds=rounds, characters=characters)
        show(rows)
        alone = rows.pop(ALONE)
        for name, row in rows.items():
            yield Figure(f"first token, {name} to {ALONE}", row.first_s / alone.first_s, "", None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure with another number of rounds, or other documents."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.hand_off", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of a document")
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for figure in figures(options.release, options.rounds, options.characters):
        print(f"{figure.name}: {figure.value:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
