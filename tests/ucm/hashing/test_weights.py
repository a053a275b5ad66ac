"""Weights are told by their bytes, wherever they lie and whatever their directory is called."""

from __future__ import annotations

import json
import os
import struct
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import HfConfig, ModelConfig, write_model
from ucm.hashing.weights import WeightsUnknownError, sampled_digest, weights_identity

if TYPE_CHECKING:
    from pathlib import Path

COMMIT, OTHER = "a" * 40, "b" * 40
LOAD = SimpleNamespace(load_format="auto")
LYING = struct.pack("<Q", 50) + b'{"a":{"data_offsets":[7,3]},"b":{"data_offsets":[0,%d]}}' % (10**30)


def safetensors(path: Path, tensors: int = 40, size: int = 100_000, changed: int | None = None) -> Path:
    """A file with a header and tensors of zeros, one of which may be filled with something else."""
    offsets = [[i * size, (i + 1) * size] for i in range(tensors)]
    header = json.dumps(
        {f"layers.{i}": {"dtype": "BF16", "shape": [size // 2], "data_offsets": offsets[i]} for i in range(tensors)}
    )
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        begin = file.tell()
        file.truncate(begin + tensors * size)
        if changed is not None:
            file.seek(begin + changed * size)
            file.write(b"\x01" * size)
    return path


def test_each_tensor_is_looked_at(tmp_path: Path) -> None:
    digests = [sampled_digest(safetensors(tmp_path / f"{i}.safetensors", changed=i)) for i in range(40)]
    digests.append(sampled_digest(safetensors(tmp_path / "none.safetensors")))
    assert len(set(digests)) == 41


def test_of_very_many_tensors_some_are(tmp_path: Path) -> None:
    changed = [sampled_digest(safetensors(tmp_path / f"{i}.safetensors", 5000, 64, i)) for i in range(0, 5000, 500)]
    assert len(set(changed)) == 10


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 8 + b"no header", struct.pack("<Q", 3) + b"{}}", LYING])
def test_a_file_that_is_no_safetensors_after_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = sampled_digest(path)
    path.write_bytes(content + b"x")
    assert sampled_digest(path) != before


@pytest.mark.parametrize("place", [0, 10, 500_000, 999_999])
def test_other_files_are_looked_at_in_many_places(tmp_path: Path, place: int) -> None:
    path = tmp_path / "model.gguf"
    content = bytearray(1_000_000)
    path.write_bytes(content)
    before = sampled_digest(path)
    content[place] = 1
    path.write_bytes(content)
    assert sampled_digest(path) != before


def test_a_long_file_is_not_read_whole(tmp_path: Path) -> None:
    """Sparse, so that reading it whole would take minutes."""
    path = safetensors(tmp_path / "model.safetensors", 80, 1 << 32)
    assert path.stat().st_size > 1 << 38
    assert len(sampled_digest(path)) == 64


def test_two_models_with_one_basename(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one" / "llama", b"A" * 200_000)
    other = write_model(tmp_path / "other" / "llama", b"B" * 200_000)
    assert weights_identity(ModelConfig(str(one)), LOAD) != weights_identity(ModelConfig(str(other)), LOAD)


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    one, other = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    os.utime(other / "config.json", (0, 0))
    assert weights_identity(ModelConfig(str(one)), LOAD) == weights_identity(ModelConfig(str(other)), LOAD)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("hf_quant_config.json", True),
        ("modeling_mine.py", True),
        ("preprocessor_config.json", True),
        ("model-00002-of-00002.safetensors", True),
        ("tokenizer.json", False),
        ("tokenizer_config.json", False),
        ("README.md", False),
    ],
)
def test_which_files_count(tmp_path: Path, name: str, *, counts: bool) -> None:
    path = write_model(tmp_path / "model")
    before = weights_identity(ModelConfig(str(path)), LOAD)
    (path / name).write_text("{}", encoding="utf-8")
    assert (weights_identity(ModelConfig(str(path)), LOAD) != before) == counts


def test_random_weights_are_their_seed_and_configuration(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", config='{"a": 1}')
    dummy = SimpleNamespace(load_format="dummy")
    found = [weights_identity(ModelConfig(str(path), seed=seed), dummy) for seed in (0, 1)]
    found.append(weights_identity(ModelConfig(str(write_model(tmp_path / "m2", config='{"a": 2}'))), dummy))
    assert found[0] != found[1] != found[2] != found[0]
    assert "files" not in found[0]


def test_a_single_file(tmp_path: Path) -> None:
    found = []
    for content in (b"A", b"B"):
        path = tmp_path / "model.gguf"
        path.write_bytes(content * 1000)
        found.append(weights_identity(ModelConfig(str(path)), LOAD)["files"])
    assert found[0] != found[1]


def test_a_hub_snapshot_by_its_path_names_its_commit(tmp_path: Path) -> None:
    path = write_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    assert weights_identity(ModelConfig(str(path)), LOAD)["commit"] == COMMIT
    assert weights_identity(ModelConfig(str(write_model(tmp_path / COMMIT))), LOAD)["commit"] is None


@pytest.mark.parametrize(
    "config",
    [
        {"revision": COMMIT},
        {"revision": "main", "hf_config": HfConfig({}, _commit_hash=COMMIT)},
        {"revision": COMMIT, "hf_config": HfConfig({}, _commit_hash=OTHER), "hf_config_path": "c/d"},
    ],
)
def test_a_hub_repository_by_its_commit(config: dict[str, Any]) -> None:
    found = weights_identity(ModelConfig("a/b", **config), LOAD)
    assert found == {"load_format": "auto", "repository": "a/b", "commit": COMMIT}


def test_a_hub_repository_whose_commit_the_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_to_load_from_cache(repository: str, name: str, revision: str | None) -> str | None:
        assert (repository, name) == ("a/b", "config.json")
        return f"/hub/models--a--b/snapshots/{COMMIT}/config.json" if revision is None else None

    hub = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert weights_identity(ModelConfig("a/b"), LOAD)["commit"] == COMMIT
    with pytest.raises(WeightsUnknownError, match="whose commit is known"):
        weights_identity(ModelConfig("a/b", revision="other"), LOAD)


@pytest.mark.parametrize(
    ("model", "load_format", "more", "message"),
    [
        ("a/b", "auto", {}, "neither a directory nor a hub repository whose commit is known"),
        ("a/b", "auto", {"hf_config": HfConfig({}, _commit_hash=OTHER), "hf_config_path": "c/d"}, "commit is known"),
        ("EMPTY", "auto", {}, "no weights in this directory"),
        ("EMPTY", "tensorizer", {}, "the format 'tensorizer' come from where UCM cannot look"),
        ("EMPTY", "my_plugin", {}, "the format 'my_plugin'"),
        ("EMPTY", "runai_streamer", {"model_weights": "s3://bucket/model"}, "object storage"),
    ],
)
def test_weights_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, load_format: str, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    config = ModelConfig(str(tmp_path) if model == "EMPTY" else model, **more)
    load = SimpleNamespace(load_format=load_format)
    with pytest.raises(WeightsUnknownError, match=message) as caught:
        weights_identity(config, load)
    assert caught.value.where in {config.model, config.model_weights}
    assert "weights_id" in caught.value.fix
    assert weights_identity(config, load, "mine-1") != weights_identity(config, load, "mine-2")
