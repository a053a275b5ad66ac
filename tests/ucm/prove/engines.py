"""Engines of a proof that need no vLLM: what each reports is written down."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.engine_process import FINISHED, LOG, RESULT, Ended
from ucm.prove.run import ENGINE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

GROUPS: list[dict[str, Any]] = [{"tokens": 16, "tag": "tp0of1-pp0of1-g0-b16"}]
WORKER: dict[str, Any] = {
    "pid": 1,
    "runner": ["vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.lora_model_runner_mixin"],
    "model": [],
    "attention": [{"mla": False, "backend": "FlashAttentionBackend", "separate_kv_write": True}],
    "groups": GROUPS,
    "graphs": "FULL_AND_PIECEWISE",
    "device": "NVIDIA H100",
}
PROMPTS: dict[str, Any] = {
    "alone": [[1] * 100, [2] * 99, [3] * 98],
    "crowd": [[request] * (40 + request) for request in range(16)],
    "aborted": [1, 5, 9, 13],
    "source": "text",
}


def told(phase: str, number: int, *, loaded: bool) -> dict[str, Any]:
    """A phase as an engine's process reports it."""
    answers: list[dict[str, Any] | None] = [
        {
            "tokens": [request, request + 1],
            "logprobs": [{request: -0.1, 99: -3.0}, {request + 1: -0.1, 99: -3.0}],
            "cached": 48 if loaded else 0,
            "first_s": 0.25,
        }
        for request in range(number)
    ]
    if number == len(PROMPTS["crowd"]):
        for request in PROMPTS["aborted"]:
            answers[request] = None
    counters = {"preemptions": 3.0, "load_bytes": 4096.0 if loaded else 0.0}
    return {"phase": phase, "answers": answers, "seconds": 1.5, "counters": counters}


@dataclass
class Engines:
    """Runs the plans of a proof.

    Attributes:
        change: Changes what an engine reports: gets its name and its phases.
        outcomes: The outcome of an engine by name, with its output.
        plans: The plans that were run, by name.
        seconds: The time limits.
        spend: Called when an engine runs.
    """

    change: Callable[[str, list[dict[str, Any]]], object] = lambda _name, _phases: None
    outcomes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    spend: Callable[[], object] = lambda: None

    def __call__(
        self, module: str, directory: Path, plan: Mapping[str, Any], timeout: float, environment: object
    ) -> Ended:
        assert module == ENGINE
        name = directory.name
        self.plans[name], self.seconds[name] = plan, timeout
        self.spend()
        outcome, output = self.outcomes.get(name, (FINISHED, ""))
        (directory / LOG).write_text(output, encoding="utf-8")
        parts: list[dict[str, Any]] = [{"about": {"workers": [WORKER], "dtype": "bfloat16", "versions": {"vllm": "9"}}}]
        if name == "plain":
            parts.append({"prompts": PROMPTS})
        phases = []
        for asked in plan["phases"]:
            prompts = PROMPTS[asked["of"]][: asked.get("first")]
            hit = asked["name"] == "hit" or "reset" in asked["name"] or "restart" in asked["name"]
            phases.append(told(asked["name"], len(prompts), loaded=hit or asked["name"] == "hit again"))
        self.change(name, phases)
        lines = [*parts, *phases] if outcome == FINISHED else []
        if plan["sparse"]:
            lines.append({"method": {"method": "BlockTopK", "figures": {"requests.restricted": 0}}})
        (directory / RESULT).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        return Ended(outcome, directory)
