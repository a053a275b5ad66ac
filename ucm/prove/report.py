"""The result of a proof as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ucm.commands.options import table
from ucm.config.settings import format_size
from ucm.prove.judge import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.prove.judge import Row
    from ucm.prove.run import EngineRun, Proof

#: Differences of a row that are shown.
SHOWN = 3


def render(proof: Proof) -> list[str]:
    """Return the lines for a terminal: what ran, and one table."""
    lines = [*_about(proof), ""]
    cells: list[tuple[str, ...]] = [("what", "result", "answers", "logprobs moved", "conditions")]
    cells += [_of_row(row) for row in proof.rows]
    noise = proof.noise
    if noise.requests:
        same = f"{noise.requests - noise.differing} of {noise.requests} same"
        cells.append(("without UCM, in other batches", "noise", same, f"{noise.batches:.1e}", ""))
    cells += [(f"first token, {name}", _duration(value), "", "", "") for name, value in proof.first_tokens().items()]
    lines += table(cells)
    details = [f"{row.name}: {difference}" for row in proof.rows for difference in _shown(row)]
    tails = [f"{name} | {line}" for name, run in proof.runs.items() for line in run.tail[-8:]]
    for title, found in (("Differences", details), ("Notes", proof.notes), ("The end of an engine's output", tails)):
        if found:
            lines += ["", title, *(f"  - {line}" for line in found)]
    return [*lines, "", verdict(proof)]


def verdict(proof: Proof) -> str:
    """Return the result in one sentence."""
    wrong = [row.name for row in proof.rows if row.verdict is Verdict.DIFFERS]
    if wrong:
        return f"Answers with UCM DIFFER from those without it: {'; '.join(wrong)}"
    missing = [row.name for row in proof.rows if row.verdict is Verdict.NOT_JUDGED]
    if len(missing) == len(proof.rows):
        return "Nothing could be judged."
    if missing:
        return f"No answer differs, as far as was judged; not judged: {'; '.join(missing)}"
    noisy = any(row.verdict is Verdict.NOISE for row in proof.rows)
    but = ", but for what differs between batches without UCM as well" if noisy else ""
    return f"All answers with UCM are those without it{but}."


def as_data(proof: Proof) -> dict[str, Any]:
    """Return the proof as plain data; `ucm.prove` describes the keys."""
    plain = proof.runs["plain"]
    prompts = plain.prompts
    data = {
        "schema": 1,
        "code": proof.code,
        "seconds": round(proof.seconds, 1),
        "model": str(proof.request.model),
        "device": _device(plain),
        "versions": plain.about.get("versions"),
        "dtype": plain.about.get("dtype"),
        "runs": {name: _run_data(run) for name, run in proof.runs.items()},
        "prompts": {
            "source": prompts.get("source"),
            **{name: [len(prompt) for prompt in prompts.get(name, ())] for name in ("alone", "crowd")},
        },
        "rows": [_row_data(row) for row in proof.rows],
        "noise": dataclasses.asdict(proof.noise),
        "first_tokens": proof.first_tokens(),
        "notes": list(proof.notes),
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def _about(proof: Proof) -> list[str]:
    plain = proof.runs["plain"]
    lines = [f"model        {proof.request.model}" + (f", {plain.about['dtype']}" if plain.about else "")]
    if plain.about:
        lines.append(f"device       {_device(plain)}")
        lines.append("versions     " + ", ".join(f"{name} {value}" for name, value in plain.about["versions"].items()))
    if plain.prompts:
        alone, crowd = ([len(prompt) for prompt in plain.prompts[name]] for name in ("alone", "crowd"))
        lines.append(
            f"prompts      {plain.prompts['source']}: {len(alone)} of up to {max(alone):,} tokens one at a time, "
            f"{len(crowd)} of {min(crowd):,} to {max(crowd):,} at once"
        )
    ways: dict[str, list[str]] = {}
    for name, run in proof.runs.items():
        if run.about:
            ways.setdefault(_way(run), []).append({"plain": "without UCM", "first": "with UCM"}.get(name, name))
    lines += [f"what ran     {way} ({', '.join(names)})" for way, names in ways.items()]
    return lines


def _device(run: EngineRun) -> str | None:
    workers = run.about.get("workers") or []
    return (
        f"{len(workers)} of {workers[0]['device']}" if len(workers) > 1 else workers[0]["device"] if workers else None
    )


def _way(run: EngineRun) -> str:
    found = _run_data(run)
    blocks = ", ".join(f"{group['tokens']}" for group in run.about["workers"][0]["groups"])
    return f"{found['runner']}, {' and '.join(found['attention'])}, graphs {found['graphs']}, blocks of {blocks} tokens"


def _run_data(run: EngineRun) -> dict[str, Any]:
    worker: Mapping[str, Any] = (run.about.get("workers") or [{}])[0]
    runners = [name for name in worker.get("runner", ()) if name.endswith("model_runner")]
    kinds = [kind["backend"] for kind in worker.get("attention", ())]
    return {
        "runner": _shortest(runners),
        "attention": list(dict.fromkeys(kinds)),
        "graphs": worker.get("graphs"),
        "reason": run.reason or None,
        "tail": run.tail,
    }


def _shortest(runners: list[str]) -> str | None:
    """Return the model runner's module and vLLM's number for it: V2 lives in a package of its own."""
    if not runners:
        return None
    second = any(".worker.gpu." in name for name in runners)
    return f"model runner V{2 if second else 1} ({min(runners, key=lambda name: ('gpu' in name, len(name)))})"


def _of_row(row: Row) -> tuple[str, ...]:
    if row.verdict is Verdict.NOT_JUDGED:
        return (row.name, row.verdict.value, "", "", row.reason)
    noise = sum(difference.is_noise for difference in row.differences)
    wrong = len(row.differences) - noise
    same = f"{row.requests - len(row.differences)} of {row.requests} same"
    counts = [f"{noise} within noise" if noise else "", f"{wrong} DIFFER" if wrong else ""]
    return (row.name, row.verdict.value, ", ".join([same, *filter(None, counts)]), f"{row.shift:.1e}", _conditions(row))


def _conditions(row: Row) -> str:
    if row.phase is None:
        return ""
    found = [f"{row.phase.cached:,} tokens not computed"] if row.phase.cached else []
    if loaded := row.phase.counters.get("load_bytes"):
        found.append(f"{format_size(loaded)} loaded")
    if row.name.startswith("16"):
        found += [f"{row.phase.aborted} aborted", f"{row.phase.counters.get('preemptions', 0):.0f} preemptions"]
    return ", ".join(found)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"  # noqa: PLR2004 - three digits


def _shown(row: Row) -> list[str]:
    found = [str(difference) for difference in row.differences]
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def _row_data(row: Row) -> dict[str, Any]:
    phase = row.phase
    return {
        "name": row.name,
        "verdict": row.verdict.value,
        "requests": row.requests,
        "differences": [{**dataclasses.asdict(one), "is_noise": one.is_noise} for one in row.differences],
        "reason": row.reason or None,
        "shift": row.shift,
        "cached_tokens": phase.cached if phase else None,
        "loaded_bytes": phase.counters.get("load_bytes") if phase else None,
        "aborted": phase.aborted if phase else None,
        "preemptions": phase.counters.get("preemptions") if phase else None,
        "seconds": phase.seconds if phase else None,
    }


def _finite(data: Any) -> Any:
    """Return data with null for infinite numbers, which JSON does not know."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
