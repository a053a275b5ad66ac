"""Functions of vLLM Ascend that rules change run to their end, on objects that stand for anything, without an NPU.

Each hook is called once, with what it is documented to get; what the function calls besides is what the published
function calls; and what a hook replaces is what the rest of the function uses. The schedulers are not here: they run
in real engines (`tests/e2e/test_ascend.py`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.releases import ASCEND
from tests.transforms.doubles import Anything, load, shown
from transforms.ascend.registry import REGISTRY
from transforms.pipeline.build import make_overlay
from transforms.pipeline.product import compose
from ucm.integration.vllm import hooks as documented

if TYPE_CHECKING:
    from types import ModuleType

    from transforms.pipeline.rewrite import Overlay, RewrittenModule

HOOKS = "ucm.integration.vllm.hooks"
PRODUCT = compose(REGISTRY)
STEP = {
    "self.execute_model_state": None,
    "scheduler_output.total_num_scheduled_tokens": 3,
    "scheduler_output.num_scheduled_tokens": {"r": 3},
    "self.input_batch.num_reqs": 1,
    "self.input_batch.req_ids": ["r"],
    "vllm.distributed.parallel_state.get_pp_group().is_last_rank": True,
}
RUNNING = {
    "scheduler_output.scheduled_cached_reqs.req_ids": ["r"],
    "self.input_batch.req_id_to_index": {"r": 0},
    "self.input_batch.req_id_to_index.get()": 0,
    # 0.9.1 has a list of requests.
    "len(scheduler_output.scheduled_cached_reqs)": 1,
    "scheduler_output.scheduled_cached_reqs[0].req_id": "r",
}
#: 0.9.1 asks how many requests of each phase the step has.
MIXED = {"(attn_metadata.num_decodes > 0)": True, "(attn_metadata.num_prefills > 0)": True}
#: What a hook returns, by the number of the argument; it is marked if the run is about replacements.
RETURNED: dict[str, int | tuple[int, ...]] = {"attention_begin": (1, 2, 3, 5), "mla_begin": 4}
#: What a hook gets, by the name of its parameter: a pattern of the path by which the function reached it.
GIVEN = {
    **dict.fromkeys(("runner", "table"), "self"),
    **{name: name for name in ("row_idx", "scheduler_output")},
    "request_ids": r"scheduler_output\.finished_req_ids",
    "request_id": "'r'",
    "request_index": "0",
    "model_output": r"self\.(model|_model_forward|_generate_process_reqs_hidden_states)\(\)",
    "layer_name": r"layer_name|.*\.mla_attn\.layer_name",
    "query": "query|hidden_states",
    "key": "key|None",
    "value": "value|None",
    "kv_cache": r"(.*\.)?kv_cache(\[.*\])?",
    "attn_metadata": r"(.*\.)?attn_metadata",
    "output": "output",
    # Halves of latent attention.
    "layer": "layer|layer_name",
    "phase": "'(decode|prefill)'",
    "query decode": r"\[self\.(_mla_preprocess\(\)\[0\]\.ql_nope|_q_proj_and_k_up_proj\(\)\[0\]), self\..*\]",
    "query prefill": r"\[self\._mla_preprocess\(\)\[1\]\.q_nope, self\..*\]|self\.q_proj\(\)\[0\]\.view\(\)",
    "output decode": r"self\._forward_decode\(\)",
    "output prefill": r"self\._forward_prefill\(\)",
}


@dataclass(frozen=True)
class Driven:
    """How a function is run.

    Attributes:
        hooks: The hooks that it must call, in any order where a release chooses it.
        answers: What stands for what; see `Anything`.
        replaced: Which call, by a part of its path, must get what a hook returned.
    """

    hooks: tuple[str, ...]
    answers: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


AROUND = ("attention_begin", "attention_finished")
LATENT = ("mla_begin decode", "mla_finished decode", "mla_begin prefill", "mla_finished prefill")
DRIVEN = {
    "unified_ascend_attention_with_output": Driven(AROUND, {}, {"impl.forward(": "<attention_begin 5>"}),
    "mla_forward": Driven(AROUND, {}, {"impl.forward(": "<attention_begin 5>"}),
    "forward": Driven(
        LATENT,
        {"len(kv_cache)": 2, **MIXED},
        {"._forward_decode(": "<mla_begin decode>", "._forward_prefill(": "<mla_begin prefill>"},
    ),
    "clear_row": Driven(("clear_row",)),
    "_update_states": Driven(("update_states", "worker_requests_finished", "blocks_updated"), RUNNING),
    "execute_model": Driven(("execute_begin", "execute_finished"), STEP),
    "_process_reqs": Driven(("execute_begin", "execute_finished"), STEP),
}


class Hooks:
    """UCM's hooks: they log their calls with arguments not in `GIVEN`, and return what they get, or marks for it."""

    def __init__(self, log: list[str], answers: dict[str, Any], *, marks: bool) -> None:
        self._log, self._answers, self._marks = log, answers, marks

    def __getattr__(self, name: str) -> Any:
        def hook(*given: Any) -> Any:
            phase = f" {given[1]}" if name.startswith("mla_") else ""
            told = inspect.signature(getattr(documented, name)).bind(*given).arguments
            wrong = [
                f"{of}={shown(value)}"
                for of, value in told.items()
                if not re.fullmatch(GIVEN.get(f"{of}{phase}") or GIVEN[of], shown(value))
            ]
            # Marks of an earlier hook are arguments of a later one.
            got = f" got {', '.join(wrong)}" if wrong and not self._marks else ""
            self._log.append(f"hook {name}{phase}{got}")
            which = RETURNED.get(name)
            if which is None:
                return None
            if isinstance(which, int):
                return self._mark(f"<{name}{phase}>") if self._marks else given[which]
            return tuple(self._mark(f"<{name} {at}>") if self._marks else given[at] for at in which)

        return hook

    def _mark(self, name: str) -> Anything:
        return Anything(name, self._log, self._answers)


@functools.cache
def overlay(release: str) -> Overlay:
    return make_overlay(release, product=PRODUCT)


def functions(module: RewrittenModule) -> list[tuple[str, str]]:
    """Return the functions that call hooks: the class, if any, and the name."""
    tree = ast.parse(module.rewritten)
    hooked = {number for number, line in enumerate(module.rewritten.splitlines(), 1) if b"_ucm_hooks." in line}
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    owners += [(node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)]
    return [
        (owner, node.name)
        for owner, of in owners
        for node in of.body
        if isinstance(node, ast.FunctionDef) and hooked.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
    ]


def run(module: ModuleType, owner: str, name: str, log: list[str], driven: Driven) -> list[str]:
    """Run a function, and return what it called."""
    function = vars(vars(module)[owner] if owner else module)[name]
    log.clear()
    function(**{of: Anything(of, log, driven.answers) for of in inspect.signature(function).parameters})
    return list(log)


def check(module: RewrittenModule, rewritten: bytes, owner: str, name: str) -> None:
    """Run a function as published, rewritten, and with hooks that replace what they are given; compare the calls."""
    how, found, about = DRIVEN[name], {}, f"{module.path}: {name}"
    for kind, source, marks in (
        ("published", module.upstream, False),
        ("rewritten", rewritten, False),
        ("marked", rewritten, True),
    ):
        log: list[str] = []
        answers = {**how.answers, HOOKS: Hooks(log, how.answers, marks=marks)}
        loaded = load(source, module.path, log, answers)
        if kind != "published" or hasattr(vars(loaded).get(owner, loaded), name):
            found[kind] = run(loaded, owner, name, log, how)
    hooks = [line.removeprefix("hook ") for line in found["rewritten"] if line.startswith("hook ")]
    assert sorted(hooks) == sorted(how.hooks), about
    others = [line for line in found["rewritten"] if not line.startswith("hook ")]
    assert others == found.get("published", []), about
    for place, mark in how.replaced.items():
        calls = [line for line in found["marked"] if place in line and f"{place})" not in line]
        assert calls, about
        assert all(mark in call for call in calls), about


@pytest.mark.parametrize("release", ASCEND)
def test_what_is_changed_runs_and_calls_its_hooks(release: str) -> None:
    driven = set()
    for module in overlay(release).modules:
        for owner, name in functions(module):
            if name not in DRIVEN:
                schedules = any(kind in module.path for kind in ("schedul", "balance", "kv_delivery"))
                assert schedules, f"{module.path}: {name} is not driven"
                continue
            check(module, module.rewritten, owner, name)
            driven.add(name)
    assert {"execute_model", "_process_reqs"} & driven
    assert "forward" in driven


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("_ucm_hooks.attention_finished(", "(lambda *_: None)("),  # a hook is not called
        ("attention_finished(layer_name, query,", "attention_finished(query, layer_name,"),  # it gets something else
        ("query, key, value, attn_metadata = _ucm_hooks", "_ucm_hooks"),  # what it replaces is not used
        ("_ucm_hooks.attention_finished(", "get_forward_context(); _ucm_hooks.attention_finished("),  # something more
    ],
)
def test_a_wrong_insertion_is_found(was: str, now: str) -> None:
    (module,) = [module for module in overlay("0.11.0").modules if module.path.endswith("attention_v1.py")]
    assert module.rewritten.count(was.encode()) == 1
    wrong = module.rewritten.replace(was.encode(), now.encode())
    with pytest.raises(AssertionError, match="unified_ascend_attention_with_output"):
        check(module, wrong, "", "unified_ascend_attention_with_output")
