"""Plan which tokens of a prompt are taken from chunks, and which are computed.

All positions are token positions in the prompt. The *stretch* is the range from the end of exact KV to the end of the
blended hit. Its *reused* spans are loaded from chunks; the rest, and some tokens of the reused spans, are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.blend.chunks import Chunk

#: Consecutive tokens that are selected together: runs of single tokens cost more than they save.
GRANULE = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens to compute: one row of a forward pass.

    Args:
        start: The first.
        end: The token after the last one.
    """

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.end - self.start


def blended_end(stored: Sequence[Chunk], computed: int, limit: int, block_size: int) -> int:
    """Return the end of the part of a prompt that is worth blending.

    Tokens that are computed in a blended stretch are not counted in the scheduler's token budget. The stretch therefore
    ends with the last chunk up to which at least half of its tokens come from chunks.

    Args:
        stored: The available chunks, in order.
        computed: Tokens with exact KV.
        limit: The maximum tokens of a hit.
        block_size: Tokens per block; the end is a multiple of it.

    Returns:
        The end; ``computed`` if there is nothing to blend.
    """
    found, reused = computed, 0
    for number, chunk in enumerate(stored):
        end = min(chunk.end, limit) // block_size * block_size
        reused += max(0, chunk.end - max(chunk.start, computed))
        if end <= computed or (chunk.end > limit and chunk.start >= end):  # the stretch has nothing of it
            continue
        # A prompt may have thousands of chunks, so only those that the end cuts are examined again.
        cut, place = 0, number
        while place >= 0 and stored[place].end > end:
            cut += stored[place].end - max(stored[place].start, computed, end)
            place -= 1
        if 2 * (reused - cut) >= end - computed:
            found = end
    return found


def reused_spans(chunks: Sequence[Chunk], start: int, end: int) -> list[Run]:
    """Return the parts of a stretch that are in chunks, one per chunk."""
    cut = (Run(max(chunk.start, start), min(chunk.end, end)) for chunk in chunks)
    return [run for run in cut if run.tokens > 0]


def runs_of(selected: Sequence[bool], start: int) -> list[Run]:
    """Return the runs of selected tokens.

    Args:
        selected: Whether each token of the stretch is selected.
        start: The position of the first.
    """
    found: list[Run] = []
    for place, chosen in enumerate(selected, start):
        if not chosen:
            continue
        if found and found[-1].end == place:
            found[-1] = Run(found[-1].start, place + 1)
        else:
            found.append(Run(place, place + 1))
    return found


def gaps_and_edges(chunks: Sequence[Chunk], start: int, end: int, edge_tokens: int) -> list[bool]:
    """Return, for each token of a stretch, whether it is computed regardless of its deviation.

    These are the tokens outside of chunks, and the first tokens of each chunk that is not at the start of the prompt.
    Two more tokens of each reused span are computed to check the others: one in its middle, and its last one.

    Args:
        chunks: The reused chunks.
        start: The start of the stretch.
        end: Its end.
        edge_tokens: The number of tokens at a chunk's start to compute.
    """
    chosen = [True] * (end - start)
    for chunk in chunks:
        edge = chunk.start + edge_tokens if chunk.start else 0
        begin, stop = max(chunk.start, start), min(chunk.end, end)
        for place in range(max(begin, edge), stop):
            chosen[place - start] = False
        if stop > begin:
            chosen[(begin + stop) // 2 - start] = chosen[stop - 1 - start] = True
    return chosen


def most_deviating(deviation: Sequence[float], start: int, spans: Sequence[Run], ratio: float) -> list[bool]:
    """Return, for each token of a stretch, whether it is among the reused tokens that deviate most.

    Args:
        deviation: The deviation of each token of the stretch.
        start: The position of the first.
        spans: The reused spans.
        ratio: The fraction of the reused tokens to select, in granules of neighbours.
    """
    pieces = [
        Run(place, min(place + GRANULE, span.end)) for span in spans for place in range(span.start, span.end, GRANULE)
    ]
    wanted = ratio * sum(span.tokens for span in spans)
    chosen = [False] * len(deviation)
    taken = 0.0
    for run in sorted(pieces, key=lambda run: (-max(deviation[run.start - start : run.end - start]), run.start)):
        # The last granule is the one that comes closest to the ratio.
        if taken + run.tokens / 2 > wanted:
            break
        taken += run.tokens
        chosen[run.start - start : run.end - start] = [True] * run.tokens
    return chosen


def passes(runs: Sequence[Run], most_tokens: int) -> Iterator[list[Run]]:
    """Split runs into forward passes of limited size, in ascending order: later passes read what earlier ones wrote."""
    batch: list[Run] = []
    room = most_tokens
    for run in runs:
        start = run.start
        while start < run.end:
            part = Run(start, min(run.end, start + room))
            batch.append(part)
            room -= part.tokens
            start = part.end
            if not room:
                yield batch
                batch, room = [], most_tokens
    if batch:
        yield batch
