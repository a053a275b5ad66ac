"""The requests of the prefix-cache runs, and the expected stored blocks and hits.

The same phases run on three kinds of engines: a *reference* without a connector, *cold* ones that fill a store,
and *warm* ones that start later with that store. Some phases run only on some of them, so that a warm engine
meets prompts that are stored in part, or under another salt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.model import VOCABULARY
from tests.e2e.workload import BLOCK, TOKENS_PER_STEP, phases

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.e2e.prefix_engine import Answer, PrefixEngine
    from tests.e2e.workload import Request

REFERENCE, COLD, WARM = "reference", "cold", "warm"
ALL = (REFERENCE, COLD, WARM)
#: A phase whose requests are aborted; an engine may have stored any part of them.
ABORTED = "aborted"
TURNS = 3

_GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Played:
    """The result of one phase on one engine.

    Attributes:
        requests: The requests, in the order of their batches.
        batches: The number of requests in each batch.
        answers: One per request.
        counters: The increase of the engine's counters.
    """

    requests: list[Request]
    batches: list[int]
    answers: list[Answer]
    counters: dict[str, float]

    @property
    def tokens(self) -> list[list[int]]:
        """Return the generated tokens of each request; empty for aborted ones."""
        pairs = zip(self.requests, self.answers, strict=True)
        return [[] if "abort_after" in request else answer.tokens for request, answer in pairs]


def prompt(length: int, name: str) -> list[int]:
    """Return random tokens, always the same for a name."""
    source = random.Random(f"{name} {length}")  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def request(tokens: list[int], max_tokens: int = 12, *, salt: str | None = None, **params: Any) -> Request:
    """Return a greedy request."""
    made: Request = {"prompt": tokens, "params": {"max_tokens": max_tokens, **_GREEDY, **params}}
    return made if salt is None else {**made, "salt": salt}


def static_phases(part: str) -> dict[str, list[list[Request]]]:
    """Return the batches of each phase of a part, except conversations, which depend on the answers."""
    document, base, shared = prompt(10 * BLOCK, "document"), prompt(5 * BLOCK + 3, "base"), prompt(3 * BLOCK, "shared")
    salted = prompt(4 * BLOCK + 5, "salted")
    aborted = [request(prompt(length, "aborted"), 200) for length in (200, 5 * TOKENS_PER_STEP // 2, 500)]
    cut = [{**one, "abort_after": steps} for steps, one in enumerate(aborted)]
    whole = [request(prompt(blocks * BLOCK, "whole"), BLOCK) for blocks in (1, 4, 7, 16)]
    table: dict[str, tuple[tuple[str, ...], list[list[Request]]]] = {
        **{name: (ALL, batches) for name, batches in phases().items()},
        "whole": (ALL, [*([one] for one in whole), whole]),
        # Together less than a step: vLLM on the CPU cannot compute seeded requests in chunks.
        "seeded": (
            ALL,
            [[request(prompt(40, f"seeded {n}"), 20, temperature=0.8, seed=n, top_p=0.9) for n in range(3)]],
        ),
        "logprobs": (ALL, [[request(prompt(100, "logprobs"), prompt_logprobs=0)]]),
        "document": ((REFERENCE, COLD), [[request(document)]]),
        "part of the document": ((REFERENCE, WARM), [[request([*document[: 4 * BLOCK], *prompt(20, "other")])]]),
        "the document": ((REFERENCE, WARM), [[request(document)]]),
        "base": ((REFERENCE, COLD), [[request(base)]]),
        "grown": ((REFERENCE, WARM), [[request([*base, *prompt(3 * TOKENS_PER_STEP, "new")])]]),
        "one salt": (ALL, [[request(salted, salt="one")]]),
        "another salt": ((REFERENCE, WARM), [[request(salted, salt="another")]]),
        "no salt": ((REFERENCE, WARM), [[request(salted)]]),
        "shared at once": (ALL, [[request([*shared, *prompt(5 + n, f"at once {n}")]) for n in range(6)]]),
        ABORTED: (ALL, [[*cut, request(prompt(90, "not aborted"), 30)], aborted]),
    }
    return {name: batches for name, (parts, batches) in table.items() if part in parts}


def play(engine: PrefixEngine, part: str, known: Mapping[str, Played] | None = None) -> dict[str, Played]:
    """Run all phases of a part on an engine.

    Args:
        engine: The engine.
        part: The part.
        known: The reference's results; None for the reference itself.
    """
    played = {name: play_phase(engine, batches) for name, batches in static_phases(part).items()}
    talk = [prompt(length, "talk") for length in (30, 75, 2 * BLOCK, 200)]
    for turn in range(1, TURNS + 1):
        done = played[f"turn {turn}"] = play_phase(engine, [[request(tokens, 25) for tokens in talk]])
        talk = _continued(done, turn)
    if part != WARM:
        played["left open"] = play_phase(engine, [[request(prompt(50, "left open"), 60)]])
    if part != COLD:
        opened = (known or played)["left open"]
        played["taken up"] = play_phase(engine, [[request(tokens)] for tokens in _continued(opened, 0)])
    return played


def play_phase(engine: PrefixEngine, batches: Sequence[Sequence[Request]]) -> Played:
    """Run some batches, each after the previous one has ended."""
    before = engine.counters()
    answers = [answer for batch in batches for answer in engine.generate(batch)]
    rise = {name: value - before.get(name, 0) for name, value in engine.counters().items()}
    return Played([one for batch in batches for one in batch], [len(batch) for batch in batches], answers, rise)


def computed_blocks(played: Iterable[Played]) -> set[tuple[int, ...]]:
    """Return the full blocks computed by these phases, each as its salt and all tokens up to its end."""
    pairs = (pair for phase in played for pair in zip(phase.requests, phase.answers, strict=True))
    return {block for one, answer in pairs for block in blocks_of(one, answer)}


def blocks_of(one: Request, answer: Answer, block_size: int = BLOCK) -> set[tuple[int, ...]]:
    """Return the full blocks that one request has computed."""
    # The KV of the last token was not computed.
    tokens = [*one["prompt"], *answer.tokens[:-1]]
    return {(hash(one.get("salt")), *tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)}


def expected_hits(phase: Played, stored: set[tuple[int, ...]]) -> list[int]:
    """Return the expected hit tokens of each prompt; add the blocks stored by the phase to ``stored``."""
    hits: list[int] = []
    answered = iter(zip(phase.requests, phase.answers, strict=True))
    for size in phase.batches:
        batch = [next(answered) for _ in range(size)]
        for one, _ in batch:
            # At least one token is computed, and every token whose logits are requested.
            last = 0 if "prompt_logprobs" in one["params"] else (len(one["prompt"]) - 1) // BLOCK
            names = ((hash(one.get("salt")), *one["prompt"][: n * BLOCK]) for n in range(1, last + 1))
            missing = next((n for n, name in enumerate(names) if name not in stored), last)
            hits.append(missing * BLOCK)
        for one, answer in batch:
            stored |= blocks_of(one, answer)
    return hits


def _continued(turn: Played, number: int) -> list[list[int]]:
    """Return the next prompts: the previous prompt, its answer, and new tokens."""
    pairs = zip(turn.requests, turn.answers, strict=True)
    return [
        [*one["prompt"], *answer.tokens, *prompt(11 + number, f"said {n}")] for n, (one, answer) in enumerate(pairs)
    ]
