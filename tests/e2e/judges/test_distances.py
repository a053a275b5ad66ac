"""The judge's ways to see distances equal a reference that shares nothing with them, and differ from each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.e2e.prefix_workload import prompt
from tests.e2e.processes import INSIDE

torch = pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

if TYPE_CHECKING:
    from torch import Tensor

LENGTH, STEP, WINDOW, TRAINED = 300, 64, 50, 100
#: By name: the judge's arguments, and the reference's.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RoPE": ({}, {}),
    "ReRoPE": ({"window": WINDOW}, {"window": WINDOW}),
    "ReRoPE, log-n": ({"window": WINDOW, "trained": TRAINED}, {"window": WINDOW, "training_length": TRAINED}),
}


@pytest.fixture(scope="module")
def scores() -> dict[str, tuple[Tensor, Tensor]]:
    """By way, the log-probabilities after a text: those of the judge, whose weights are in bfloat16, and the others."""
    tokens, found = prompt(LENGTH, "distances"), {}
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.syspath_prepend(str(INSIDE))
        judge, reference = import_module("real_beyond"), import_module("rerope_reference")
        model = write_model(MODEL)
        for name, (ours, others) in WAYS.items():
            beyond = judge.Beyond(model, LENGTH + STEP, **ours)
            steps = [beyond.compute(tokens[begin : begin + STEP], begin) for begin in range(0, LENGTH, STEP)]
            wanted = reference.Llama(model, **others)._step(tokens, 0)
            found[name] = steps[-1][-1].log_softmax(-1), wanted.log_softmax(-1)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_the_judge_sees_distances_as_the_reference_does(scores: dict[str, tuple[Tensor, Tensor]], name: str) -> None:
    apart = {way: float((scores[name][0] - wanted).abs().mean()) for way, (_, wanted) in scores.items()}
    assert apart.pop(name) < 0.1 < min(apart.values())
