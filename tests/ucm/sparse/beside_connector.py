"""Shared by the tests of sparse methods with UCM's connector: the model, the engines and the prompts.

The engine of the connector's own tests has a model in miniature whose every wrong byte shows. Here its layers attend to
a few tokens only, so that what it computes depends neither on steps nor on what was released; for vLLM it is a model
with full attention, whose blocks the method gives back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import END, VOCABULARY, Truth
from tests.ucm.integration.vllm.connector.simulation.vllm_runs import serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine

#: The model attends to this many tokens, including the newest; methods keep at least as many before the newest.
ATTENDS = 9

ENGINES = {
    "direct": Setting(),
    "direct, loads and saves fail": Setting(ranks=2, failing_loads=0.3, failing_saves=0.05, aborts=0.2),
    "direct, asynchronous": Setting(asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct, no prefix cache": Setting(caching=False, failing_loads=0.1),
    "layer by layer, asynchronous": Setting(layerwise=True, asynchronous=True, aborts=0.2),
}


def truth_of(setting: Setting) -> Truth:
    """Return the expected content of such an engine."""
    return Truth([ATTENDS] * 5, setting.ranks)


def prompts(chance: random.Random) -> list[list[int]]:
    """Return some prompts with common prefixes, of up to 30 blocks."""

    def some(length: int) -> list[int]:
        return [chance.choice([token for token in range(VOCABULARY) if token != END]) for _ in range(length)]

    stems = [some(length) for length in (8, 30, 70)]
    return [[*stem, *some(chance.randint(1, 50))] for stem in stems for _ in range(4)]


def check_engines(
    make: Callable[[Setting, Path, random.Random, Truth, SimulatedClock], VllmEngine],
    name: str,
    blocks: int,
    directory: Path,
) -> None:
    """Serve requests on engines with this many blocks; check that blocks are released and nothing is wrong."""
    setting = replace(ENGINES[name], blocks=blocks, budget=24)
    chance = random.Random(name)  # noqa: S311 - no secret
    happened = serve(make, setting, directory, chance, truth_of(setting), prompts(chance), (1, 6, 25), "released")
    print(name, dict(happened))
