"""Run the engines of a proof, one after the other, and judge what they answered."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ucm.engine_process import FAILED, TIMED_OUT, Ended, connector, prepare_model, run_child
from ucm.integration.vllm.sparse.config import KEY
from ucm.prove.command import engine_arguments, full_budget, pool_size
from ucm.prove.judge import Noise, Phase, Row, Verdict, judge, measure_noise
from ucm.prove.store import proof_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.prove.command import Request
    from ucm.prove.store import ProofStore

    RunChild = Callable[[str, Path, Mapping[str, Any], float, Mapping[str, str] | None], Ended]

ENGINE = "ucm.prove.engine"
#: A plain engine uses as many threads as one with a connector, for which vLLM would reserve one more.
ENVIRONMENT = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
#: The most of the remaining time that the plain engine may take, and the first one with UCM, and one before the last.
PLAIN_SHARE, FIRST_SHARE, RESTART_SHARE = 0.5, 0.8, 0.6
#: An engine is not started in fewer seconds.
LEAST = 10.0
SPARSE = "sparse, full budget"

_REFUSED = re.compile(
    r"\[UCM\.\w+\] refused: (.*)$|\b(?:UcmError|ConfigError|SparseMethodError|UnsupportedModelError): (.*)$"
)
_MEMORY = re.compile(
    r"(.*(?:OutOfMemoryError|out of memory|No available memory for the cache blocks).*|.*Free memory on device.*less.*|"
    r".*larger than the (?:available KV cache memory|maximum number of tokens).*)$",
    re.IGNORECASE,
)
_ERROR = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception): .*)$")
_NAMESPACE = re.compile(r"\[UCM\.Connector\] namespace (\S+),")

PLAIN_PHASES: tuple[dict[str, Any], ...] = (
    {"name": "cold", "of": "alone", "reset": True},
    {"name": "hit", "of": "alone"},
    {"name": "hit again", "of": "alone", "first": 1},
    {"name": "crowd", "of": "crowd", "reset": True},
    {"name": "crowd reversed", "of": "crowd", "reset": True, "reversed": True},
    {"name": "crowd continued", "of": "crowd", "reset": True, "continues": "crowd"},
    {"name": "cold again", "of": "alone", "reset": True, "first": 1},
)
FIRST_PHASES: tuple[dict[str, Any], ...] = (
    {"name": "cold", "of": "alone"},
    {"name": "hit", "of": "alone"},
    {"name": "reset", "of": "alone", "settle": True, "reset": True},
    {"name": "crowd", "of": "crowd", "reset": True},
    {"name": "crowd reset", "of": "crowd", "settle": True, "reset": True},
)
RESTART_PHASES: tuple[dict[str, Any], ...] = (
    {"name": "restart", "of": "alone"},
    {"name": "crowd restart", "of": "crowd", "reset": True},
)
SPARSE_PHASES: tuple[dict[str, Any], ...] = (
    {"name": "sparse", "of": "alone"},
    {"name": "crowd sparse", "of": "crowd", "reset": True},
)
_PHASE = TypeAdapter(Phase)
_CROWDS = ("crowd", "crowd reversed", "crowd continued")
#: The rows: the engine, its phase, the plain phases to compare with, and whether something must have been loaded.
ROWS = (
    ("one at a time, cold", "first", "cold", ("cold", "hit"), False),
    ("one at a time, after a reset", "first", "reset", ("hit", "cold"), True),
    ("one at a time, after a restart", "restart", "restart", ("hit", "cold"), True),
    ("16 at a time, cold", "first", "crowd", _CROWDS, False),
    ("16 at a time, after a reset", "first", "crowd reset", _CROWDS, True),
    ("16 at a time, after a restart", "restart", "crowd restart", _CROWDS, True),
)
SPARSE_ROWS = (
    (f"one at a time, {SPARSE}", SPARSE, "sparse", ("cold", "hit"), False),
    (f"16 at a time, {SPARSE}", SPARSE, "crowd sparse", _CROWDS, False),
)


@dataclass
class EngineRun:
    """What one engine reported.

    Attributes:
        about: What ran; empty if it did not start.
        phases: By name.
        method: The sparse method that ran, and what it counted; see `ucm.engine.WorkerFacts.ucm_method`.
        prompts: The prompts that it made.
        reason: Why its remaining phases were not run; empty if all were.
        tail: The end of its output if it failed.
    """

    about: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tail: list[str] = field(default_factory=list)

    @property
    def way(self) -> tuple[Any, ...]:
        """How it computes: the model runner, the attention back ends and the graph mode."""
        workers = self.about.get("workers") or [{}]
        return tuple(str(workers[0].get(name)) for name in ("runner", "attention", "graphs"))

    def read(self, ended: Ended) -> None:
        """Read what the engine reported, as far as it came."""
        for told in ended.results():
            if "phase" in told:
                self.phases[told["phase"]] = _PHASE.validate_python(told)
            else:
                self.about = told.get("about", self.about)
                self.prompts = told.get("prompts", self.prompts)
                self.method = told.get("method", self.method)


@dataclass(frozen=True)
class Proof:
    """The result."""

    request: Request
    rows: tuple[Row, ...]
    noise: Noise
    runs: Mapping[str, EngineRun]
    notes: tuple[str, ...]
    seconds: float

    @property
    def code(self) -> int:
        """The exit code: 1 if an answer differs, else 3 if a row was not judged, else 0."""
        verdicts = {row.verdict for row in self.rows}
        return 1 if Verdict.DIFFERS in verdicts else 3 if Verdict.NOT_JUDGED in verdicts else 0

    def first_tokens(self) -> dict[str, float]:
        """Return the median seconds to the first token of the requests alone."""
        of = (
            ("computed, without UCM", "plain", "cold"),
            ("hit in vLLM's own cache, without UCM", "plain", "hit"),
            ("computed, with UCM", "first", "cold"),
            ("hit in vLLM's own cache, with UCM", "first", "hit"),
            ("loaded after a reset", "first", "reset"),
            ("loaded after a restart", "restart", "restart"),
        )
        found = {}
        for name, engine, phase in of:
            run = self.runs.get(engine)
            answers = run.phases[phase].answers if run and phase in run.phases else ()
            seconds = [one.first_s for one in answers if one is not None and one.first_s is not None]
            if seconds:
                found[name] = median(seconds)
        return found


def prove(
    request: Request,
    *,
    run: RunChild = run_child,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Run the engines and judge them.

    Args:
        request: What to prove.
        run: Runs a module in a process of its own; see `run_child`.
        clock: Seconds that only rise.
        say: Takes a line about the progress.

    Raises:
        UcmError: The model, the settings or the arguments are wrong.
    """
    # So that a mistake is told before anything is made.
    longest = engine_arguments(request)["max_model_len"]
    if request.sparse:
        full_budget(*request.sparse, longest, {})
    directory = Path(tempfile.mkdtemp(prefix="ucm-prove-"))
    try:
        return _Prover(request, directory, proof_store(request.config, directory), run, clock, say).prove()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def why(lines: Sequence[str]) -> str:
    """Return why an engine failed, from its output: what UCM refused, that memory was lacking, or the last error."""
    for number, line in enumerate(lines):
        refused = _REFUSED.search(line)
        if refused:
            what = next(text for text in reversed(refused.groups()) if text)
            # vLLM prints a prefix before each line of a process.
            further = [re.search(r"(where:|to do:) .*$", one) for one in lines[number + 1 : number + 3]]
            return " ".join(["UCM refused:", what, *(one[0] for one in further if one)])
    errors = [found[1] for line in lines if (found := _ERROR.search(line))]
    for line in [*errors, *lines]:
        if lacking := _MEMORY.search(line):
            return f"out of memory: {lacking[1].strip()}"
    telling = [error for error in errors if "Engine core initialization failed" not in error]
    return f"vLLM failed: {(telling or errors or ['it printed no error'])[0 if telling else -1]}"


@dataclass
class _Prover:
    """The state of one proof; see `prove`."""

    request: Request
    directory: Path
    store: ProofStore
    run: RunChild
    clock: Callable[[], float]
    say: Callable[[str], None]
    runs: dict[str, EngineRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._arguments = engine_arguments(self.request)
        self._notes = list(self.store.notes)

    def prove(self) -> Proof:
        try:
            self._engines()
        finally:
            workers = [worker for run in self.runs.values() for worker in run.about.get("workers", ())]
            self._notes += self.store.remove({group["tag"] for worker in workers for group in worker["groups"]})
        plain = self.runs["plain"]
        noise = measure_noise(plain.phases, str(plain.about.get("dtype")))
        wanted = (*ROWS, *(SPARSE_ROWS if self.request.sparse else ()))
        rows = tuple(self._row(*row, noise=noise) for row in wanted)
        self._note_conditions(rows)
        return Proof(
            self.request,
            rows,
            noise,
            self.runs,
            tuple(dict.fromkeys(self._notes)),
            self.clock() - self._began,
        )

    def _engines(self) -> None:
        plain = self._engine("plain", PLAIN_PHASES, self._arguments, PLAIN_SHARE)
        if not plain.prompts:
            return
        arguments, groups = dict(self._arguments), plain.about["workers"][0]["groups"]
        longest = arguments["max_model_len"]
        if groups:
            arguments.setdefault("num_gpu_blocks_override", pool_size(plain.prompts, groups, longest))
        transfer = {"kv_transfer_config": connector(self.store.extra)}
        first = self._engine("first", FIRST_PHASES, arguments | transfer, FIRST_SHARE)
        if first.phases:
            share = RESTART_SHARE if self.request.sparse else 1.0
            self._engine("restart", RESTART_PHASES, arguments | transfer, share)
        if self.request.sparse:
            name, options = self.request.sparse
            section = {"pipeline": "Posix", "directories": [str(self.directory / "offloaded")]}
            method = {name: full_budget(name, options, longest, section)}
            self._engine(SPARSE, SPARSE_PHASES, {**arguments, "additional_config": {KEY: method}}, 1.0)

    def _left(self) -> float:
        return 60 * self.request.minutes - (self.clock() - self._began)

    def _engine(
        self, name: str, phases: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], share: float
    ) -> EngineRun:
        """Run one engine within a share of the remaining time."""
        found = self.runs[name] = EngineRun()
        seconds = self._left() * share
        if seconds < LEAST:
            found.reason = "no time was left: give more --minutes"
            return found
        self.say(f"ucm: {_ENGINES.get(name, name)}, at most {seconds:.0f} s …")
        directory = self.directory / name.replace(" ", "-").replace(",", "")
        directory.mkdir()
        plan = {
            **prepare_model(self.request.model, directory),
            "engine": arguments,
            "phases": phases,
            "prompts": None if name == "plain" else self.runs["plain"].prompts,
            "longest": self.request.longest,
            "sparse": name == SPARSE,
        }
        ended = Ended(FAILED, directory)
        try:
            ended = self.run(ENGINE, directory, plan, seconds, ENVIRONMENT)
        finally:  # what it stored on servers is deleted even if it was interrupted
            found.read(ended)
            self.store.namespaces |= {match[1] for line in ended.lines if (match := _NAMESPACE.search(line))}
        if ended.outcome == TIMED_OUT:
            found.reason = f"it did not fit into {seconds:.0f} s: give more --minutes, or fewer --tokens"
        elif ended.failure:
            found.reason, found.tail = why(ended.lines), ended.tail
        return found

    def _row(
        self, name: str, engine: str, phase: str, references: Sequence[str], must_hit: bool, *, noise: Noise
    ) -> Row:
        plain, run = self.runs["plain"], self.runs.get(engine, EngineRun())
        known = [plain.phases[one] for one in references if one in plain.phases]
        found, alone, reason = run.phases.get(phase), not phase.startswith("crowd"), ""
        if found is None:
            reason = run.reason or (plain.reason and f"the engine without UCM: {plain.reason}")
            return Row(name, Verdict.NOT_JUDGED, reason=reason or self.runs["first"].reason)
        if not known:
            reason = f"the engine without UCM: {plain.reason}"
        elif engine == SPARSE:
            reason = _not_full(run)
        elif must_hit and not _has_loaded(found, None if alone else max(one.cached for one in known)):
            reason = "nothing was loaded from the store"
        if reason:
            return Row(name, Verdict.NOT_JUDGED, reason=reason, phase=found)
        exact = alone and run.way == plain.way and engine != SPARSE
        if alone and run.way != plain.way and engine != SPARSE:
            self._notes.append(
                "the engines with UCM compute in another way than the one without it (see what ran), so that requests "
                "one at a time were judged like batches"
            )
        return judge(name, found, known, noise, exact=exact)

    def _note_conditions(self, rows: Sequence[Row]) -> None:
        """Note which of the conditions that a proof wants to force did not occur."""
        run = [(row.name, row.phase.counters) for row in rows if row.phase is not None]
        for name, counters in run:
            if name.startswith("16") and not counters.get("preemptions"):
                self._notes.append(f"{name}: vLLM counted no preemption, so answers after one were not judged there")
        if failed := sum(counters.get("failures", 0) for _, counters in run):
            self._notes.append(
                f"UCM counted {failed:.0f} blocks that it could not save or load and that were recomputed"
            )


_ENGINES = {
    "plain": "an engine without UCM",
    "first": "an engine with UCM",
    "restart": "another engine with UCM, as after a restart",
    SPARSE: "an engine with the sparse method",
}


def _has_loaded(phase: Phase, own: int | None) -> bool:
    """Return whether blocks came from the store in a phase that began with an empty cache of vLLM's own.

    Some releases do not export UCM's count of bytes, or drop that of some steps. Requests alone share no block, so that
    tokens that were not computed were loaded. Those of a crowd do, so that they must be more than without UCM.

    Args:
        phase: The phase.
        own: The tokens of a crowd that vLLM's own cache spared without UCM; None for requests alone.
    """
    loaded = phase.counters.get("load_bytes")
    if own is None:
        return bool(loaded) or phase.cached > 0
    return bool(loaded) if loaded is not None else phase.cached > own


def _not_full(run: EngineRun) -> str:
    """Return why an engine says nothing about a sparse method with a full budget; empty if it does."""
    if not run.method:
        return run.reason or "the engine did not say what its sparse method did"
    if not run.method["method"]:
        return "the sparse method did not run: install the overlay of this vLLM; `ucm doctor` says what is missing"
    restricted = run.method["figures"].get("requests.restricted")
    return f"the budget is not full: of {restricted:.0f} requests less than the context was read" if restricted else ""
