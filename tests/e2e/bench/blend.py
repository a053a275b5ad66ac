"""Blending: the accuracy lost with a model that can fail, and the time to first token saved."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.model_files import write_llama
from tests.e2e.blend.asking import FULL, NAIVE, WAYS, ask, connector
from tests.e2e.blend.task import KINDS
from tests.e2e.environment import with_runtime
from tests.e2e.model import CONFIG
from tests.e2e.prefix_engine import PrefixEngine
from tests.e2e.processes import IN_PROCESS
from transforms.pipeline.package import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.blend.asking import Result
    from tests.e2e.environment import Environment

#: Chunks of a prompt, and questions for each number of them.
CHUNKS, COUNT = (2, 4, 8, 16), 60
#: The measured prompts: their tokens and chunks.
LENGTHS = ((4096, 8), (8192, 16), (16384, 16))
ROUNDS = 3
QUESTION = 64
EDGES = 16
#: The goals: how much faster than full computation, and how much slower than an exact hit plus the computed share.
FASTER, SLOWER = 3.0, 1.5
#: The goal for the best setting: this share of full computation's answers.
KEPT = 0.98
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
BLOCK = 128
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 4 * 17_408 // BLOCK,
    "kv_cache_memory_bytes": 1 << 30,
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
    """Seconds to the first token, one for each round."""

    computed: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    blended: list[float] = field(default_factory=list)
    share: float = 0.0

    @property
    def medians(self) -> tuple[float, float, float]:
        """Return the medians of full computation, an exact hit and a blend."""
        return statistics.median(self.computed), statistics.median(self.exact), statistics.median(self.blended)


def figures(release: str) -> Iterator[Figure]:
    """Measure accuracy and times; print tables, and yield the figures with goals."""
    environment = with_runtime(release)
    yield from _quality(environment)
    yield from _times(environment)


def _quality(environment: Environment) -> Iterator[Figure]:
    table = Table("chunks", "way", *KINDS, "computed", title="answers that are right")
    kept: dict[int, dict[str, Result]] = {}
    for chunks in CHUNKS:
        kept[chunks] = ask(environment, chunks, COUNT, WAYS)
        for way, result in kept[chunks].items():
            shares = [f"{result.accuracy[kind]:.0%}" for kind in KINDS]
            table.add_row(str(chunks), way, *shares, "" if way == FULL else f"{result.share:.0%}")
    Console(width=120).print(table)
    for way in WAYS:
        if way not in {FULL, NAIVE}:
            ratios = [_right(of[way]) / max(1e-9, _right(of[FULL])) for of in kept.values()]
            goal = 1 - KEPT if way == "deviation 15%" else None
            yield Figure(f"answers lost by {way}, worst of {CHUNKS} chunks", 1 - min(ratios), "", goal)


def _right(result: Result) -> float:
    return statistics.fmean(result.accuracy.values())


def _times(environment: Environment) -> Iterator[Figure]:
    root = BUILD / "bench" / "blend"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    model = BUILD / "bench" / "blend-model"
    write_llama(environment.python, model, LLAMA)
    blend = connector(root / "store", select="edges", edge_tokens=EDGES, min_tokens=BLOCK)
    table = Table(
        "tokens", "chunks", "computing", "exact hit", "blended", "computed of it", title="time to first token"
    )
    kept = {}
    with PrefixEngine(environment, root / "engine", {"model": str(model), **ENGINE, **blend}, IN_PROCESS) as engine:
        engine.generate([_request(list(range(100)), None)])
        for length, chunks in LENGTHS:
            times = kept[length] = _measure(engine, length, chunks)
            computed, exact, blended = times.medians
            row = (f"{computed:.2f} s", f"{exact:.2f} s", f"{blended:.2f} s", f"{times.share:.1%}")
            table.add_row(str(length), str(chunks), *row)
            allowed = exact + times.share * computed
            yield Figure(f"blended / computed time, {length} tokens", blended / computed, "", 1 / FASTER)
            yield Figure(f"blended / (exact hit + computed share), {length} tokens", blended / allowed, "", SLOWER)
    Console(width=120).print(table)
    found = {length: vars(times) for length, times in kept.items()}
    (root / "times.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def _measure(engine: PrefixEngine, length: int, chunks: int) -> Times:
    source = random.Random(length)  # noqa: S311 - prompts, no secrets
    size = (length - QUESTION) // chunks
    texts = [[source.randrange(3, LLAMA["vocab_size"]) for _ in range(size)] for _ in range(chunks)]
    marks = [[number * size, (number + 1) * size] for number in range(chunks)]
    _store(engine, texts)
    times = Times()
    for _ in range(ROUNDS):
        question = [source.randrange(3, LLAMA["vocab_size"]) for _ in range(QUESTION)]
        order = source.sample(texts, len(texts))
        prompt = [token for text in order for token in text] + question
        engine.reset()
        before = _counted(engine)
        times.blended.append(_first(engine, prompt, marks))
        reused, computed = (after - was for after, was in zip(_counted(engine), before, strict=True))
        times.share = computed / max(1.0, reused + computed)
        times.computed.append(_first(engine, prompt, None))
        # What was saved is found once it is visible.
        until = time.monotonic() + SAVED
        while True:
            engine.reset()
            (answer,) = engine.generate([_request(prompt, None)])
            if (answer.cached or 0) >= len(prompt) // BLOCK * BLOCK - BLOCK or time.monotonic() > until:
                break
        times.exact.append(answer.first_s or float("nan"))
    return times


def _store(engine: PrefixEngine, texts: list[list[int]]) -> None:
    """Store chunks until all can be found; a prompt with a beginning of its own finds nothing else.

    What is computed before the weights are identified is not stored, so each attempt offers all of them.
    """
    until = time.monotonic() + SAVED
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


def _first(engine: PrefixEngine, prompt: list[int], marks: list[list[int]] | None) -> float:
    (answer,) = engine.generate([_request(prompt, marks)])
    return answer.first_s or float("nan")


def _counted(engine: PrefixEngine) -> tuple[float, float]:
    counters = engine.counters()
    return counters["ucm:blend_reused_tokens_total"], counters["ucm:blend_computed_tokens_total"]


def _request(prompt: list[int], marks: list[list[int]] | None) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    if marks is not None:
        params["extra_args"] = {"kv_transfer_params": {"ucm_chunks": marks}}
    return {"prompt": prompt, "params": params}
