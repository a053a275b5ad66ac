"""The child process of ``ucm prove``: one vLLM engine that answers the planned requests, greedily.

``python -m ucm.prove.engine PLAN RESULT`` reads the plan that `ucm.prove.run` wrote, and appends one JSON object per
line to the result: first what runs (``about``), the prompts if it had to make them, and then each phase as soon as it
has ended. What was done before the time was over is kept.
"""

from __future__ import annotations

import itertools
import platform
import random
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ucm
from ucm import engine as short_engine
from ucm.compat import optional
from ucm.engine_process import run_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Requests one at a time; requests at once, and how many of those are aborted.
ALONE, CROWD, ABORTED = 3, 16, 4
#: Generated tokens; log-probabilities of so many tokens at each position.
ANSWER, TOP = 24, 5
#: Seconds until what was saved is visible, and between two looks.
SETTLE, LOOK = 20.0, 0.25
#: Fewer kinds of tokens than these in a text say that the tokenizer does not know its words.
KINDS = 64
_NUMBERS = itertools.count()


class Engine(short_engine.Engine):
    """One engine of a proof."""

    def about(self) -> dict[str, Any]:
        """Return what runs: the workers' facts, the data type, the longest context and the size of the vocabulary."""
        model = self.llm.llm_engine.vllm_config.model_config
        return {
            "workers": self.workers("ucm_facts"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "vocabulary": int(model.get_vocab_size()),
        }

    def ask(self, prompts: Sequence[list[int]], count: int, aborted: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Answer requests that arrive at once.

        Args:
            prompts: Their token ids.
            count: Tokens to generate.
            aborted: Requests that are aborted, each a step later than the one before.

        Returns:
            For each request its ``tokens``, the ``logprobs`` of the likeliest tokens at each position, the ``cached``
            tokens of its prompt, and the seconds to its first token, ``first_s``.
        """
        engine, params = self.llm.llm_engine, self.params(count, logprobs=TOP)
        answers: dict[str, dict[str, Any]] = {}
        began = time.perf_counter()
        for prompt in prompts:
            name = f"ucm-prove-{next(_NUMBERS)}"
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            answers[name] = {"tokens": [], "logprobs": [], "cached": 0, "first_s": None}
        names = list(answers)
        ends = {names[request]: 3 + 2 * order for order, request in enumerate(aborted)}
        for step in itertools.count():
            if due := [name for name, last in ends.items() if last == step]:
                engine.abort_request(due)
            if not engine.has_unfinished_requests():
                return list(answers.values())
            for output in engine.step():
                _take(answers[output.request_id], output, time.perf_counter() - began)
        raise AssertionError("count() does not end")

    def reset(self) -> None:
        """Empty vLLM's own prefix cache.

        Raises:
            RuntimeError: It could not be emptied.
        """
        for _ in range(20):
            if self.llm.reset_prefix_cache() is not False:
                return
            time.sleep(LOOK)  # until blocks that are still being saved are free
        raise RuntimeError("vLLM's own prefix cache could not be emptied")

    def settle(self, prompts: Sequence[list[int]]) -> None:
        """Wait until no more of the prompts becomes visible in the store, as far as this ends in `SETTLE` seconds."""
        deadline, before = time.monotonic() + SETTLE, -1
        while time.monotonic() < deadline:
            self.reset()
            found = sum(answer["cached"] or 0 for answer in self.ask(prompts, 1))
            if found == before > 0:
                break
            before = found
            time.sleep(LOOK)

    def counters(self) -> dict[str, float]:
        """Return the preemptions that vLLM has counted, and the blocks that failed and bytes that moved in UCM."""
        found: dict[str, float] = {"preemptions": self.vllm_counters().get(short_engine.PREEMPTIONS, 0)}
        for family in import_module("prometheus_client").REGISTRY.collect():
            for sample in family.samples:
                if sample.name in {"ucm:failures_total", "ucm:load_bytes_total", "ucm:save_bytes_total"}:
                    name = sample.name.removeprefix("ucm:").removesuffix("_total")
                    found[name] = found.get(name, 0) + sample.value
        return found


def _take(answer: dict[str, Any], output: Any, seconds: float) -> None:
    """Record a request's output so far."""
    completion = output.outputs[0]
    answer["tokens"] = list(completion.token_ids)
    answer["logprobs"] = [
        {token: value.logprob for token, value in position.items()} for position in completion.logprobs or ()
    ]
    answer["cached"] = output.num_cached_tokens or 0
    if answer["first_s"] is None and answer["tokens"]:
        answer["first_s"] = seconds


def make_prompts(model: Path, about: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the prompts of all engines.

    Those of a crowd end shortly before a block does, so that each answer soon needs a further one. They have as many
    blocks each, so that the next one takes the place of one that was aborted. The last four share their beginnings.

    Args:
        model: The model's directory; its tokenizer turns a text into tokens.
        about: What `Engine.about` returned.
        longest: Tokens of a prompt, at most.

    Returns:
        ``alone`` and ``crowd``, lists of prompts; ``aborted``, the places in the crowd of those that are aborted;
        ``source``, ``text`` or ``token ids``.
    """
    block = max((group["tokens"] for group in about["workers"][0]["groups"]), default=16)
    wanted = longest * (ALONE + CROWD)
    tokens = _tokens_of_text(model, wanted)
    source = "text" if tokens else "token ids"
    if not tokens:
        drawn = random.Random(0)  # noqa: S311 - prompts, no secrets
        tokens = [drawn.randrange(3, about["vocabulary"]) for _ in range(wanted)]
    pieces = [tokens[longest * number : longest * (number + 1)] for number in range(ALONE + CROWD)]
    alone = [piece[: longest - 3 * number] for number, piece in enumerate(pieces[:ALONE])]
    shared, length = longest // 6, block * max(1, longest // 3 // block)
    crowd = [piece[: length - 2 - number % 4] for number, piece in enumerate(pieces[ALONE:])]
    crowd[-4:] = [crowd[-4][:shared] + prompt[shared:] for prompt in crowd[-4:]]
    aborted = [number for number in range(CROWD) if number % (CROWD // ABORTED) == 2]  # noqa: PLR2004 - any of four
    return {"alone": alone, "crowd": crowd, "aborted": aborted, "source": source}


def _tokens_of_text(model: Path, count: int) -> list[int]:
    """Return so many tokens of UCM's own source text; none if the model has no tokenizer that knows its words."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - vLLM brings it

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        tokens: list[int] = []
        for file in sorted(Path(ucm.__file__).parent.rglob("*.py")):
            if len(tokens) >= count:
                break
            tokens += tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001 - a tokenizer may fail in many ways, and token ids do without
        return []
    if not tokens or len(set(tokens)) < KINDS:
        return []
    return list(itertools.islice(itertools.cycle(tokens), count))


def main(plan: dict[str, Any], tell: Callable[[Any], None]) -> None:
    """Run the plan."""
    run(plan, Engine(plan["model"], **{"load_format": plan["load_format"], **plan["engine"]}), tell)


def run(plan: dict[str, Any], engine: Any, tell: Callable[[dict[str, Any]], None]) -> None:
    """Serve the phases of a plan.

    Args:
        plan: ``phases``; ``prompts`` (None: make them, of at most ``longest`` tokens); for a sparse method, ``sparse``.
        engine: The engine.
        tell: Takes each part of the result.
    """
    about = engine.about()
    tell({"about": {**about, "versions": _versions()}})
    prompts = plan["prompts"]
    warm = [3 + token % 250 for token in range(min(256, about["max_model_len"] - ANSWER))]
    engine.ask([warm], 2)
    engine.ask([warm[:8], warm[1:17]], 4)
    if prompts is None:
        longest = min(plan["longest"], about["max_model_len"] - ANSWER)
        prompts = make_prompts(Path(plan["model"]), about, longest)
        tell({"prompts": prompts})
    done: dict[str, list[dict[str, Any] | None]] = {}
    for phase in plan["phases"]:
        asked = prompts[phase["of"]][: phase.get("first")]
        if phase.get("settle"):
            engine.settle(asked)
        if phase.get("reset"):
            engine.reset()
        before, started = engine.counters(), time.perf_counter()
        if "continues" in phase:
            answers = _continued(engine, asked, done[phase["continues"]])
        else:
            answers = _answers(engine, phase, asked, prompts["aborted"])
        done[phase["name"]] = answers
        seconds = time.perf_counter() - started
        rise = {name: value - before.get(name, 0) for name, value in engine.counters().items()}
        tell({"phase": phase["name"], "answers": answers, "seconds": seconds, "counters": rise})
    if plan.get("sparse"):
        tell({"method": engine.workers("ucm_method")[0]})


def _answers(
    engine: Any, phase: dict[str, Any], asked: list[list[int]], aborted: Sequence[int]
) -> list[dict[str, Any] | None]:
    """Return the answers of one phase in the order of the prompts; None for a request that was aborted."""
    if phase["of"] == "alone":
        return [answer for prompt in asked for answer in engine.ask([prompt], ANSWER)]
    order = list(range(len(asked)))[:: -1 if phase.get("reversed") else 1]
    gone = [place for place, request in enumerate(order) if request in aborted]
    answers = engine.ask([asked[request] for request in order], ANSWER, gone)
    found: list[dict[str, Any] | None] = [None] * len(asked)
    for place, request in enumerate(order):
        if place not in gone:
            found[request] = answers[place]
    return found


def _continued(engine: Any, asked: list[list[int]], known: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return answers whose first halves are known and are part of the prompts, as after a preemption."""
    half = ANSWER // 2
    places = [place for place, one in enumerate(known) if one is not None]
    halves = [{**one, "tokens": one["tokens"][:half], "logprobs": one["logprobs"][:half]} for one in known if one]
    prompts = [asked[place] + one["tokens"] for place, one in zip(places, halves, strict=True)]
    found: list[dict[str, Any] | None] = [None] * len(asked)
    for place, first, rest in zip(places, halves, engine.ask(prompts, ANSWER - half), strict=True):
        found[place] = {**rest, **{name: first[name] + rest[name] for name in ("tokens", "logprobs")}}
    return found


def _versions() -> dict[str, str]:
    """Return the versions of what the result depends on."""
    import torch  # noqa: PLC0415 - ucm imports without torch
    import vllm  # noqa: PLC0415 - likewise

    found = {"vllm": vllm.__version__, "torch": torch.__version__, "ucm": ucm.__version__}
    found["python"] = platform.python_version()
    toolkit = optional(torch, "version.cuda") or optional(torch, "version.hip")
    return found | ({"toolkit": str(toolkit)} if toolkit else {})


if __name__ == "__main__":
    run_plan(main)
