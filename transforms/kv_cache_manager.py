"""The KV-cache manager: an allocation that a sparse method may take over, request by request."""

from __future__ import annotations

from transforms.engine.edits import after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Parameter
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

MODULE = Module(
    id="kv_cache_manager", group="kv_cache_manager", paths=(ModulePath("vllm/v1/core/kv_cache_manager.py"),)
)

SCOPE = Scope("KVCacheManager.allocate_slots")
PARAMETER = "num_slots_sparsed: int = _ucm_hooks.INVALID_SLOT"
TAKE_OVER = """\
if num_slots_sparsed != _ucm_hooks.INVALID_SLOT:
    return _ucm_hooks.allocate_slots(self, request, num_new_tokens, num_slots_sparsed, new_computed_blocks)
"""
CHECKS = {
    "none-to-adopt": (
        "if num_new_tokens == 0 and num_external_computed_tokens == 0 and num_new_computed_tokens == 0: ...",
        Releases(since="0.31.0"),
    ),
    "external": ("if num_new_tokens == 0 and num_external_computed_tokens == 0: ...", Releases("0.14.1", "0.31.0")),
    "new-only": ("if num_new_tokens == 0: ...", Releases(before="0.14.1")),
}

GIVEN = """\
class KVCacheManager:
    def allocate_slots(self, request, num_new_tokens{}):
        if num_new_tokens == 0:
            raise ValueError
{}        return self.blocks(request)
"""
TAKEN_OVER = """\
        if num_slots_sparsed != _ucm_hooks.INVALID_SLOT:  # ucm: kv_cache_manager.take-over
            return _ucm_hooks.allocate_slots(self, request, num_new_tokens, num_slots_sparsed, new_computed_blocks)
"""

TRANSFORM = Transform(
    id="kv_cache_manager",
    module=MODULE,
    governance=Governance(
        why="A request under a sparse method keeps fewer blocks than its tokens would need; the manager must account "
        "for what it really holds, or memory is neither saved nor safe.",
        how="One parameter at the end of allocate_slots and one test after its own argument check. The default is the "
        "sentinel itself, so every caller that does not know the parameter takes upstream's path.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "a manager per sparse algorithm was proposed there and went stale without a decision",
            "https://github.com/vllm-project/vllm/issues/21772",
        ),
        removal="vLLM lets a plugin register a single-type KV-cache manager that releases blocks of running requests.",
    ),
    rules=(
        rule("kv_cache_manager.parameter", SCOPE, Parameter(PARAMETER)),
        Rule(
            "kv_cache_manager.take-over",
            tuple(Variant(SCOPE, after(text, TAKE_OVER), known, name) for name, (text, known) in CHECKS.items()),
        ),
    ),
    cases=(
        Case("kv_cache_manager.parameter", GIVEN.format("", ""), GIVEN.format(f", {PARAMETER}", ""), "0.9.0"),
        Case("kv_cache_manager.take-over", GIVEN.format("", ""), GIVEN.format("", TAKEN_OVER), "0.9.0"),
    ),
)
