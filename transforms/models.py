"""Decoder models: hooks around each layer and its feed-forward block, in four model families."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.edits import after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.rule import Module, ModulePath, Rule, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

LAYER_CALL = "hidden_states, residual = layer(positions, hidden_states, residual, ...)"
LAYER_BEGIN = "hidden_states, residual = _ucm_hooks.layer_begin(layer, positions, hidden_states, residual)"
LAYER_FINISHED = "hidden_states, residual = _ucm_hooks.layer_finished(layer, positions, hidden_states, residual)"
NORM = "hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)"
MLP = "hidden_states = self.mlp(hidden_states)"
FFN_BEGIN = "hidden_states, residual = _ucm_hooks.ffn_begin(self, hidden_states, residual)"
FFN_FINISHED = "hidden_states, residual = _ucm_hooks.ffn_finished(self, hidden_states, residual)"

GOVERNANCE = Governance(
    why="Methods that act between layers (prefetch for the next layer, blend recomputed tokens, skip the feed-forward "
    "block for reused tokens) need the hidden states there. No interface of vLLM exposes them.",
    how="One call before and one after each decoder layer in the model's loop, and the same around the feed-forward "
    "block inside the layer. Each returns the states for the next operation. Without a sparse method the calls return "
    "their arguments, so they leave no trace in a compiled graph.",
    processes=(Process.WORKER,),
    upstream=Upstream(
        UpstreamStatus.NOT_SUBMITTED,
        "vLLM collects layer outputs for speculative decoding after the loop, read-only; no hook is proposed",
    ),
    removal="vLLM offers per-layer callbacks that may replace hidden states, valid under torch.compile.",
)


NOT_COUNTED = (
    "Each of vLLM's hundreds of models has its own loop over layers; four families are hooked. A method that needs the "
    "calls finds out in its first step whether the model makes them."
)


#: The tests on engines.
LLAMA = "tests/e2e/test_hooks.py::test_model_hooks_fire_once_per_layer_and_forward"
MODELS = "tests/e2e/test_probe_models.py::test_each_layer_calls_its_hooks_in_each_forward"


def _layer_rules(transform: str, model: str) -> tuple[Rule, ...]:
    scope = Scope(f"{model}.forward")
    return (
        rule(f"{transform}.layer-begin", scope, before(LAYER_CALL, LAYER_BEGIN)),
        rule(f"{transform}.layer-finished", scope, after(LAYER_CALL, LAYER_FINISHED)),
    )


def _ffn_rules(transform: str, layer: str) -> tuple[Rule, ...]:
    scope = Scope(f"{layer}.forward")
    return (
        rule(f"{transform}.ffn-begin", scope, before(NORM, FFN_BEGIN)),
        rule(f"{transform}.ffn-finished", scope, after(MLP, FFN_FINISHED)),
    )


def _transform(name: str, layer: str, model: str | None, test: str = MODELS) -> Transform:
    layer_rules = _layer_rules(name, model) if model else ()
    return Transform(
        id=name,
        module=Module(id=name, group="models", paths=(ModulePath(f"vllm/model_executor/models/{name}.py"),)),
        governance=GOVERNANCE,
        not_counted=NOT_COUNTED,
        rules=(*layer_rules, *_ffn_rules(name, layer)),
        cases=cases_beside(__file__, name),
        engine_tests=(EngineTest(test),),
        needs=("worker",),
        opt_in=(name,),
    )


#: Qwen3Model inherits its loop from Qwen2Model, so its module contains none to change.
TRANSFORMS = (
    _transform("llama", "LlamaDecoderLayer", "LlamaModel", LLAMA),
    _transform("qwen2", "Qwen2DecoderLayer", "Qwen2Model"),
    _transform("qwen3", "Qwen3DecoderLayer", None),
    _transform("qwen3_moe", "Qwen3MoeDecoderLayer", "Qwen3MoeModel"),
)
