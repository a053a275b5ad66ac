"""Run one engine with several settings of BlendConnector: `blend_engine.py SPECIFICATION RESULTS`, both JSON.

The specification has ``engine`` (arguments of ``LLM``), ``chunks`` (each is stored by a request of its own),
``prompts`` (each with ``prompt`` and ``marks``) and ``ways``: for each, either ``null``, which computes all, or what of
the settings of blending is to be another; with ``wrong_table`` among them, keys are turned by another table from then
on. The results have for each way the first token of each answer, and the counters.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ucm.integration.vllm import metrics as names

#: The time limit for saved chunks to become visible, in seconds.
SAVED = 300.0


def main(specification: Path, results: Path) -> None:
    """Store the chunks, then ask."""
    vllm: Any = import_module("vllm")
    spec = json.loads(specification.read_text(encoding="utf-8"))
    llm = vllm.LLM(**spec["engine"])
    connector = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
    worker = connector._worker._blending

    def ask(prompts: list[list[int]], marks: list[Any]) -> list[Any]:
        params = [
            vllm.SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args=None if of is None else {"kv_transfer_params": {"ucm_chunks": of}},
            )
            for of in marks
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found: list[Any] = llm.generate(asked, params, use_tqdm=False)
        return found

    counted = _Counts(worker)
    chunks, until = {tuple(chunk) for chunk in spec["chunks"]}, time.monotonic() + SAVED
    # What is computed before the weights are identified is not stored.
    while counted.saved < len(chunks) and time.monotonic() < until:
        llm.reset_prefix_cache()
        ask(spec["chunks"], [[[0, len(chunk)]] for chunk in spec["chunks"]])
    transfers = connector._worker.worker
    while transfers._left() and time.monotonic() < until:
        time.sleep(0.01)
    if counted.saved < len(chunks) or transfers._left():
        raise RuntimeError(f"{counted.saved} of {len(chunks)} chunks were saved in {SAVED:.0f} s")
    prompts = [one["prompt"] for one in spec["prompts"]]
    told = []
    for way in spec["ways"]:
        llm.reset_prefix_cache()
        if way is not None:
            if way.pop("wrong_table", False):
                _turn_wrongly(worker._caches)
            worker._settings = worker._settings.model_copy(update=way)
        marks = [None if way is None else one["marks"] for one in spec["prompts"]]
        counted = _Counts(worker)
        outputs = ask(prompts, marks)
        told.append(
            {
                "answers": [output.outputs[0].token_ids[0] for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "reused": counted.reused,
                "computed": counted.computed,
                "gate_failures": counted.failures,
            }
        )
        results.write_text(json.dumps(told), encoding="utf-8")


def _turn_wrongly(caches: Any) -> None:
    rotations = caches._rotations
    for name, rotation in rotations.items():
        rotations[name] = type(rotation)(rotation.table.roll(1, dims=0), rotation.neox)


#: What is summed, by the series that it is counted in.
_COUNTED = {
    names.BLEND_REUSED_TOKENS: "reused",
    names.BLEND_COMPUTED_TOKENS: "computed",
    names.BLEND_GATE_FAILURES: "failures",
    names.BLEND_SAVED_CHUNKS: "saved",
}


class _Counts:
    """Sums a worker's counters from now on."""

    def __init__(self, worker: Any) -> None:
        self.reused = self.computed = self.failures = self.saved = 0
        worker._counters.add = self._add

    def _add(self, metric: Any, value: float = 1, key: str = "") -> None:
        del key
        if metric in _COUNTED:
            self.__dict__[_COUNTED[metric]] += int(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
