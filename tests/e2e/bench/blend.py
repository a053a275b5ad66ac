"""Blending: what it loses with a real model and with one that is built to fail, and the time to first token saved."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.model_files import write_llama
from tests.e2e.blend.asking import FULL, NAIVE, WAYS, ask, connector
from tests.e2e.blend.judging import CURVE, curve, judged
from tests.e2e.blend.judging import WAYS as JUDGED
from tests.e2e.blend.task import KINDS
from tests.e2e.environment import with_runtime
from tests.e2e.model import CONFIG
from tests.e2e.prefix_engine import PrefixEngine, posix
from tests.e2e.prefix_engine import connector as prefix_connector
from tests.e2e.processes import IN_PROCESS
from tests.e2e.real.judge import COUNTS, OPEN, START
from tests.e2e.real.model import real_model
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.e2e.blend.asking import Result
    from tests.e2e.environment import Environment

#: Chunks of a prompt, and questions for each number of them.
CHUNKS, COUNT = (2, 4, 8, 16), 60
#: The measured prompts: their tokens and chunks.
LENGTHS = ((4096, 8), (8192, 16), (16384, 16))
ROUNDS = 3
#: The kinds of seconds.
CLOCK, PROCESSOR = "to the first token", "of processors"
QUESTION = 64
#: The settings that are timed; each is printed beside its accuracy.
TIMED = (NAIVE, "edges 16", "question 15%")
#: The goals: how much faster than full computation, and how much slower than an exact hit plus the computed share.
FASTER, SLOWER = 3.0, 1.5
#: The goal for the best setting: this share of full computation's answers.
KEPT = 0.98
#: The goal for open answers of the real model: so many begin as the full computation's.
BEGIN = 0.8
#: The time limit for saved blocks to become visible, in seconds.
SAVED = 120.0

LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 17_408,
    "torch_dtype": "bfloat16",
}
#: One is as deep as those of 7 to 8 billion parameters, with about as many weights in all as the other.
MODELS = {
    "8 layers of 512": LLAMA,
    "32 layers of 256": {
        **LLAMA,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
BLOCK = 128
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 4 * 17_408 // BLOCK,
    "kv_cache_memory_bytes": 2 << 30,
    "max_model_len": 17_408,
    "max_num_batched_tokens": 2_048,
    "max_num_seqs": 2,
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@dataclass
class Times:
    """Seconds that the same prompts took until their first token, one for each round: on the clock, or of processors.

    Attributes:
        computed: Without any hit.
        miss: With `UCMConnector`, a prefix cache, on the same store: it finds the prompt's first chunk only.
        exact: With `UCMConnector`, when it has stored the whole prompt.
        blended: By setting.
        share: By setting, the share of the stretch's tokens that went through all layers, 0 to 1.
    """

    computed: list[float] = field(default_factory=list)
    miss: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    blended: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in TIMED})
    share: dict[str, float] = field(default_factory=dict)

    def found(self, way: str) -> Found:
        """Return the medians of a setting."""
        whole, exact, blended = (statistics.median(of) for of in (self.computed, self.exact, self.blended[way]))
        allowed = exact + self.share[way] * whole
        return Found(blended, allowed, whole / blended, blended / allowed)


@dataclass(frozen=True)
class Found:
    """The result of a setting.

    Attributes:
        seconds: To the first token.
        allowed: The same, as the sum of an exact hit and the share of a full computation.
        faster: Times as fast as a full computation.
        slower: Times as slow as an exact hit plus the share that went through all layers.
    """

    seconds: float
    allowed: float
    faster: float
    slower: float


def figures(release: str) -> Iterator[Figure]:
    """Measure accuracy and times; print tables, and yield the figures with goals."""
    environment = with_runtime(release)
    yield from _real(environment)
    kept = _quality(environment)
    for way, share in kept.items():
        goal = 1 - KEPT if way == "question 15%" else None
        yield Figure(f"answers lost by {way}, worst of {CHUNKS} chunks", 1 - share, "", goal)
    for name, config in MODELS.items():
        yield from _times(environment, name, config, kept)


def _real(environment: Environment) -> Iterator[Figure]:
    """Print what blending loses on a real model: all selections without an engine, and the product's in one."""
    model = real_model()
    table = Table(
        "stored/way", "computed", "loss, nats", "same tokens", f"first {START}", "equal", title="open answers"
    )
    for way, found in sorted(curve(environment, model, CURVE).items(), key=lambda pair: pair[1]["share"]):
        means = f"{found['share']:.1%}", f"{found['loss']:.4f}", f"{found['same']:.1f}"
        table.add_row(way, *means, str(found["start"]), str(found["equal"]))
        yield Figure(f"loss of {way} at {found['share']:.0%} computed", found["loss"], " nats", None)
    Console(width=120).print(table)
    columns = "computed", "equal", "same tokens", f"first {START}", "known", "codes"
    table = Table("way", *columns, title="answers of the engine")
    for way, verdict in judged(environment, model, JUDGED).items():
        table.add_row(way, *verdict.row)
        goal = (1 - BEGIN) * OPEN * len(COUNTS) if way == "question 20%" else None
        yield Figure(f"answers that begin otherwise, {way}", OPEN * len(COUNTS) - verdict.start, "", goal)
    Console(width=120).print(table)


def _quality(environment: Environment) -> dict[str, float]:
    """Print the share of right answers; return the worst of all numbers of chunks, relative to full computation."""
    table = Table("chunks", "way", *KINDS, "computed", title="answers that are right")
    found: dict[int, dict[str, Result]] = {}
    for chunks in CHUNKS:
        found[chunks] = ask(environment, chunks, COUNT, WAYS)
        for way, result in found[chunks].items():
            shares = [f"{result.accuracy[kind]:.0%}" for kind in KINDS]
            table.add_row(str(chunks), way, *shares, "" if way == FULL else f"{result.share:.0%}")
        guess = statistics.fmean(question.guess for question in found[chunks][FULL].questions)
        table.add_row(str(chunks), "a guess", *[f"{guess:.1%}"] * len(KINDS), "")
    Console(width=120).print(table)
    return {
        way: min(_right(of[way]) / max(1e-9, _right(of[FULL])) for of in found.values()) for way in WAYS if way != FULL
    }


def _right(result: Result) -> float:
    return statistics.fmean(result.accuracy.values())


def _times(
    environment: Environment, name: str, config: Mapping[str, Any], kept: Mapping[str, float]
) -> Iterator[Figure]:
    root = BUILD / "bench" / "blend" / name.replace(" ", "-")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    model = BUILD / "bench" / f"blend-model-{config['num_hidden_layers']}"
    write_llama(environment.python, model, config)
    common = {"model": str(model), **ENGINE}
    blending = {**common, **connector(root / "store", min_tokens=BLOCK, select="question")}
    exact = {**common, **prefix_connector(posix(root / "store"), "UCMConnector")}
    plain = Table("tokens", "chunks", "seconds", "computing", "prefix cache", "exact hit", title=name)
    blended = Table("tokens", "setting", "seconds", "measured", "allowed", "computed", "x faster", "x allowed", "right")
    times = {}
    with (
        PrefixEngine(environment, root / "blending", blending, IN_PROCESS) as engine,
        PrefixEngine(environment, root / "exact", exact, IN_PROCESS) as beside,
    ):
        for each in (engine, beside):
            each.generate([_request(list(range(100)), None)])
        for length, chunks in LENGTHS:
            times[length] = _measure(engine, beside, length, chunks)
            for kind, of in times[length].items():
                medians = (f"{statistics.median(seconds):.2f}" for seconds in (of.computed, of.miss, of.exact))
                plain.add_row(str(length), str(chunks), kind, *medians)
                for way in TIMED:
                    found = of.found(way)
                    both = f"{found.seconds:.2f}", f"{found.allowed:.2f}"
                    ratios = f"{found.faster:.1f}", f"{found.slower:.2f}"
                    blended.add_row(str(length), way, kind, *both, f"{of.share[way]:.1%}", *ratios, f"{kept[way]:.0%}")
                    goals = (1 / FASTER, SLOWER) if way == "question 15%" else (None, None)
                    about = f"{kind}, {name}, {length} tokens, {way}"
                    yield Figure(f"blended / computing, {about}", 1 / found.faster, "", goals[0])
                    yield Figure(f"blended / (exact hit + computed share), {about}", found.slower, "", goals[1])
            # After each length, because the longest takes minutes.
            kept_times = {n: {kind: asdict(of) for kind, of in both.items()} for n, both in times.items()}
            (root / "times.json").write_text(json.dumps(kept_times), encoding="utf-8")
    for table in (plain, blended):
        Console(width=120).print(table)


def _measure(engine: PrefixEngine, beside: PrefixEngine, length: int, chunks: int) -> dict[str, Times]:
    """Return the seconds by kind; other load on the machine changes those of processors least."""
    source = random.Random(length)  # noqa: S311 - prompts, no secrets
    size = (length - QUESTION) // chunks
    texts = [[source.randrange(3, LLAMA["vocab_size"]) for _ in range(size)] for _ in range(chunks)]
    marks = [[number * size, (number + 1) * size] for number in range(chunks)]
    _store(engine, texts)
    times = {CLOCK: Times(), PROCESSOR: Times()}
    for number in range(ROUNDS):
        question = [source.randrange(3, LLAMA["vocab_size"]) for _ in range(QUESTION)]
        order = source.sample(texts, len(texts))
        prompt = [token for text in order for token in text] + question
        for way in TIMED:
            engine.blend(WAYS[way] or {})
            engine.reset()
            before = _counted(engine)
            _, seconds = _first(engine, _request(prompt, marks))
            reused, computed = (after - was for after, was in zip(_counted(engine), before, strict=True))
            for kind, of in times.items():
                of.blended[way].append(seconds[kind])
                of.share[way] = computed / max(1.0, reused + computed)
        beside.reset()
        _, missed = _first(beside, _request(prompt, None))
        # With a salt that nothing was stored under.
        _, whole = _first(beside, {**_request(prompt, None), "salt": f"computed {number}"})
        # What was saved is found once it is visible.
        until = time.monotonic() + SAVED
        while True:
            beside.reset()
            cached, exact = _first(beside, _request(prompt, None))
            if cached >= len(prompt) // BLOCK * BLOCK - BLOCK or time.monotonic() > until:
                break
        for kind, of in times.items():
            of.miss.append(missed[kind])
            of.computed.append(whole[kind])
            of.exact.append(exact[kind])
    return times


def _store(engine: PrefixEngine, texts: list[list[int]]) -> None:
    """Store chunks until all can be found; a prompt with a beginning of its own finds nothing else.

    What is computed before the weights are identified is not stored, so each attempt offers all of them.
    """
    until = time.monotonic() + SAVED
    engine.blend(WAYS[NAIVE] or {})  # so that all that is found is reused
    for attempt in range(3, LLAMA["vocab_size"]):
        for text in texts:
            engine.generate([_request(text, [[0, len(text)]])])
        begin = [attempt] * BLOCK
        places = [BLOCK + sum(map(len, texts[:number])) for number in range(len(texts) + 1)]
        marks = [[start, end] for start, end in pairwise(places)]
        before = _counted(engine)[0]
        engine.generate([_request([*begin, *(token for text in texts for token in text), 3], marks)])
        found = _counted(engine)[0] - before
        if found > places[-1] - BLOCK - 0.9 * min(map(len, texts)) or time.monotonic() > until:
            return


def _first(engine: PrefixEngine, request: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Return how many prompt tokens were not computed, and the seconds until the first token, by kind."""
    before = engine.processor_seconds()
    (answer,) = engine.generate([request])
    return answer.cached or 0, {CLOCK: answer.first_s or math.nan, PROCESSOR: engine.processor_seconds() - before}


def _counted(engine: PrefixEngine) -> tuple[float, float]:
    counters = engine.counters()
    return counters["ucm:blend_reused_tokens_total"], counters["ucm:blend_computed_tokens_total"]


def _request(prompt: list[int], marks: list[list[int]] | None) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    if marks is not None:
        params["extra_args"] = {"kv_transfer_params": {"ucm_chunks": marks}}
    return {"prompt": prompt, "params": params}
