"""Attention operators: hooks with which a sparse method sees and replaces the inputs of every attention layer."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(
    id="attention",
    group="attention",
    paths=(
        ModulePath("vllm/model_executor/layers/attention/attention.py", Releases(since="0.16.0")),
        ModulePath("vllm/attention/layer.py", Releases(before="0.16.0")),
    ),
)

BEGIN = (
    "query, key, value, attn_metadata = "
    "_ucm_hooks.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)"
)
FINISHED = "_ucm_hooks.attention_finished(layer_name, query, kv_cache, attn_metadata, output)"
FORWARD = "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, ...)"
MLA_BEGIN = (
    "q, kv_c_normed, k_pe, attn_metadata = "
    "_ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)"
)
MLA_FINISHED = "_ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)"
MLA_FORWARD = "self.impl.forward(self, q, kv_c_normed, k_pe, kv_cache, attn_metadata, ...)"
KV_BEGIN = "layer_slot_mapping = _ucm_hooks.kv_write_begin(layer_name, key, value, kv_cache, layer_slot_mapping)"
KV_FINISHED = "_ucm_hooks.kv_write_finished(layer_name, kv_cache, layer_slot_mapping)"
KV_WRITE = "attn_layer.impl.do_kv_cache_update(...)"

#: Code that the known UCM's patches for 0.9.2 and 0.11.0 insert; a source that contains it is already patched.
PATCHED_ALREADY = ("maybe_execute_sparse_attention_begin(...)",)

MLA_OUTPUT = Scope("unified_mla_attention_with_output")

NO_RETURNING_OP = Absent(
    Releases(since="0.20.0"),
    "the operator that returns its output was removed: every backend writes to unified_attention_with_output's buffer",
)
NO_KV_WRITE_OP = Absent(
    Releases(before="0.15.0"), "there is no separate operator for the KV write: impl.forward does it"
)
NO_MLA_OP = (
    Absent(Releases(before="0.11.1"), "MLA has no separate operator: it runs through unified_attention_with_output"),
    Absent(Releases(since="0.16.0"), "the MLA operators are in mla_attention.py, which the transform mla changes"),
)


OPERATORS = (
    "attention.begin",
    "attention.output-begin",
    "attention.mla-begin",
    "attention.mla-output-begin",
    "attention.kv-begin",
    "mla.op-begin",
    "mla.returning-begin",
)


def _own_attention(*places: str) -> Elsewhere:
    return Elsewhere(
        places,
        Consequence.REFUSED,
        "the model's own attention, which bypasses vLLM's operators: its layer has a KV cache but never calls the "
        "method, so the engine stops at its first step",
        refused_by=refusals.UNASKED,
    )


def _draft(*places: str) -> Elsewhere:
    return Elsewhere(
        places,
        Consequence.REFUSED,
        "part of a draft model; a method refuses draft models before the model is loaded",
        refused_by=refusals.DRAFTS,
    )


CENSUS = (
    Census(
        "attention.forwards",
        "calls of a backend's forward",
        ("_.impl.forward(...)", "impl.forward(...)"),
        rules=OPERATORS,
        elsewhere=(
            Elsewhere(
                ("vllm/attention/layer.py:*Attention.forward",),
                Consequence.REFUSED,
                "replaces the operator on platforms that are neither CUDA-like nor CPU: no layer calls the method, so "
                "the engine stops at its first step",
                refused_by=refusals.UNASKED,
                releases=Releases(before="0.16.0"),
            ),
            Elsewhere(
                ("vllm/v1/attention/backends/composite.py:create_composite_attention_backend.*",),
                Consequence.REACHES,
                "a backend that delegates to another one; the hooked operator calls it, and it passes on the metadata "
                "that the method returned",
            ),
            _own_attention("vllm/models/minimax_m3/*:*._run_attention"),
        ),
    ),
    Census(
        "attention.operators",
        "operators that look a layer up by its name",
        ("get_attention_context(...)", "_.no_compile_layers[_]"),
        rules=OPERATORS,
        elsewhere=(
            Elsewhere(
                ("*:get_attention_context", "*:maybe_calc_kv_scales", "*:maybe_transfer_kv_layer.wrapper"),
                Consequence.HARMLESS,
                "part of the hooked operators; it computes no attention",
            ),
            Elsewhere(
                ("vllm/distributed/kv_transfer/kv_connector/*:*",),
                Consequence.HARMLESS,
                "a KV connector looks up a layer's cache for its own use, outside of attention",
            ),
            Elsewhere(
                (
                    "*:*moe_forward*",
                    "*/fused_moe/*:get_layer_from_name",
                    "*:*moe_experts_op",
                    "*/cohere2_moe.py:_dual_stream_layer",
                    "vllm/lora/*:*",
                ),
                Consequence.HARMLESS,
                "experts or adapters, looked up in the same way; they have no KV cache",
            ),
            Elsewhere(
                (
                    "vllm/_xpu_ops.py:_gdn_attention_core_xpu_impl",
                    "vllm/model_executor/layers/kda.py:*",
                    "vllm/model_executor/layers/mamba/*:*",
                    "vllm/model_executor/models/*:*gdn*",
                    "vllm/model_executor/models/*:*mamba*",
                    "vllm/model_executor/models/*:*kda*",
                ),
                Consequence.REFUSED,
                "linear attention or a state-space layer; a method refuses models that mix it with attention",
                refused_by=refusals.MODEL,
            ),
            Elsewhere(
                ("vllm/compilation/passes/fusion/*:*kv_cache_update_impl",),
                Consequence.GAP,
                "a fusion of the rotary embedding with the KV write, which bypasses the hooks of the KV write. The "
                "attention that follows is hooked as usual, and no shipped method uses the hooks of the write",
            ),
            Elsewhere(
                ("vllm/model_executor/layers/hpc/rope_norm.py:*", "*:fused_qk_norm_rope_kv_insert"),
                Consequence.GAP,
                "norm, rotary embedding and KV write fused, for one backend or model, which bypasses the hooks of the "
                "KV write. The attention that follows is hooked as usual, and no shipped method uses the hooks of the "
                "write",
            ),
            Elsewhere(
                ("vllm/model_executor/layers/attention/static_sink_attention.py:maybe_populate_sink",),
                Consequence.REFUSED,
                "it writes learned sinks into blocks ahead of the request's own; methods do not account for them",
                refused_by=refusals.LAYER,
            ),
            Elsewhere(
                ("*:unified_mla_kv_cache_update",),
                Consequence.REFUSED,
                "the KV write of latent attention; methods refuse MLA, except BlockTopK, which needs no hook there",
                refused_by=refusals.MODEL,
            ),
            _draft("vllm/model_executor/models/extract_hidden_states.py:*"),
            _own_attention(
                "vllm/model_executor/layers/deepseek_v4_attention.py:*",
                "vllm/models/deepseek_v32/*:*",
                "vllm/models/deepseek_v4/*:*",
                "vllm/models/kimi_k3/*:*",
                "vllm/models/qwen4_exp/*:*",
                "vllm/models/step5/*:*",
            ),
        ),
    ),
    Census(
        "attention.kv-writes",
        "places that write a layer's keys and values",
        (
            "def do_kv_cache_update",
            "_.do_kv_cache_update(...)",
            "_.do_rope_and_kv_cache_update(...)",
            "unified_kv_cache_update(...)",
            "_.unified_kv_cache_update(...)",
        ),
        rules=("attention.kv-begin",),
        elsewhere=(
            Elsewhere(
                (
                    "vllm/model_executor/layers/attention/attention.py:Attention.forward",
                    "vllm/attention/layer.py:Attention.forward",
                ),
                Consequence.REACHES,
                "the layer calls the hooked operator, directly or as a custom operator of torch",
            ),
            Elsewhere(
                ("vllm/v1/attention/backends/*.py:*Impl.do_kv_cache_update", "vllm/v1/attention/backend.py:*"),
                Consequence.REACHES,
                "a backend's own write, called by the hooked operator; BlockTopK needs no hook of latent attention's",
            ),
            Elsewhere(
                (
                    "vllm/model_executor/layers/attention/mla_attention.py:*",
                    "vllm/models/dots3_note/*:*SparseImpl.do_kv_cache_update",
                ),
                Consequence.REFUSED,
                "the KV write of latent attention; methods refuse MLA, except BlockTopK, which needs no hook there",
                refused_by=refusals.MODEL,
            ),
            Elsewhere(
                (
                    "vllm/model_executor/layers/attention/cross_attention.py:*",
                    "vllm/model_executor/models/whisper_causal.py:*",
                ),
                Consequence.REFUSED,
                "attention to, or within, an encoder; a method refuses encoder-decoder models, and layers of this kind",
                refused_by=refusals.LAYER,
            ),
            Elsewhere(
                ("vllm/compilation/passes/fusion/*:*", "*:RocmAttentionImpl.do_rope_and_kv_cache_update"),
                Consequence.GAP,
                "a compiler pass replaces the hooked operator by a fused one, which bypasses the hooks of the KV "
                "write. The attention that follows is hooked as usual, and no shipped method uses the hooks of the "
                "write",
            ),
            _draft(
                "vllm/model_executor/models/extract_hidden_states.py:*",
                "vllm/model_executor/models/*dflash.py:*",
                "vllm/models/*/*dspark*.py:*",
            ),
            _own_attention(
                "vllm/models/deepseek_v32/*:*",
                "vllm/models/qwen4_exp/*:*",
                "vllm/models/step5/*:*",
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="attention",
    module=MODULE,
    governance=Governance(
        why="A sparse method must see each layer's query to choose KV blocks, and must hand the backend a smaller "
        "block table. No plugin interface of vLLM reaches the attention operators.",
        how="One call before and one after the only impl.forward of each operator, inside all decorators. The first "
        "may return other tensors and other attention metadata. The separate KV-write operator gets the same pair "
        "because, from 0.15.0 on, it writes the cache before the attention operator runs.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "a common framework for sparse KV was proposed there and went stale without a decision",
            "https://github.com/vllm-project/vllm/issues/21772",
        ),
        removal="vLLM offers plugins a callback per attention layer, with replaceable attention metadata.",
    ),
    rules=(
        rule(
            "attention.begin",
            Scope("unified_attention"),
            before(FORWARD, BEGIN),
            absent=(NO_RETURNING_OP,),
            never=PATCHED_ALREADY,
        ),
        rule("attention.finished", Scope("unified_attention"), after(FORWARD, FINISHED), absent=(NO_RETURNING_OP,)),
        rule(
            "attention.output-begin",
            Scope("unified_attention_with_output"),
            before(FORWARD, BEGIN),
            never=PATCHED_ALREADY,
        ),
        rule("attention.output-finished", Scope("unified_attention_with_output"), after(FORWARD, FINISHED)),
        rule("attention.mla-begin", Scope("unified_mla_attention"), before(MLA_FORWARD, MLA_BEGIN), absent=NO_MLA_OP),
        rule(
            "attention.mla-finished", Scope("unified_mla_attention"), after(MLA_FORWARD, MLA_FINISHED), absent=NO_MLA_OP
        ),
        rule("attention.mla-output-begin", MLA_OUTPUT, before(MLA_FORWARD, MLA_BEGIN), absent=NO_MLA_OP),
        rule("attention.mla-output-finished", MLA_OUTPUT, after(MLA_FORWARD, MLA_FINISHED), absent=NO_MLA_OP),
        rule(
            "attention.kv-begin", Scope("unified_kv_cache_update"), before(KV_WRITE, KV_BEGIN), absent=(NO_KV_WRITE_OP,)
        ),
        rule(
            "attention.kv-finished",
            Scope("unified_kv_cache_update"),
            after(KV_WRITE, KV_FINISHED),
            absent=(NO_KV_WRITE_OP,),
        ),
    ),
    cases=cases_beside(__file__, "attention"),
    engine_tests=(EngineTest("tests/e2e/test_hooks.py::test_model_hooks_fire_once_per_layer_and_forward"),),
    needs=("worker",),
    opt_in=(
        "attention.mla-begin",
        "attention.mla-finished",
        "attention.mla-output-begin",
        "attention.mla-output-finished",
        "attention.kv-begin",
        "attention.kv-finished",
    ),
    census=CENSUS,
)
