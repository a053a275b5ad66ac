"""The order of the measurements on the engines, and their samples.

Within a round every side runs the same in turn, and the first of one round is last in the next, so that other load
on the machine affects all equally. Round 0 is a warm-up and is not kept.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.peers import NO_CONNECTOR
from tests.e2e.bench.ttft_engine import EngineFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.e2e.bench.ttft_model import Workload
    from tests.e2e.bench.ttft_plain import PlainBytes
    from tests.e2e.bench.ttft_side import Side

#: The phases of a prompt's life.
COLD, NEXT, HIT, RESET = "cold", "next", "hit", "reset"
RESTART, DISK, DROPPED = "restart", "disk", "dropped"
#: The phases that begin with new engines, in their order.
RESTARTS = (RESTART, DISK, DROPPED)
PLAIN_READ, PLAIN_COPY = "plain read", "plain copy"
#: A short prompt with a prefix hit, sent right behind a long one.
SHORT = 512


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        side: Whose.
        phase: One of those above.
        length: Tokens of the prompt that can be loaded.
        number: The round.
        seconds: To the first token.
        tokens: The answer; empty for plain reads and copies.
        cached: Prompt tokens that were not computed.
        others: The share of all processors that others used meanwhile, 0 to 1.
        disturbed: Whether that was enough to disturb.
        load: The machine's load average at that time.
    """

    side: str
    phase: str
    length: int
    number: int
    seconds: float
    tokens: tuple[int, ...] = ()
    cached: int | None = None
    others: float = 0.0
    disturbed: bool = False
    load: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Stages:
    """The measurement of one group of sides.

    Args:
        workload: What is asked.
        sides: Them; the one without a connector is the first.
        plain: What the same bytes cost without any of them.
        lengths: Tokens that can be loaded, whole blocks.
        rounds: How many rounds are kept.
        phases: Those of `RESTARTS` that are measured.

    Attributes:
        failures: The sides that could not go on, each with what it wrote last.
    """

    def __init__(
        self,
        workload: Workload,
        sides: Sequence[Side],
        plain: PlainBytes,
        *,
        lengths: Sequence[int],
        rounds: int,
        phases: Sequence[str],
    ) -> None:
        self._workload = workload
        self._reference, *_ = self._sides = list(sides)
        if self._reference.setup.name != NO_CONNECTOR:
            raise ValueError(f"the first side of a group is {NO_CONNECTOR!r}")
        self._plain = plain
        self._lengths = list(lengths)
        self._rounds = rounds
        self._phases = phases
        self.failures: dict[str, str] = {}

    def samples(self) -> Iterator[Sample]:
        """Start the engines and take every phase; a side that fails is left out from there on.

        Raises:
            EngineFailedError: If the side without a connector fails.
        """
        self._start(COLD, self._sides)
        yield from self._each_round(self._sides, self._first_life)
        with_store = [side for side in self._sides[1:] if side.setup.on_disk or side.setup.in_memory]
        sides = {
            RESTART: with_store,
            DISK: [side for side in with_store if side.setup.in_memory],
            DROPPED: [side for side in with_store if side.setup.on_disk],
        }
        for phase in RESTARTS:
            if phase in self._phases:
                yield from self._restarted(phase, sides[phase])

    def _first_life(self, side: Side, length: int, number: int) -> Iterator[Sample]:
        """A prompt that nobody knows, then the same prompt again, from the engine's cache and from the connector's."""
        prompt = self._workload.prompt
        short, long = prompt(SHORT, "short"), prompt(length, str(number))
        side.ask(short)
        yield from self._timed(side, (COLD, NEXT), length, number, long, short)
        yield from self._timed(side, (HIT,), length, number, long)
        side.engine.reset()
        if side is self._reference:
            yield from self._plainly(RESET, length, number)
        else:
            yield from self._timed(side, (RESET,), length, number, long)

    def _restarted(self, phase: str, sides: Sequence[Side]) -> Iterator[Sample]:
        """Start engines anew and ask for what the first ones have stored."""
        if not sides:
            return
        self._start(phase, sides)
        self._fill_reference()

        def loads(side: Side, length: int, number: int) -> Iterator[Sample]:
            if side is self._reference:
                yield from self._timed(side, (f"{phase} {HIT}",), length, number, self._workload.prompt(length, "0"))
                yield from self._plainly(phase, length, number)
                return
            (side.drop_files if phase == DROPPED else side.read_files)()
            yield from self._timed(side, (phase,), length, number, self._workload.prompt(length, str(number)))

        yield from self._each_round([self._reference, *sides], loads)

    def _plainly(self, phase: str, length: int, number: int) -> Iterator[Sample]:
        """Read and copy the bytes of a prompt without any engine."""
        for name, measure in ((PLAIN_READ, self._plain.read), (PLAIN_COPY, self._plain.copy)):
            self._reference.quiet.wait()
            seconds = measure(self._workload.kv_bytes(length))
            yield Sample(name, phase, length, number, seconds, load=os.getloadavg()[0])

    def _start(self, phase: str, sides: Sequence[Side]) -> None:
        """Start engines, or start them anew."""
        for side in self._going(sides):
            _say(f"{phase}: start {side.setup.name}")
            try:
                side.stop()
                if phase not in {COLD, RESTART}:
                    side.lose_memory()
                side.start(**self._workload.engine)
            except EngineFailedError as error:
                self._failed(side, error)

    def _going(self, sides: Sequence[Side]) -> list[Side]:
        return [side for side in sides if side.setup.name not in self.failures]

    def _failed(self, side: Side, error: EngineFailedError) -> None:
        if side is self._reference:
            raise error
        _say(f"{side.setup.name} failed:\n{error}")
        self.failures[side.setup.name] = str(error)
        side.stop()

    def _fill_reference(self) -> None:
        """Have one prompt of each length in the cache of the engine without a connector."""
        self._reference.engine.reset()
        for length in self._lengths:
            self._reference.ask(self._workload.prompt(length, "0"))

    def _each_round(
        self, sides: Sequence[Side], measure: Callable[[Side, int, int], Iterator[Sample]]
    ) -> Iterator[Sample]:
        for number in range(self._rounds + 1):
            for length in self._lengths:
                turn = number % len(sides)
                for side in self._going([*sides[turn:], *sides[:turn]]):
                    try:
                        found = list(measure(side, length, number))
                    except EngineFailedError as error:
                        self._failed(side, error)
                        continue
                    for sample in found:
                        _say(f"{number} {sample.side}, {length}, {sample.phase}: {sample.seconds:.4f} s")
                    yield from found if number else ()

    def _timed(
        self, side: Side, phases: Sequence[str], length: int, number: int, *prompts: list[int]
    ) -> Iterator[Sample]:
        """Ask for prompts one right after the other, each in its phase."""
        answers, others, disturbed = side.ask(*prompts, answer=self._workload.answer)
        load = os.getloadavg()[0]
        for phase, answer in zip(phases, answers, strict=True):
            name, tokens, cached = side.setup.name, tuple(answer.tokens), answer.cached
            yield Sample(name, phase, length, number, answer.seconds, tokens, cached, others, disturbed, load)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
