"""Damaged and missing blocks of each KV-cache group: they cost time, and neither a wrong token nor the engine.

vLLM's own scheduler and KV-cache manager run with our connector and a model in which every wrong byte shows; see
``tests.ucm.integration.vllm.connector.simulation``. Needs vLLM.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.campaign.damage import DAMAGES, BlockFile, block_files
from tests.campaign.figures import Figures
from tests.simulated import repeatable
from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import RING, STATE, reach
from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine
from tests.ucm.integration.vllm.connector.simulation.vllm_runs import check_stored

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping
    from pathlib import Path

    from tests.campaign.scene import Stage
    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from ucm.integration.vllm.connector.kv_cache import CacheGroup

#: The prompts of a round, each of which loses or has damaged blocks of one group.
PROMPTS = 17
#: The fewest and the most tokens of a prompt, and how many the engines generate after it.
_SHORTEST, _LONGEST, _GENERATED = 14, 44, 3
#: The most prompts that are served at once.
_AT_ONCE = 4

#: Kinds of models. All have full attention or latents, and groups that need less than all blocks of a prefix.
MODELS = {
    "window": Setting(groups=((4, None, 2), (4, 9, 2))),
    "chunks": Setting(groups=((4, None, 2), (4, 9, 2)), stored_tokens=8),
    "state": Setting(groups=((4, None, 2), (4, STATE, 2), (4, STATE, 1))),
    "state and window": Setting(groups=((4, None, 1), (4, 9, 1), (4, STATE, 2))),
    "latents": Setting(groups=((4, None, 4),), precisions=True),
    "compressed": Setting(groups=((8, None, 2), (4, 9, 1), (2, 3, 1)), precisions=True),
    "local": Setting(groups=((4, -8, 2), (4, None, 2))),
    "ring": Setting(groups=((4, RING, 1), (4, STATE, 1), (4, None, 2))),
}
#: Beside the ways of ``tests.campaign.damage``: what a prompt has of a group is deleted, of one rank or of all.
LACKS, EVICTED = "lacks", "evicted"


@dataclass(frozen=True)
class Place:
    """A block in the store.

    Args:
        group: The number of its group.
        rank: The part of it, by the rank that stores it.
        file: Its file.
    """

    group: int
    rank: int
    file: BlockFile


@dataclass
class Round:
    """Engines that serve the same prompts from one store.

    Args:
        setting: The engines' settings.
        directory: The directory of the store.
        rng: The source of all random choices.
        clock: Time and threads.
        figures: What is counted.
    """

    setting: Setting
    directory: Path
    rng: random.Random
    clock: SimulatedClock
    figures: Figures
    truth: Truth = field(init=False)
    prompts: list[list[int]] = field(init=False)
    known: dict[bytes, tuple[int, ...]] = field(default_factory=dict)  #: the tokens up to a block's end, by its key

    def __post_init__(self) -> None:
        self.truth = self.setting.truth()
        # The first tokens differ, so that no two prompts have a block in common.
        self.prompts = [
            [number + 1, *(self.rng.randrange(1, 100) for _ in range(self.rng.randint(_SHORTEST, _LONGEST) - 1))]
            for number in range(PROMPTS)
        ]

    def serve(self, *, last: bool = False) -> list[int] | None:
        """Serve all prompts with a new engine.

        Args:
            last: Whether the whole store is to be read afterwards, which quarantines what is still damaged.

        Returns:
            How many tokens of each prompt were promised from the store; None if the engine ended.
        """
        figures = self.figures
        engine = Counting(self.setting, self.directory, self.rng, self.truth, self.clock)
        with engine._patched:  # a failure here must not leak its patches into the next round
            try:
                left = list(self.prompts)
                while left:
                    for _ in range(min(len(left), self.rng.randint(1, _AT_ONCE))):
                        engine.submit(left.pop(0), _GENERATED)
                    engine.drain()
                self.known |= engine.known
                if last:
                    engine.known = self.known
                    figures.add(_read_all(engine))
                engine.close()
            except Exception as error:  # noqa: BLE001 - whatever ends an engine counts
                figures.crashes += 1
                figures.notes.append(f"an engine ended: {error!r}")
                return None
            finally:
                figures.wrong_bytes += engine.wrong
        figures.stuck += len(self.prompts) - engine.happened["finished"] - engine.wrong
        figures.visible += engine.happened["loads"]
        figures.refused += engine.happened["invalid"]
        return [engine.found[tuple(prompt)] for prompt in self.prompts]

    def stored(self) -> dict[int, list[Place]]:
        """Return the blocks in the store by the prompt that they belong to."""
        found: dict[int, list[Place]] = {number: [] for number in range(len(self.prompts))}
        for file in block_files(self.directory / "store"):
            tokens, namespace = self.known.get(file.key), file.path.parents[1].name
            if tokens is None:
                continue
            rank, group = namespace.rpartition("tp")[2], namespace.rpartition("-g")[2].partition("-")[0]
            part = 0 if rank.startswith("all") else int(rank.partition("of")[0])
            found[tokens[0] - 1].append(Place(int(group), part, file))
        return found

    def expected(self, places: Mapping[int, list[Place]], damaged: Mapping[Path, bytes]) -> list[int]:
        """Return how many tokens of each prompt a hit must have, from the files alone.

        Args:
            places: The blocks in the store, see ``stored``.
            damaged: The content of damaged files.
        """
        whole = {
            (place.group, place.rank, self.known[place.file.key])
            for of_prompt in places.values()
            for place in of_prompt
            if not place.file.path.exists() or damaged.get(place.file.path) != place.file.path.read_bytes()
        }
        groups = self.setting.cache_groups().groups
        ranks = range(1 if self.setting.precisions else self.setting.ranks)
        step = lcm(*(size for size, _, _ in self.setting.groups), *(group.chunk_tokens for group in groups))

        def has(prompt: list[int], end: int) -> bool:
            return all(
                (group.index, rank, tuple(prompt[:last])) in whole
                for group in groups
                for last in self._needed(group, end)
                for rank in ranks
            )

        return [
            max((end for end in range(step, len(prompt), step) if has(prompt, end)), default=0)
            for prompt in self.prompts
        ]

    def _needed(self, group: CacheGroup, end: int) -> set[int]:
        """Return where the chunks end that hold what the token after the first ``end`` ones reads of a group."""
        window = self.setting.groups[group.index][1]
        first = end - 1 if window == STATE else reach(end, window)
        return {(position // group.chunk_tokens + 1) * group.chunk_tokens for position in range(first, end)}


class Counting(VllmEngine):
    """An engine that counts wrong tokens, and how much of each prompt was found in the store."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wrong = 0
        self.found: dict[tuple[int, ...], int] = {}
        asked = self.connector.get_num_new_matched_tokens

        def note(request: Any, computed: int) -> Any:
            answer = asked(request, computed)
            if answer[0] is not None:
                self.found.setdefault(tuple(request.prompt_token_ids), answer[0])
            return answer

        self._patched.enter_context(patch.object(self.connector, "get_num_new_matched_tokens", note))

    def _check(self, request: Any) -> None:
        try:
            super()._check(request)
        except AssertionError:
            self.wrong += 1


def _read_all(engine: VllmEngine) -> Figures:
    """Read the whole store; count the blocks that are right, or that one was not."""
    try:
        return Figures(loaded=check_stored(engine))
    except AssertionError:
        return Figures(wrong_bytes=1)


def run(count: int, stage: Stage) -> Figures:
    """Make this many corruptions, each of one group of one prompt's blocks.

    In each round an engine stores the prompts' blocks; one serves them after the damage; and another one after that.

    Args:
        count: The number of corruptions.
        stage: Where the stores are created.
    """
    figures, counts = Figures(), Counter[str]()
    names = list(MODELS)
    number = 0
    while figures.trials < count:
        name = names[number % len(names)]
        number += 1
        setting = replace(
            MODELS[name],
            ranks=stage.rng.choice((1, 2)),
            loads="direct" if stage.rng.random() < 0.25 else "staged",
            blocks=200 if MODELS[name].precisions else 120,
            asynchronous=stage.rng.random() < 0.3,
        )
        directory = stage.disk / f"{stage.rng.getrandbits(64):016x}"
        directory.mkdir()
        clock = repeatable(stage.rng.getrandbits(32))
        with ExitStack() as stack:
            stack.callback(clock.close)
            stack.enter_context(patch.object(os, "setpriority", lambda *_: None))  # its threads take turns
            one = Round(setting, directory, stage.rng, clock, figures)
            counts.update(_one_round(one, name, min(PROMPTS, count - figures.trials), stage))
    figures.notes.append(", ".join(f"{what} {counts[what]:,}" for what in sorted(counts)))
    return figures


def _one_round(one: Round, name: str, count: int, stage: Stage) -> Counter[str]:
    """Run three engines; return what was done, and how many tokens were expected and found."""
    figures, counts = one.figures, Counter[str]()
    if one.serve() is None:
        return counts
    places = one.stored()
    figures.committed += sum(map(len, places.values()))
    before = one.expected(places, {})
    damaged: dict[Path, bytes] = {}
    everything = [place.file for of_prompt in places.values() for place in of_prompt]
    for prompt in stage.rng.sample(range(PROMPTS), count):
        way = _corrupt(places[prompt], everything, damaged, stage.rng)
        figures.trials += 1
        counts[way] += 1
        counts[f"of {name}"] += 1
        stage.tick()
    expected = one.expected(one.stored(), damaged)
    # After an engine has served all prompts, the store must have again what it had before.
    for results, wanted in ((one.serve(), expected), (one.serve(last=True), before)):
        if results is None:
            continue
        figures.lost += sum(result < most for result, most in zip(results, wanted, strict=True))
        if one.setting.loads == "staged":  # else blocks are promised by their names, and damage is found by the load
            figures.corrupt_hits += sum(result > most for result, most in zip(results, wanted, strict=True))
            counts["staged tokens expected"] += sum(wanted)
            counts["staged tokens found"] += sum(results)
    return counts


def _corrupt(places: list[Place], everything: list[BlockFile], damaged: dict[Path, bytes], rng: random.Random) -> str:
    """Corrupt one group's blocks of a prompt, of one rank or of all; return how."""
    group = rng.choice(sorted({place.group for place in places}))
    of_group = [place for place in places if place.group == group]
    rank = rng.choice(sorted({place.rank for place in of_group}))
    way = rng.choice((*DAMAGES, LACKS, EVICTED))
    if way in {LACKS, EVICTED}:
        for place in of_group:
            if way == EVICTED or place.rank == rank:
                place.file.path.unlink()
        return way
    key = rng.choice([place.file.key for place in of_group])
    everywhere = rng.random() < 0.3
    for place in of_group:
        if place.file.key == key and (everywhere or place.rank == rank):
            DAMAGES[way](place.file.path, rng, everything)
            if place.file.path.exists():
                damaged[place.file.path] = place.file.path.read_bytes()
    return way
