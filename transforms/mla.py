"""Multi-head latent attention: its operator, and the prefill and decode halves inside it."""

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

MODULE = Module(
    id="mla",
    group="attention",
    paths=(
        ModulePath("vllm/model_executor/layers/attention/mla_attention.py", Releases(since="0.15.0")),
        ModulePath("vllm/v1/attention/backends/mla/common.py", Releases(before="0.15.0")),
    ),
)

LAYER = Scope("MLAAttention.forward_impl")
IMPL = Scope("MLACommonImpl.forward")
OP = Scope("unified_mla_attention_with_output")
SINCE_LAYER, BEFORE_LAYER = Releases(since="0.16.0"), Releases(before="0.16.0")

OP_BEGIN = (
    "q, kv_c_normed, k_pe, attn_metadata = "
    "_ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)"
)
OP_FINISHED = "_ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)"
OP_FORWARD = "layer.forward_impl(q, kv_c_normed, k_pe, kv_cache, attn_metadata, ...)"
OP_ELSEWHERE = Absent(
    BEFORE_LAYER,
    "the operator is in vllm/attention/layer.py (from 0.11.1 on; before, MLA runs through "
    "unified_attention_with_output) and calls MLACommonImpl.forward, whose two halves are hooked here",
)
RETURNING_OP = Scope("unified_mla_attention")
NO_RETURNING_OP = (
    OP_ELSEWHERE,
    Absent(Releases(since="0.20.0"), "the operator that returns its output was removed: MLA writes into a buffer"),
)


def _begin(layer: str, phase: str, query: str) -> str:
    return f'attn_metadata = _ucm_hooks.mla_begin({layer}, "{phase}", {query}, kv_cache, attn_metadata)'


def _finished(layer: str, phase: str, output: str) -> str:
    return f'_ucm_hooks.mla_finished({layer}, "{phase}", {output})'


#: From 0.24.0 the prefill half may write into another buffer than the decode half.
OWN_BUFFER = "self.impl.forward_mha(..., output=mha_output[num_mqa_tokens:num_actual_toks])"
SHARED_BUFFER = "self.impl.forward_mha(..., output=output[num_mqa_tokens:])"
MHA, MQA = "self.impl.forward_mha(...)", "self.impl.forward_mqa(...)"
PREFILL, DECODE = "self._forward_prefill(...)", "self._forward_decode(...)"
SPLIT_DECODE = "self._forward_decode(decode_ql_nope, decode_q_pe, ...)"
WHOLE_DECODE = "self._forward_decode(decode_q, ...)"

CENSUS = (
    Census(
        "mla.halves",
        "calls of latent attention, in one piece or in halves",
        (
            "layer.forward_impl(...)",
            "_.impl.forward_mha(...)",
            "_.impl.forward_mqa(...)",
            "self._forward_prefill(...)",
            "self._forward_decode(...)",
        ),
        rules=("mla.prefill-begin", "mla.decode-begin", "mla.op-begin", "mla.returning-begin"),
        elsewhere=(
            Elsewhere(
                ("vllm/attention/backends/mla/common.py:*",),
                Consequence.REFUSED,
                "latent attention of the V0 engine; methods refuse MLA, BlockTopK all back ends but CPU_MLA",
                refused_by=refusals.MODEL,
                releases=Releases(before="0.11.0"),
            ),
            Elsewhere(
                (
                    "vllm/model_executor/layers/deepseek_v4_attention.py:*",
                    "vllm/models/deepseek_v32/*:*",
                    "vllm/models/deepseek_v4*/*:*",
                    "vllm/models/kimi_k3/*:*",
                    "vllm/models/step5/*:*",
                ),
                Consequence.REFUSED,
                "a model's own latent attention; methods refuse MLA, except BlockTopK, and all refuse any layer that "
                "has a KV cache but never calls it",
                refused_by=refusals.MODEL,
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="mla",
    module=MODULE,
    governance=Governance(
        why="MLA models keep one latent vector per token and split each step into a prefill half and a decode half "
        "with different queries. A sparse method has to see each half, and the whole operator.",
        how="One call before and one after each half, and the usual pair of calls around the operator. The first call "
        "of each pair may return other attention metadata, which the rest of the function uses.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the discussion there is about models with their own sparse indexer, not about callbacks",
            "https://github.com/vllm-project/vllm/issues/48203",
        ),
        removal="vLLM offers plugins a callback around MLA's prefill and decode, with replaceable metadata.",
    ),
    rules=(
        Rule(
            "mla.prefill-begin",
            (
                Variant(LAYER, before(MHA, _begin("self", "prefill", "q[num_mqa_tokens:]")), SINCE_LAYER, "layer"),
                Variant(IMPL, before(PREFILL, _begin("layer", "prefill", "prefill_q")), BEFORE_LAYER, "impl"),
            ),
        ),
        Rule(
            "mla.prefill-finished",
            (
                Variant(
                    LAYER,
                    after(OWN_BUFFER, _finished("self", "prefill", "mha_output[num_mqa_tokens:num_actual_toks]")),
                    Releases(since="0.24.0"),
                    "own buffer",
                ),
                Variant(
                    LAYER,
                    after(SHARED_BUFFER, _finished("self", "prefill", "output[num_mqa_tokens:]")),
                    Releases("0.16.0", "0.24.0"),
                    "shared buffer",
                ),
                Variant(
                    IMPL,
                    after(PREFILL, _finished("layer", "prefill", "output[num_decode_tokens:]")),
                    BEFORE_LAYER,
                    "impl",
                ),
            ),
        ),
        Rule(
            "mla.decode-begin",
            (
                Variant(LAYER, before(MQA, _begin("self", "decode", "mqa_q")), SINCE_LAYER, "layer"),
                Variant(
                    IMPL,
                    before(WHOLE_DECODE, _begin("layer", "decode", "decode_q")),
                    Releases("0.10.2", "0.16.0"),
                    "whole query",
                ),
                Variant(
                    IMPL,
                    before(SPLIT_DECODE, _begin("layer", "decode", "(decode_ql_nope, decode_q_pe)")),
                    Releases(before="0.10.2"),
                    "split query",
                ),
            ),
        ),
        Rule(
            "mla.decode-finished",
            (
                Variant(LAYER, after(MQA, _finished("self", "decode", "attn_out")), SINCE_LAYER, "layer"),
                Variant(
                    IMPL,
                    after(WHOLE_DECODE, _finished("layer", "decode", "attn_out")),
                    Releases("0.10.2", "0.16.0"),
                    "whole query",
                ),
                Variant(
                    IMPL,
                    after(SPLIT_DECODE, _finished("layer", "decode", "output[:num_decode_tokens]")),
                    Releases(before="0.10.2"),
                    "split query",
                ),
            ),
        ),
        rule("mla.returning-begin", RETURNING_OP, before(OP_FORWARD, OP_BEGIN), absent=NO_RETURNING_OP),
        rule("mla.returning-finished", RETURNING_OP, after(OP_FORWARD, OP_FINISHED), absent=NO_RETURNING_OP),
        rule("mla.op-begin", OP, before(OP_FORWARD, OP_BEGIN), absent=(OP_ELSEWHERE,)),
        rule("mla.op-finished", OP, after(OP_FORWARD, OP_FINISHED), absent=(OP_ELSEWHERE,)),
    ),
    cases=cases_beside(__file__, "mla"),
    engine_tests=(EngineTest("tests/e2e/test_probe_models.py::test_latent_attention_calls_its_hooks_in_each_forward"),),
    needs=("worker",),
    opt_in=("mla",),
    census=CENSUS,
)
