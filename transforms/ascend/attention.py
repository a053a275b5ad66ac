"""vLLM Ascend's own attention operators, and its latent attention."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

BEGIN = (
    "query, key, value, attn_metadata = "
    "_ucm_hooks.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)"
)
FINISHED = "_ucm_hooks.attention_finished(layer_name, query, kv_cache, attn_metadata, output)"
FORWARD = "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, ...)"
OPERATOR = Scope("unified_ascend_attention_with_output")

#: Why no test runs latent attention on an engine.
NOT_RUN = "Latent attention of vLLM Ascend needs an NPU; test_ascend_modules.py runs the changed functions."
MLA_OPERATOR = Scope("mla_forward")
MLA_BEGIN = (
    "hidden_states, _, _, attn_metadata = _ucm_hooks.attention_begin("
    "self.mla_attn.layer_name, hidden_states, None, None, kv_cache, attn_metadata)"
)
MLA_FINISHED = "_ucm_hooks.attention_finished(self.mla_attn.layer_name, hidden_states, kv_cache, attn_metadata, output)"
MLA_FORWARD = "self.mla_attn.impl.forward(self.mla_attn.layer_name, hidden_states, kv_cache, attn_metadata, ...)"

HALVES = Scope("AscendMLAImpl.forward")
PREFILL = "output_prefill = self._forward_prefill(...)"
DECODE = "output_decode = self._forward_decode(...)"
BY_NAME, BY_LAYER = Releases(since="0.11.0"), Releases(before="0.11.0")
NO_OPERATOR = Absent(Releases(since="0.12.0rc1"), "the operator is vLLM's own, which vLLM's overlay hooks")

RECORD = Governance(
    why="A sparse method must see each layer's query and pass the backend a smaller block table. Up to 0.11.0, NPUs "
    "run vLLM Ascend's own operator in place of vLLM's.",
    how="One call before and one after the operator's only impl.forward, as in vLLM's operator. From 0.13.0 on, NPUs "
    "run vLLM's operator.",
    processes=(Process.WORKER,),
    upstream=Upstream(
        UpstreamStatus.NOT_SUBMITTED,
        "a common framework for sparse KV was proposed to vLLM and went stale without a decision",
        "https://github.com/vllm-project/vllm/issues/21772",
    ),
    removal="The oldest supported release is 0.13.0, which runs vLLM's operator, or vLLM offers a callback per layer.",
)


CENSUS = (
    Census(
        "ascend.attention.forwards",
        "calls of a backend's forward",
        ("_.impl.forward(...)", "impl.forward(...)"),
        rules=("ascend.attention.begin", "ascend.mla_operator.begin"),
        elsewhere=(
            Elsewhere(
                ("vllm_ascend/patch/worker/patch_attention_layer.py:forward",),
                Consequence.REACHES,
                "it replaces Attention.forward; the backend's forward that it calls goes through the hooked operator",
            ),
            Elsewhere(
                (
                    "vllm_ascend/models/deepseek_v2.py:*",
                    "vllm_ascend/models/layers/sfa.py:*",
                    "vllm_ascend/ops/dsa.py:*",
                    "vllm_ascend/torchair/models/torchair_deepseek_v2.py:*",
                ),
                Consequence.REFUSED,
                "latent attention, some of it natively sparse; methods refuse MLA, BlockTopK all of it on NPUs",
                refused_by=refusals.MODEL,
            ),
            Elsewhere(
                ("vllm_ascend/torchair/models/*:*",),
                Consequence.REFUSED,
                "a model for torchair's graphs, which bypass the operator; a method refuses such graphs",
                refused_by=refusals.PLATFORM,
            ),
            Elsewhere(
                ("vllm_ascend/models/minimax_m3/*:*",),
                Consequence.REFUSED,
                "the model's own attention, which bypasses the operators: its layer has a KV cache but never calls the "
                "method, so the engine stops at its first step",
                refused_by=refusals.UNASKED,
            ),
        ),
    ),
)

ATTENTION = Transform(
    id="ascend.attention",
    module=Module(
        "ascend.attention", "attention", (ModulePath("vllm_ascend/attention/attention_v1.py"),), (NO_OPERATOR,)
    ),
    governance=RECORD,
    rules=(
        rule("ascend.attention.begin", OPERATOR, before(FORWARD, BEGIN)),
        rule("ascend.attention.finished", OPERATOR, after(FORWARD, FINISHED)),
    ),
    cases=cases_beside(__file__, "attention"),
    engine_tests=(EngineTest("tests/e2e/test_ascend.py::test_each_step_of_its_runner_calls_its_hooks"),),
    needs=("worker",),
    census=CENSUS,
)

MLA_RECORD = Governance(
    why="In every release, vLLM Ascend has its own latent-attention operator and its own prefill and decode halves, "
    "which bypass the hooks in vLLM's.",
    how="The same calls as in vLLM's: a pair around the operator's impl.forward and a pair around each half. From "
    "0.11.0 on the backend has the name of its layer, so the calls around the halves pass the name.",
    processes=(Process.WORKER,),
    upstream=Upstream(
        UpstreamStatus.NOT_SUBMITTED,
        "the discussion at vLLM is about models with their own sparse indexer, not about callbacks",
        "https://github.com/vllm-project/vllm/issues/48203",
    ),
    removal="vLLM offers plugins a callback around latent attention, and its platforms call it, too.",
)

MLA_OPERATOR_TRANSFORM = Transform(
    id="ascend.mla_operator",
    module=Module(
        "ascend.mla_operator",
        "attention",
        (
            ModulePath("vllm_ascend/ops/mla.py", Releases(since="0.12.0rc1")),
            ModulePath("vllm_ascend/models/layers/mla.py", Releases(before="0.12.0rc1")),
        ),
        (Absent(Releases(before="0.11.0"), "latent attention has no operator: the model calls the backend directly"),),
    ),
    governance=MLA_RECORD,
    rules=(
        rule("ascend.mla_operator.begin", MLA_OPERATOR, before(MLA_FORWARD, MLA_BEGIN)),
        rule("ascend.mla_operator.finished", MLA_OPERATOR, after(MLA_FORWARD, MLA_FINISHED)),
    ),
    cases=cases_beside(__file__, "mla_operator"),
    not_run=NOT_RUN,
    needs=("worker",),
    opt_in=("ascend.mla_operator",),
    not_counted="Calls of a backend's forward are counted under ascend.attention.",
)


def _half(layer: str, phase: str, query: str) -> str:
    return f'attn_metadata = _ucm_hooks.mla_begin({layer}, "{phase}", {query}, kv_cache, attn_metadata)'


def _half_done(layer: str, phase: str) -> str:
    return f'_ucm_hooks.mla_finished({layer}, "{phase}", output_{phase})'


QUERIES = {
    "prefill": ("(prefill_preprocess_res.q_nope, prefill_preprocess_res.q_pe)", "prefill_q"),
    "decode": ("(decode_preprocess_res.ql_nope, decode_preprocess_res.q_pe)", "(decode_ql_nope, decode_q_pe)"),
}


def _half_rules(phase: str, anchor: str) -> tuple[Rule, ...]:
    by_name, by_layer = QUERIES[phase]
    return (
        Rule(
            f"ascend.mla.{phase}-begin",
            (
                Variant(HALVES, before(anchor, _half("layer_name", phase, by_name)), BY_NAME, "by name"),
                Variant(HALVES, before(anchor, _half("layer", phase, by_layer)), BY_LAYER, "by layer"),
            ),
        ),
        Rule(
            f"ascend.mla.{phase}-finished",
            (
                Variant(HALVES, after(anchor, _half_done("layer_name", phase)), BY_NAME, "by name"),
                Variant(HALVES, after(anchor, _half_done("layer", phase)), BY_LAYER, "by layer"),
            ),
        ),
    )


MLA = Transform(
    id="ascend.mla",
    module=Module("ascend.mla", "attention", (ModulePath("vllm_ascend/attention/mla_v1.py"),)),
    governance=MLA_RECORD,
    rules=(*_half_rules("prefill", PREFILL), *_half_rules("decode", DECODE)),
    cases=cases_beside(__file__, "mla"),
    not_run=NOT_RUN,
    needs=("worker",),
    opt_in=("ascend.mla",),
    census=(
        Census(
            "ascend.mla.halves",
            "calls of the halves of latent attention",
            ("self._forward_prefill(...)", "self._forward_decode(...)"),
            rules=("ascend.mla.prefill-begin", "ascend.mla.decode-begin"),
            elsewhere=(
                Elsewhere(
                    (
                        "vllm_ascend/attention/mla_v1.py:AscendMLAImpl.forward",
                        "vllm_ascend/torchair/torchair_mla.py:*",
                        "vllm_ascend/attention/dsa_v1.py:*",
                    ),
                    Consequence.REFUSED,
                    "latent attention in a graph, or natively sparse; methods refuse MLA, BlockTopK all of it on NPUs",
                    refused_by=refusals.MODEL,
                ),
            ),
        ),
    ),
)

TRANSFORMS = (ATTENTION, MLA_OPERATOR_TRANSFORM, MLA)
