"""Attention operators: what a sparse method sees and may replace around every attention layer."""

from __future__ import annotations

from transforms.engine.edits import after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

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

#: What the known UCM's own patches for 0.9.2 and 0.11.0 put into the operators: sources with it are not vLLM's.
PATCHED_ALREADY = ("maybe_execute_sparse_attention_begin(...)",)

MLA_OUTPUT = Scope("unified_mla_attention_with_output")

NO_RETURNING_OP = Absent(
    Releases(since="0.20.0"),
    "the operator that returns its output is gone: every backend writes into unified_attention_with_output's buffer",
)
NO_KV_WRITE_OP = Absent(Releases(before="0.16.0"), "the KV write is no operator of its own: impl.forward does it")
NO_MLA_OP = (
    Absent(Releases(before="0.11.1"), "MLA has no operator of its own: it runs through unified_attention_with_output"),
    Absent(Releases(since="0.16.0"), "the MLA operators lie in mla_attention.py, where the transform mla has them"),
)


def _op(name: str, call: str, inserted_before: str = "", inserted_after: str = "") -> str:
    lines = [
        f"def {name}(query, key, value, output, layer_name):",
        *filter(None, (inserted_before, call, inserted_after)),
    ]
    return "\n    ".join(lines) + "\n"


def _case(rule_id: str, op: str, call: str, release: str, *, begin: str = "", finished: str = "") -> Case:
    mark = f"  # ucm: {rule_id}"
    added = _op(op, call, begin and begin + mark, finished and finished + mark)
    return Case(rule_id, _op(op, call), added, release)


RETURNING = "output = self.impl.forward(self, query, key, value, kv_cache, attn_metadata)"
WRITING = "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output)"
MLA_RETURNING = "output = self.impl.forward(self, q, kv_c_normed, k_pe, kv_cache, attn_metadata)"
MLA_WRITING = "self.impl.forward(self, q, kv_c_normed, k_pe, kv_cache, attn_metadata, output=output)"
UPDATE = "attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)"

TRANSFORM = Transform(
    id="attention",
    module=MODULE,
    governance=Governance(
        why="A sparse method must see each layer's query to choose KV blocks, and must hand the backend a smaller "
        "block table; no plugin interface of vLLM reaches the attention operators.",
        how="One call before and one after the only impl.forward of each operator, inside every decorator; the first "
        "may return other tensors and other attention metadata. The separate KV-write operator gets the same pair, "
        "because from 0.16.0 the cache is written before the attention operator runs.",
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
    cases=(
        _case("attention.begin", "unified_attention", RETURNING, "0.9.0", begin=BEGIN),
        _case("attention.finished", "unified_attention", RETURNING, "0.9.0", finished=FINISHED),
        _case("attention.output-begin", "unified_attention_with_output", WRITING, "0.32.0", begin=BEGIN),
        _case("attention.output-finished", "unified_attention_with_output", WRITING, "0.32.0", finished=FINISHED),
        _case("attention.mla-begin", "unified_mla_attention", MLA_RETURNING, "0.14.1", begin=MLA_BEGIN),
        _case("attention.mla-finished", "unified_mla_attention", MLA_RETURNING, "0.14.1", finished=MLA_FINISHED),
        _case("attention.mla-output-begin", MLA_OUTPUT.name, MLA_WRITING, "0.14.1", begin=MLA_BEGIN),
        _case("attention.mla-output-finished", MLA_OUTPUT.name, MLA_WRITING, "0.14.1", finished=MLA_FINISHED),
        _case("attention.kv-begin", "unified_kv_cache_update", UPDATE, "0.32.0", begin=KV_BEGIN),
        _case("attention.kv-finished", "unified_kv_cache_update", UPDATE, "0.32.0", finished=KV_FINISHED),
    ),
    needs=("worker",),
)
