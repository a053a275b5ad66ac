"""Tiny random models with other KV caches than a Llama's."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from tests.e2e.model import VOCABULARY, write_tokenizer
from tests.e2e.processes import INSIDE
from tests.e2e.shared import locked
from transforms.place import BUILD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
#: Multi-head latent attention, with the only latent sizes for which vLLM has a CPU kernel.
MLA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "hidden_act": "silu",
}
#: The only block size of vLLM's reference implementation of latent attention on the CPU.
LATENT_BLOCK = 16
#: How an engine of such a model is started. On a CPU with AMX, vLLM would choose another backend, which only supports
#: bfloat16. vLLM's compiled rotary embedding for the CPU reads latent attention's queries wrongly.
LATENT_ENGINE: dict[str, Any] = {
    "attention_backend": "CPU_MLA",
    "block_size": LATENT_BLOCK,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
#: The window of the sliding-window layers in `HYBRID`, in tokens.
WINDOW = 96
#: Full attention in every third layer and a sliding window in the others, so several KV-cache groups.
HYBRID: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_activation": "gelu_pytorch_tanh",
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
#: Attention within chunks of tokens, and full attention in the last layer (Llama 4, without experts).
LOCAL: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size_mlp": 256,
    "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": [*["chunked_attention"] * 3, "full_attention"],
    "moe_layers": [],
    "interleave_moe_layer_step": 8,
    "use_qk_norm": True,
    "attn_temperature_tuning": False,
    "rope_parameters": _ROPE,
    "hidden_act": "silu",
}
#: A sliding window in every second layer, learned sinks in all, and experts (GPT-OSS).
SINKS: dict[str, Any] = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rope_parameters": {
        **_ROPE,
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 384,
        "truncate": False,
    },
    "hidden_act": "silu",
}
#: Models with several KV-cache groups in which all layers have attention, and how many groups each has.
SEVERAL_GROUPS = {"Gemma 3": (HYBRID, 3), "Llama 4": (LOCAL, 4), "GPT-OSS": (SINKS, 2)}
#: The block size that vLLM chooses for `RECURRENT`, so that a block of attention has room for a state.
STATE_BLOCK = 160
#: Mamba 2 in every second layer: a state instead of KV.
RECURRENT: dict[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 4096,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "position_embedding_type": "rope",
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
#: How an engine of such a model is started: vLLM's kernel for the CPU fails on steps longer than a block.
RECURRENT_ENGINE: dict[str, Any] = {"max_num_batched_tokens": STATE_BLOCK, "num_gpu_blocks_override": 40}
#: Mamba 2 in every second layer, and nothing else in these (Nemotron-H).
NEMOTRON: dict[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 4096,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*M*",
    "layers_block_type": ["mamba", "attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_head_dim": 32,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "layer_norm_epsilon": 1e-5,
    "use_conv_bias": True,
}
#: Models with recurrent layers, and the block size that vLLM chooses for each: that of `RECURRENT_ENGINE` at least.
RECURRENT_MODELS = {"Granite hybrid": (RECURRENT, STATE_BLOCK), "Nemotron-H": (NEMOTRON, STATE_BLOCK)}
#: The block size that vLLM chooses for `GATED`.
GATED_BLOCK = 544
#: Gated delta nets, and full attention in the last layer. vLLM's kernels for the CPU want heads of 128 and bfloat16.
GATED: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
#: How an engine of such a model is started. Without the type of states, the block size depends on the processor.
GATED_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "max_model_len": 2560,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 60,
}
#: As many KV heads as two ranks can share.
SHARED: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
}

#: A name of 64 hexadecimal digits that a client gives to a sound, as vLLM's own names are.
NAME = "ab" * 32
#: The token that stands for a sound in a prompt; vLLM repeats it, 25 times for a second.
SOUND = 0
#: Text and sounds: multimodal inputs whose code needs no media package. vLLM fixes the number of frames at 3,000.
AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": SOUND,
    "text_config": {
        **_COMMON,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": 1500,
    },
    "torch_dtype": "float32",
}
#: The processor of `AUDIO`, with tokens that the tokenizer has.
PROCESSOR: dict[str, Any] = {
    "processor_class": "Qwen2AudioProcessor",
    "audio_token": "<pad>",
    "audio_bos_token": "<s>",
    "audio_eos_token": "</s>",
    "feature_extractor": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "chunk_length": 30,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16_000,
    },
}


def several_groups(environment: Environment, name: str) -> tuple[dict[str, Any], int]:
    """Write a model of `SEVERAL_GROUPS`.

    Returns:
        Arguments of ``LLM``, with room for two requests of maximum length in each group; and the number of groups.
    """
    config, groups = SEVERAL_GROUPS[name]
    model = write_tiny_model(environment, name.replace(" ", "-").lower(), config)
    return {"model": str(model), "num_gpu_blocks_override": 50 * groups + 1}, groups


def write_tiny_model(environment: Environment, name: str, config: dict[str, Any]) -> Path:
    """Write a model with an environment's interpreter, unless it exists."""
    directory = BUILD / "e2e" / f"{name}-{environment.release}"
    complete = directory / "complete"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory.with_name(f"{directory.name}.lock")):
        if not complete.exists() or json.loads(complete.read_text(encoding="utf-8")) != config:
            write_tokenizer(directory, VOCABULARY)
            (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
            if "audio_config" in config:
                (directory / "processor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
            subprocess.run([environment.python, INSIDE / "tiny_model.py", directory], check=True)
            complete.write_text(json.dumps(config), encoding="utf-8")
    return directory
